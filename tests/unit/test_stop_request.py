"""A stop lets the step finish; a second signal, or the end of the grace, ends the run at once, in words and with exit 7."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tunix_rt.errors import Preempted
from tunix_rt.train import preemption as stopping
from tunix_rt.train.preemption import ENDING_SECONDS, Preemption, program_began


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number):
    before = signal.getsignal(number)
    with Preemption().listening() as stop:
        os.kill(os.getpid(), number)
        assert stop.signal_name == signal.Signals(number).name
        assert not stop.now
        with pytest.raises(Preempted, match="second") as caught:
            os.kill(os.getpid(), number)
            signal.raise_signal(number)  # delivered at once, whatever the operating system did with the one above
        assert caught.value.exit_code == 7 and "--resume" in caught.value.fix
        assert stop.now
    assert signal.getsignal(number) == before


class Loop:
    """A training loop as a stop sees it. `save` may wait for ever, as on a dead disk."""

    def __init__(self, saved, *, save=lambda: True, seconds=0.0):
        self.saved, self._save, self._seconds = saved, save, seconds

    def stop_plan(self):
        return "stopping after step 7"

    def stop_seconds(self):
        return self._seconds

    def save_finished(self):
        done = self._save()
        self.saved.append("step 7")
        return done


def test_a_signal_in_a_long_step_saves_the_last_finished_one_and_leaves_the_step(caplog):
    saved, stop = [], Preemption()
    stop.saved_state = lambda: f"{saved[-1] if saved else 'nothing'} is saved"
    caplog.set_level("INFO", logger="tunix_rt")
    with (
        pytest.raises(Preempted, match="stopped by SIGINT; step 7 is saved"),
        stop.listening(),
        stop.while_training(Loop(saved)),
    ):
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
    assert "SIGINT: stopping after step 7. Ctrl-C again exits at once (nothing is saved)" in caplog.text
    assert stop.now and stop.training is None


@pytest.mark.parametrize("grace", [1, None])
def test_what_does_not_end_within_the_grace_is_interrupted_and_names_what_is_kept(monkeypatch, grace):
    """The grace is as configured, or derived from the measured times."""
    monkeypatch.setattr(stopping, "LEAST_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(stopping, "ENDING_SECONDS", 0.25)
    stop = Preemption(grace_seconds=grace)
    stop.saved_state = lambda: "step 5 is saved"
    with (
        pytest.raises(Preempted, match="the grace period of 1 s after SIGTERM is over; step 5 is saved"),
        stop.listening(), stop.while_training(Loop([], save=threading.Event().wait, seconds=0.5)),
    ):  # fmt: skip
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)


def test_a_forced_exit_makes_every_act_and_ends_whatever_the_disk_does(tmp_path):
    script = """
        import hashlib, sys
        from tunix_rt.errors import StorageError
        from tunix_rt.train import preemption
        def full(error):
            raise StorageError("no space", fix="free some")
        stop = preemption.Preemption()
        stop.on_forced_exit += [lambda error: print("restored", flush=True), full]
        with stop.listening():
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout.readline() == "ready\n"
            program.send_signal(signal.SIGINT)
            printed = program.communicate(timeout=30)
        finally:
            program.kill()
    assert program.returncode == 7 and printed[0] == "restored\n"


def test_the_grace_is_25_seconds_or_what_saving_needs():
    stop = Preemption()
    assert stop.grace == 25
    with stop.while_training(Loop([], seconds=40)):
        assert stop.grace == 65
        assert Preemption(grace_seconds=5).grace == 5
    assert stop.grace == 25


def test_what_ends_within_the_grace_is_left_alone():
    with Preemption(grace_seconds=1).listening() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.1)
    assert stop.signal_name == "SIGTERM"


def test_a_block_that_belongs_together_is_finished_before_it_is_interrupted():
    stop, done = Preemption(), []
    with pytest.raises(Preempted, match="second"), stop.listening():
        signal.raise_signal(signal.SIGTERM)
        with stop.deferring_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append("the whole block")
        done.append("more")
    assert done == ["the whole block"]


def test_nothing_of_it_is_left_behind_and_it_can_listen_again():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    stop = Preemption()
    for _ in range(2):
        with stop.listening():
            pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(Preempted, match="second"), stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


GOES_ON = """
    import hashlib, logging, sys, time
    from pathlib import Path
    from tunix_rt.errors import Preempted
    from tunix_rt.train.preemption import Preemption
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    stop = Preemption(grace_seconds=2)
    stop.saved_state = lambda: "step 7 is saved"
    def last(error):
        Path(sys.argv[1]).write_text(error.problem)
        if sys.argv[2] == "hangs at the end":
            time.sleep(60)
    stop.on_forced_exit.append(last)
    try:
        with stop.listening():
            print("ready", flush=True)
            if sys.argv[2] == "in Python":
                time.sleep(60)
            while sys.argv[2] == "swallows it":
                try:
                    time.sleep(60)
                except Exception:
                    continue
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # a minute and more in one call, which no signal breaks
    except Preempted as error:
        Path(sys.argv[1]).write_text(error.problem)
        raise SystemExit(error.exit_code)
    """


@pytest.mark.slow  # by the wall clock
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["in Python", "swallows it", "in one call", "hangs at the end"])
def test_whatever_goes_on_is_answered_and_cannot_hold_the_exit(tmp_path, how, number):
    """In Python the alarm ends it. Where that is swallowed, or waits for Python, a thread does, whatever its last acts do."""
    said = tmp_path / "said"
    command = [sys.executable, "-c", textwrap.dedent(GOES_ON), str(said), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as program:
        try:
            assert program.stdout.readline() == "ready\n"
            began = time.monotonic()
            program.send_signal(number)
            name = number.name
            assert program.stdout.readline().startswith(f"{name}: stopping; step 7 is saved.")
            assert time.monotonic() - began < 0.5
            hangs = how == "hangs at the end" and number == signal.SIGINT  # no deadline: a person sends more
            while hangs and program.poll() is None and time.monotonic() - began < 20:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(timeout=0.5)
                program.send_signal(number if said.exists() else 0)
            assert program.wait(timeout=20) == 7
            assert time.monotonic() - began < 3 + hangs * ENDING_SECONDS
        finally:
            program.kill()
    stuck = "" if how == "in Python" else ", in a call that does not return"
    assert said.read_text() == f"stopped by {name}{stuck}; step 7 is saved"


@pytest.mark.parametrize("ends", [True, False])
def test_the_ending_is_not_interrupted_and_cannot_hold_the_exit_either(tmp_path, ends):
    """A first signal, a second, the alarm: none breaks it. Only after the grace the thread exits, and nothing else writes."""
    script = """
        import os, signal, sys, time
        from tunix_rt.train.preemption import Preemption
        stop = Preemption(grace_seconds=2)
        stop.on_forced_exit.append(lambda error: print("a second ending", flush=True))
        with stop.listening(), stop.ending():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(float(sys.argv[1]))
            print("written", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("nothing is heard any more")
        """
    command = [sys.executable, "-c", textwrap.dedent(script), "0.1" if ends else "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.stdout == ("written\nnothing is heard any more\n" if ends else ""), done.stderr
    assert done.returncode == (0 if ends else 7)


# --- the time budget -------------------------------------------------------------------------------------------------


def test_a_budget_stops_when_what_comes_next_would_not_fit_with_its_ending(monkeypatch):
    monkeypatch.setattr(stopping, "program_began", time.monotonic)
    stop = Preemption(time_budget=60)
    assert stop.why(needed_seconds=60 - ENDING_SECONDS - 1) == ""
    assert stop.why(needed_seconds=60 - ENDING_SECONDS) == "time budget: 60 s of 60 s left, stopping"
    stop.check("nothing was trained yet")
    with pytest.raises(Preempted, match="time budget: 3 s of 3 s left, stopping; step 2 is saved") as caught:
        Preemption(time_budget=3).check("step 2 is saved")
    assert caught.value.exit_code == 7 and "--resume" in caught.value.fix


def test_a_budget_shorter_than_the_start_says_to_raise_it_and_not_to_continue(monkeypatch):
    monkeypatch.setattr(stopping, "program_began", lambda: time.monotonic() - 11)
    for budget, said in ((8, r"\(11 s\); nothing"), (14, r"\(11 s\) and the 5 s kept for the ending; nothing")):
        with pytest.raises(
            Preempted, match=f"the time budget of {budget} s is shorter than the start {said}"
        ) as caught:
            Preemption(time_budget=budget).check("nothing was trained yet", starting=True)
        assert caught.value.fix == "raise training.time_budget"


def test_what_takes_longer_than_is_left_is_not_begun_and_the_way_out_is_one_that_leads_there(monkeypatch):
    monkeypatch.setattr(stopping, "program_began", lambda: time.monotonic() - 30)
    stop = Preemption(time_budget=60)
    stop.check_time(20, "evaluation after training", "all 5 steps are saved", in_vain=False)
    with pytest.raises(Preempted) as caught:
        stop.check_time(40, "evaluation after training", "all 5 steps are saved", in_vain=False)
    assert caught.value.problem == (
        "time budget: 30 s of 60 s left, stopping; evaluation after training takes about 40 s; all 5 steps are saved"
    )
    assert caught.value.fix == stopping.RESUME
    with pytest.raises(Preempted) as caught:
        stop.check_time(100, "evaluation after training", "all 5 steps are saved", in_vain=False)
    assert caught.value.fix.startswith("raise training.time_budget above 135 s, and run the same command")
    with pytest.raises(Preempted) as caught:  # no step was left to take: the next process would stop here as well
        stop.check_time(40, "evaluation after training", "all 5 steps are saved", in_vain=True)
    assert caught.value.fix.startswith("raise training.time_budget above 75 s, and run the same command")
    stop.signal_name = "SIGTERM"
    with pytest.raises(Preempted) as caught:
        stop.check_time(0, "evaluation after training", "all 5 steps are saved", in_vain=False)
    assert caught.value.problem == "stopped by SIGTERM; all 5 steps are saved"
    Preemption().check_time(1e12, "evaluation after training", "all 5 steps are saved", in_vain=False)


def test_without_a_budget_there_is_always_time():
    assert Preemption().why(needed_seconds=1e12) == ""


def test_the_budget_is_counted_from_the_start_of_the_process():
    script = """
        import time
        time.sleep(2)  # imports, say
        from tunix_rt.train.preemption import program_began
        print(time.monotonic() - program_began())
        """
    began = time.monotonic()
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    known_to = 1.0  # seconds: Linux tells the time it was booted at in whole ones
    assert 2 - known_to <= float(told.stdout) <= time.monotonic() - began + known_to
    assert program_began() < time.monotonic()
