"""`tunix-rt chat`: in a terminal of its own, as a person sits before it; and its memory of what was said."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.chain_model import write_chain_model
from tests.program import ROOT, command, environment
from tunix_rt.cli.main import cli

SAID = "<reasoning>3 < 4</reasoning><answer>80</answer>"
# What is said last stands last, so that the first letter of an answer depends on the question.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last or not add_generation_prompt %}<eos>{% endif %}{% endfor %}"
)
PATIENCE = 200
LONGEST = 1_600
"""Tokens of an answer: long enough for a person to interrupt it."""


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Path:
    """A model that answers what ends in `?` and never stops answering what ends in `!`."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    return write_chain_model(folder, {"?": SAID, "!": "xyz..."}, template=TEMPLATE, positions=LONGEST + LONGEST // 2)


class Terminal:
    """A program in a pseudo-terminal of its own, whose keys are pressed and whose screen is read."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        self.program = subprocess.Popen(
            command(*arguments), cwd=ROOT, env=environment(TERM="xterm-256color", OMP_NUM_THREADS="1"),
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=_take_the_terminal,
        )  # fmt: skip
        os.close(theirs)
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, words: str) -> str:
        """What came up to and with `words`."""
        deadline = time.monotonic() + PATIENCE
        while words not in self._unread:
            if not self._more(deadline):
                raise AssertionError(f"{words!r} did not come after {self._unread[-2000:]!r}")
        found, self._unread = self._unread[: self._unread.index(words) + len(words)], self._unread.partition(words)[2]
        return found

    def ended(self) -> int:
        """The exit code, once the program is over; all it said is read."""
        deadline = time.monotonic() + PATIENCE
        while self._more(deadline):
            pass
        return self.program.wait(timeout=PATIENCE)

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait()
        os.close(self._ours)

    def _more(self, deadline: float) -> bool:
        if not select.select([self._ours], [], [], max(0, deadline - time.monotonic()))[0]:
            return False
        try:
            came = os.read(self._ours, 65_536)
        except OSError:  # Linux says so when the other end is closed
            return False
        self._unread += came.decode(errors="replace")
        return bool(came)


def _take_the_terminal() -> None:
    """Make standard input the terminal that sends Ctrl-C to this program."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background are told to ignore it


@pytest.fixture
def sitting(talker) -> Iterator[Terminal]:
    terminal = Terminal("chat", talker, "--device", "cpu", "--max-new-tokens", LONGEST)
    yield terminal
    terminal.close()


def test_a_person_can_talk_interrupt_and_leave(sitting):
    banner = "An empty line ends it. /reset begins a new conversation. /help lists more."
    assert "Using device: cpu" in sitting.until(banner)
    sitting.until("> ")

    sitting.type("How many?\n")
    screen = sitting.until("> ")
    assert "\x1b[2m3\x1b[0m" in screen, "the reasoning is dim, and comes token by token"
    assert "\x1b[1m8\x1b[0m\x1b[1m0\x1b[0m" in screen, "the answer is bright"
    assert "reasoning" not in screen and "answer" not in screen

    sitting.type("Go!\n")
    assert "cut off at --max-new-tokens" in sitting.until("> ")
    sitting.type("Go!\n")
    sitting.until("xyzxyz")
    sitting.type("\x03")
    assert "cut off" not in sitting.until("(interrupted)")
    sitting.until("> ")
    sitting.type("Go!\n")
    assert "cut off: the context is full" in sitting.until("> "), "the conversation is remembered"

    sitting.type("/reset\n")
    sitting.until("> ")
    sitting.type("And now?\n")
    assert "\x1b[1m8\x1b" in sitting.until("> ")
    sitting.type("\x04")
    assert sitting.ended() == 0


# --- without a terminal, within this process ------------------------------------------------------------------------


def talk(model: Path, typed: str, *more: object) -> Result:
    return CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(
        cli, ["chat", str(model), "--device", "cpu", *map(str, more)], input=typed
    )


def test_two_questions_have_two_answers_and_an_empty_line_ends_it(talker):
    done = talk(talker, "How many?\nAnd now?\n\nNever asked?\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("3 < 4\n80\n") == 2


def test_the_end_of_a_file_ends_it_too(talker):
    done = talk(talker, "How many?\n")
    assert done.exit_code == 0 and done.stdout.endswith("80\n> \n")


@pytest.mark.parametrize("leave", ["/quit", "exit", "Quit"])
def test_commands_are_not_sent_to_the_model(talker, leave):
    done = talk(talker, f"/help\n/nosuch 3\nHow many?\n{leave}\nNever asked?\n")
    assert done.exit_code == 0 and done.stdout.count("80\n") == 1
    assert done.stdout.count("/reset  begin a new conversation") == 2 and "no command /nosuch\n" in done.stdout


def test_a_question_is_read_from_standard_input(talker):
    words = ["generate", str(talker), "-", "--device", "cpu"]
    piped = CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(cli, words, input="How many?\n")
    assert piped.exit_code == 0 and piped.stdout == "3 < 4\n80\n"
    empty = CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(cli, words, input="\n")
    assert empty.exit_code == 3 and "the question is empty" in empty.stderr


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory) -> Path:
    """The same with few positions."""
    folder = tmp_path_factory.mktemp("models") / "forgetful"
    return write_chain_model(folder, {"?": SAID}, template=TEMPLATE, positions=160)


def test_what_was_said_is_remembered_until_it_is_begun_anew(forgetful):
    long = "word " * 50 + "so?"  # two of them with their answers leave no room for a third
    done = talk(forgetful, f"{long}\n{long}\n{long}\nHow many?\n/new\n{long}\n\n")
    assert done.exit_code == 0, done.output
    refusals = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(refusals) == 1 and "the conversation takes" in refusals[0] and "160 positions" in refusals[0]
    assert "begin anew with /reset" in done.stderr
    assert done.stdout.count("80\n") == 4, "what does not fit ends neither the talk nor what was said before"


def test_models_without_a_template_are_asked_each_question_alone(tmp_path):
    plain = write_chain_model(tmp_path / "plain", {"\n": SAID}, positions=160)
    done = talk(plain, ("word " * 50 + "so?\n") * 4 + "\n")
    assert "Each question is a conversation of its own." in done.stdout
    assert done.exit_code == 0 and done.stdout.count("80\n") == 4 and "error" not in done.stderr


def test_two_models_are_talked_with_side_by_side(talker, forgetful):
    done = talk(talker, "How many?\nAnd now?\n", "--against", forgetful)
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"3 < 4 +3 < 4", done.stdout)) == 2


def test_a_question_that_is_too_long_alone_does_not_end_the_talk(forgetful):
    done = talk(forgetful, "word " * 200 + "\nHow many?\n")
    assert done.exit_code == 0 and "the question takes" in done.stderr and "80" in done.stdout
