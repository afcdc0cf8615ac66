"""Whatever single byte of a run folder is changed, it is found: by the hashes, in the metrics by the chain as well."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tunix_rt.evidence.hashes import list_problems, write_hashes
from tunix_rt.rundir import RunDir, json_line, sha256_text, write_json, write_text

LOSSES = st.lists(st.floats(min_value=0.0, max_value=20.0), min_size=1, max_size=5)
COVERED = ("config.yaml", "precommit.json", "metrics.jsonl", "result.json", "checkpoints/step-000001/state.json")


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Durability is tested elsewhere; here it would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def make_run(root: Path, losses: list[float]) -> RunDir:
    run = RunDir(root)
    write_text(run.config, "training:\n  seed: 0\n")
    write_json(run.precommit, {"seed": 0})
    write_json(run.checkpoints / "step-000001" / "state.json", {"step": 1})
    prev, text, line = hashlib.sha256(run.precommit.read_bytes()).hexdigest(), "", ""
    for step, loss in enumerate(losses, start=1):
        line = json_line({"step": step, "loss": loss, "loss_hex": loss.hex(), "prev": prev})
        prev = sha256_text(line.removesuffix("\n"))
        text += line
    write_text(run.metrics, text)
    result = {
        "schema": "tunix-rt/result/1",
        "status": "completed",
        "exit_code": 0,
        "steps_completed": len(losses),
        "final_loss": losses[-1],
        "final_loss_hex": losses[-1].hex(),
        "metrics_head": prev,
    }
    write_json(run.result, result)
    write_hashes(run)
    return run


def flip(path: Path, place: float, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= bits
    path.write_bytes(bytes(data))


PLACE = st.floats(min_value=0.0, max_value=1.0, exclude_max=True)
BITS = st.integers(min_value=1, max_value=255)


@given(losses=LOSSES)
@settings(deadline=None, max_examples=30)
@example(losses=[5e-324])
@example(losses=[0.0, 20.0])
def test_an_untouched_run_verifies_whatever_its_losses(losses):
    with TemporaryDirectory() as folder:
        assert list_problems(make_run(Path(folder), losses).root) == []


@given(losses=LOSSES, name=st.sampled_from([*COVERED, "SHA256SUMS"]), place=PLACE, bits=BITS)
@settings(deadline=None, max_examples=400)
@example(losses=[1.0], name="SHA256SUMS", place=0.999999, bits=1)
def test_any_changed_byte_in_any_file_is_found(losses, name, place, bits):
    with TemporaryDirectory() as folder:
        run = make_run(Path(folder), losses)
        flip(run.root / name, place, bits)
        assert list_problems(run.root) != []


@given(losses=LOSSES, name=st.sampled_from(["precommit.json", "metrics.jsonl"]), place=PLACE, bits=BITS)
@settings(deadline=None, max_examples=400)
@example(losses=[1.0, 2.0], name="metrics.jsonl", place=0.999999, bits=0x2A)
def test_any_changed_byte_in_metrics_or_precommit_is_found_even_with_new_hashes(losses, name, place, bits):
    with TemporaryDirectory() as folder:
        run = make_run(Path(folder), losses)
        flip(run.root / name, place, bits)
        write_hashes(run)
        assert list_problems(run.root) != []


@given(losses=LOSSES, name=st.sampled_from(COVERED), place=PLACE)
@settings(deadline=None, max_examples=60)
def test_a_file_cut_short_anywhere_is_found(losses, name, place):
    with TemporaryDirectory() as folder:
        run = make_run(Path(folder), losses)
        data = (run.root / name).read_bytes()
        (run.root / name).write_bytes(data[: int(place * len(data))])
        assert list_problems(run.root) != []


@given(garbage=st.binary(max_size=300), name=st.sampled_from([*COVERED, "SHA256SUMS"]))
@settings(deadline=None, max_examples=100)
@example(garbage=b"", name="SHA256SUMS")
def test_garbage_in_place_of_any_file_is_a_finding_and_never_a_traceback(garbage, name):
    with TemporaryDirectory() as folder:
        run = make_run(Path(folder), [1.0, 0.5])
        if garbage != (run.root / name).read_bytes():
            (run.root / name).write_bytes(garbage)
            assert list_problems(run.root) != []
