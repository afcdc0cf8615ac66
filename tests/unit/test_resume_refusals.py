"""What `train --resume` refuses before it reads or writes a file of the run."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.tables import parametrize
from tunix_rt.cli.main import cli
from tunix_rt.engines.base import NUMERICS
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.runs.folder import FORMAT
from tunix_rt.storage import write_json
from tunix_rt.train.commitment import refuse_another_format, refuse_another_run

COMMITTED: dict[str, Any] = {
    "format": FORMAT, "numerics": NUMERICS["torch"], "device": "cpu", "versions": {"tunix-rt": "0.1.0", "torch": "2.9.0"},
    "source_sha256": "a" * 64, "source_files": {"train.py": "b" * 64}, "created": "2026-01-01T00:00:00+00:00",
    "config_sha256": "c" * 64, "dataset": {"sha256": "d" * 64}, "base_model": {"name": "m"},
}  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["training_log.txt", "checkpoints", "metrics.jsonl", ".lock", "eval", "final_model"])
def test_nothing_is_written_or_deleted_through_a_link_in_the_folder(tmp_path, name, resume):
    outside = tmp_path / "outside"
    (outside / "step-000000001").mkdir(parents=True)
    for file in ("thesis.txt", "step-000000001/thesis.txt", ".staged-mine"):
        (outside / file).write_text("mine\n")
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "precommit.json", COMMITTED)
    before = content(tmp_path)
    is_file = "." in name
    (run / name).symlink_to(outside / "thesis.txt" if is_file else outside)
    asked = ["train", "smoke_tiny", "--output", str(run), *(["--resume"] if resume else [])]
    said = CliRunner().invoke(cli, asked)
    assert said.exit_code == 8, said.output
    assert name in said.stderr
    (run / name).unlink()
    assert {name: text for name, text in content(tmp_path).items() if name != "run/.lock"} == before


@pytest.mark.parametrize(
    ("found", "named"), [(None, "no format"), (3, "format 3"), (5, "format 5"), ("4", "no format")]
)
def test_a_run_of_another_format_is_refused_by_name(tmp_path, found, named):
    refuse_another_format(COMMITTED, tmp_path)
    with pytest.raises(InputError, match=f"{named}, this version of tunix-rt writes format {FORMAT}") as caught:
        refuse_another_format(COMMITTED | {"format": found}, tmp_path)
    assert caught.value.exit_code == 3


@parametrize("changed", "named")
def test_a_run_is_resumed_only_by_what_computes_the_same(tmp_path, changed, named):
    with pytest.raises(ConfigError, match=named):
        refuse_another_run(COMMITTED, COMMITTED | changed, tmp_path)


def test_another_source_and_version_of_the_same_numerics_may_resume_a_run(tmp_path):
    newer = {"source_sha256": "0" * 64, "source_files": {}, "created": "now"}
    newer["dataset"] = COMMITTED["dataset"] | {"commits": {"o/plain": "5" * 40}}
    versions = COMMITTED["versions"] | {"tunix-rt": "0.2.0"}
    refuse_another_run(COMMITTED, COMMITTED | newer | {"versions": versions}, tmp_path)
