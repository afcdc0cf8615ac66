"""Write the parts of the pages that code or measurements decide: `python -m docs.generate`, or `--check` to compare only.

Whole pages: docs/doctor and docs/reference without run-folder.md. Blocks between markers: the demo's figures in README.md,
the manifest's in the model card, what was measured in docs/concepts/{memory-model,data-at-scale,checkpoints,evidence}.md and
docs/guides/{did-it-help,plan,take-it-elsewhere}.md, the causes in docs/index.md,
the compiler's verdicts in docs/decisions/m38-audit.md and docs/reference/plan-tpu.md. Everything else is written by hand and
held by tests/contract/test_docs.py.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from benchmarks import accumulation_error, kills, mutations
from docs import (
    answer_pages,
    any_model_pages,
    cluster_pages,
    data_pages,
    dialect_pages,
    doctor_pages,
    engine_pages,
    gguf_pages,
    jax_pages,
    memory_pages,
    plan_pages,
    replay_pages,
    speed_pages,
    tpu_pages,
)
from docs.markdown import WRITTEN, relabelled, replaced, table, with_block
from tunix_rt import errors
from tunix_rt.errors import ConfigError, TunixError

ROOT = Path(__file__).parents[1]
HELP_COLUMNS = 100
MEMORY = memory_pages.ON_CPU
DATA_PAGE = Path("docs/concepts/data-at-scale.md")
CHECKPOINTS_PAGE = Path("docs/concepts/checkpoints.md")
EVIDENCE_PAGE = Path("docs/concepts/evidence.md")
OPTIMIZERS_PAGE = Path("docs/concepts/optimizers.md")
INDEX_PAGE = Path("docs/index.md")
ANSWERS_PAGE = Path("docs/guides/did-it-help.md")
CARD = Path("models/tiny-gemma3")


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Path below the root -> the text it should hold now, with the labels of today for recorded ones."""
    return {path: relabelled(text) for path, text in _pages(root).items()}


def _pages(root: Path) -> dict[Path, str]:
    return {
        Path("docs/reference/config.md"): config_page(),
        Path("docs/reference/cli.md"): cli_page(),
        Path("docs/reference/exit-codes.md"): exit_codes_page(),
        dialect_pages.PAGE: dialect_pages.page(root),
        dialect_pages.GUIDE: dialect_pages.guide(root),
        Path("docs/reference/data-formats.md"): data_pages.formats_page(),
        Path("docs/reference/data-rules.md"): data_pages.rules_page(),
        Path("docs/reference/torch-engine.md"): engine_pages.page(root),
        Path("docs/reference/speed.md"): speed_pages.page(root),
        **doctor_pages.pages(),
        INDEX_PAGE: with_block(root, INDEX_PAGE, "causes", doctor_pages.index_block()),
        Path("README.md"): with_block(
            root, Path("README.md"), "demo", answer_pages.demo_block(answer_pages.read_demo(root))
        ),
        memory_pages.PAGE: memory_pages.page(root),
        any_model_pages.PAGE: any_model_pages.page(root),
        cluster_pages.PAGE: cluster_pages.page(root),
        gguf_pages.PAGE: gguf_pages.page(root),
        EVIDENCE_PAGE: evidence_page(root),
        DATA_PAGE: with_block(root, DATA_PAGE, "measured", data_pages.measured_block(root)),
        OPTIMIZERS_PAGE: with_block(root, OPTIMIZERS_PAGE, "accumulation", accumulation_error.block(root)),
        CHECKPOINTS_PAGE: with_block(root, CHECKPOINTS_PAGE, "kills", kills.block(root)),
        ANSWERS_PAGE: answers_page(root),
        plan_pages.PAGE: with_block(root, plan_pages.PAGE, "example", plan_pages.example_block()),
        Path("tunix-rt.md"): with_block(root, Path("tunix-rt.md"), "bundles", bundles_block(root)),
        tpu_pages.PAGE: tpu_pages.page(root),
        tpu_pages.PLAN_PAGE: tpu_pages.plan_page(root),
        jax_pages.PAGE: jax_pages.page(root),
        jax_pages.TUNIX_PAGE: jax_pages.tunix_page(root),
        CARD / "README.md": with_block(root, CARD / "README.md", "manifest", manifest_block(root)),
    }


def evidence_page(root: Path) -> str:
    text = with_block(root, EVIDENCE_PAGE, "tolerances", replay_pages.tolerances_block(root))
    return replaced(text, "mutations", mutations.block(root), EVIDENCE_PAGE)


def answers_page(root: Path) -> str:
    text = with_block(root, ANSWERS_PAGE, "answers", answer_pages.answers_block(root))
    return replaced(text, "decode", answer_pages.decode_block(root), ANSWERS_PAGE)


def bundles_block(root: Path) -> str:
    """The bundles of submission_runs in a table, with the figures of run_manifest.json."""
    rows = []
    for file in sorted((root / "submission_runs").glob("*/run_manifest.json")):
        stated = json.loads(file.read_text(encoding="utf-8"))
        speeds, backend = stated["tokens_per_second"], stated["backend"]
        engine = f"{'JAX' if backend == 'jax' else 'PyTorch'} {stated['versions'][backend]}"
        cpu = f", {speeds['ratio']:.1f} times the CPU's {speeds['cpu']:,.0f}" if "ratio" in speeds else ""
        scores = stated.get("scores")
        rows.append((
            f"[{file.parent.name}](submission_runs/{file.parent.name}/README.md)",
            f"{stated['model']}, {stated['weights']} weights", f"{stated['hardware']['name']}, {engine}",
            f"{stated['steps_completed']}", f"{stated['final_loss']:.4f}",
            f"{scores['before']['correct']}, {scores['after']['correct']} of {scores['after']['items']}" if scores else "",
            f"{speeds['device']:,.0f}{cpu}",
        ))  # fmt: skip
    return table(("bundle", "model", "ran on", "steps", "final loss", "right before, after", "tokens/s"), rows)


# --- settings --------------------------------------------------------------------------------------------------------


def config_page() -> str:
    from tunix_rt.config.load import INSTEAD, OLD_NAMES, SETTINGS
    from tunix_rt.config.settings import RunConfig

    parts = [
        "# Settings",
        WRITTEN,
        f"A run has {len(SETTINGS)} settings in four sections. A configuration is a YAML file; see `training/configs/` for "
        "complete ones. The file comes first, then `--set section.key=value`, then the named flags of the command line, "
        "each over the one before. No environment variable is a setting.",
        "An unknown setting is an error that names the nearest one. Unknown names are reported at once, then wrong "
        "values. A key given twice "
        "and a YAML alias are refused. The settled result, in these names, is `config.yaml` in the run folder.",
    ]
    for section, field in RunConfig.model_fields.items():
        model: Any = field.annotation
        rows = [
            (f"`{name}`", allowed(setting), _default(setting.default), _sentence(setting.description))
            for name, setting in model.model_fields.items()
        ]
        parts += [f"## {section}", table(("setting", "allowed", "default", "meaning"), rows)]
    parts += [
        "## Refused in this version",
        "These values are known, and no engine honours them yet. A run that sets one ends with exit code 2.",
        table(("setting", "error", "fix"), list(_refused())),
        "## Old names",
        "Still read, and written into the run folder under the new name. Two spellings of one setting may agree; when they "
        "differ, the file is refused. A setting may also stand at the top level, outside its section.",
        table(("old or foreign name", "setting"), [(f"`{old}`", f"`{new}`") for old, new in OLD_NAMES.items()]),
        "## Known elsewhere, not a setting here",
        "Each is refused with the way to write it.",
        table(("name", "instead"), [(f"`{name}`", hint) for name, hint in INSTEAD.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def allowed(setting: Any) -> str:
    """What a setting takes, in words, with the other words for its values."""
    kind, bounds, optional = _unwrapped(setting.annotation, setting.metadata)
    several = any(get_origin(getattr(one, "__origin__", one)) is tuple for one in get_args(setting.annotation))
    if bool in (either := get_args(kind)) and len(either) == 2:  # yes, no, or how much
        other, limits, _ = _unwrapped(either[1] | None, setting.metadata)
        named = [f"`{value}`" for value in get_args(other)] if get_origin(other) is Literal else []
        words = f"`true`, `false`, or {' or '.join(named) or f'a {_number(other, limits)}'}"
    elif get_origin(kind) is Literal:
        words = ", ".join(f"`{value}`" for value in get_args(kind))
    elif kind is bool:
        words = "`true`, `false`"
    elif kind is str or several:
        words = "text, or a list of texts" if several else "text"
    elif get_origin(kind) is dict:
        words = "a mapping of texts"
    else:
        words = _number(kind, bounds)
    extra = "".join(f"; {said}" for said in _other_words(setting.metadata))
    return words + ("; or left out" if optional else "") + extra


def _number(kind: Any, bounds: list[Any]) -> str:
    words = {int: "whole number", float: "number"}[kind]
    return words + "".join(f", {sign} {limit:,}" for sign, limit in _limits(bounds))


def _unwrapped(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any], bool]:
    """The bare type, its bounds, and whether None is allowed (`Annotated[int, Field(ge=1)] | None`)."""
    options = [option for option in get_args(annotation) if option is not NoneType]
    optional = NoneType in get_args(annotation)
    if not optional:
        return annotation, metadata, False
    inner = options[0]
    if hasattr(inner, "__metadata__"):
        bounds = [bound for field in inner.__metadata__ for bound in getattr(field, "metadata", [field])]
        return inner.__origin__, bounds, True
    return inner, metadata, True


def _limits(bounds: list[Any]) -> Iterator[tuple[str, float]]:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for bound in bounds:
        for name, sign in signs.items():
            if (limit := getattr(bound, name, None)) is not None:
                yield sign, limit


def _other_words(metadata: list[Any]) -> Iterator[str]:
    """Other words for a value, read from the closures of config.py's `_same_as` and `_none_for`."""
    for validator in metadata:
        if (function := getattr(validator, "func", None)) is None:
            continue
        bound = inspect.getclosurevars(function).nonlocals
        for word, meaning in bound.get("table", {}).items():
            yield f"`{word}` is `{meaning}`"
        for word in bound.get("spellings", ()):
            yield f"`{word}` is left out"


def _default(value: Any) -> str:
    if value is None:
        return "left out"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _sentence(text: str | None) -> str:
    if not text:
        raise TunixError(
            "a setting has no docstring", fix="write one sentence below it in src/tunix_rt/config/settings.py"
        )
    return " ".join(text.split())


def _refused() -> Iterator[tuple[str, str, str]]:
    """Every choice that `require_runnable` turns down, found by asking it."""
    from tunix_rt.config.conflicts import require_runnable
    from tunix_rt.config.load import build_config
    from tunix_rt.config.settings import RunConfig

    runnable = {"model": {"model_name_or_path": "tiny-gemma3"}, "data": {"dataset": "dev-reasoning-v2"}}
    tried = [("model", "revision", "flax")]
    for section, field in RunConfig.model_fields.items():
        model: Any = field.annotation
        for name, setting in model.model_fields.items():
            tried += [(section, name, value) for value in get_args(setting.annotation) if isinstance(value, str)]
    for section, name, value in tried:
        raw = {**runnable, section: {**runnable.get(section, {}), name: value}}
        try:
            require_runnable(build_config(raw, "docs"))
        except ConfigError as error:
            yield f"`{section}.{name}: {value}`", error.problem, error.fix


# --- the command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    parts = [
        "# Command line",
        WRITTEN,
        "Results go to standard output, words to standard error. `--json` prints the result as JSON. Errors are two "
        "parts, what is wrong and the way out, with an [exit code](exit-codes.md) for each kind. Settings are in "
        "[config.md](config.md).",
    ]
    for path, text in help_texts():
        parts += [f"{'##' if len(path) < 2 else '###'} {' '.join(('tunix-rt', *path))}", f"```text\n{text}\n```"]
    parts += [
        "## The command lines of the founding documents",
        "`python training_pt/train.py` runs the PyTorch engine, `python training/run_train_jax.py` (and its older name, "
        "`training/train_jax.py`) the JAX engine. They take the old flags, exactly: `--config`, `--output`, `--dataset`, "
        "`--device`, `--max_steps`, `--smoke_config`, `--smoke_steps`. They are frozen. Besides them they take what their own "
        "error messages name: `--model`, `--data`, `--weights`, `--set` and `--resume`. `--config` and `--output` must be "
        "given. The smoke flags change a run only when they are given. A configuration that names the other engine is "
        "refused; one that names none gets the engine of the script. Everything else is as in `tunix-rt train`.",
    ]
    return "\n\n".join(parts) + "\n"


def help_texts() -> Iterator[tuple[tuple[str, ...], str]]:
    """The real `--help` of the program, of every verb and of every command below one, at a fixed width."""
    from click.testing import CliRunner

    from tunix_rt.cli.main import cli

    runner = CliRunner()
    for path in _commands(cli, ()):
        shown = runner.invoke(cli, [*path, "--help"], prog_name="tunix-rt", terminal_width=HELP_COLUMNS)
        if shown.exit_code != 0:
            name = " ".join(("tunix-rt", *path))
            raise TunixError(f"{name} --help ends with {shown.exit_code}: {shown.exception!r}", fix="repair the verb")
        yield path, "\n".join(line.rstrip() for line in shown.output.rstrip().splitlines())


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    import click

    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*path, name))


# --- exit codes ------------------------------------------------------------------------------------------------------


def exit_codes_page() -> str:
    rows = [("0", "", "done")]
    rows += [(str(kind.exit_code), f"`{kind.__name__}`", words) for kind, words in error_kinds()]
    return (
        "\n\n".join(
            [
                "# Exit codes",
                WRITTEN,
                "One code for each kind of error, the same for every verb. The kinds are the classes of "
                "`src/tunix_rt/errors.py`.",
                table(("code", "error", "meaning"), rows),
                "An error is two parts on standard error: what is wrong, with names and numbers, then the way out.",
                "```text\nerror: no dataset named 'dev-reasoning-v3'\n"
                "  fix: use one of: dev-reasoning-v2; or the path of a file or folder\n```",
                "Code 2 is also that of a flag the command line does not know. A traceback is a defect of tunix-rt; its code "
                "is 1.",
                "## What `result.json` says",
                "`tunix-rt train` writes its ending into the [run folder](run-folder.md), with the exit code and the reason.",
                table(
                    ("status", "when"),
                    [
                        ("`completed`", "all steps taken, or stopped early by `training.patience`; exit code 0"),
                        ("`refused`", "codes 2, 3, 4 and 5 before training began"),
                        (
                            "`preempted`",
                            "code 7: SIGTERM, SIGINT or the time budget; "
                            "no finished step is lost ([checkpoints](../concepts/checkpoints.md))",
                        ),
                        ("`failed`", "everything else, also codes 2 to 5 once training has begun"),
                    ],
                ),
                "What is refused before the run folder is opened leaves no `result.json`: a configuration that does not load "
                "or cannot run, a folder that is in use or already holds a run.",
            ]
        )
        + "\n"
    )


def error_kinds() -> list[tuple[type[TunixError], str]]:
    """Every error class by exit code, with its line in the tree that the docstring of errors.py draws."""
    drawn = {
        name: (int(code), words)
        for name, code, words in re.findall(r"(\w+) +(\d)   (.+)", inspect.getdoc(errors) or "")
    }
    kinds = sorted([TunixError, *_subclasses(TunixError)], key=lambda kind: kind.exit_code)
    for kind in kinds:
        if drawn.get(kind.__name__, (None, ""))[0] != kind.exit_code:
            raise TunixError(
                f"{kind.__name__} has exit code {kind.exit_code}; the docstring of errors.py says otherwise",
                fix="draw the class in the tree at the top of src/tunix_rt/errors.py",
            )
    return [(kind, drawn[kind.__name__][1]) for kind in kinds]


def _subclasses(kind: type[TunixError]) -> Iterator[type[TunixError]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


# --- figures ---------------------------------------------------------------------------------------------------------


def manifest_block(root: Path) -> str:
    """The figures of the model card, from `manifest.json` and the size of the weights."""
    facts = json.loads((root / CARD / "manifest.json").read_text(encoding="utf-8"))
    size = (root / CARD / "model.safetensors").stat().st_size
    rows = [
        ("parameters", f"{facts['parameters']:,}"),
        ("size of `model.safetensors`", f"{size:,} bytes"),
        ("steps", f"{facts['steps']:,}"),
        ("tokens trained on", f"{facts['tokens_trained']:,}"),
        ("distinct rows of the corpus", f"{facts['rows']:,}"),
        ("highest learning rate", f"{facts['learning_rate']:g}"),
        ("seed", f"{facts['seed']}"),
        ("final loss, mean of the last 50 steps", f"{facts['final_loss']:.4f}"),
        ("made on", f"{facts['device']}, torch {facts['torch']}"),
        ("time, corpus and tokenizer included", f"{facts['seconds']} s"),
        ("SHA-256 of the weights", f"`{facts['sha256']}`"),
    ]
    return table(("fact", "value"), rows)


# --- write or compare ------------------------------------------------------------------------------------------------


def list_problems(root: Path = ROOT) -> list[str]:
    """Every way the pages are out of step; an empty list means none is."""
    problems = []
    if not (root / answer_pages.DEMO).is_file():
        problems.append(
            f"{answer_pages.DEMO} is missing: run {answer_pages.DEMO_COMMAND}, then python -m docs.generate"
        )
    for path, text in pages(root).items():
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text:
            problems.append(f"stale: {path}: run python -m docs.generate")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of step")
    options = parser.parse_args(arguments)
    try:
        if options.check:
            problems = list_problems()
            sys.stderr.writelines(f"{problem}\n" for problem in problems)
            return 1 if problems else 0
        for path, text in pages().items():
            same = (ROOT / path).is_file() and (ROOT / path).read_text(encoding="utf-8") == text
            if not same:
                (ROOT / path).parent.mkdir(exist_ok=True)
                (ROOT / path).write_text(text, encoding="utf-8", newline="\n")
            sys.stdout.write(f"{'unchanged' if same else 'written'}  {path}\n")
    except TunixError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
