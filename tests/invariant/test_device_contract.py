"""After the first step every tensor of a run is where it was asked for; each stray is found, one at a time."""

from pathlib import Path

import pytest
import torch

from tunix_rt.backends.process_memory import RiseMeter
from tunix_rt.backends.torch_backend import _assert_on_device, make_optimizer
from tunix_rt.backends.torch_model import Engine
from tunix_rt.config import Training
from tunix_rt.errors import HardwareError
from tunix_rt.models import ModelSource


@pytest.fixture
def stepped():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    source = ModelSource(name="test", folder=Path(), revision="local", weights="random", config={})
    engine = Engine(model=model, source=source, device=torch.device("cpu"), parameters=28, meter=RiseMeter())
    optimizer = make_optimizer(engine, Training())
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return engine, optimizer, loss.detach()


def elsewhere(tensor):
    return torch.empty_like(tensor, device="meta")


def test_a_step_on_its_device_passes(stepped):
    _assert_on_device(*stepped)


@pytest.mark.parametrize("slot", ["step", "exp_avg", "exp_avg_sq"])
def test_state_of_the_optimizer_elsewhere_is_found(stepped, slot):
    engine, optimizer, loss = stepped
    weight = engine.model[0].weight
    optimizer.state[weight][slot] = elsewhere(optimizer.state[weight][slot])
    with pytest.raises(HardwareError, match=rf"{slot} of 0\.weight on meta"):
        _assert_on_device(engine, optimizer, loss)


def test_a_parameter_a_buffer_or_the_loss_elsewhere_is_found(stepped):
    engine, optimizer, loss = stepped
    with pytest.raises(HardwareError, match="the loss on meta"):
        _assert_on_device(engine, optimizer, elsewhere(loss))
    engine.model[1].running_mean = elsewhere(engine.model[1].running_mean)
    with pytest.raises(HardwareError, match=r"1\.running_mean on meta"):
        _assert_on_device(engine, optimizer, loss)
    engine.model[0].weight = torch.nn.Parameter(elsewhere(engine.model[0].weight), requires_grad=False)
    with pytest.raises(HardwareError, match=r"2 of .* tensors live elsewhere: 0\.weight on meta"):
        _assert_on_device(engine, optimizer, loss)


def test_a_parameter_that_was_not_trained_is_found(stepped):
    engine, optimizer, loss = stepped
    del optimizer.state[engine.model[0].bias]
    with pytest.raises(HardwareError, match=r"no state of 0\.bias"):
        _assert_on_device(engine, optimizer, loss)
