"""The optimizers of the PyTorch engine: their state, and which code updates a parameter.

The rules are in `update_rules.py`. On CUDA, updates of bfloat16 weights are kernels of `triton/dispatch.py`, where Triton
works, and so are those of float32 weights with moments of 8 bits: the same rules without slices, with random bits of their own.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from tunix_rt.engines.torch import update_rules as rounding
from tunix_rt.engines.torch import update_rules as rules
from tunix_rt.engines.torch.update_rules import State, column
from tunix_rt.errors import TunixError
from tunix_rt.plan.optimizers import state_tensors

logger = logging.getLogger(__name__)


# --- kernels instead -------------------------------------------------------------------------------------------------


def _kernels_of(parameter: torch.nn.Parameter, state: State) -> ModuleType | None:
    """`triton_optim`, where it has an update of `parameter`: of bfloat16 weights on CUDA, with coded moments of float32 too."""
    fit = (torch.bfloat16, torch.float32) if _coded(state) else (torch.bfloat16,)
    if parameter.device.type != "cuda" or parameter.dtype not in fit or not parameter.numel():
        return None
    kernels = _triton(parameter.device)
    unfactored = "exp_avg" not in state and "exp_avg_sq" in state
    return None if kernels and unfactored and parameter.numel() > kernels.WHOLE_UP_TO else kernels


def _coded(state: State) -> bool:
    """Whether moments are kept in 8 bits."""
    return "exp_avg_absmax" in state


@functools.cache
def _triton(device: torch.device) -> ModuleType | None:
    """`triton_optim`, where its kernels can be compiled for `device`. Where they cannot, the log says why."""
    problem: str | None = "Triton is not installed"
    if importlib.util.find_spec("triton") is not None:
        try:
            kernels = importlib.import_module("tunix_rt.engines.torch.triton.dispatch")
            problem = kernels.problem(device)
        except ImportError as error:
            problem = f"Triton cannot be imported: {error}"
        if problem is None:
            return kernels
    logger.info("Updates on %s go without Triton's kernels, and are slower: %s", device, problem)
    return None


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels update weights on `device`, of types and by rules that they know (`kernels_know`)."""
    return device.type == "cuda" and _triton(device) is not None


def kernels_know(kind: str, weights: str) -> bool:
    """Whether there are kernels for optimizer `kind` and weights of this type."""
    return weights == "bfloat16" or (weights == "float32" and kind == "adamw_8bit")


def _wide_places(weights: torch.Tensor, gradient: torch.Tensor) -> tuple[int, int] | None:
    """Where both lie, if they are of one type, in order, and from addresses on at which loads of 16 bytes can start."""
    first, second = weights.data_ptr(), gradient.data_ptr()
    fit = (first | second) % 16 == 0 and gradient.is_contiguous() and gradient.dtype == weights.dtype
    return (first, second) if fit else None


_Alike = tuple[torch.device, torch.dtype, torch.dtype]
"""Device, type of moments and type of weights: what tensors that share a launch have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crowd:
    """Parameters whose AdamW is one launch. One joins with its first gradient."""

    numbers: dict[int, int]
    """Number of a parameter -> its place in `table`."""
    table: Any
    """Their `triton_optim.Crowd`."""


# --- the optimizer ---------------------------------------------------------------------------------------------------


class Optimizer:
    """Updates parameters in place: all together (`step`), or each as soon as its gradient is there (`update`).

    The place of a parameter in `named` is its number for everything random. Matrices are decayed, vectors are not. The step
    is counted by the caller, once for all parameters; one without a gradient is left alone, and so is its state."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        *,
        kind: str,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        seed: int,
        stochastic_rounding: bool,
    ) -> None:
        for name, parameter in named.items():
            _refuse_unfit(name, parameter)
        self._kind = kind
        self._rule = rules.RULES[kind]
        self._named = dict(named)
        self._index = {parameter: index for index, parameter in enumerate(named.values())}
        self._weight_decay = weight_decay
        self._seed = seed
        self._now = rules.Now(
            step=0, rate=0.0, beta1=beta1, beta2=beta2, epsilon=epsilon, stochastic=stochastic_rounding
        )
        self._restored = 0
        self._states: dict[torch.nn.Parameter, State] = {}
        self._counts: dict[torch.device, torch.Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._kernels: dict[torch.nn.Parameter, ModuleType | None] = {}
        self._room: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._alike: dict[torch.nn.Parameter, _Alike | None] = {}
        self._crowds: dict[_Alike, _Crowd] = {}

    # --- updating

    def begin(self, step: int, rate: float) -> None:
        """What is updated from now on belongs to step `step`, counted from 1, and has learning rate `rate`."""
        if step <= self._restored:
            raise ValueError(f"step {step} was begun, but the first after what was restored is {self._restored + 1}")
        self._now = replace(self._now, step=step, rate=rate)
        self._counts.clear()

    def update(
        self, parameter: torch.nn.Parameter, *, scale: torch.Tensor | None = None, sound: torch.Tensor | None = None
    ) -> None:
        """Update one parameter by its gradient times `scale`. Where `sound` is false nothing changes, state included.

        Both are of shape [] and on the device, and are not waited for."""
        if parameter.grad is None:
            return
        state = self._state(parameter)
        if kernels := self._kernels[parameter]:
            self._launch(kernels, parameter, scale=scale, sound=sound)
            return
        weights, gradient = parameter.detach(), parameter.grad.detach()
        if "exp_avg_sq_row" not in state:
            weights, gradient = column(weights), column(gradient)
        update = rules.Update(
            weights=weights,
            gradient=gradient,
            state=state,
            decay=self._decay(parameter),
            scale=scale,
            sound=sound,
            count=self._count(parameter.device),
            generator=self._generator(parameter),
            now=self._now,
        )
        with torch.no_grad():
            self._rule(update)

    def update_clipped(
        self, parameter: torch.nn.Parameter, *, limit: float | None, sound: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update one parameter by its gradient, clipped by its own norm to `limit`.

        Returns that norm, and whether the update was sound: `sound`, and the norm is finite. Else nothing has changed. Both
        are of shape [] and on the device. Kernels of Adafactor find the norm among sums that they need anyway."""
        gradient = parameter.grad
        if gradient is None:
            raise ValueError("a parameter without a gradient has no norm to clip by")
        if self._state(parameter) and (kernels := self._kernels[parameter]):
            room = self._room.setdefault(parameter.device, [])
            if not room:
                room += kernels.Clip.room(parameter.device)
            norm, good = room.pop()
            clip = kernels.Clip(limit=float(limit) if limit else None, norm=norm, good=good)
            self._launch(kernels, parameter, sound=sound, clip=clip)
            return norm, good
        summed = (
            torch.float64 if parameter.dtype == torch.float64 else torch.float32
        )  # in bfloat16 it would be a bfloat16
        norm = torch.linalg.vector_norm(gradient, dtype=summed).double()
        sound = sound & torch.isfinite(norm)
        self.update(parameter, scale=(limit / (norm + 1e-6)).clamp(max=1.0) if limit else None, sound=sound)
        return norm, sound

    def _launch(
        self,
        kernels: ModuleType,
        parameter: torch.nn.Parameter,
        *,
        scale: torch.Tensor | None = None,
        sound: torch.Tensor | None,
        clip: Any = None,
    ) -> None:
        """Update `parameter` by `kernels`. `clip` is their `Clip`, in place of a scale."""
        now, state = self._begun(), self._states[parameter]
        gradient = parameter.grad if parameter.grad.is_contiguous() else parameter.grad.contiguous()
        seed = self._seed_of(parameter) if now.stochastic else None
        same: dict[str, Any] = {"step": now.step, "rate": now.rate, "decay": self._decay(parameter), "seed": seed}
        if "exp_avg" in state:
            if clip is not None:
                scale, sound = kernels.clip(gradient, sound=sound, clip=clip), clip.good
            same |= {"beta1": now.beta1, "beta2": now.beta2, "epsilon": now.epsilon, "scale": scale, "sound": sound}
            if _coded(state):  # moments are rounded at random in any case
                same |= {"seed": self._seed_of(parameter), "stochastic": now.stochastic}
                kernels.adamw_8bit(parameter, gradient, *state.values(), **same)
            else:
                kernels.adamw(parameter, gradient, *state.values(), **same)
        else:
            rule = kernels.adafactor if "exp_avg_sq_row" in state else kernels.adafactor_whole
            rule(parameter, gradient, *state.values(), scale=scale, sound=sound, clip=clip, **same)

    def step(self, *, scale: torch.Tensor | None = None, sound: torch.Tensor | None = None) -> None:
        """Update every parameter that has a gradient, to the bits that `update` gives.

        AdamW takes one launch for all weights that `triton/dispatch.py` updates, and one more for those with moments of 8 bits.
        Others in float32 or float64 take one call of the fused kernel, which leaves their gradients scaled."""
        together: dict[tuple[torch.device, torch.dtype, float], list[torch.nn.Parameter]] = {}
        crowds: dict[_Alike, dict[int, tuple[int, int]]] = {}
        for index, parameter in enumerate(self._named.values()):
            if (gradient := parameter.grad) is None:
                continue
            if self._fused(parameter):
                alike = (parameter.device, parameter.dtype, self._decay(parameter))
                together.setdefault(alike, []).append(parameter)
            elif (crowd := self._crowd_of(parameter)) and (lies := _wide_places(parameter, gradient)):
                crowds.setdefault(crowd, {})[index] = lies
            else:
                self.update(parameter, scale=scale, sound=sound)
        for crowd, members in crowds.items():
            self._launch_crowd(crowd, members, scale=scale, sound=sound)
        unsound = None if sound is None else sound.logical_not().float()
        for (device, dtype, decay), parameters in together.items():
            states = [self._state(parameter) for parameter in parameters]
            gradients = [column(parameter.grad.detach()) for parameter in parameters]
            if scale is not None:
                torch._foreach_mul_(gradients, scale.to(dtype))
            moments = ([column(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
            weights = [column(parameter.detach()) for parameter in parameters]
            same = {"now": self._now, "decay": decay, "count": self._count(device), "unsound": unsound}
            rules.fused_kernel(weights, gradients, *moments, **same)

    def _fused(self, parameter: torch.nn.Parameter) -> bool:
        """Whether torch's fused kernel updates `parameter` in place: by AdamW, with whole moments."""
        if self._kind == "adafactor" or parameter.dtype == torch.bfloat16:
            return False
        return not _coded(self._state(parameter))

    def _crowd_of(self, parameter: torch.nn.Parameter) -> _Alike | None:
        """Which crowd `parameter` can be in: kernels have its AdamW. Made known once, because a step has no time to ask."""
        if parameter not in self._alike:
            state = self._state(parameter)
            whole = self._kernels[parameter] is not None and "exp_avg" in state
            self._alike[parameter] = (parameter.device, state["exp_avg"].dtype, parameter.dtype) if whole else None
        return self._alike[parameter]

    def _launch_crowd(
        self,
        alike: _Alike,
        members: Mapping[int, tuple[int, int]],
        *,
        scale: torch.Tensor | None,
        sound: torch.Tensor | None,
    ) -> None:
        """Update the parameters with these numbers in one launch: where the weights of each lie, and where its gradient."""
        now, kernels = self._begun(), _triton(alike[0])
        assert kernels is not None, "a crowd is of parameters that have kernels"
        crowd = self._crowds.get(alike)
        if crowd is None or not members.keys() <= crowd.numbers.keys():
            crowd = self._crowds[alike] = self._joined(kernels, crowd.numbers if crowd else {}, members)
        coded = alike[1] == torch.uint8
        weights, gradients, seeds = ([0] * len(crowd.numbers) for _ in range(3))
        for index, lies in members.items():
            number = crowd.numbers[index]
            weights[number], gradients[number] = lies
            if now.stochastic or coded:
                seeds[number] = rounding.seed_of(self._seed, now.step, index, alike[0].type)
        same = {
            "step": now.step, "rate": now.rate, "beta1": now.beta1, "beta2": now.beta2, "epsilon": now.epsilon,
            "decay": self._weight_decay, "scale": scale, "sound": sound,
        }  # fmt: skip
        if coded:
            kernels.adamw_8bit_many(
                crowd.table, weights, gradients, seeds, dtype=alike[2], stochastic=now.stochastic, **same
            )
        else:
            kernels.adamw_many(crowd.table, weights, gradients, seeds if now.stochastic else None, **same)

    def _joined(self, kernels: ModuleType, known: Mapping[int, int], members: Mapping[int, object]) -> _Crowd:
        """A crowd of those who were `known` and of `members`."""
        parameters, everyone = list(self._named.values()), sorted({*known, *members})
        states = [self._state(parameters[index]) for index in everyone]
        moments, decayed = [tuple(state.values()) for state in states], [parameters[one].dim() >= 2 for one in everyone]
        if _coded(states[0]):
            table = kernels.crowd_8bit(moments, decayed, [parameters[one].numel() for one in everyone])
        else:
            table = kernels.Crowd.of(moments, decayed)
        return _Crowd(numbers={index: number for number, index in enumerate(everyone)}, table=table)

    def _decay(self, parameter: torch.nn.Parameter) -> float:
        return self._weight_decay if parameter.dim() >= 2 else 0.0

    def _begun(self) -> rules.Now:
        if self._now.step < 1:
            raise ValueError("an update needs its step: call begin first")
        return self._now

    def _count(self, device: torch.device) -> torch.Tensor:
        if device not in self._counts:
            self._counts[device] = torch.full((), float(self._begun().step), dtype=torch.float32, device=device)
        return self._counts[device]

    def _seed_of(self, parameter: torch.nn.Parameter) -> int:
        return rounding.seed_of(self._seed, self._now.step, self._index[parameter], parameter.device.type)

    def _generator(self, parameter: torch.nn.Parameter) -> torch.Generator:
        """The device's generator, seeded for this parameter in this step."""
        device = parameter.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(self._seed_of(parameter))

    # --- the state

    def state_of(self, parameter: torch.nn.Parameter) -> State:
        """What is kept of `parameter`; empty before its first update."""
        return self._states.get(parameter, {})

    def tensors(self) -> State:
        """All that a checkpoint has to hold beside the step: `exp_avg.NAME` and the like.

        A parameter that was never updated has its zeros there, so that nothing can be missing unnoticed."""
        found: State = {}
        for name, parameter in self._named.items():
            state = self._states.get(parameter) or self._fresh(parameter)
            found |= {f"{slot}.{name}": tensor for slot, tensor in state.items()}
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Put back what `tensors` gave after `step` steps, bit for bit, on each parameter's device."""
        states = {parameter: self._fresh(parameter) for parameter in self._named.values()}
        expected = {
            f"{slot}.{name}": tensor
            for name, parameter in self._named.items()
            for slot, tensor in states[parameter].items()
        }
        _refuse_others(expected, tensors, self._kind)
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
        self._states = states
        self._crowds.clear()  # they have the addresses of what was there before
        self._restored = step

    def _state(self, parameter: torch.nn.Parameter) -> State:
        if parameter not in self._states:
            self._states[parameter] = self._fresh(parameter)
        if parameter not in self._kernels:
            self._kernels[parameter] = _kernels_of(parameter, self._states[parameter])
        return self._states[parameter]

    def _fresh(self, parameter: torch.nn.Parameter) -> State:
        dtype = str(parameter.dtype).removeprefix("torch.")
        return {
            slot: torch.zeros(shape, dtype=getattr(torch, stored), device=parameter.device)
            for slot, (shape, stored) in state_tensors(tuple(parameter.shape), self._kind, dtype).items()
        }


# --- what is refused -------------------------------------------------------------------------------------------------


def _refuse_unfit(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise TunixError(
            f"{name}: weights of type {parameter.dtype} are not updated, small changes would be lost in them",
            fix="keep the weights in float32 and cast them for the forward pass",
        )
    if not parameter.is_contiguous():
        raise TunixError(
            f"{name}: its {parameter.numel():,} weights do not lie in order", fix="call .contiguous() on it"
        )


def _refuse_others(expected: State, found: Mapping[str, torch.Tensor], kind: str) -> None:
    """Name the first tensor that is missing, foreign or of another shape or type."""
    fix = "continue with the model and the optimizer that wrote this checkpoint, or start anew in another folder"
    for name, tensor in expected.items():
        if name not in found:
            raise TunixError(f"the optimizer state has no {name}, which {kind} keeps", fix=fix)
        other = found[name]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            said = [f"{list(one.shape)} in {str(one.dtype).removeprefix('torch.')}" for one in (other, tensor)]
            raise TunixError(f"the optimizer state has {name} as {said[0]}; {kind} keeps {said[1]}", fix=fix)
    if strange := sorted(set(found) - set(expected)):
        raise TunixError(f"the optimizer state has {strange[0]}, which {kind} of this model does not keep", fix=fix)
