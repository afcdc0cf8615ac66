"""The first signal lets the step finish; the second ends the run at once, in words and with its own exit code."""

import os
import signal

import pytest

from tunix_rt.errors import Preempted
from tunix_rt.train import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number):
    before = signal.getsignal(number)
    with StopRequest().listening() as stop:
        os.kill(os.getpid(), number)
        assert stop.signal_name == signal.Signals(number).name
        with pytest.raises(Preempted, match="second") as caught:
            os.kill(os.getpid(), number)
            signal.raise_signal(number)  # delivered at once, whatever the operating system did with the one above
        assert caught.value.exit_code == 7 and "--resume" in caught.value.fix
    assert signal.getsignal(number) == before
