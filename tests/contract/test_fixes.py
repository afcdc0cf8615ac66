"""Every fix that is printed works: the words are taken from it and carried out in the situation that printed it.

A row of the table: the command that fails with its exit code, a pattern that takes the way out from the printed fix, what is done
with it, and how that ends. `{command}` is the command that failed, `{0}` what the pattern took; `change` replaces
words of either, as a person fills in a name. A fix that is advice in prose names nothing to take: its row has what a person does.
"""

import ast
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from huggingface_hub import constants

from tests.program import ROOT, in_process, refused
from tests.tables import tables
from tunix_rt.cli.main import cli
from tunix_rt.config.load import SETTINGS

CONFIG = """
model: {model_name_or_path: tiny-gemma3}
data: {dataset: dev-reasoning-v2, max_length: 256, validation_fraction: 0}
training: {device: cpu, max_steps: 2, per_device_train_batch_size: 1}
evaluation: {enabled: false}
"""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after the first of its two steps."""
    folder = tmp_path_factory.mktemp("fixes")
    (folder / "tiny.yaml").write_text(CONFIG)
    done = in_process("train", folder / "tiny.yaml", "--output", folder / "half", "--stop-after", 1)
    assert done.returncode == 7, done.stderr
    return folder / "half"


@pytest.fixture(scope="module")
def done(half: Path) -> Path:
    """The same run, complete."""
    folder = half.with_name("done")
    shutil.copytree(half, folder)
    finished = in_process("train", half.with_name("tiny.yaml"), "--output", folder, "--resume")
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a row, with a configuration."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the variable is read when the library is imported
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def prepare(row: dict[str, Any], place: Path, half: Path, request: pytest.FixtureRequest) -> None:
    for name in row.get("runs", []):
        shutil.copytree(half, place / "runs" / name)
    for name, content in row.get("files", {}).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    for name in row.get("models", []):
        folder = place / name
        folder.mkdir(parents=True)
        for kept in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "models" / "tiny-gemma3" / kept, folder)
    if complete := row.get("complete"):
        shutil.copytree(request.getfixturevalue("done"), place / complete)
    for name in row.get("without", []):
        (place / name).unlink()


def run(line: str) -> Any:
    words = shlex.split(line)
    return in_process(*(words[1:] if words[0] == "tunix-rt" else words))


def way_out(row: dict[str, Any], fix: str) -> list[str]:
    """The commands of a row, with what its pattern takes from the printed fix."""
    taken = re.search(row["take"], fix) if "take" in row else None
    assert taken or "take" not in row, f"the fix has no {row['take']!r}: {fix}"
    words = {"command": row["command"], "0": (taken[1] if taken.re.groups else taken[0]) if taken else ""}
    lines = row["do"] if isinstance(row["do"], list) else [row["do"]]
    commands = [re.sub(r"\{(command|0)\}", lambda one: words[one[1]], line) for line in lines]
    for old, new in row.get("change", {}).items():
        assert any(old in command for command in commands), f"{old!r} is not in {commands}"
        commands = [command.replace(old, new) for command in commands]
    return commands


ROWS = [row for rows in tables(__file__).values() for row in rows]
MARKED = [pytest.param(row, id=row["command"], marks=[pytest.mark.slow] if row.get("slow") else []) for row in ROWS]


@pytest.mark.parametrize("row", MARKED)
def test_the_printed_fix_works_in_its_situation(
    row: dict[str, Any], place: Path, half: Path, request: pytest.FixtureRequest
) -> None:
    prepare(row, place, half, request)
    printed = refused(run(row["command"]), row["exit"])
    assert printed.count("Usage:") == 0
    fix = printed.partition("\n  fix: ")[2]
    for problem in row.get("problem", []):
        assert problem in printed
    for command in way_out(row, fix):
        done = run(command)
    said = done.stdout + done.stderr
    assert done.returncode == row["then"], f"{command}\n{said}"
    assert row["says"] in said, f"{command}\n{said}"


def test_a_run_folder_is_a_model_to_plan_with_and_to_train(place: Path) -> None:
    shutil.copytree(ROOT / "models" / "tiny-gemma3", place / "runs" / "done" / "final_model")
    (place / "runs" / "done" / "config.yaml").write_text(CONFIG)
    assert run("plan tiny.yaml --model runs/done").returncode == 0
    trained = run("train tiny.yaml --model runs/done --output runs/more --stop-after 1")
    assert trained.returncode == 7 and "model=runs/done/final_model revision=local" in trained.stderr


def commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(command)
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    below = {name: command.get_command(context, name) for name in names}  # type: ignore[attr-defined]
    return [path, *(one for name, inner in below.items() if inner for one in commands(inner, (*path, name)))]


def test_every_command_has_the_short_option_for_help_and_lists_whole_sentences() -> None:
    every = commands(cli)
    assert ("evidence", "collect") in every and len(every) > 20
    for path in every:
        done = in_process(*path, "-h")
        assert done.returncode == 0 and done.stdout.startswith(f"Usage: {' '.join(('tunix-rt', *path))} ")
        assert not re.search(r"\.\.\.$", done.stdout.partition("Commands:")[2], flags=re.MULTILINE)


# --- every fix, by its words ------------------------------------------------------------------------------------------

OF_OTHERS = {"--gpus", "--merge", "--security-opt", "--depth", "--filter", "--unshallow", "--repo-type"}
"""Options of docker, git and llama.cpp."""


def fixes() -> list[tuple[str, str]]:
    """Place and words of every fix in the source, and of the constants that fixes are made of."""
    found = []
    for path in sorted((ROOT / "src" / "tunix_rt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            values = [word.value for word in node.keywords if word.arg == "fix"] if isinstance(node, ast.Call) else []
            if isinstance(node, ast.Assign) and any(
                isinstance(one, ast.Name) and one.id == "fix" for one in node.targets
            ):
                values.append(node.value)
            for value in values:
                parts = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
                found.append((f"{path.name}:{value.lineno}", " ".join(part for part in parts if isinstance(part, str))))
    return found


def options(command: click.Command) -> set[str]:
    context = click.Context(command)
    below = (
        [command.get_command(context, name) for name in command.list_commands(context)]
        if isinstance(command, click.Group)
        else []
    )
    return {name for one in command.params for name in one.opts}.union(*(options(one) for one in below if one))


def test_every_fix_names_options_settings_verbs_and_pages_that_exist() -> None:
    known, verbs = options(cli) | OF_OTHERS, set(cli.list_commands(click.Context(cli)))
    every = fixes()
    assert len(every) > 400, "the source is read"
    for place, words in every:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", words))
        settings = set(re.findall(r"\b(?:model|data|training|evaluation)\.[a-z_]+\b", words))
        pages = re.findall(r"docs/[\w/.-]+\.md", words)
        called = set(re.findall(r"[`:] ?tunix-rt ([a-z]+)", words))
        assert named <= known, f"{place}: {named - known}"
        assert settings <= SETTINGS, f"{place}: {settings - SETTINGS}"
        assert called <= verbs, f"{place}: {called - verbs}"
        assert all((ROOT / page).is_file() for page in pages), f"{place}: {pages}"
