"""What a run writes down of itself is for strangers."""

import logging

import pytest

from tunix_rt.evidence.record import WithoutSecrets, without_home


def test_a_log_does_not_name_the_folder_of_whoever_ran_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    record = logging.LogRecord(
        "tunix_rt", logging.INFO, "", 0, "kept in %s", ("/home/somebody/.cache/tunix-rt/x",), None
    )
    assert WithoutSecrets("%(message)s").format(record) == "kept in ~/.cache/tunix-rt/x"


@pytest.mark.parametrize("text", ["/home/somebodyelse/x", "/data/home/x", "no path at all"])
def test_other_places_stay_as_they_are(text, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert without_home(text) == text


def test_a_home_at_the_root_strikes_nothing(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert without_home("/etc/x") == "/etc/x"
