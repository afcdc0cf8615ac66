"""`metrics.jsonl` is a chain from the precommit to the last step, and a run continues from the newest good checkpoint."""

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.test_rundir import run_limited
from tunix_rt.config.load import build_config
from tunix_rt.data.packing import facts_of_rows
from tunix_rt.data.prepare import Prepared
from tunix_rt.data.sources import Dataset
from tunix_rt.engines.base import Step
from tunix_rt.engines.memory_meter import PhasePeak
from tunix_rt.errors import ConfigError, Preempted, StorageError, TunixError
from tunix_rt.runs import folder as run_folder
from tunix_rt.runs.journal import RunJournal
from tunix_rt.runs.ledger import MetricsLog, final_state, is_checkpoint, state_hash
from tunix_rt.runs.schemas import Batch
from tunix_rt.storage import append_jsonl, read_json, write_json, write_text
from tunix_rt.train.checkpointer import best_checkpoint
from tunix_rt.train.context import Options, RunContext
from tunix_rt.train.loop import train_run
from tunix_rt.train.preemption import Preemption
from tunix_rt.train.resume import find_start, newest_checkpoint, refuse_other_kernels, truncate_to


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Durability is tested with the run folder; here it would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def step(number, loss=None):
    return Step(
        step=number, loss=3.0 / number + 0.1 if loss is None else loss, lr=1e-3, grad_norm=1.5, target_tokens=100,
        tokens=160, seconds=0.25, peak_bytes=1_000_000, batch=hashlib.sha256(str(number).encode()).hexdigest(),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    run = run_folder.RunDir(tmp_path)
    write_json(run.precommit, {"schema": "tunix-rt/precommit/1", "seed": 0})
    return run


@pytest.fixture
def five_steps(run):
    log = MetricsLog.open(run, keep_steps=0)
    for number in range(1, 6):
        log.append(step(number))
    return run


def lines(run):
    return run.metrics.read_bytes().splitlines(keepends=True)


def assert_chain(run, steps, head):
    """The chain recomputed here, without the code that wrote it."""
    expected = hashlib.sha256(run.precommit.read_bytes()).hexdigest()
    records = [json.loads(line) for line in lines(run)]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    for line, record in zip(lines(run), records, strict=True):
        assert line.endswith(b"\n")
        assert record["prev"] == expected
        expected = hashlib.sha256(line[:-1]).hexdigest()
    assert head == expected


def test_the_chain_begins_at_the_hash_of_the_precommit(run):
    log = MetricsLog.open(run, keep_steps=0)
    assert log.head == hashlib.sha256(run.precommit.read_bytes()).hexdigest()
    for number in range(1, 6):
        log.append(step(number))
        assert_chain(run, number, log.head)


def test_every_line_has_the_same_keys_and_the_exact_loss(run):
    log = MetricsLog.open(run, keep_steps=0)
    log.append(step(1, loss=0.1 + 0.2))
    record = json.loads(lines(run)[0])
    assert sorted(record) == [
        "batch", "grad_norm", "loss", "loss_hex", "lr", "peak_bytes", "prev", "seconds", "step", "target_tokens", "tokens",
    ]  # fmt: skip
    assert float.fromhex(record["loss_hex"]) == record["loss"] == 0.1 + 0.2


@pytest.mark.parametrize("kept", range(6))
def test_resuming_cuts_the_lines_of_steps_that_are_taken_again(five_steps, kept):
    whole = lines(five_steps)
    log = MetricsLog.open(five_steps, keep_steps=kept)
    assert lines(five_steps) == whole[:kept]
    for number in range(kept + 1, 6):
        log.append(step(number))
    assert lines(five_steps) == whole, "the same steps give the same lines, byte for byte"
    assert_chain(five_steps, 5, log.head)


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b"\x00\xff", b"{", b"\n"])
def test_a_torn_last_line_beyond_the_kept_steps_is_dropped(five_steps, torn):
    whole = lines(five_steps)
    with five_steps.metrics.open("ab") as file:
        file.write(torn)
    log = MetricsLog.open(five_steps, keep_steps=5)
    assert lines(five_steps) == whole
    log.append(step(6))
    assert_chain(five_steps, 6, log.head)


@pytest.mark.parametrize(("kept", "torn", "seed", "words"), [
    (5, -1, 0, r"metrics\.jsonl:5 "), (6, None, 0, "ends before step 6"), (5, None, 1, r"metrics\.jsonl:1 "),
], ids=["a torn line", "too few lines", "another precommit"])  # fmt: skip
def test_metrics_that_do_not_reach_from_the_precommit_to_the_checkpoint_are_found(five_steps, kept, torn, seed, words):
    five_steps.metrics.write_bytes(five_steps.metrics.read_bytes()[:torn])
    write_json(five_steps.precommit, {"schema": "tunix-rt/precommit/1", "seed": seed})
    with pytest.raises(TunixError, match=words):
        MetricsLog.open(five_steps, keep_steps=kept)


@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize(("was", "becomes"), [(b'"lr": 0.001', b'"lr": 0.002'), (b'"tokens": 160', b'"tokens": 161')])
def test_a_changed_line_is_found_by_the_line_after_it(five_steps, changed, was, becomes):
    content = lines(five_steps)
    assert was in content[changed]
    content[changed] = content[changed].replace(was, becomes)
    five_steps.metrics.write_bytes(b"".join(content))
    with pytest.raises(TunixError, match=rf"metrics\.jsonl:{changed + 2} "):
        MetricsLog.open(five_steps, keep_steps=5)


@pytest.mark.parametrize("change", ["swap", "remove", "repeat"])
def test_lines_that_are_swapped_removed_or_repeated_are_found(five_steps, change):
    first, second, *rest = lines(five_steps)
    content = {"swap": [second, first, *rest], "remove": [first, *rest], "repeat": [first, first, second, *rest]}
    five_steps.metrics.write_bytes(b"".join(content[change]))
    with pytest.raises(TunixError):
        MetricsLog.open(five_steps, keep_steps=4)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_never_reaches_the_log(five_steps, loss):
    whole = lines(five_steps)
    log = MetricsLog.open(five_steps, keep_steps=5)
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(step(6, loss=loss))
    assert lines(five_steps) == whole


def test_a_full_disk_at_resume_does_not_cost_the_lines_that_are_kept(five_steps):
    """Without its metrics a run cannot be continued: cutting the file must not pass through an empty one."""
    whole = lines(five_steps)
    imports = "from tunix_rt.runs.folder import RunDir; from tunix_rt.runs.ledger import MetricsLog"
    cut = f"{imports}; MetricsLog.open(RunDir(Path(sys.argv[1])), keep_steps=4)"
    ended = run_limited(cut, five_steps.root, file_bytes=0)
    assert ended.returncode in (0, 8), ended.stderr
    assert lines(five_steps)[:4] == whole[:4]


# --- the checkpoint to continue from ---------------------------------------------------------------------------------


@pytest.fixture
def heads(run):
    """150 steps in the metrics, and the head of the chain after each."""
    log = MetricsLog.open(run, keep_steps=0)
    heads = [log.head]
    for number in range(1, 151):
        log.append(step(number))
        heads.append(log.head)
    return heads


@pytest.fixture
def commit(run, heads):
    """Commit a checkpoint of a step as training does: it knows the line of its step."""

    def commit(number):
        state = {"metrics_head": heads[number]}
        return run_folder.publish_checkpoint(
            run_folder.stage_checkpoint(
                run.checkpoints, number, lambda folder: write_json(folder / "state.json", state)
            )
        )

    return commit


def test_a_run_goes_on_from_the_checkpoint_with_the_highest_step_never_from_a_staged_one_or_else_begins(run, commit):
    assert newest_checkpoint(run) == (None, 0)
    commit(100)
    commit(50)
    assert newest_checkpoint(run) == (run.checkpoints / "step-000100", 100)
    (run.checkpoints / "step-000100").rename(run.checkpoints / ".staged-step-000100")
    assert newest_checkpoint(run) == (run.checkpoints / "step-000050", 50)


def test_what_was_passed_over_is_known_at_the_start_with_its_problems(run, commit):
    commit(50)
    (commit(100) / "state.json").write_text("other\n")
    (commit(150) / "MANIFEST.json").unlink()
    assert find_start(run, resume=True).facts["skipped_checkpoints"] == [
        {"name": "step-000150", "problems": ["MANIFEST.json is missing"]},
        {"name": "step-000100", "problems": ["changed: state.json"]},
    ]


@pytest.mark.parametrize("torn", ["lost", "half a line", "another line"])
def test_a_valid_checkpoint_without_its_lines_is_not_given_up(run, commit, torn, tmp_path):
    commit(50)
    newest = commit(100)
    content = lines(run)
    rest = {"lost": b"", "half a line": content[99][:-9], "another line": content[99].replace(b"160", b"161")}[torn]
    run.metrics.write_bytes(b"".join(content[:99]) + rest)
    with pytest.raises(TunixError, match=r"metrics\.jsonl:100 is missing or breaks the hash chain") as caught:
        find_start(run, resume=True)
    assert lines(run) == [*content[:99], *filter(None, [rest])], "to look changes nothing"
    assert "move step-000100 out of the run folder to continue from the checkpoint before it" in caught.value.fix
    newest.rename(tmp_path / "aside")
    start = find_start(run, resume=True)
    assert start.step == 50
    truncate_to(run, start)
    assert lines(run) == content[:50]


@pytest.mark.parametrize(("broken", "said"), [(1, 2), (60, 60), (99, 100)])
def test_a_sound_checkpoint_is_not_given_up_for_a_line_in_the_middle_of_the_metrics(run, commit, broken, said):
    """A line that still reads is found by the one after it."""
    commit(50)
    commit(100)
    content = lines(run)
    content[broken - 1] = content[broken - 1].replace(b"160", b"161" if said > broken else b"{")
    run.metrics.write_bytes(b"".join(content))
    missing = rf"metrics\.jsonl:{said} is missing or breaks the hash chain, and the valid step-000100"
    with pytest.raises(TunixError, match=missing) as caught:
        find_start(run, resume=True)
    assert "from a copy" in caught.value.fix
    assert run.metrics.read_bytes() == b"".join(content)


@pytest.mark.parametrize("state", [None, "not JSON", "[]", "{}"])
def test_a_checkpoint_with_a_manifest_but_no_sound_state_is_passed_over(run, commit, state):
    commit(50)
    run_folder.publish_checkpoint(
        run_folder.stage_checkpoint(
            run.checkpoints, 100, lambda folder: state and write_text(folder / "state.json", state)
        )
    )
    assert newest_checkpoint(run) == (run.checkpoints / "step-000050", 50)


def test_what_the_kept_steps_took_is_known_at_the_start(run, commit, heads):
    commit(100)
    start = find_start(run, resume=True)
    assert start.facts == {
        "steps_completed": 100,
        "final_loss": step(100).loss,
        "final_loss_hex": step(100).loss.hex(),
        "metrics_head": heads[100],
    }
    assert (start.seconds, start.peak_bytes, start.saved_state) == (25.0, 1_000_000, "step 100 is saved")


def test_the_state_of_a_checkpoint_is_one_hash_over_weights_and_optimizer():
    """As `sha256sum model.safetensors optimizer.safetensors | sha256sum` prints it."""
    files = {"optimizer.safetensors": "b" * 64, "state.json": "c" * 64, "model.safetensors": "a" * 64}
    listed = f"{'a' * 64}  model.safetensors\n{'b' * 64}  optimizer.safetensors\n"
    assert state_hash(files) == hashlib.sha256(listed.encode()).hexdigest()


def test_the_state_of_several_ranks_is_one_hash_over_the_files_of_all():
    names = [f"{kind}-{rank:05d}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)]
    files = {name: str(number) * 64 for number, name in enumerate(names)}
    listed = "".join(f"{digest}  {name}\n" for name, digest in files.items())
    assert state_hash(files | {"state.json": "c" * 64}) == hashlib.sha256(listed.encode()).hexdigest()
    assert is_checkpoint([*names, "state.json"]) and is_checkpoint(
        ["model.safetensors", "optimizer.safetensors", "state.json"]
    )
    for other in (
        names,
        [*names[1:], "state.json"],
        [*names, "model.safetensors", "state.json"],
        [*names, "state.json", "x"],
    ):
        assert not is_checkpoint(other)
    assert not is_checkpoint([*names[:2], "optimizer.safetensors", "state.json"])


# --- the loop around an engine ---------------------------------------------------------------------------------------


class SummingEngine:
    """An engine small enough to see through: its one weight is the sum of the steps it took."""

    attention = SimpleNamespace(name="none", why="it has nothing to look at")
    layers = "plain"
    device_type = "cpu"
    devices = ("cpu",)

    def __init__(self):
        self.weight = 0

    def take_peak(self):
        return PhasePeak(used_bytes=0, measure="none", alone=True)

    def make_optimizer(self, engine, training):
        return None

    def restore_state(self, engine, optimizer, folder, *, step):
        self.weight = int((folder / "model.safetensors").read_text())

    def snapshot_bytes(self, engine, optimizer):
        return len(str(self.weight))

    def host_has_room(self, needed_bytes):
        return True

    def snapshot(self, engine, optimizer):
        return Copied(str(self.weight))

    def prepare_steps(self, engine, batch_of, training, *, total, longest_row, as_before, planned):
        return {"layers": self.layers}

    def optimizer_steps(self, engine, optimizer, batch_of, training, *, first, total, before_update, ends):
        for number in range(first, total + 1):
            before_update()
            self.weight += number
            yield step(number, loss=1.0 / self.weight)

    def heldout_loss(self, engine, rows, *, batch_size, pad_id, report):
        return 1.0 / max(1.0, self.weight), 10


class Copied:
    def __init__(self, text):
        self.text = text

    def write(self, folder):
        (folder / "model.safetensors").write_text(self.text)


def nothing_prepared(tmp_path, heldout=()):
    return Prepared(
        dataset=Dataset(key="none", files=(), sha256="0" * 64), style=None, evalset=None, items=(), rows=(),
        heldout_rows=heldout, traces=0, heldout_traces=0, dropped=0, truncated=0, tokens=0, trained_tokens=0, longest_row=0,
        fill=0.0, row_facts=facts_of_rows(()),
    )  # fmt: skip


def train(run, *, total, resume=False, stop_after=None, read_along=None, **training):
    engine, stop, journal = SummingEngine(), Preemption(), RunJournal(run=run, continued=resume)

    def progress(what, done, of, note):
        if done == stop_after:
            stop.signal_name = "SIGTERM"

    config = build_config({"training": {"save_steps": 2, "eval_steps": 2, **training}}, "test")
    start = find_start(run, resume=resume)
    refuse_other_kernels(engine, start.checkpoint)
    metrics = truncate_to(run, start)
    journal.result.set(**start.facts)
    context = RunContext(
        journal=journal, stop=stop, options=Options(progress=progress), config=config, device=None, gpus=frozenset(),
        model=None, shape=None, tokenizer=SimpleNamespace(pad_id=0), data=nothing_prepared(run.root, heldout=("a row",)),
        plan=SimpleNamespace(eval_rows=4, generation_rows=4, layers=None), batch=Batch(rows=8, devices=1), start=start,
        total=total,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix_rt.train.context.load_backend", lambda name: engine)
        train_run(context, engine, metrics, read_along)
    return journal.result.to_json() | {"weight": engine.weight}


def test_a_run_keeps_its_newest_checkpoints_and_a_line_for_every_step(run):
    notes = train(run, total=7)
    assert [path.name for path in run_folder.list_checkpoints(run.checkpoints)] == ["step-000007", "step-000006"]
    assert best_checkpoint(run) == {"best_step": 7, "best_heldout_loss": 1 / 28}
    assert not any(run_folder.checkpoint_problems(path) for path in run_folder.list_checkpoints(run.checkpoints))
    assert_chain(run, 7, notes["metrics_head"])
    assert notes["steps_completed"] == 7
    assert notes["final_loss"] == 1 / 28
    assert [json.loads(line)["step"] for line in run.heldout.read_text().splitlines()] == [0, 2, 4, 6, 7]


def measured(line):
    """A line without what an extra checkpoint changes."""
    return {name: value for name, value in json.loads(line).items() if name not in ("states", "prev")}


@pytest.mark.parametrize("stop_after", [None, 1, 3, 4, 7])
def test_every_state_that_was_saved_is_covered_by_the_metrics_or_by_the_result(run, stop_after):
    if stop_after is not None:
        with pytest.raises(Preempted):
            train(run, total=7, stop_after=stop_after)
    train(run, total=7, resume=stop_after is not None)
    saved = read_json(run.checkpoint_list)["checkpoints"]
    hashes = {
        str(entry["step"]): hashlib.sha256(
            f"{entry['files']['model.safetensors']['sha256']}  model.safetensors\n".encode()
        ).hexdigest()
        for entry in saved
    }
    chained = {json.loads(line)["step"]: json.loads(line).get("states", {}) for line in lines(run)}
    covered = {number: state for states in chained.values() for number, state in states.items()}
    assert covered | {"7": final_state(run)["final_state"]} == hashes
    assert "7" not in covered, "the result has the last"
    if stop_after is None:
        assert {at: sorted(states) for at, states in chained.items() if states} == {4: ["2"], 6: ["4"], 7: ["6"]}
    if stop_after == 3:
        assert sorted(chained[4]) == ["2", "3"], "saved because the run was stopped"


@pytest.mark.parametrize("stop_after", [1, 2, 3, 6, 7])
def test_a_stopped_run_saves_its_step_and_continues_to_the_same_end(run, tmp_path, stop_after):
    uninterrupted = run_folder.RunDir(tmp_path / "whole")
    write_json(uninterrupted.precommit, read_json(run.precommit))
    whole = train(uninterrupted, total=7)
    with pytest.raises(Preempted, match=f"step {stop_after} is saved") as caught:
        train(run, total=7, stop_after=stop_after)
    assert caught.value.exit_code == 7
    ended = train(run, total=7, resume=True)
    assert_chain(run, 7, ended.pop("metrics_head"))
    assert ended == {name: value for name, value in whole.items() if name != "metrics_head"}
    assert [measured(line) for line in lines(run)] == [measured(line) for line in lines(uninterrupted)]
    if stop_after % 2 == 0 or stop_after == 7:  # a checkpoint was due there
        assert run.metrics.read_bytes() == uninterrupted.metrics.read_bytes()
    assert run.heldout.read_bytes() == uninterrupted.heldout.read_bytes()


def test_a_continued_run_falls_back_over_a_damaged_checkpoint_to_the_same_end(run, tmp_path):
    uninterrupted = run_folder.RunDir(tmp_path / "whole")
    write_json(uninterrupted.precommit, read_json(run.precommit))
    whole = train(uninterrupted, total=7)
    with pytest.raises(Preempted):
        train(run, total=7, stop_after=5)
    (run.checkpoints / "step-000005" / "model.safetensors").write_text("999")
    skipped = [{"name": "step-000005", "problems": ["changed: model.safetensors"]}]
    assert train(run, total=7, resume=True) == {**whole, "skipped_checkpoints": skipped}
    assert run.metrics.read_bytes() == uninterrupted.metrics.read_bytes()


def test_a_changed_last_line_is_found_and_its_step_can_be_taken_again(run, tmp_path):
    """No line follows it, but the checkpoint has kept its hash."""
    uninterrupted = run_folder.RunDir(tmp_path / "whole")
    write_json(uninterrupted.precommit, read_json(run.precommit))
    train(uninterrupted, total=7)
    with pytest.raises(Preempted):
        train(run, total=7, stop_after=4)
    content = lines(run)
    content[-1] = content[-1].replace(b'"tokens": 160', b'"tokens": 161')
    run.metrics.write_bytes(b"".join(content))
    with pytest.raises(TunixError, match=r"metrics\.jsonl:4 .* the valid step-000004 was saved after it"):
        train(run, total=7, resume=True)
    run_folder.list_checkpoints(run.checkpoints)[0].rename(tmp_path / "aside")
    train(run, total=7, resume=True)
    assert run.metrics.read_bytes() == uninterrupted.metrics.read_bytes()


@pytest.mark.parametrize(
    "torn", [b'{"loss": 0.5, "st', b"\xff\x00}", b"[1]", b"3}", b'{"step": "x"}', b'{"step": 2}{}']
)
def test_a_torn_line_of_heldout_losses_is_dropped_when_a_run_is_continued(run, torn):
    with pytest.raises(Preempted):
        train(run, total=7, stop_after=5)
    with run.heldout.open("ab") as file:
        file.write(torn)
    train(run, total=7, resume=True)
    assert [json.loads(line)["step"] for line in run.heldout.read_bytes().splitlines()] == [0, 2, 4, 6, 7]


def test_a_checkpoint_lies_on_the_disk_before_an_evaluation_starts(run):
    """Also at steps that no checkpoint was asked for: what goes wrong in an evaluation costs no step."""
    found = {}
    train(
        run,
        total=7,
        save_steps=5,
        eval_steps=2,
        read_along=lambda at: found.update({at: run_folder.list_checkpoints(run.checkpoints)}),
    )
    newest = {at: run_folder.checkpoint_step(paths[0]) if paths else 0 for at, paths in found.items()}
    assert newest == {0: 0, 2: 2, 4: 4, 6: 6, 7: 7}
    assert not any(run_folder.checkpoint_problems(path) for path in run_folder.list_checkpoints(run.checkpoints))


@pytest.mark.parametrize("stop_after", [2, 3, 4])
def test_samples_of_a_continued_run_are_those_of_one_that_was_not_stopped(run, tmp_path, stop_after):
    whole = run_folder.RunDir(tmp_path / "whole")
    write_json(whole.precommit, read_json(run.precommit))
    kept = {}
    for each in (run, whole):
        say = partial(append_jsonl, each.samples_along)
        if each is run:
            with pytest.raises(Preempted):
                train(
                    each, total=7, stop_after=stop_after, read_along=lambda at, say=say: say([{"step": at, "id": "a"}])
                )
            say([{"step": stop_after + 1, "id": "of a step that is taken again"}])
        train(each, total=7, resume=each is run, read_along=lambda at, say=say: say([{"step": at, "id": "a"}]))
        kept[each] = each.samples_along.read_bytes()
    assert kept[run] == kept[whole]


def test_a_retaken_checkpoint_survives_a_damaged_one_of_a_higher_step(run):
    with pytest.raises(Preempted):
        train(run, total=9, stop_after=7)
    for path in run_folder.list_checkpoints(run.checkpoints):
        (path / "model.safetensors").write_text("999")
    with pytest.raises(StorageError, match="saved steps before, and now no checkpoint is valid"):
        train(run, total=9, resume=True, stop_after=2)
    for path in (run.checkpoint_list, run.metrics, *run_folder.list_checkpoints(run.checkpoints)[1:]):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run_folder.list_checkpoints(run.checkpoints)[0] / "MANIFEST.json").unlink()
    with pytest.raises(StorageError, match="saved steps before"):
        train(run, total=9, resume=True, stop_after=2)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(Preempted):
        train(run, total=9, resume=True, stop_after=2)
    assert [path.name for path in run_folder.list_checkpoints(run.checkpoints)] == ["step-000002"]
    assert train(run, total=9, resume=True)["weight"] == 45


def test_the_metrics_are_on_the_disk_before_the_checkpoint_that_counts_on_them(run, monkeypatch):
    """After a power cut a checkpoint without its lines could not be continued from."""
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    train(run, total=2)
    named = [Path(path).name for path in synced]
    assert "metrics.jsonl" in named
    assert named.index("metrics.jsonl") < named.index("checkpoints")


def test_a_stop_before_the_first_step_takes_no_step(run):
    stop = Preemption()
    stop.check("nothing was trained yet")
    stop.signal_name = "SIGINT"
    with pytest.raises(Preempted, match="stopped by SIGINT; nothing was trained yet"):
        stop.check("nothing was trained yet")


@pytest.mark.parametrize(
    ("part", "other", "torn", "words"),
    [
        ("layers", "compiled", b"", "layers: plain, here it would be layers: compiled"),
        ("attention", SimpleNamespace(name="eager", why=""), b"torn\n", "none attention, here it would be eager"),
    ],
)
def test_a_run_is_not_continued_with_other_kernels(run, monkeypatch, part, other, torn, words):
    """Its steps would have other bits; which kernel works depends on what is installed."""
    with pytest.raises(Preempted):
        train(run, total=7, stop_after=5)
    with run.metrics.open("ab") as file:
        file.write(torn)
    before = run.metrics.read_bytes()
    monkeypatch.setattr(SummingEngine, part, other)
    with pytest.raises(ConfigError, match=f"was trained with {words}"):
        train(run, total=7, resume=True)
    assert run.metrics.read_bytes() == before
