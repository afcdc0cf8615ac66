"""The optimizers of the PyTorch engine: their states, and which code updates a parameter.

The updates are those of `engines/optimizers/`. On CUDA, where Triton works, a kernel of `triton/dispatch.py` updates weights of
the dtypes that `config/optimizers.py` lists for the optimizer: the same update without slices, with random bits of its own.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from tunix_rt.config.optimizers import BLOCK, WHOLE_STATE, optimizer_of, state_tensors
from tunix_rt.engines.checkpoint import refuse_other_tensors
from tunix_rt.engines.torch import optim_rules
from tunix_rt.engines.torch.optim_rules import (
    Group,
    GroupKey,
    Rule,
    described,
    dtype_name,
    refuse_cut_blocks,
    refuse_unfit,
    rule_of,
    wide_places,
)  # fmt: skip
from tunix_rt.engines.torch.sharding import Sharding
from tunix_rt.engines.torch.update_rules import Bits, State, StepSettings, Update, column, seed_of
from tunix_rt.ranks import Part

logger = logging.getLogger(__name__)


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
        sharding: Sharding | None = None,
    ) -> None:
        """Above one rank, `named` are the shards of `sharding`, and the whole shapes decide the states."""
        self._sharding = sharding
        self._parts = {
            one: Part.whole(tuple(one.shape)) if sharding is None else sharding.part(name)
            for name, one in named.items()
        }
        for name, parameter in named.items():
            refuse_unfit(name, parameter)
            if sharding is not None:
                refuse_cut_blocks(name, kind, self._parts[parameter], sharding.shards)
        self._kind = kind
        self._named = dict(named)
        self._index = {parameter: index for index, parameter in enumerate(named.values())}
        self._weight_decay = weight_decay
        self._seed = seed
        self._now = StepSettings(
            step=0, lr=0.0, beta1=beta1, beta2=beta2, epsilon=epsilon, stochastic=stochastic_rounding
        )
        self._restored = 0
        self._states: dict[torch.nn.Parameter, State] = {}
        self._counts: dict[torch.device, torch.Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._rules: dict[torch.nn.Parameter, Rule] = {}
        self._workspace: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._groups: dict[GroupKey, Group] = {}

    # --- updating

    def begin(self, step: int, lr: float) -> None:
        """Updates from now on belong to step `step`, counted from 1, with learning rate `lr`."""
        if step <= self._restored:
            raise ValueError(f"step {step} was begun, but the first after the restored state is {self._restored + 1}")
        self._now = replace(self._now, step=step, lr=lr)
        self._counts.clear()

    def update(
        self, parameter: torch.nn.Parameter, *, scale: torch.Tensor | None = None, finite: torch.Tensor | None = None
    ) -> None:
        """Update one parameter by its gradient times `scale`. Where `finite` is false nothing changes, states included.

        Both are of shape [] and on the device, and are not waited for."""
        if parameter.grad is None:
            return
        state, rule = self._state(parameter), self._rules[parameter]
        if rule.kernels:
            self._launch(rule, parameter, scale=scale, finite=finite)
            return
        weights, gradient, part = parameter.detach(), parameter.grad.detach(), self._parts[parameter]
        by_rows = rule.spec.factored and parameter.dim() == 2
        if not by_rows:
            weights, gradient = column(weights), column(gradient)
        width = 1 if by_rows else math.prod(part.shape[1:])
        bits = Bits(generator=self._generator(parameter))
        update = Update(
            weights=weights,
            gradient=gradient,
            state=state,
            decay=self._decay(parameter),
            scale=scale,
            finite=finite,
            count=self._count(parameter.device),
            bits=bits,
            now=self._now,
            sharding=self._sharding,
            first=part.first * width,
            whole=part.shape[0] if by_rows else math.prod(part.shape),
        )
        with torch.no_grad():
            rule.module.torch_update(update)

    def update_clipped(
        self, parameter: torch.nn.Parameter, *, limit: float | None, finite: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update one parameter by its gradient, clipped by its own norm to `limit`.

        Returns that norm, and whether the update was applied: `finite`, and the norm is finite. Otherwise nothing changed.
        Both are of shape [] and on the device. Adafactor kernels take the norm from sums that they need anyway."""
        gradient = parameter.grad
        if gradient is None:
            raise ValueError("a parameter without a gradient has no norm to clip by")
        self._state(parameter)
        rule = self._rules[parameter]
        if (kernels := rule.kernels) and self._sharding is None:
            workspace = self._workspace.setdefault(parameter.device, [])
            if not workspace:
                workspace += kernels.Clip.workspace(parameter.device)
            norm, good = workspace.pop()
            clip = kernels.Clip(limit=float(limit) if limit else None, norm=norm, good=good)
            self._launch(rule, parameter, finite=finite, clip=clip)
            return norm, good
        # a norm summed in bfloat16 would be a bfloat16
        summed = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(gradient, dtype=summed).double()
        if self._sharding is not None:
            norm = self._sharding.total(norm.square()).sqrt()
        finite = finite & torch.isfinite(norm)
        self.update(parameter, scale=(limit / (norm + 1e-6)).clamp(max=1.0) if limit else None, finite=finite)
        return norm, finite

    def _launch(
        self,
        rule: Rule,
        parameter: torch.nn.Parameter,
        *,
        scale: torch.Tensor | None = None,
        finite: torch.Tensor | None,
        clip: Any = None,
    ) -> None:
        """Update `parameter` by its kernel. `clip` is a `Clip`, in place of a scale."""
        assert rule.kernels is not None and parameter.grad is not None
        rule.kernels.update(
            rule.name, parameter, parameter.grad.contiguous(), self._states[parameter], now=self._begun(),
            decay=self._decay(parameter), seed=self._seed_of(parameter), scale=scale, finite=finite, clip=clip,
        )  # fmt: skip

    def step(self, *, scale: torch.Tensor | None = None, finite: torch.Tensor | None = None) -> None:
        """Update every parameter that has a gradient, to the bits that `update` gives.

        One launch updates all tensors of a group (`triton/dispatch.py`). PyTorch's fused kernel takes one call for others in
        float32 or float64, and leaves their gradients scaled."""
        together: dict[tuple[torch.device, torch.dtype, float], list[torch.nn.Parameter]] = {}
        groups: dict[GroupKey, dict[int, tuple[int, int]]] = {}
        for index, parameter in enumerate(self._named.values()):
            if (gradient := parameter.grad) is None:
                continue
            if (rule := self._rules.get(parameter)) is None:
                self._state(parameter)
                rule = self._rules[parameter]
            if rule.fused and not rule.kernels:
                together.setdefault((parameter.device, parameter.dtype, self._decay(parameter)), []).append(parameter)
            elif rule.kernels and rule.name in rule.kernels.GROUPED and (lies := wide_places(parameter, gradient)):
                groups.setdefault((parameter.device, rule.name, parameter.dtype), {})[index] = lies
            else:
                self.update(parameter, scale=scale, finite=finite)
        for key, members in groups.items():
            self._launch_group(key, members, scale=scale, finite=finite)
        skip = None if finite is None else finite.logical_not().float()
        for (device, dtype, decay), parameters in together.items():
            states = [self._state(parameter) for parameter in parameters]
            gradients = [column(parameter.grad.detach()) for parameter in parameters if parameter.grad is not None]
            if scale is not None:
                torch._foreach_mul_(gradients, scale.to(dtype))
            weights = [column(parameter.detach()) for parameter in parameters]
            self._rules[parameters[0]].module.torch_update_many(
                weights, gradients, states, now=self._now, decay=decay, count=self._count(device), skip=skip
            )

    def _launch_group(
        self,
        key: GroupKey,
        members: Mapping[int, tuple[int, int]],
        *,
        scale: torch.Tensor | None,
        finite: torch.Tensor | None,
    ) -> None:
        """Update the parameters with these numbers in one launch: the addresses of the weights and the gradient of each."""
        now, kernels, (device, name, dtype) = self._begun(), optim_rules.triton_kernels(key[0]), key
        assert kernels is not None, "a group is of parameters that have kernels"
        group = self._groups.get(key)
        if group is None or not members.keys() <= group.numbers.keys():
            group = self._groups[key] = self._joined(kernels, name, group.numbers if group else {}, members)
        weights, gradients, seeds = ([0] * len(group.numbers) for _ in range(3))
        for index, lies in members.items():
            number = group.numbers[index]
            weights[number], gradients[number] = lies
            seeds[number] = self._seed_at(index, device)
        kernels.update_group(
            name, group.tensors, weights, gradients, seeds, dtype=dtype, now=now, decay=self._weight_decay, scale=scale,
            finite=finite,
        )  # fmt: skip

    def _joined(self, kernels: ModuleType, name: str, known: Mapping[int, int], members: Mapping[int, object]) -> Group:
        """A group of those that were `known` and of `members`."""
        parameters, everyone = list(self._named.values()), sorted({*known, *members})
        states = [tuple(self._state(parameters[index]).values()) for index in everyone]
        decayed = [parameters[one].dim() >= 2 for one in everyone]
        tensors = kernels.group(name, states, decayed, [parameters[one].numel() for one in everyone])
        return Group(numbers={index: number for number, index in enumerate(everyone)}, tensors=tensors)

    def _decay(self, parameter: torch.nn.Parameter) -> float:
        return self._weight_decay if parameter.dim() >= 2 else 0.0

    def _begun(self) -> StepSettings:
        if self._now.step < 1:
            raise ValueError("an update needs its step: call begin first")
        return self._now

    def _count(self, device: torch.device) -> torch.Tensor:
        if device not in self._counts:
            self._counts[device] = torch.full((), float(self._begun().step), dtype=torch.float32, device=device)
        return self._counts[device]

    def _seed_of(self, parameter: torch.nn.Parameter) -> int:
        return self._seed_at(self._index[parameter], parameter.device)

    def _seed_at(self, index: int, device: torch.device) -> int:
        """Triton kernels count elements from the start of a shard: there each shard has a seed of its own."""
        shard = self._sharding.shard if self._sharding and device.type == "cuda" else 0
        return seed_of(self._seed, self._now.step, index + shard * len(self._index), device.type)

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

        def fill(states: State) -> None:
            refuse_other_tensors("the optimizer state", described(tensors), described(states))
            for name, tensor in states.items():
                tensor.copy_(tensors[name])

        self.refill(fill, step=step)

    def refill(self, fill: Callable[[State], None], *, step: int) -> None:
        """Put back the states after `step` steps: `fill` sets all of them, by the names that `tensors` gives."""
        states = {parameter: self._fresh(parameter) for parameter in self._named.values()}
        fill(
            {
                f"{slot}.{name}": tensor
                for name, parameter in self._named.items()
                for slot, tensor in states[parameter].items()
            }
        )
        self._states = states
        self._groups.clear()  # they have the addresses of the former states
        self._restored = step

    def _state(self, parameter: torch.nn.Parameter) -> State:
        if parameter not in self._states:
            self._states[parameter] = self._fresh(parameter)
        if parameter not in self._rules:
            name = optimizer_of(self._kind, self._parts[parameter].shape)
            self._rules[parameter] = rule_of(name, parameter, self._sharding)
        return self._states[parameter]

    def _fresh(self, parameter: torch.nn.Parameter) -> State:
        full = state_tensors(self._parts[parameter].shape, self._kind, dtype_name(parameter))
        parts = self._parts_of_states(parameter)
        return {
            slot: torch.zeros(
                (parts[slot].rows, *shape[1:]) if shape else (), dtype=getattr(torch, stored), device=parameter.device
            )
            for slot, (shape, stored) in full.items()
        }

    def part_of(self, parameter: torch.nn.Parameter) -> Part:
        return self._parts[parameter]

    def parts(self) -> dict[str, Part]:
        """Of each of `tensors()`, the rows that are here."""
        return {
            f"{slot}.{name}": part
            for name, parameter in self._named.items()
            for slot, part in self._parts_of_states(parameter).items()
        }

    def _parts_of_states(self, parameter: torch.nn.Parameter) -> dict[str, Part]:
        """States are shared as their parameter is: by its rows, or by the blocks of its elements; one per column is whole."""
        part, found = self._parts[parameter], {}
        for slot, (shape, _) in state_tensors(part.shape, self._kind, dtype_name(parameter)).items():
            if part.everywhere or slot == WHOLE_STATE:
                found[slot] = Part.whole(shape)
            elif shape == part.shape or len(shape) == 1:
                found[slot] = Part(shape=shape, first=part.first, rows=part.rows)
            else:
                width = math.prod(part.shape[1:])
                blocks = -(-part.rows * width // BLOCK)
                found[slot] = Part(shape=shape, first=part.first * width // BLOCK, rows=blocks)
        return found
