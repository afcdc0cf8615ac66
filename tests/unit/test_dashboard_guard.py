"""Who gets an answer from the dashboard: by Host, by where the request comes from, and by the key in the printed address."""

from tests.tables import parametrize
from tunix_rt.dashboard.guard import Guard, new_key
from tunix_rt.loopback import LOOPBACK, MOST_HEADER_BYTES

KEY = new_key()
GUARD = Guard(hosts=(*LOOPBACK, "box.example"), key=KEY, port=8080)


def head(*pairs: tuple[str, str], host: str | None = "127.0.0.1:8080") -> list[tuple[bytes, bytes]]:
    given = [] if host is None else [("host", host)]
    return [(name.encode(), value.encode("latin-1")) for name, value in (*given, *pairs)]


def status(
    *pairs: tuple[str, str], method: str = "GET", path: bytes = b"/", host: str | None = "127.0.0.1:8080"
) -> int:
    refused = GUARD.refusal(method, path, head(*pairs, host=host))
    return 200 if refused is None else refused.status


@parametrize("host")
def test_a_name_of_this_computer_at_any_port_is_answered(host):
    assert status(host=host) == 200


@parametrize("host")
def test_any_other_name_is_refused_however_it_is_spelt(host):
    refused = GUARD.refusal("GET", b"/", [(b"host", host.encode("utf-8"))])
    assert refused is not None and refused.status == 403


def test_no_host_and_two_hosts_are_refused():
    assert status(host=None) == 403
    assert status(("Host", "evil.example")) == 403
    assert status(("host", "127.0.0.1:8080")) == 403


@parametrize("site", "mode", "dest", "method", "expected")
def test_a_page_of_another_site_may_lead_here_and_nothing_else(site, mode, dest, method, expected):
    pairs = [("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", dest)]
    action = [("x-tunix-rt", "1"), ("content-type", "application/json")] if method == "POST" else []
    assert status(*pairs, *action, method=method) == expected


def test_an_action_needs_the_header_of_our_script_and_json():
    json, ours = ("content-type", "application/json"), ("x-tunix-rt", "1")
    assert status(json, ours, method="POST") == 200
    assert status(json, method="POST") == status(ours, method="POST") == 403
    assert status(("content-type", "text/plain"), ours, method="POST") == 403
    assert status(("content-type", "application/json"), ("content-type", "text/plain"), ours, method="POST") == 403


@parametrize("method")
def test_other_methods_are_refused(method):
    assert status(method=method) == 405


def test_a_head_that_is_too_large_is_refused():
    assert status(("cookie", "a" * MOST_HEADER_BYTES)) == 431
    assert status(path=b"/" + b"a" * 30_000) == 431
    assert status(*[("x", "y" * 100)] * 200) == 431


def test_the_cookie_is_bound_to_the_port_and_compared_whole():
    def holds(cookie: str) -> bool:
        return GUARD.holds_key(head(("cookie", cookie)))

    assert holds(f"tunix_rt_8080={KEY}") and holds(f"other=1; tunix_rt_8080={KEY}")
    for wrong in (
        "",
        f"tunix_rt_8081={KEY}",
        f"tunix_rt_8080={KEY[:-1]}",
        f"tunix_rt_8080={KEY}x",
        "tunix_rt_8080=",
        "\xff=;;",
    ):
        assert not holds(wrong), wrong
    assert Guard(hosts=LOOPBACK, key=None, port=1).holds_key(head())
    assert not GUARD.is_key("") and GUARD.is_key(KEY) and not GUARD.is_key("ü")
    assert not Guard(hosts=LOOPBACK, key=None, port=1).is_key("")
