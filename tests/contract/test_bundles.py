"""The bundles in submission_runs: each verifies, and was made from a commit of this repository."""

import functools
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.forging.bases import GPU
from tests.program import ROOT, environment
from tunix_rt.cli.main import cli
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.verify import verify
from tunix_rt.runs.source import CommitMatch, find_commit

BUNDLES = sorted(path.parent for path in (ROOT / "submission_runs").glob("*/run_manifest.json"))
DEMO = ROOT / "submission_runs" / "demo_v1"


def has_history() -> bool:
    """A copy without history, or a shallow clone, cannot show the commit."""
    asked = subprocess.run(["git", "-C", ROOT, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    return asked.stdout.strip() == "false"


def test_every_folder_of_submission_runs_is_a_bundle_of_this_format():
    assert BUNDLES and {path for path in (ROOT / "submission_runs").iterdir() if path.is_dir()} == set(BUNDLES)


@functools.cache
def commit_of(source_sha256: str) -> CommitMatch | None:
    if not has_history():
        pytest.skip("this copy has no history to look the commit up in")
    return find_commit(source_sha256, ROOT)


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_a_committed_bundle_is_consistent_and_its_commit_is_one_of_this_repository(bundle):
    examined = examine(bundle)
    assert (examined.level, examined.findings) == ("L1", [])
    found = commit_of(examined.run.commitment.source_sha256)
    assert found is not None and found.commit == examined.record.manifest.commit


def test_the_command_finds_the_commit_of_a_bundle_in_this_repository():
    if not has_history():
        pytest.skip("this copy has no history to look the commit up in")
    done = CliRunner().invoke(cli, ["evidence", "verify", str(GPU), "--repository", str(ROOT), "--json"])
    assert done.exit_code == 0, done.output
    (commit,) = (claim for claim in json.loads(done.stdout)["claims"] if claim["name"] == "commit")
    assert commit["label"] == "consistent", commit["how"]


@pytest.mark.parametrize("level", ["L2", *(pytest.param(level, marks=pytest.mark.slow) for level in ("L3", "L4"))])
def test_the_demo_bundle_is_regenerated_replayed_and_reproduced_from_the_clone_alone(level):
    verdict = verify(DEMO, level)
    assert verdict.ok and verdict.level == level, (verdict.findings, verdict.notes)
    labels = {claim.name: claim.label for claim in verdict.claims}
    recomputed = {"accuracy"} if level == "L2" else {"accuracy", "loss", "dataset"}
    assert {name for name in recomputed if labels[name] != "recomputed"} == set()
    if level == "L3":
        assert len(verdict.details["replayed"]["segments"]) == 3


def test_verifying_a_bundle_loads_neither_torch_nor_jax(cpu_bundle):
    asked = "import sys; from pathlib import Path; from tunix_rt.evidence.examine import examine; "
    asked += f"assert examine(Path({str(cpu_bundle)!r})).level == 'L1'; "
    asked += "print(sorted({'torch', 'jax', 'transformers', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr
