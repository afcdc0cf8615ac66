"""A snapshot on a GPU is made beside training: the host goes on at once, and what is trained next is not in it."""

import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tunix_rt.engines.torch import save as torch_state
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.optim import Optimizer

pytestmark = pytest.mark.gpu

LAYERS, WIDTH = 16, 4096
"""1 GiB of weights and 2 GiB of moments: tens of milliseconds on the way to the host."""


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    unused = dict.fromkeys(("source", "parameters", "meter", "recipe", "attention"))
    return Engine(model=model, device=torch.device("cuda"), **unused)


@pytest.fixture(scope="module")
def optimizer(engine):
    made = Optimizer(
        dict(engine.model.named_parameters()), kind="adamw", beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.0,
        seed=0, stochastic_rounding=False,
    )  # fmt: skip
    update(engine, made, 1)
    return made


def update(engine, optimizer, step):
    for parameter in engine.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    torch_state.await_copy(engine)
    optimizer.begin(step, 1e-3)
    optimizer.step()
    engine.model.zero_grad()


def state_of(engine, optimizer):
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in {**dict(engine.model.named_parameters()), **optimizer.tensors()}.items()
    }


def written(folder):
    return {**load_file(folder / torch_state.MODEL), **load_file(folder / torch_state.OPTIMIZER)}


@pytest.mark.parametrize("first", [2, 5, 8])
def test_updates_that_follow_at_once_are_not_in_the_snapshot(engine, optimizer, tmp_path, first):
    kept = state_of(engine, optimizer)
    copy = torch_state.snapshot(engine, optimizer)
    for step in range(first, first + 3):
        update(engine, optimizer, step)
    copy.write(tmp_path)
    found = written(tmp_path)
    assert found.keys() == kept.keys()
    assert [name for name in kept if not torch.equal(found[name], kept[name])] == []


def test_the_host_does_not_wait_for_the_copies(engine, optimizer, tmp_path):
    torch_state.snapshot(engine, optimizer).write(tmp_path)  # its pinned blocks are there for the next
    torch.cuda.synchronize()
    began = time.perf_counter()
    copy = torch_state.snapshot(engine, optimizer)
    asked = time.perf_counter() - began
    assert not copy.copied.query(), "the copies are still under way"
    torch_state.await_copy(engine)
    assert not copy.copied.query(), "and the device waits for them, not the host"
    copy.copied.synchronize()
    took = time.perf_counter() - began
    print(f"{copy.bytes / 2**30:.2f} GiB: {1000 * asked:.1f} ms on the host, {1000 * took:.1f} ms until copied")
    assert asked < took / 2
    copy.write(tmp_path)


def test_pinned_memory_is_taken_once_and_used_again(engine, optimizer, tmp_path):
    places = []
    for _ in range(2):
        copy = torch_state.snapshot(engine, optimizer)
        assert all(block.is_pinned() for block in copy.copies.blocks)
        places.append({block.data_ptr() for block in copy.copies.blocks})
        copy.write(tmp_path)
    assert places[0] == places[1]
    assert len(torch_state._idle_blocks) == len(places[0])


def test_where_nothing_can_be_pinned_the_copy_is_as_exact(engine, optimizer, tmp_path, monkeypatch):
    real = torch.empty

    def without_pinning(*sizes, pin_memory=False, **named):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*sizes, **named)

    monkeypatch.setattr(torch_state, "_idle_blocks", [])
    monkeypatch.setattr(torch, "empty", without_pinning)
    kept = state_of(engine, optimizer)
    torch_state.snapshot(engine, optimizer).write(tmp_path)
    found = written(tmp_path)
    assert [name for name in kept if not torch.equal(found[name], kept[name])] == []
    assert torch_state._idle_blocks == []


def test_tensors_made_for_the_snapshot_alone_outlive_their_copies(engine, tmp_path):
    """Their memory is free for others as soon as they are dropped: the copies must have been made by then."""
    made = SimpleNamespace(tensors=lambda: {str(n): torch.full((2**26,), float(n), device="cuda") for n in range(8)})
    copy = torch_state.snapshot(engine, made)
    others = [torch.full((2**26,), -1.0, device="cuda") for _ in range(8)]
    copy.write(tmp_path)
    found = load_file(tmp_path / torch_state.OPTIMIZER)
    assert all(bool((found[str(n)] == n).all()) for n in range(8))
    assert all(bool((other == -1).all()) for other in others)


def test_both_ways_write_the_same_bytes_and_come_back_to_the_bit(engine, optimizer, tmp_path):
    for name in ("snapshot", "direct"):
        (tmp_path / name).mkdir()
    torch_state.snapshot(engine, optimizer).write(tmp_path / "snapshot")
    torch_state.write_direct(engine, optimizer, tmp_path / "direct")
    for name in (torch_state.MODEL, torch_state.OPTIMIZER):
        assert (tmp_path / "snapshot" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    kept = state_of(engine, optimizer)
    update(engine, optimizer, 99)
    torch_state.restore_state(engine, optimizer, tmp_path / "direct", step=99)
    again = state_of(engine, optimizer)
    assert [name for name in kept if not torch.equal(again[name], kept[name])] == []
