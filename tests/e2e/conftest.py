"""The real bundles, made once for all tests; and signals, heard again after a run in this process."""

import signal

import pytest

from tests.contract.conftest import *  # noqa: F403


@pytest.fixture
def signals_heard_again():
    """A program that was asked to stop hears none while it exits; this one goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
