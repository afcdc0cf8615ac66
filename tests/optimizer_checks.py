"""What every optimizer has to keep, on a CPU as on a GPU: parameters of several shapes, and checks of their updates."""

import numpy as np
import pytest
import torch

from tests.device_waits import nothing_waits
from tunix_rt.config.optimizers import OPTIMIZERS
from tunix_rt.engines.optimizers import Hyperparameters, module_of
from tunix_rt.engines.torch.optim import Optimizer

KINDS = list(OPTIMIZERS)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = {"matrix": (96, 80), "vector": (96,), "scalar": (), "cube": (5, 32, 40), "narrow": (5000, 1)}
UPDATES = 20
RATES = [1e-2 * (1 - step / 40) for step in range(UPDATES)]

each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(named, kind="adamw", *, decay=0.1, seed=0, stochastic=True, beta2=0.999):
    return Optimizer(
        named, kind=kind, beta1=0.9, beta2=beta2, epsilon=1e-8, weight_decay=decay, seed=seed,
        stochastic_rounding=stochastic,
    )  # fmt: skip


def parameters(dtype, device="cpu"):
    drawn = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=drawn, dtype=torch.float64).to(device, dtype))
        for name, shape in SHAPES.items()
    }


def give_gradients(named, step, size=1.0):
    drawn = torch.Generator().manual_seed(1000 + step)
    for parameter in named.values():
        gradient = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * size
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def walk(optimizer, named, *, first=1, last=5, how=Optimizer.step):
    for step in range(first, last + 1):
        give_gradients(named, step)
        optimizer.begin(step, RATES[step - 1])
        how(optimizer)


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def everything(optimizer, named):
    return copies(named) | copies(optimizer.tensors())


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].device == tensor.device
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def reference_of(kind, weights, gradients, *, decay):
    """Parameter and state after all `gradients`, in float64, the state named as ours."""
    states = {}
    for step, (gradient, lr) in enumerate(zip(gradients, RATES, strict=False), 1):
        at = Hyperparameters(step=step, lr=lr, decay=decay)
        states = module_of(kind).reference(weights, states, gradient, at)
        weights = states.pop("parameter")
    return weights, states


def float64(tensor):
    return tensor.detach().double().cpu().numpy()


def check_reference(kind, dtype, *, size=1.0, device="cpu"):
    """20 updates are those of the float64 reference.

    An update rounds a weight twice (decay, difference), half a unit each, and its own size, at most 4 rates, by some 16
    roundings in a row. A mean is rounded 3 times an update, and float32 knows 1 - 0.999 to 5e-5 of it only. On a GPU the
    correction 1 - 0.999^t is in float32 too, which is most in the first steps; the root halves it."""
    named = parameters(dtype, device)
    starts, gradients = copies(named), {name: [] for name in named}
    optimizer = make(named, kind)
    for step in range(1, UPDATES + 1):
        give_gradients(named, step, size)
        for name, parameter in named.items():
            gradients[name].append(float64(parameter.grad))
        optimizer.begin(step, RATES[step - 1])
        optimizer.step()
    unit = torch.finfo(dtype).eps
    correction = 0.0 if device == "cpu" else sum(rate * 2 * unit / (0.001 * t) for t, rate in enumerate(RATES, 1))
    for name, parameter in named.items():
        decay = 0.1 if parameter.dim() >= 2 else 0.0
        start, found = float64(starts[name]), float64(parameter)
        expected, state = reference_of(kind, start, gradients[name], decay=decay)
        bound = UPDATES * unit * (np.abs(expected) + 16 * 4 * max(RATES)) + correction
        assert (np.abs(found - expected) <= bound).all(), name
        kept = optimizer.state_of(parameter)
        assert kept.keys() == state.keys()
        for slot, part in state.items():
            off = np.abs(float64(kept[slot]) - part).max()
            assert off <= np.abs(part).max() * (5e-5 if dtype == torch.float32 else UPDATES * 3 * unit), (name, slot)
        if size == 0.0:
            assert np.array_equal(found, start) == (decay == 0.0)
        elif size == 1.0:
            assert np.abs(found - start).max() > 0.01, "nothing was tested"


def check_torchs_own(dtype, device="cpu"):
    """AdamW gives the bits of `torch.optim.AdamW(fused=True)`."""
    ours, theirs = parameters(dtype, device), parameters(dtype, device)
    optimizer = make(ours)
    groups = [
        {"params": [p for p in theirs.values() if (p.dim() >= 2) == decayed], "weight_decay": 0.1 if decayed else 0.0}
        for decayed in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for step in range(1, 11):
        for named in (ours, theirs):
            give_gradients(named, step)
        for group in adamw.param_groups:
            group["lr"] = RATES[step]
        adamw.step()
        optimizer.begin(step, RATES[step])
        optimizer.step()
    assert_same_bits(copies(ours), copies(theirs))
    for name, parameter in ours.items():
        state = adamw.state[theirs[name]]
        assert_same_bits(optimizer.state_of(parameter), {slot: state[slot] for slot in ("exp_avg", "exp_avg_sq")})


def check_one_by_one(kind, dtype, device="cpu"):
    """Updated one by one and backwards, parameters and state have the bits of updated all together."""
    scale, finite = torch.tensor(0.37, device=device), torch.tensor(True, device=device)

    def one_by_one(optimizer):
        for parameter in reversed(list(separate.values())):
            optimizer.update(parameter, scale=scale, finite=finite)

    together, separate = parameters(dtype, device), parameters(dtype, device)
    first, second = make(together, kind), make(separate, kind)
    walk(first, together, how=lambda optimizer: optimizer.step(scale=scale))
    walk(second, separate, how=one_by_one)
    assert_same_bits(everything(second, separate), everything(first, together))


def check_restored(kind, dtype, kept, device="cpu"):
    """Restored after `kept` steps from what lay on a CPU, the rest is the same to the last bit."""
    named = parameters(dtype, device)
    optimizer = make(named, kind, seed=5)
    walk(optimizer, named, last=kept)
    saved, weights = {name: tensor.clone().cpu() for name, tensor in optimizer.tensors().items()}, copies(named)
    before = copies(saved)
    walk(optimizer, named, first=kept + 1, last=6)

    later = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    again = make(later, kind, seed=5)
    again.restore(saved, step=kept)
    walk(again, later, first=kept + 1, last=6)
    assert_same_bits(everything(again, later), everything(optimizer, named))
    assert_same_bits(saved, before)


HOW = {
    "one by one": lambda optimizer, named, scale, finite: [
        optimizer.update(parameter, scale=scale, finite=finite) for parameter in named.values()
    ],
    "together": lambda optimizer, named, scale, finite: optimizer.step(scale=scale, finite=finite),
    "clipped": lambda optimizer, named, scale, finite: [
        optimizer.update_clipped(parameter, limit=1.0, finite=torch.ones_like(finite)) for parameter in named.values()
    ],
}
"""Ways to an update that is not finite: as its `finite` says, or, clipped by its own norm, as it finds out by itself."""


def check_not_finite(kind, dtype, first, device="cpu", how="one by one"):
    """An update that is not finite, of step `first`, changes neither weights nor state, and is not waited for."""
    named = parameters(dtype, device)
    optimizer = make(named, kind)
    if device != "cpu":  # kernels and codes are loaded by the first update, which is waited for
        others = parameters(dtype, device)
        walk(make(others, kind), others, last=1)
    walk(optimizer, named, last=first - 1)
    before = everything(optimizer, named)
    give_gradients(named, first)
    for parameter in named.values():
        parameter.grad.view(-1)[0] = torch.nan
    scale, finite = torch.tensor(torch.nan, device=device), torch.tensor(False, device=device)
    with nothing_waits(device):
        optimizer.begin(first, 1e-2)
        HOW[how](optimizer, named, scale, finite)
    assert_same_bits(everything(optimizer, named), before)


def check_clipped(kind, dtype, limit, device="cpu"):
    """Clipped by its own norm an update is the one with that factor as its scale, and the norm is told.

    Kernels add up squares in another order: a factor, off in its last bits, may turn a rounding over, which is one gap of
    the weights in each step."""
    clipped, by_hand = parameters(dtype, device), parameters(dtype, device)
    first, second = make(clipped, kind), make(by_hand, kind)
    finite = torch.tensor(True, device=device)
    for step in range(1, 4):
        for named, optimizer in ((clipped, first), (by_hand, second)):
            give_gradients(named, step)
            optimizer.begin(step, 1e-2)
        for name, parameter in by_hand.items():
            norm = torch.linalg.vector_norm(
                parameter.grad, dtype=torch.float64 if dtype == torch.float64 else torch.float32
            )
            scale = (limit / (norm.double() + 1e-6)).clamp(max=1.0) if limit else None
            second.update(parameter, scale=scale, finite=finite)
            found, good = first.update_clipped(clipped[name], limit=limit, finite=finite)
            assert found.shape == good.shape == () and found.dtype == torch.float64 and good.item() is True
            exact = float(np.linalg.norm(float64(parameter.grad)))
            assert found.item() == pytest.approx(exact, rel=1e-14 if dtype == torch.float64 else 1e-6), name
            if limit and limit < 1:
                assert scale.item() < 1, "nothing is clipped"
    kernels = str(dtype).removeprefix("torch.") in OPTIMIZERS[kind].triton
    if device == "cpu" or not kernels:
        assert_same_bits(everything(first, clipped), everything(second, by_hand))
        return
    if (
        kind == "adamw_8bit"
    ):  # a code that is turned over is another level: a few of all, and of the weights in the next steps
        found, expected = everything(first, clipped), everything(second, by_hand)
        for name, tensor in expected.items():
            off = (found[name].double() - tensor.double()).abs() > 1e-5 * tensor.double().abs() + 1e-9
            assert off.float().mean().item() <= 2e-3, name
        return
    for name, parameter in clipped.items():
        torch.testing.assert_close(parameter, by_hand[name], rtol=3 * 2.0**-7, atol=1e-5)
    for name, tensor in first.tensors().items():
        torch.testing.assert_close(tensor, second.tensors()[name], rtol=1e-5, atol=1e-9)
