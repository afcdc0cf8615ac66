"""The cases of the kernel self-test: inputs, expected numbers in float64, and how far a result may be off.

Inputs are NumPy's and exact in the run's dtype; no engine takes part. Expected numbers come from `reference.py`, those of an
update from `engines/optimizers/`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tunix_rt.config.optimizers import optimizer_of
from tunix_rt.data.packing import IGNORED
from tunix_rt.doctor.selftest import CheckResult
from tunix_rt.engines.optimizers import Hyperparameters, module_of
from tunix_rt.engines.selftest import reference as references
from tunix_rt.engines.selftest.runner import UNIT, Setting, compare
from tunix_rt.plan.precision import loss_rows


def rounded(values: Any, dtype: str) -> Any:
    """`values` rounded to `dtype`, stored as float64 for float64 and else as float32."""
    if dtype == "float64":
        return values.astype(np.float64)
    wide = values.astype(np.float32)
    if dtype == "float16":
        return wide.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32, to the nearest, ties to even
        bits = wide.view(np.uint32)
        bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
        bits &= np.uint32(0xFFFF0000)
    return wide


def normal(generator: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    """Normal numbers of size `scale` that are exact in `dtype`."""
    drawn = generator.standard_normal(shape, dtype=np.float32)
    return rounded(drawn if scale == 1.0 else drawn * np.float32(scale), dtype)


# --- cases and tolerances ---------------------------------------------------------------------------------------------
#
# u is the unit roundoff of the run's dtype, w that of its accumulation. Two things are allowed:
#
# 1. Roundings to the run's dtype: of the stored result, and of intermediate ones (attention weights, logits, partial sums
#    of a split-K matmul). `relative` counts those of the result itself, in u.
# 2. Roundings of a sum. n terms of size s have partial sums of size sqrt(n) s; each addition is off by w times that,
#    and the errors wander: sqrt(n) * w * sqrt(n) s at the worst. Of a result of size S = sqrt(n) s that is sqrt(n) w S.
#
# So `absolute` is (c u + WALK sqrt(n) w) S. S is that of the element's own row, not of the whole: the first rows of
# causal attention are 17 times larger than the last ones, whose errors would hide behind them.


WALK = 16.0
"""The largest of millions of walks, twice over. A 4096 x 4096 matmul in float32 may be off by 0.0039; measured were 1.1e-4
on a CPU, 0.95e-3 and 1.13e-3 on an H200. Inputs with 14 bits after the point are off by up to 0.0067, with 13 by 0.014,
with the 10 of TF32 by 0.1.

Measured in float32 on an H200 at head size 64: causal out 9.0e-7, dq 2.7e-6, dk 2.7e-6, dv 1.6e-6, packed dk 3.9e-6. On a
CPU correct kernels use up to 22 % of the tolerance in float32, 47 % in 16-bit dtypes and 49 % with bfloat16 weights. A CPU
computes the loss of 16-bit dtypes in float32; in their own arithmetic, as on a GPU, it uses 53 %."""


def _sums(setting: Setting, terms: int) -> float:
    return WALK * math.sqrt(terms) * setting.sum_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCase:
    """Two square matrices of standard normal numbers, and their matmul."""

    left: Any
    right: Any
    want: Any

    def judge(self, setting: Setting, got: Any) -> CheckResult:
        """An element has size sqrt(n): 64 for n = 4096. In float32 it may be off by 0.004, in bfloat16 by 0.5 + 0.8 %."""
        terms = len(self.want)
        absolute = (2 * setting.unit + _sums(setting, terms)) * math.sqrt(terms)
        found = compare("product", got, self.want, relative=2 * setting.unit, absolute=absolute)
        return replace(found, detail=f"{terms} x {terms} against float64; {found.detail}")


def matmul_case(setting: Setting, *, size: int) -> MatmulCase:
    generator = np.random.default_rng(1)
    left, right = (normal(generator, (size, size), setting.dtype) for _ in range(2))
    want = left.astype(np.float64) @ right.astype(np.float64)
    return MatmulCase(left=left, right=right, want=want)


SCORE_CAP = 2.0
"""Of scores of size 1, which it bends by a tenth. Models cap at 50: no half type holds scores that large well enough
to show whether they were bent."""
WINDOW = 50
"""Sliding window of the case, or the model's own where that is smaller. Every packed example is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """`examples` numbers the packed examples of a row; None is one example. `window` is the sliding window in tokens."""

    name: str
    q: Any
    k: Any
    v: Any
    upstream: Any
    examples: Any
    window: int | None
    query_size: float
    want: references.Attention

    @property
    def positions(self) -> Any:
        """Of every token in its example [rows, tokens], as in the rows of a run: they restart with each example."""
        rows, _, tokens, _ = self.q.shape
        of_row = np.arange(tokens)
        if self.examples is not None:
            of_row = of_row - np.searchsorted(self.examples, self.examples)  # the place where its example begins
        return np.tile(of_row, (rows, 1))

    def judge(self, setting: Setting, got: Mapping[str, Any], *, spelled_out: bool) -> list[CheckResult]:
        """Softmax weights and their gradients are rounded to the run's type before they meet v, q and k. The gradients
        of a shared head are sums over its group, which kernels also round as they go: a random walk of their own.

        `spelled_out` is for attention that is no kernel: each of its steps is rounded, and its softmax is in float32."""
        if spelled_out and setting.dtype == "float64":
            setting = replace(setting, dtype="float32")
        walk = math.sqrt(self.q.shape[1] // self.k.shape[1])
        of_query, of_key = self.want.of_query, self.want.of_key
        out, dq = (13.0, 20.0) if spelled_out else (8.0, 12.0)
        allowed = {
            "out": (2.0, out, of_query),
            "dq": (2.0, dq, of_query / self.query_size),
            "dk": (2.0 + 2 * walk, 8.0 + 6 * walk, of_key),
            "dv": (2.0 + 2 * walk, 8.0 + 6 * walk, of_key),
        }
        # Sums over tokens, of scores that are sums over the head, through the fast exponentials of GPUs.
        sums = 2 * _sums(setting, self.q.shape[2] + self.q.shape[3])
        return [
            compare(
                f"{self.name} {part}",
                got[part],
                getattr(self.want, part),
                relative=relative * setting.unit,
                absolute=(count * setting.unit + sums) * size,
            )
            for part, (relative, count, size) in allowed.items()
        ]


def attention_cases(setting: Setting) -> list[AttentionCase]:
    """Causal; with shared heads where the model has them; packed, as most rows of a run are; and packed with a window
    where some layers have one."""
    query_heads, kv_heads = setting.query_heads or 1, setting.kv_heads or setting.query_heads or 1
    group = max(1, query_heads // kv_heads)
    shared = 2 if kv_heads > 1 else 1  # two groups are enough to mix them up
    causal = _attention_case(setting, "causal", heads=2, kv_heads=2)
    sample = partial(_attention_case, setting, heads=shared * group, kv_heads=shared)
    grouped = [sample("grouped")] if group > 1 else []
    packed = sample("packed", packed=True)
    if setting.window is None:
        return [causal, *grouped, packed]
    window = min(setting.window, WINDOW)
    return [causal, *grouped, packed, sample("window", packed=True, window=window)]


def _attention_case(
    setting: Setting, name: str, *, heads: int, kv_heads: int, packed: bool = False, window: int | None = None
) -> AttentionCase:
    rows, tokens = 2, 300  # no multiple of a kernel's tile: the last one is a part
    generator = np.random.default_rng(2)
    shapes = [(rows, count, tokens, setting.head_size) for count in (heads, kv_heads, kv_heads, heads)]
    # Whatever the scaling, scores have size 1: neither all the same nor one above all.
    query_size = 1.0 if setting.scaling is None else 1.0 / (setting.scaling * math.sqrt(setting.head_size))
    sizes = (query_size, 1.0, 1.0, 1.0)
    q, k, v, upstream = (
        normal(generator, shape, setting.dtype, size) for shape, size in zip(shapes, sizes, strict=True)
    )
    examples = np.repeat([0, 1, 2], [70, 150, 80]) if packed else None
    want = references.attention(
        *(part.astype(np.float64) for part in (q, k, v, upstream)),
        examples=examples,
        window=window,
        scaling=setting.scaling,
        softcap=score_cap(setting),
    )
    return AttentionCase(
        name=name, q=q, k=k, v=v, upstream=upstream, examples=examples, window=window, query_size=query_size, want=want
    )


def score_cap(setting: Setting) -> float | None:
    return SCORE_CAP if setting.capped_scores else None


def attention_words(setting: Setting, samples: Sequence[AttentionCase], name: str) -> str:
    """What was checked of the attention called `name`."""
    kinds = ", ".join(f"window of {sample.window}" if sample.window else sample.name for sample in samples)
    scaled = "" if setting.scaling is None else f", scores times {setting.scaling:g}"
    capped = f"{' and' if scaled else ', scores'} soft-capped at {cap:g}" if (cap := score_cap(setting)) else ""
    return f"{kinds} with backward, {name}, head size {setting.head_size}{scaled}{capped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """Hidden states [rows, tokens, hidden] and labels as in the loop: the state at t - 1 predicts token t."""

    states: Any
    head: Any
    labels: Any
    loss: float
    d_states: Any
    d_head: Any
    of_state: Any
    of_token: Any
    logit_size: float
    targets: int

    def judge(self, setting: Setting, got: Mapping[str, Any]) -> list[CheckResult]:
        """Logits are summed in float32, and so are losses; the loss of a target is off by what its logits are.

        The gradient of a logit is rounded to the compute dtype before it is multiplied with lm_head and hidden states.
        The gradient of lm_head is rounded to the dtype of the weights when a chunk of targets is added: the sum before
        it, and the matmul of the chunk itself, which the JAX engine rounds before it adds, and a BLAS may. Where terms
        of opposite sign cancel, these two roundings are all of the error, so they count by the size of the row."""
        logits = _sums(setting, self.states.shape[-1]) * self.logit_size
        wander = 2 * math.sqrt(self.targets) * setting.sum_unit  # of losses of one sign, each a part of the sum
        summed = compare("loss", got["loss"], self.loss, relative=wander, absolute=2 * logits * math.sqrt(self.targets))
        kept = UNIT[setting.weights]
        chunks = math.ceil(self.targets / loss_rows(self.targets))
        added = 2 * (chunks - 1) * (2 * kept)  # two roundings for each chunk but the first, of up to two row sizes
        gradients = [
            compare(
                name,
                got[name],
                getattr(self, name),
                relative=2 * setting.unit + kept + 2 * logits,
                absolute=(5 * setting.unit + stored + 2 * logits + _sums(setting, self.targets)) * size,
            )
            for name, size, stored in (("d_states", self.of_state, 0.0), ("d_head", self.of_token, added))
        ]
        return [summed, *gradients]


def loss_case(setting: Setting) -> LossCase:
    """Targets for two chunks; on an accelerator also a vocabulary of more than one slice of lm_head."""
    rows, tokens, hidden = 2, 160, 256
    vocabulary = 1000 if setting.device == "cpu" else 33_000
    generator = np.random.default_rng(3)
    # Logits of size 1, or 3 where they are capped: enough for the cap to bend them.
    logit_size = 3.0 if setting.softcap else 1.0
    size = logit_size / math.sqrt(hidden)
    states = normal(generator, (rows, tokens, hidden), setting.dtype)
    head = normal(generator, (vocabulary, hidden), setting.dtype, size)
    labels = generator.integers(0, vocabulary, (rows, tokens))
    labels[generator.random((rows, tokens)) < 0.1] = IGNORED
    labels[:, 0] = IGNORED  # nothing predicts it
    predicted = labels[:, 1:]
    row, before = np.nonzero(predicted != IGNORED)
    wide = states.astype(np.float64)
    want = references.cross_entropy(
        wide[row, before], head.astype(np.float64), predicted[row, before], softcap=setting.softcap
    )
    d_states, of_state = np.zeros(states.shape), np.zeros((rows, tokens, 1))
    d_states[row, before], of_state[row, before] = want.d_states, want.of_target * size
    return LossCase(
        states=states,
        head=head,
        labels=labels,
        loss=want.loss,
        d_states=d_states,
        d_head=want.d_head,
        of_state=of_state,
        of_token=want.of_token,
        logit_size=logit_size,
        targets=len(row),
    )


# --- two updates of the optimizer -------------------------------------------------------------------------------------

HYPERPARAMETERS = Hyperparameters(step=1, lr=0.25, decay=0.5, beta1=0.9, beta2=0.999, epsilon=0.25)
"""Large enough that lr, decay, bias correction and epsilon all show in bfloat16."""
SCALES = (1.0, 0.25)
"""What the gradients of the first and the second update are multiplied with, as clipping does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCase:
    """A matrix and a vector, and gradients of two updates, not yet scaled. The vector is not decayed.

    Two updates, because the first of Adam is the same whatever the size of the gradient. The second gradient is larger, so
    that Adafactor has an update to clip."""

    parameters: Mapping[str, Any]
    gradients: tuple[Mapping[str, Any], ...]

    def judge(self, setting: Setting, got: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[CheckResult]:
        """`got` has, after each update, `parameter` and the optimizer states of every parameter."""
        before: Mapping[str, Mapping[str, Any]] = {name: {"parameter": one} for name, one in self.parameters.items()}
        units = {"weights_unit": UNIT[setting.weights], "unit": setting.sum_unit}
        results = []
        for step, (gradients, after) in enumerate(zip(self.gradients, got, strict=True), 1):
            for name, unscaled in gradients.items():
                decay = HYPERPARAMETERS.decay if unscaled.ndim == 2 else 0.0
                at = replace(HYPERPARAMETERS, step=step, decay=decay)
                gradient = unscaled.astype(np.float64) * SCALES[step - 1]
                rule = module_of(optimizer_of(setting.optim, unscaled.shape))
                results += [
                    compare(f"update {step} of {name}, {part}", actual, want, relative=relative, absolute=absolute)
                    for part, actual, want, relative, absolute in rule.expectations(
                        before[name], gradient, after[name], at, **units
                    )
                ]
            before = after
        return results


def optimizer_case(setting: Setting) -> OptimizerCase:
    generator = np.random.default_rng(4)
    # The matrix is no multiple of an 8-bit block; the vector is too small to have any.
    shapes = {"matrix": (64, 97), "vector": (96,)}
    parameters = {name: normal(generator, shape, setting.weights) for name, shape in shapes.items()}

    def gradient(shape: tuple[int, ...], size: float) -> Any:
        drawn = size * generator.uniform(0.5, 2.0, shape) * generator.choice([-1.0, 1.0], shape)
        return rounded(drawn, setting.weights)

    gradients = tuple({name: gradient(shape, 1 / scale**2) for name, shape in shapes.items()} for scale in SCALES)
    return OptimizerCase(parameters=parameters, gradients=gradients)


ROUNDING = replace(HYPERPARAMETERS, lr=2.0**-9, decay=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingCase:
    """Equal bfloat16 weights, whose first update leads to a number between two neighbours."""

    parameter: Any
    gradient: Any
    want: float
    below: float
    above: float

    def judge(self, got: Any) -> list[CheckResult]:
        """As many are rounded up as the number is on its way there; five standard deviations are allowed."""
        share = (self.want - self.below) / (self.above - self.below)
        strangers = int(((got != self.below) & (got != self.above)).sum())
        allowed = 5 * math.sqrt(share * (1 - share) / got.size)
        up = float((got == self.above).mean())
        return [
            compare("weights rounded to no neighbour", strangers, 0.0, relative=0.0, absolute=0.0),
            compare("share of weights rounded up", up, share, relative=0.0, absolute=allowed),
        ]


def rounding_case(setting: Setting) -> RoundingCase:
    start, step = 1.5, 2.0**-7  # the distance of bfloat16 numbers between 1 and 2
    weights = np.full(65_536, start, dtype=np.float32)
    wide = weights.astype(np.float64)
    want = module_of(setting.optim).reference(wide, {}, np.ones_like(wide), ROUNDING)["parameter"]
    return RoundingCase(
        parameter=weights, gradient=np.ones_like(weights), want=float(want[0]), below=start - step, above=start
    )
