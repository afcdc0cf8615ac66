"""After the first step every tensor of a run is where it was asked for; each stray is found, one at a time."""

from pathlib import Path

import pytest
import torch

from tunix_rt.config.settings import Training
from tunix_rt.engines.memory_meter import RiseMeter
from tunix_rt.engines.torch.attention import Attention
from tunix_rt.engines.torch.loop import _assert_on_device, make_optimizer
from tunix_rt.engines.torch.model import Engine
from tunix_rt.errors import HardwareError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.precision import recipe_of


def stepped(optim: str = "adamw"):
    """An engine and its optimizer after one step. The first matrix is large enough for moments in 8 bits."""
    training = Training(optim=optim)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    engine = Engine(
        model=model, source=ModelSource(name="test", folder=Path(), revision="local", weights="random", config={}),
        device=torch.device("cpu"), parameters=sum(parameter.numel() for parameter in model.parameters()),
        meter=RiseMeter(), recipe=recipe_of(training),
        attention=Attention(name="sdpa", training="sdpa", generating="sdpa", why="on the CPU"),
    )  # fmt: skip
    optimizer = make_optimizer(engine, training)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.begin(1, 1e-3)
    optimizer.step()
    return engine, optimizer


def elsewhere(tensor):
    return torch.empty_like(tensor, device="meta")


SLOTS = {
    "adamw": ["exp_avg", "exp_avg_sq"],
    "adamw_8bit": ["exp_avg", "exp_avg_absmax", "exp_avg_sq", "exp_avg_sq_absmax"],
    "adafactor": ["exp_avg_sq_row", "exp_avg_sq_col"],
}


@pytest.mark.parametrize("optim", SLOTS)
def test_a_step_on_its_device_passes(optim):
    engine, optimizer = stepped(optim)
    assert sorted(optimizer.state_of(engine.model[0].weight)) == sorted(SLOTS[optim])
    _assert_on_device(engine, optimizer)


@pytest.mark.parametrize(("optim", "slot"), [(optim, slot) for optim, slots in SLOTS.items() for slot in slots])
def test_state_of_the_optimizer_elsewhere_is_found(optim, slot):
    engine, optimizer = stepped(optim)
    state = optimizer.state_of(engine.model[0].weight)
    state[slot] = elsewhere(state[slot])
    with pytest.raises(HardwareError, match=rf"1 of .* tensors are elsewhere: {slot} of 0\.weight on meta"):
        _assert_on_device(engine, optimizer)


def test_a_buffer_or_a_parameter_elsewhere_is_found():
    engine, optimizer = stepped()
    engine.model[1].running_mean = elsewhere(engine.model[1].running_mean)
    with pytest.raises(HardwareError, match=r"1 of .* tensors are elsewhere: 1\.running_mean on meta"):
        _assert_on_device(engine, optimizer)
    engine.model[0].weight = torch.nn.Parameter(elsewhere(engine.model[0].weight), requires_grad=False)
    with pytest.raises(HardwareError, match=r"2 of .* tensors are elsewhere: 0\.weight on meta"):
        _assert_on_device(engine, optimizer)


def test_a_parameter_that_was_not_trained_is_found():
    engine, optimizer = stepped()
    optimizer.state_of(engine.model[0].bias).clear()
    with pytest.raises(HardwareError, match=r"no state of 0\.bias"):
        _assert_on_device(engine, optimizer)


def test_a_frozen_parameter_needs_no_state():
    engine, optimizer = stepped()
    engine.model[0].bias.requires_grad_(False)
    optimizer.state_of(engine.model[0].bias).clear()
    _assert_on_device(engine, optimizer)
