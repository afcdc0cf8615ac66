"""A checkpoint is the state of its step whatever is trained meanwhile, and a save that fails is neither lost nor hidden."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import write_small_model
from tunix_rt.config.settings import Training
from tunix_rt.engines.torch import save as torch_state
from tunix_rt.engines.torch import tensor_files
from tunix_rt.engines.torch.model import Engine, LossScale
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.errors import Preempted, StorageError, TunixError
from tunix_rt.runs.folder import RunDir, checkpoint_problems, list_checkpoints
from tunix_rt.storage import write_text
from tunix_rt.train.checkpointer import Checkpointer, FinishedStep, best_checkpoint
from tunix_rt.train.loop import SaveSchedule
from tunix_rt.train.preemption import Preemption

# --- the copies ------------------------------------------------------------------------------------------------------


def make_optimizer(model, kind):
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Optimizer(
        named, kind=kind, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, seed=3, stochastic_rounding=True
    )


def make_engine(tmp_path, *, dtype=torch.float32, kind="adamw", scaled=False, seed=0):
    """A real model with a real optimizer, and of the engine what a checkpoint needs."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(write_small_model("gpt2", tmp_path / "model"))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return engine_of(model, loss_scale=LossScale() if scaled else None), make_optimizer(model, kind)


def engine_of(model, **fields):
    unused = dict.fromkeys(("source", "parameters", "meter", "recipe", "attention"))
    return Engine(model=model, device=torch.device("cpu"), **unused, **fields)


def train_a_little(engine, optimizer, step):
    torch.manual_seed(step)
    ids = torch.randint(1024, (2, 16))
    engine.model(input_ids=ids, labels=ids).loss.backward()
    optimizer.begin(step, 1e-2)
    optimizer.step()
    engine.model.zero_grad()
    if engine.loss_scale is not None:
        engine.loss_scale.overflowed()


def state_of(engine, optimizer):
    """All that a checkpoint must bring back, by name, as bytes."""
    tensors = {**dict(engine.model.named_parameters()), **optimizer.tensors()}
    if engine.loss_scale is not None:
        tensors |= engine.loss_scale.tensors()
    return {
        name: (tensor.dtype, tensor.detach().view(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


KINDS = [
    ("adamw", torch.float32, False), ("adamw", torch.bfloat16, False), ("adamw_8bit", torch.float32, True),
    ("adafactor", torch.bfloat16, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype", "scaled"), KINDS)
@pytest.mark.parametrize("way", ["snapshot", "direct"])
def test_what_was_saved_comes_back_to_the_bit(tmp_path, monkeypatch, kind, dtype, scaled, way):
    for module in (torch_state, tensor_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)  # most tensors lie in several
    engine, optimizer = make_engine(tmp_path, kind=kind, dtype=dtype, scaled=scaled)
    for step in (1, 2):
        train_a_little(engine, optimizer, step)
    kept = state_of(engine, optimizer)
    if way == "direct":
        torch_state.write_direct(engine, optimizer, tmp_path)
    else:
        copy = torch_state.snapshot(engine, optimizer)
        train_a_little(engine, optimizer, 3)  # what is trained after the copy is not in it
        copy.write(tmp_path)
    again, other = make_engine(tmp_path, kind=kind, dtype=dtype, scaled=scaled, seed=9)
    torch_state.restore_state(again, other, tmp_path, step=2)
    assert state_of(again, other) == kept
    written = sum((tmp_path / name).stat().st_size for name in (torch_state.MODEL, torch_state.OPTIMIZER))
    assert torch_state.snapshot_bytes(again, other) == written


def test_both_ways_and_safetensors_itself_write_the_same_bytes(tmp_path):
    engine, optimizer = make_engine(tmp_path)
    train_a_little(engine, optimizer, 1)
    folders = [tmp_path / name for name in ("snapshot", "direct", "safetensors")]
    for folder in folders:
        folder.mkdir()
    torch_state.snapshot(engine, optimizer).write(folders[0])
    torch_state.write_direct(engine, optimizer, folders[1])
    save_file(dict(engine.model.named_parameters()), folders[2] / torch_state.MODEL)
    save_file(optimizer.tensors(), folders[2] / torch_state.OPTIMIZER)
    for name in (torch_state.MODEL, torch_state.OPTIMIZER):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1


def test_every_type_a_state_may_have_is_written_as_safetensors_reads_it(tmp_path):
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in tensor_files.NAMES}
    tensors |= {"none": torch.zeros(0), "one": torch.tensor(1.5), 'é"\n': torch.zeros(2, 3).t()}
    optimizer = SimpleNamespace(tensors=lambda: tensors)
    engine = engine_of(torch.nn.Linear(2, 2))
    torch_state.write_direct(engine, optimizer, tmp_path)
    read = load_file(tmp_path / torch_state.OPTIMIZER)
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == tensor.dtype and read[name].equal(tensor) for name, tensor in tensors.items())


def test_what_is_not_trained_is_not_in_a_checkpoint(tmp_path):
    engine, _ = make_engine(tmp_path)
    for name, parameter in engine.model.named_parameters():
        parameter.requires_grad_("c_attn" in name)
    optimizer = make_optimizer(engine.model, "adamw")
    torch_state.write_direct(engine, optimizer, tmp_path)
    assert all("c_attn" in name for name in load_file(tmp_path / torch_state.MODEL))
    torch_state.restore_state(engine, optimizer, tmp_path, step=1)


POSITIONS = "transformer.wpe.weight"


@pytest.mark.parametrize(
    ("file", "name", "becomes", "said"),
    [
        ("model", POSITIONS, None, f"lacks {POSITIONS}"),
        ("model", "foreign", torch.zeros(1), "unexpected tensor foreign"),
        ("model", POSITIONS, torch.zeros(1), rf"has {POSITIONS} as \[1\] float32"),
        ("model", POSITIONS, torch.zeros(256, 32, dtype=torch.bfloat16), "bfloat16; this model"),
        ("optimizer", f"exp_avg.{POSITIONS}", None, f"lacks exp_avg.{POSITIONS}"),
        ("optimizer", "exp_avg.foreign", torch.zeros(1), "exp_avg.foreign"),
        ("optimizer", f"exp_avg_sq.{POSITIONS}", torch.zeros(2), f"has exp_avg_sq.{POSITIONS} as"),
        ("optimizer", "loss_scale", None, "lacks loss_scale"),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(tmp_path, file, name, becomes, said):
    engine, optimizer = make_engine(tmp_path, scaled=True)
    torch_state.write_direct(engine, optimizer, tmp_path)
    path = tmp_path / f"{file}.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()} | {name: becomes}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(TunixError, match=said) as caught:
        torch_state.restore_state(engine, optimizer, tmp_path, step=1)
    assert caught.value.fix


def test_a_file_that_cannot_be_read_is_a_storage_error_that_names_it(tmp_path):
    engine, optimizer = make_engine(tmp_path)
    torch_state.write_direct(engine, optimizer, tmp_path)
    (tmp_path / torch_state.OPTIMIZER).write_bytes(b"short")
    with pytest.raises(StorageError, match=torch_state.OPTIMIZER):
        torch_state.restore_state(engine, optimizer, tmp_path, step=1)


def test_host_memory_is_asked_for_before_a_copy_is_made():
    assert torch_state.host_has_room(1)
    assert not torch_state.host_has_room(2**60)


# --- saving in the background ----------------------------------------------------------------------------------------


class Held:
    """A snapshot whose writing waits until the test lets it go on."""

    def __init__(self, backend, text):
        self.backend, self.text = backend, text

    def write(self, folder):
        self.backend.writing.set()
        assert self.backend.go_on.wait(20)
        if self.backend.fault:
            raise self.backend.fault
        (folder / "model.safetensors").write_text(self.text)


class HeldBackend:
    def __init__(self):
        self.writing, self.go_on, self.fault, self.room = threading.Event(), threading.Event(), None, True
        self.weight, self.bytes = 0, 100
        self.go_on.set()

    def snapshot_bytes(self, engine, optimizer):
        return self.bytes

    def host_has_room(self, needed_bytes):
        return self.room

    def snapshot(self, engine, optimizer):
        return Held(self, str(self.weight))

    def write_direct(self, engine, optimizer, folder):
        Held(self, str(self.weight)).write(folder)


@pytest.fixture
def backend():
    return HeldBackend()


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


@pytest.fixture
def stop():
    return Preemption()


@pytest.fixture
def make(run, backend, stop):
    def make(**changed):
        given = {"keep": 2, "start": 0, "sync_metrics": lambda: None, "stop": stop, **changed}
        return Checkpointer(backend, None, None, run=run, **given)

    return make


def steps(run):
    return sorted(int(path.name[5:]) for path in list_checkpoints(run.checkpoints))


def test_training_goes_on_while_a_step_is_saved_and_only_what_is_there_counts(run, backend, make):
    backend.go_on.clear()
    with make() as saver:
        backend.weight = 1
        saver.save(1, {"step": 1})
        assert backend.writing.wait(10)
        backend.weight = 2  # the next update
        assert (saver.requested, saver.committed, steps(run)) == (1, 0, [])
        assert saver.saved_state() == "nothing is saved yet"
        backend.go_on.set()
        saver.wait()
        assert (saver.committed, saver.saved_state()) == (1, "step 1 is saved")
    assert (run.checkpoints / "step-000001" / "model.safetensors").read_text() == "1"
    assert json.loads((run.checkpoints / "step-000001" / "state.json").read_text()) == {"step": 1}
    assert checkpoint_problems(run.checkpoints / "step-000001") == []


def test_the_optimizer_is_let_go_when_training_ends_and_what_is_kept_can_still_be_told(run, backend, stop):
    """The answers after training need its memory, and may be interrupted."""
    engine, optimizer = torch.zeros(1), torch.zeros(1)
    held = [weakref.ref(one) for one in (engine, optimizer)]
    with Checkpointer(
        backend, engine, optimizer, run=run, stop=stop, keep=2, start=0, sync_metrics=lambda: None
    ) as saver:
        saver.save(1, {})
    del engine, optimizer, saver
    assert [one() for one in held] == [None, None]
    assert stop.saved_state() == "step 1 is saved"


def test_a_second_save_waits_for_the_first_and_says_so_when_that_took_long(run, backend, make, caplog):
    caplog.set_level(logging.INFO, logger="tunix_rt")
    backend.go_on.clear()
    with make() as saver:
        saver.save(1, {})
        threading.Timer(1.2, backend.go_on.set).start()
        saver.save(2, {})
        assert saver.committed >= 1
    assert steps(run) == [1, 2]
    assert "s for the checkpoint of step 1" in caplog.text


def test_the_metrics_are_made_durable_before_the_checkpoint_is_staged(run, backend, make):
    order = []
    with make(sync_metrics=lambda: order.append(("metrics", steps(run), backend.writing.is_set()))) as saver:
        saver.save(1, {})
    assert order == [("metrics", [], False)]


def test_where_host_memory_has_no_room_the_save_is_waited_for_and_that_is_said_once(run, backend, make, caplog):
    backend.room, backend.bytes = False, 3 * 2**30
    with make() as saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix_rt.train.checkpointer.require_space", lambda *told, **named: None)
        for step in (1, 2):
            saver.save(step, {})
            assert saver.committed == step
    assert len(re.findall(r"a snapshot needs 3\.00 GiB of host memory, [\d.]+ GiB are free", caplog.text)) == 1


@pytest.mark.parametrize("when", ["next step", "next save", "end"])
def test_a_save_that_fails_is_raised_and_the_one_before_stays(run, backend, make, when):
    with pytest.raises(StorageError, match="No space left on device") as caught, make() as saver:
        saver.save(1, {})
        saver.wait()
        backend.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saver.save(2, {})
        if when == "next step":
            saver._idle.wait()
            saver.raise_if_failed()
        elif when == "next save":
            saver.save(3, {})
    assert caught.value.exit_code == 8
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"], "nothing half-made holds space"
    assert saver.committed == 1


def test_what_is_no_matter_of_storage_is_raised_as_it_is(backend, make):
    backend.fault = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"), make() as saver:
        saver.save(1, {})


def test_an_error_of_the_loop_waits_for_the_save_under_way_and_is_not_hidden_by_it(run, backend, make, caplog):
    backend.go_on.clear()
    with pytest.raises(KeyError, match="of the loop"), make() as saver:
        saver.save(1, {})
        threading.Timer(0.3, backend.go_on.set).start()
        raise KeyError("of the loop")
    assert steps(run) == [1]
    backend.fault = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(KeyError, match="of the loop"), make(start=1) as saver:
        saver.save(2, {})
        raise KeyError("of the loop")
    assert "The checkpoint of step 2 failed as well" in caplog.text and "Input/output error" in caplog.text
    assert steps(run) == [1]


def test_a_run_that_must_end_now_waits_for_no_save_and_none_is_committed_after(run, backend, make, stop):
    backend.go_on.clear()
    began = time.monotonic()
    with pytest.raises(Preempted, match="second SIGTERM; nothing is saved yet"), stop.listening(), make() as saver:
        saver.save(1, {})
        thread = saver._thread
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert time.monotonic() - began < 60
    backend.go_on.set()
    thread.join()
    assert list(run.checkpoints.iterdir()) == [], "the result has said already what is kept"


def test_a_grace_that_ends_while_a_save_is_waited_for_gives_it_up(run, backend, make):
    backend.go_on.clear()
    stop = Preemption(grace_seconds=1)
    with pytest.raises(Preempted, match="grace"), stop.listening(), make(stop=stop) as saver:
        finished = FinishedStep(saver, direct=False)
        finished.before_update()
        finished.finished({"step": 1})
        with stop.while_training(finished):
            saver.save(1, {})
            thread = saver._thread
            signal.raise_signal(signal.SIGTERM)
            saver.wait()
    backend.go_on.set()
    thread.join()
    assert steps(run) == []


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), RuntimeError("out of memory")])
def test_a_stop_that_cannot_save_lets_the_next_step_finish_and_that_is_saved(run, backend, make, fault):
    with make() as saver:
        finished = FinishedStep(saver, direct=False)
        finished.before_update()
        finished.finished({"step": 1})
        backend.fault = fault
        assert not finished.save_finished()
        backend.fault = None
        finished.before_update()  # is not held by the thread that failed
        finished.finished({"step": 2})
        finished.save()
        assert saver.committed == 2


def test_a_step_whose_save_failed_is_saved_when_it_is_tried_again(run, backend, make):
    with make() as saver:
        backend.fault = OSError(errno.EIO, "a moment ago")
        saver.save(1, {})
        with pytest.raises(StorageError):
            saver.wait()
        backend.fault = None
        saver.save(1, {})
        saver.wait()
        assert saver.committed == 1


def test_the_time_to_stop_counts_the_update_and_the_save_in_progress(backend, make):
    with make() as saver:
        finished = FinishedStep(saver, direct=False)
        saver.save(1, {"step": 1})
        saver.wait()
        alone = saver.stop_seconds
        finished.before_update()
        assert finished.stop_plan().startswith("stopping after the current step; saving it takes about")
        time.sleep(0.05)
        finished.finished({"step": 2})
        assert "saving step 2, or 3 if it ends within 1 s," in finished.stop_plan()
        assert finished.stop_seconds() >= alone + 0.05
        backend.go_on.clear()
        saver.save(2, {"step": 2})
        assert saver.stop_seconds == 2 * alone
        backend.go_on.set()


def test_a_forced_end_does_not_wait_for_the_thread(tmp_path):
    script = """
        import sys, threading
        from pathlib import Path
        from types import SimpleNamespace
        from tunix_rt.runs.folder import RunDir
        from tunix_rt.train.checkpointer import Checkpointer
        from tunix_rt.train.preemption import Preemption
        never = SimpleNamespace(write=lambda folder: threading.Event().wait())
        backend = SimpleNamespace(snapshot_bytes=lambda *a: 1, host_has_room=lambda n: True, snapshot=lambda *a: never)
        saver = Checkpointer(backend, None, None, run=RunDir(Path(sys.argv[1])), keep=2, start=0, sync_metrics=lambda: None,
                      stop=Preemption())
        saver.save(1, {})
        sys.exit(5)
        """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], timeout=30)
    assert ended.returncode == 5


def test_a_volume_without_room_for_the_checkpoint_is_refused_with_the_numbers(run, backend, make, monkeypatch):
    with pytest.raises(StorageError) as caught, make() as saver:
        saver.save(1, {})
        saver.wait()
        backend.bytes = 100 * 2**20
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=163 * 2**20 + 5))
        saver.save(2, {})
    assert "the checkpoint of step 2, with a margin, needs 164 MiB on disk, 163 MiB are free" in str(caught.value)
    assert caught.value.exit_code == 8
    assert steps(run) == [1] and checkpoint_problems(run.checkpoints / "step-000001") == []


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "save_seconds", "due"),
    [
        ({}, 1, [10, 20, 25]),  # every 10 minutes, of steps of a minute
        ({}, 24, [20, 25]),  # 2 % of 20 minutes
        ({"save_minutes": 5}, 1, [5, 10, 15, 20, 25]),
        ({"save_steps": 8}, 1, [8, 16, 24, 25]),
        ({"save_steps": 8, "save_minutes": 10}, 1, [8, 16, 24, 25]),
        ({"save_steps": 8, "save_minutes": 6}, 1, [6, 8, 14, 16, 22, 24, 25]),
    ],
)
def test_a_checkpoint_is_due_by_steps_or_by_time_and_costs_at_most_2_percent(settings, save_seconds, due, caplog):
    caplog.set_level("INFO", logger="tunix_rt")
    schedule = SaveSchedule.of(Training(**settings))
    steps = [SimpleNamespace(step=step, seconds=60.0) for step in range(1, 26)]
    assert [step.step for step in steps if schedule.due(step, 25, save_seconds, anyway=False)] == due
    assert ("saving every 20 min" in caplog.text) == (save_seconds == 24)


def test_an_evaluation_saves_and_the_time_begins_anew():
    schedule = SaveSchedule.of(Training())
    steps = [SimpleNamespace(step=step, seconds=60.0) for step in range(1, 26)]
    assert [one.step for one in steps if schedule.due(one, 25, 1, anyway=one.step == 7)] == [7, 17, 25]


# --- what is kept ----------------------------------------------------------------------------------------------------


def note_heldout(run, losses):
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    write_text(run.heldout, "\n".join([*lines, '{"step": 9, "lo']))


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ({}, [4, 5]),
        ({1: 3.0, 2: 1.0, 3: 2.0}, [2, 4, 5]),
        ({1: 3.0, 2: 1.0, 3: 1.0, 4: 1.0}, [2, 4, 5]),
        ({1: 3.0, 2: 2.0, 3: 1.5, 4: 1.0, 5: 1.2}, [4, 5]),
        ({1: 0.5, 3: 1.0}, [1, 4, 5]),
    ],
)
def test_the_newest_and_the_best_by_heldout_loss_are_kept(run, make, losses, kept):
    known = {}
    with make() as saver:
        for step in range(1, 6):
            saver.save(step, {})
            saver.wait()
            if step in losses:  # measured after the step was saved
                known[step] = losses[step]
                note_heldout(run, known)
        saver.finish()
    assert steps(run) == kept
    best = min(losses, key=lambda step: losses[step], default=None)
    assert best_checkpoint(run) == ({"best_step": best, "best_heldout_loss": losses[best]} if losses else {})


def test_the_best_is_one_that_is_kept_under_its_name(run, make):
    note_heldout(run, {1: 0.1, 2: 3.0})
    with make() as saver:
        saver.save(2, {})
    assert best_checkpoint(run) == {"best_step": 2, "best_heldout_loss": 3.0}


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(run, make, monkeypatch, caplog):
    def fail(*told, **named):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with make() as saver:
        for step in (1, 2):
            saver.save(step, {})
        saver.wait()
        monkeypatch.setattr("shutil.rmtree", fail)
        saver.save(3, {})
        saver.wait()
        monkeypatch.undo()
        left = run.checkpoints / ".step-000001.staged"
        assert f"{left} cannot be deleted (Device or resource busy)" in caplog.text
        assert steps(run) == [2, 3]
        saver.save(4, {})
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000003", "step-000004"]


def test_older_ones_are_deleted_only_after_the_newer_is_durable(run, make, monkeypatch):
    order, rename, sync = [], type(run.root).rename, os.fsync
    with make() as saver:
        for step in (1, 2):
            saver.save(step, {})
        saver.wait()
        monkeypatch.setattr("os.fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
        monkeypatch.setattr("pathlib.Path.rename", lambda p, to: (order.append(f"move {p.name}"), rename(p, to))[1])
        saver.save(3, {})
        saver.wait()
    moved, gone = order.index("move .staged-step-000003"), order.index("move step-000001")
    assert moved < order.index(str(run.checkpoints), moved) < gone
