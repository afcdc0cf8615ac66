"""What a person sees on a real terminal of 80, 100 and 140 columns: nothing cut, nothing silent, red only where one must act.

python -m tests.e2e.test_terminal --write      writes tests/golden/terminal anew; look at them, then commit them
"""

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.terminal import Recorded, in_terminal

GOLDEN = ROOT / "tests" / "golden" / "terminal"
WIDTHS = (80, 100, 140)
VIEWS = (
    "runs submission_runs",
    "runs show submission_runs/gemma3_270m_gsm8k_v1",
    "compare submission_runs/gemma3_270m_gsm8k_v1",
    "plan submission_local_gpu --on rtx5090",
    "plan submission_local_gpu --on 8gb",
    "plan submission_local_gpu --on all",
    "doctor --device cuda --facts facts.json",
)
ALL_VIEWS = f"""
import json, os, pathlib, sys, tempfile
from tests.unit.test_fact_files import COMPUTERS
from tunix_rt.cli.main import cli, report
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.errors import TunixError
from tunix_rt.storage import json_text
for view in {VIEWS!r}:
    print("$ tunix-rt", view, flush=True)
    if "facts.json" in view:
        os.chdir(tempfile.mkdtemp())
        facts = facts_from_json(COMPUTERS["rtx5090-ready"]["facts"])
        pathlib.Path("facts.json").write_text(json_text(facts))
    try:
        cli(view.split(), standalone_mode=False)
    except TunixError as error:
        report(error)
    sys.stdout.flush()
"""
PHASES = """
import logging, sys, threading, time
from tunix_rt.cli.views.progress import watching
from tunix_rt.progress import close_displays, phase
log = logging.getLogger("tunix_rt.shown")
with watching() as progress:
    with phase("convert GGUF"):
        time.sleep(0.6)
    with phase("train", 7_473, done=0):
        for step in (1, 2, 3):
            time.sleep(0.3)
            progress("train", step, 7_473, "loss 0.0256, 12,881 tokens/s")
            log.info("step %d/%d  loss %.4f  lr 1e-4", step, 7_473, 0.0256)
        log.info("step %d  held-out loss %.4f over %s tokens", 3, 0.2648, "1,144")
        log.warning("Checkpoints block training")
        with phase("held-out loss", 347) as report:
            report(120, "")
            time.sleep(0.6)
            if sys.argv[1:] == ["forced"]:  # as the thread that ends a process in the middle of a call
                threading.Thread(target=lambda: (close_displays(), __import__("os")._exit(7))).start()
                time.sleep(60)
print("the prompt")
"""


def script(code: str, *arguments: str, columns: int = 80) -> Recorded:
    return in_terminal(
        arguments,
        columns=columns,
        program=(sys.executable, "-c", code),
        TZ="UTC",
        PYTHONPATH=f"{ROOT}:{ROOT / 'src'}",
        seconds=120,
    )


@cache
def shown(columns: int) -> str:
    """The views; dates and the seconds that planning took are replaced, and the year decides how a date is written."""
    text = script(ALL_VIEWS, columns=columns).screen.text
    text = re.sub(r"planned in [\d.]+ s", "planned in N s", text)
    return re.sub(r" (\d{4}-\d\d-\d\d|\d\d-\d\d \d\d:\d\d)(?= *$)", " DATE", text, flags=re.MULTILINE) + "\n"


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_views_look_as_they_were_looked_at(columns):
    assert shown(columns) == (GOLDEN / f"{columns}.txt").read_text(encoding="utf-8")


def test_no_word_is_cut_at_80_columns():
    """Long paths may be folded, and lenient scores (0->1) are left out of the list; every other word is there."""
    lost = set(shown(140).split()) - set(shown(80).split())
    assert not [word for word in lost if len(word) < 30 and "->" not in word and not set(word) <= set("─━█▌▐▏▎▍▊▉▋")]
    assert max(map(len, shown(80).splitlines())) <= 80


def last_frame(recorded: Recorded, word: str) -> str:
    """The screen after the last piece that contains `word`."""
    count = max(number for number, (_, piece) in enumerate(recorded.pieces) if word in piece)
    return Recorded(recorded.columns, recorded.pieces[: count + 1]).screen.text


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_bar_shows_total_and_time_left_and_disappears_with_its_phase(columns):
    recorded = script(PHASES, columns=columns)
    spinner, train = last_frame(recorded, "convert GGUF"), last_frame(recorded, "3/7,473")
    assert re.search(r"^convert GGUF +[-\\|/] +\d+\.\d s$", spinner, flags=re.MULTILINE)
    assert re.search(
        r"^train +\S+ 3/7,473 +\d+ (min \d\d s|h \d\d min) left loss 0\.0256, 12,881 toke", train, flags=re.MULTILINE
    )
    assert "convert GGUF" not in train and max(map(len, train.splitlines())) <= columns
    assert re.search(r"^held-out loss +\S+ 120/347 ", last_frame(recorded, "120/347"), flags=re.MULTILINE)
    end = recorded.screen
    assert end.text.splitlines() == [
        "step 3  held-out loss 0.2648 over 1,144 tokens", "Checkpoints block training", "the prompt",
    ]  # fmt: skip
    assert end.cursor_shown and not recorded.red() and "\x1b[33mCheckpoints" in recorded.raw
    assert recorded.longest_silence(since=recorded.pieces[0][0]) < 5, "imports take as long as other programs let them"


def test_a_process_that_is_ended_in_a_call_leaves_a_terminal_as_it_was():
    recorded = script(PHASES, "forced")
    assert recorded.code == 7 and "?25l" in recorded.raw and recorded.screen.cursor_shown
    assert recorded.screen.column == 0 and "held-out loss  " not in recorded.screen.text


# --- whole runs -------------------------------------------------------------------------------------------------------

SHORT = "--max-steps 2 --set evaluation.max_new_tokens=8 --device cpu"
CONFIGURED = (
    "smoke_tiny",
    "demo",
    "submission_local --model tiny-gemma3",
    "submission_gemma_flax --model tiny-gemma3 --set model.revision=main",
)
FILES = {
    "chat.jsonl": '{"messages": [{"role": "user", "content": "1 + %d?"}, {"role": "assistant", "content": "It is %d."}]}',
    "alpaca.jsonl": '{"instruction": "Add 1 to %d.", "input": "", "output": "That gives %d."}',
    "prompt.jsonl": '{"prompt": "What is 1 + %d?", "completion": "It is %d."}',
    "sharegpt.jsonl": '{"conversations": [{"from": "human", "value": "1 + %d?"}, {"from": "gpt", "value": "%d"}]}',
    "gsm8k.jsonl": '{"question": "1 + %d?", "answer": "One more is %d.\\n#### 5"}',
}
HOW = ("", "--set training.save_steps=1", "--set training.lora_rank=4 --set training.save_dtype=null", "--profile 1")


def ordinary_runs(folder: Path):
    """Twenty runs that an ordinary person makes: shipped configurations, and files of every accepted kind."""
    for config in CONFIGURED:
        for how in HOW[:1] if "submission" in config else HOW[:4]:
            yield f"{config} {SHORT} {how}"
    for name, line in FILES.items():
        (folder / name).write_text("".join(line.replace("%d", str(n)) + "\n" for n in range(60)))
        for how in HOW[:2]:
            given = f"--model tiny-gemma3 --data {folder / name} --set data.max_length=256"
            yield f"{given} --set evaluation.enabled=false {SHORT} {how}"


@pytest.mark.slow
def test_twenty_ordinary_runs_have_no_red_line_and_no_silence(tmp_path):
    commands = list(ordinary_runs(tmp_path))
    assert len(commands) == 20
    for number, words in enumerate(commands):
        arguments = ["train", *words.split(), "--output", tmp_path / str(number)]
        recorded = in_terminal(arguments, columns=(80, 100, 140)[number % 3], XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert recorded.code == 0, f"{words}\n{recorded.screen.text}"
        assert not recorded.red(), f"{words}: {recorded.red()}"
        assert recorded.screen.cursor_shown and "held-out loss" in recorded.screen.text
        assert recorded.longest_silence() < 4, f"{words}: {recorded.longest_silence()}"  # two seconds on idle cores


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GOLDEN.mkdir(exist_ok=True)
    for width in WIDTHS:
        (GOLDEN / f"{width}.txt").write_text(shown(width), encoding="utf-8")
