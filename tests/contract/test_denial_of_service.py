"""No folder makes the reader hang, or take more than a gigabyte: through the real program, measured from outside.

M6: inputs whose checking once took quadratic time or all memory. M7: a tokenizer that never comes to an end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forging.bases import copy_of
from tests.forging.edits import edited, put, read
from tests.forging.measuring import Measured, measured
from tests.forging.sealing import reseal, reseal_run_sums, reseal_sums
from tests.program import ROOT
from tunix_rt.data.render import Style
from tunix_rt.data.template import Template
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.runs.checksums import SUMS

GIB = 2**30
STATE = "checkpoints/step-000010/state.json"
MODEL = "final_model/model.safetensors"


def sparse(path: Path, size: int) -> None:
    """A file of that size that takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def flood(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        put(folder / name, content)
        reseal_run_sums(folder)
        reseal_sums(folder)

    return change


def without_end(folder: Path) -> None:
    in_place_of("metrics.jsonl", os.mkfifo)(folder)
    in_place_of("result.json", lambda path: path.symlink_to("/dev/zero"))(folder)


def large_facts(folder: Path) -> None:
    sparse(folder / STATE, 900_000_000)
    sparse(folder / "metrics.jsonl", 3 * 10**9)


IN_A_BUNDLE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "SHA256SUMS of 4 million newlines": (lambda folder: put(folder / SUMS, b"\n" * 4_000_000), ["SHA256SUMS:1: malformed line"]),
    "metrics of 300,000 empty objects": (flood("metrics.jsonl", b"{}\n" * 300_000), ["metrics.jsonl:1: step: missing"]),
    "facts of 4 GB on no disk": (large_facts, [f"{STATE}: 900,000,000 bytes", "metrics.jsonl: 3,000,000,000 bytes"]),
    "weights of 200 GB on no disk": (lambda folder: sparse(folder / MODEL, 200 * 10**9), ["186.3 GiB, at most 8 GiB are read"]),
    "files without end": (without_end, ["metrics.jsonl: not a regular file", "result.json: a symbolic link"]),
}  # fmt: skip

QUICK = ("weights of 200 GB on no disk", "files without end", "facts of 4 GB on no disk")


def within_limits(done: Measured, seconds: float = 60.0) -> str:
    assert done.seconds < seconds and done.peak_bytes < GIB, done
    assert "Traceback" not in done.output
    return done.output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in IN_A_BUNDLE]
)
def test_m6_a_flood_in_a_bundle_is_found_within_seconds(name: str, cpu_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(cpu_bundle, tmp_path / "folder")
    change, found = IN_A_BUNDLE[name]
    change(folder)
    done = measured("evidence", "verify", folder)
    output = within_limits(done)
    assert done.code == 6 and "FAILED at L0" in output and all(problem in output for problem in found), output
    assert output.count("\n") < 120, "the findings are few"


@pytest.mark.slow
def test_m6_a_log_line_of_10_mb_is_hashed_and_not_parsed(cpu_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(cpu_bundle, tmp_path / "folder")
    put(folder / "training_log.txt", b"Preflight: model=" + b"x " * 5_000_000)
    reseal(folder)
    done = measured("evidence", "verify", folder)
    assert done.code == 0 and "level L1" in within_limits(done)


@pytest.mark.slow
def test_m6_runs_lists_and_shows_a_folder_with_files_without_end(cpu_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(cpu_bundle, tmp_path / "runs" / "hostile")
    without_end(folder)
    shown = within_limits(measured("runs", "show", folder, seconds=30.0), 30.0)
    assert "metrics.jsonl" in shown and "result.json" in shown
    assert "hostile" in within_limits(measured("runs", tmp_path / "runs", "--json", seconds=30.0), 30.0)


@pytest.mark.slow
def test_m6_a_pipe_in_a_run_folder_is_a_finding(cpu_run: Path, tmp_path: Path) -> None:
    folder = copy_of(cpu_run, tmp_path / "run")
    in_place_of("result.json", os.mkfifo)(folder)
    done = measured("evidence", "verify", folder)
    assert done.code == 6 and "result.json: not a regular file" in within_limits(done)


@pytest.mark.slow
def test_m6_sparse_weights_in_a_run_folder_are_hashed_for_a_limited_time(tiny_run: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_run, tmp_path / "run")
    sparse(folder / MODEL, 200 * 10**9)
    done = measured("evidence", "verify", folder, seconds=300.0)
    assert done.code == 6 and "of CPU time" in within_limits(done, 240.0)


# --- M7 ---------------------------------------------------------------------------------------------------------------

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
"""Of a conversation with two turns or more: the trials with one come to an end."""


def with_template(bundle: Path, tokenizer: Path, template: str, to: Path) -> Path:
    """A bundle whose run committed to the tokenizer in `tokenizer`, given this chat template."""
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        put(tokenizer / name, (ROOT / "models" / "tiny-gemma3" / name).read_bytes())
    put(tokenizer / "chat_template.jinja", template)
    found = load_tokenizer(tokenizer, read(tokenizer / "config.json")["model_type"])
    folder = copy_of(bundle, to)
    with edited(folder / "precommit.json") as committed:
        committed["tokenizer_sha256"] = found.sha256
        style = Style(template=Template(name="tokenizer", jinja=template, source="chat_template.jinja"))
        committed["dataset"]["style_sha256"] = style.sha256
    with edited(folder / "eval_summary.json") as summary:
        summary["decoding"]["tokenizer"] = found.sha256
    reseal(folder)
    return folder


@pytest.mark.slow
def test_m7_a_chat_template_of_the_bundle_is_never_rendered(cpu_bundle: Path, tmp_path: Path) -> None:
    """The tokenizer is the verifier's, by its hash; none is at hand with a template that the run brought itself."""
    folder = with_template(cpu_bundle, tmp_path / "tokenizer", ENDLESS, tmp_path / "folder")
    put(folder / "final_model" / "chat_template.jinja", ENDLESS)
    reseal(folder)
    done = measured("evidence", "verify", folder, "--require", "L3")
    assert done.code == 3 and "missing inputs, by hash: tokenizer" in within_limits(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "found"),
    [(ENDLESS, "s of wall-clock time"), ("{{ 'x' * 1000000000000 }}", "MemoryError"), ("x" * 600_000_000, "GiB")],
    ids=["endless", "endless text", "huge"],
)
def test_m7_a_tokenizer_that_the_verifier_supplies_is_prepared_within_limits(
    template: str, found: str, tiny_replayable: Path, tmp_path: Path
) -> None:
    folder = with_template(tiny_replayable, tmp_path / "tokenizer", template, tmp_path / "folder")
    done = measured(
        "evidence", "verify", folder, "--require", "L2", "--tokenizer", tmp_path / "tokenizer", seconds=200.0
    )
    assert done.code in (3, 6) and done.seconds < 120.0 and done.peak_bytes < 2 * GIB, done
    assert found in done.output, done.output
