"""The update rules of the PyTorch engine, in plain torch, for any device. docs/concepts/optimizers.md has their definitions.

The three stand below each other. What they share: bfloat16 weights are updated in float32 and rounded afterwards, a large tensor
is walked through in slices so that no temporary is larger than one, and nothing waits for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tunix_rt.backends import torch_rounding as rounding
from tunix_rt.plan.state_bytes import BLOCK

SLICE_ELEMENTS = 8 * 2**20
"""Elements updated at a time, a multiple of the 8-bit block: 32 MiB for a temporary in float32. A slice has at least one row
of a matrix of Adafactor. Random bits are drawn slice by slice, so this number is part of what a seed means."""

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What holds for every parameter in a step."""

    step: int
    rate: float
    beta1: float
    beta2: float
    epsilon: float
    stochastic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update of one parameter."""

    weights: torch.Tensor
    """The parameter itself, [rows, columns] where Adafactor factors it, else [elements, 1]."""
    gradient: torch.Tensor
    """In the same shape, not yet multiplied by `scale`."""
    state: State
    decay: float
    scale: torch.Tensor | None
    sound: torch.Tensor | None
    count: torch.Tensor
    """Number of the step on the device, as torch's fused kernel wants it."""
    generator: torch.Generator
    now: Now

    @property
    def work(self) -> torch.dtype:
        """The type in which the update is computed."""
        return torch.float64 if self.weights.dtype == torch.float64 else torch.float32

    def slices(self) -> Iterator[slice]:
        rows = max(1, SLICE_ELEMENTS // max(1, self.weights.shape[1]))
        for start in range(0, len(self.weights), rows):
            yield slice(start, min(start + rows, len(self.weights)))

    def scaled_gradient(self, at: slice) -> torch.Tensor:
        """The gradient in the type of the work; not to be written to. A scale of shape [1] makes cast and product one pass."""
        if self.scale is None:
            return self.gradient[at].to(self.work)
        return self.gradient[at] * self.scale.to(self.work).view(1)

    def whole(self, name: str) -> torch.Tensor:
        """A moment that is kept of every element, in the shape of `weights`."""
        return column(self.state[name])

    def take(self, at: slice) -> torch.Tensor:
        """Weights to be changed in place: the parameter's own, or a copy where they are bfloat16."""
        return self.weights[at].to(self.work)

    def put(self, at: slice, changed: torch.Tensor) -> None:
        """Round what `take` gave, where that was a copy."""
        if self.weights.dtype != torch.bfloat16:
            return
        if self.now.stochastic:
            rounding.round_to_bfloat16_(self.weights[at].view(-1), changed.view(-1), self.generator)
        else:
            self.weights[at].copy_(changed)

    def keep(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put `new` into the state, unless the update is not sound."""
        old.copy_(new if self.sound is None else torch.where(self.sound, new, old))


# --- the three rules -------------------------------------------------------------------------------------------------


def _adamw(update: Update) -> None:
    """w <- w - rate decay w - rate m' / (sqrt(v') + epsilon): m is the mean of g and v that of g^2, m' and v' what they
    come to without their start at 0. Torch's fused kernel computes it."""
    first, second = update.whole("exp_avg"), update.whole("exp_avg_sq")
    for at in update.slices():
        weights = update.take(at)
        _fused_adamw(update, weights, update.scaled_gradient(at), first[at], second[at])
        update.put(at, weights)


def _adamw_8bit(update: Update) -> None:
    """The same, with m and v unpacked from 8 bits and packed again. A small tensor has them whole."""
    if update.state["exp_avg"].dtype != torch.uint8:
        _adamw(update)
        return
    state, (signed, unsigned) = update.state, rounding.tables(update.weights.device)
    for at in update.slices():
        blocks, elements = slice(at.start // BLOCK, -(-at.stop // BLOCK)), at.stop - at.start
        first = rounding.decode(state["exp_avg"][blocks], state["exp_avg_absmax"][blocks], signed)
        second = rounding.decode(state["exp_avg_sq"][blocks], state["exp_avg_sq_absmax"][blocks], unsigned)
        weights, first, second = update.take(at), first.to(update.work), second.to(update.work)
        moments = (moment.view(-1, 1)[:elements] for moment in (first, second))  # the last block may go beyond the end
        _fused_adamw(update, weights, update.scaled_gradient(at), *moments)
        update.put(at, weights)
        for name, moment, encode in (
            ("exp_avg", first, rounding.encode_signed),
            ("exp_avg_sq", second, rounding.encode_unsigned),
        ):
            codes, absmax = encode(moment.float(), update.generator)
            update.keep(state[name][blocks], codes)
            update.keep(state[f"{name}_absmax"][blocks], absmax)


def _adafactor(update: Update) -> None:
    """w <- w - rate decay w - rate u / max(1, RMS(u)): u = g / sqrt(v), v the mean of g^2, of a matrix in rows and columns
    only. `across` and `down` are what g is multiplied with to be u: element by element, and row by row."""
    across, down = (_factored if "exp_avg_sq_row" in update.state else _unfactored)(update)
    squares = torch.zeros((), dtype=update.work, device=update.weights.device)
    for at in update.slices():
        of_rows = torch.linalg.vector_norm(update.gradient[at] * across(at), dim=1, keepdim=True)
        squares += of_rows.mul_(down(at)).square_().sum()
    pace = -update.now.rate / (squares / update.weights.numel()).sqrt_().clamp_(min=1.0)
    kept = torch.full_like(pace, 1.0 - update.now.rate * update.decay)
    if update.sound is not None:
        kept = torch.where(update.sound, kept, 1.0)
    for at in update.slices():
        weights, moved, speed = update.take(at), update.gradient[at] * across(at), down(at) * pace
        if update.sound is not None:  # both: NaN times 0 would be NaN
            moved, speed = (torch.where(update.sound, values, 0.0) for values in (moved, speed))
        if update.decay:
            weights.mul_(kept)
        update.put(at, weights.addcmul_(moved, speed))


RULES = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}


# --- what the rules are made of --------------------------------------------------------------------------------------


def _fused_adamw(
    update: Update, weights: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> None:
    unsound = None if update.sound is None else update.sound.logical_not().float()
    lists = [weights], [gradient], [first], [second]
    fused_kernel(*lists, now=update.now, decay=update.decay, count=update.count, unsound=unsound)


def fused_kernel(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    *,
    now: Now,
    decay: float,
    count: torch.Tensor,
    unsound: torch.Tensor | None = None,
) -> None:
    """What `torch.optim.AdamW(fused=True)` calls. It reads memory in order, whatever the strides say."""
    torch._fused_adamw_(
        weights, gradients, first, second, [], [count] * len(weights), lr=now.rate, beta1=now.beta1, beta2=now.beta2,
        weight_decay=decay, eps=now.epsilon, amsgrad=False, maximize=False, found_inf=unsound,
    )  # fmt: skip


def column(tensor: torch.Tensor) -> torch.Tensor:
    """The elements below each other as they lie in memory; copied first where they do not lie in order."""
    return tensor.contiguous().as_strided((tensor.numel(), 1), (1, 1))


_Factor = Callable[[slice], torch.Tensor]


def _factored(update: Update) -> tuple[_Factor, _Factor]:
    """Move the means of rows and columns of g^2. v is their outer product over the mean of the rows."""
    height, width = update.weights.shape
    rows = torch.empty(height, dtype=update.work, device=update.weights.device)
    columns = torch.zeros(width, dtype=update.work, device=update.weights.device)
    for at in update.slices():
        rows[at] = torch.linalg.vector_norm(update.gradient[at], dim=1, dtype=update.work)
        columns += torch.linalg.vector_norm(update.gradient[at], dim=0, dtype=update.work).square_()
    scale = _scale(update)
    rows = _moved(update, update.state["exp_avg_sq_row"], rows.mul_(scale).square_().div_(width))
    columns = _moved(update, update.state["exp_avg_sq_col"], columns.mul_(scale).mul_(scale).div_(height)).rsqrt_()
    down = (rows.mean().sqrt() * rows.rsqrt() * scale).view(-1, 1)  # the mean over a row could be too large for float32
    return lambda _: columns, lambda at: down[at]


def _unfactored(update: Update) -> tuple[_Factor, _Factor]:
    """Move the mean of g^2 of every element."""
    second, scale = update.whole("exp_avg_sq"), _scale(update)
    for at in update.slices():
        _moved(update, second[at], update.scaled_gradient(at).square())
    return lambda at: second[at].rsqrt(), lambda _: scale


def _moved(update: Update, mean: torch.Tensor, towards: torch.Tensor) -> torch.Tensor:
    """`mean` moved `towards` (spoilt by it) by the share of this step: all of the way at the first. Kept, where sound."""
    moved = mean.lerp(towards.add_(1e-30), update.now.step**-0.8)
    update.keep(mean, moved)
    return moved


def _scale(update: Update) -> torch.Tensor:
    if update.scale is None:
        return torch.ones((), dtype=update.work, device=update.weights.device)
    return update.scale.to(update.work)
