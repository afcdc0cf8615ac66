"""The samples of the proofs, the numbers expected of them, and how far a result may be off.

Samples are numpy's and exact in the run's type; no engine takes part. Expected numbers come from `references.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunix_rt.backends import references
from tunix_rt.backends.proving import Setting, compare
from tunix_rt.data.pack import IGNORED
from tunix_rt.doctor.prove import Proved


def rounded(values: Any, dtype: str) -> Any:
    """`values` as numbers that are exact in `dtype`, without an engine: float64 for float64, else float32."""
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


def _normal(generator: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    drawn = generator.standard_normal(shape, dtype=np.float32)
    return rounded(drawn if scale == 1.0 else drawn * np.float32(scale), dtype)


# --- samples and how far a result may be off --------------------------------------------------------------------------
#
# u is the unit roundoff of the run's type, w that of its sums. A stored result is rounded once; intermediate results in
# the run's type (weights of attention, logits, partial sums of a split product) are rounded too. So `relative` is 2 u.
# n terms whose sum has size s have partial sums that wander, and their roundings add up like a random walk: about
# sqrt(n) * w * sqrt(n) * s = n * w * s. So `absolute` is (c u + n w) s with a small c that counts the intermediate
# roundings. Seen on correct hardware in all types: at most 62 % of it (an H200 with head sizes 16 to 256 and groups of 4
# query heads; a CPU with head sizes 64 to 256 and groups of 1 to 32).


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSample:
    """Two square matrices of standard normal numbers, and their product."""

    left: Any
    right: Any
    want: Any

    def judge(self, setting: Setting, got: Any) -> Proved:
        """An element has size sqrt(n): 64 for n = 4096. In float32 it may be off by 0.016, in bfloat16 by 0.5 + 0.8 %."""
        terms = len(self.want)
        absolute = (2 * setting.unit + terms * setting.sum_unit) * math.sqrt(terms)
        found = compare("product", got, self.want, relative=2 * setting.unit, absolute=absolute)
        return replace(found, detail=f"{terms} x {terms} against float64; {found.detail}")


def product_sample(setting: Setting, *, size: int) -> ProductSample:
    generator = np.random.default_rng(1)
    left, right = (_normal(generator, (size, size), setting.dtype) for _ in range(2))
    want = references.product(left.astype(np.float64), right.astype(np.float64))
    return ProductSample(left=left, right=right, want=want)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """`examples` numbers the packed examples of a row; None is one example."""

    name: str
    q: Any
    k: Any
    v: Any
    upstream: Any
    examples: Any
    want: references.Attention

    def judge(self, setting: Setting, got: Mapping[str, Any]) -> list[Proved]:
        """Softmax weights and their gradients are rounded to the run's type before they meet v, q and k. The gradients
        of a shared head are sums over its group, which kernels also round as they go: a random walk of their own."""
        tokens = self.q.shape[2]
        walk = 2 * math.sqrt(self.q.shape[1] // self.k.shape[1])
        roundings = {"out": 4.0, "dq": 4.0, "dk": 4.0 + walk, "dv": 4.0 + walk}
        return [
            compare(
                f"{self.name} {part}",
                got[part],
                want := getattr(self.want, part),
                relative=2 * setting.unit,
                absolute=(count * setting.unit + tokens * setting.sum_unit) * float(np.abs(want).max()),
            )
            for part, count in roundings.items()
        ]


def attention_samples(setting: Setting) -> list[AttentionSample]:
    """Causal; with shared heads where the model has them; and packed, as most rows of a run are."""
    query_heads, kv_heads = setting.query_heads or 1, setting.kv_heads or setting.query_heads or 1
    group = max(1, query_heads // kv_heads)
    shared = 2 if kv_heads > 1 else 1  # two groups are enough to mix them up
    plain = [("causal", 2, 2, False)]
    if group > 1:
        plain.append(("grouped", shared * group, shared, False))
    plain.append(("packed", shared * group, shared, True))
    return [_attention_sample(setting, *which) for which in plain]


def _attention_sample(setting: Setting, name: str, heads: int, kv_heads: int, packed: bool) -> AttentionSample:
    rows, tokens = 2, 300  # no multiple of a kernel's tile: the last one is a part
    generator = np.random.default_rng(2)
    shapes = [(rows, count, tokens, setting.head_size) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, upstream = (_normal(generator, shape, setting.dtype) for shape in shapes)
    examples = np.repeat([0, 1, 2], [70, 150, 80]) if packed else None
    want = references.attention(*(part.astype(np.float64) for part in (q, k, v, upstream)), examples=examples)
    return AttentionSample(name=name, q=q, k=k, v=v, upstream=upstream, examples=examples, want=want)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSample:
    """Hidden states [rows, tokens, hidden] and labels as the loop has them: the state at t - 1 predicts token t."""

    states: Any
    head: Any
    labels: Any
    loss: float
    d_states: Any
    d_head: Any
    largest_logit: float
    targets: int

    def judge(self, setting: Setting, got: Mapping[str, Any]) -> list[Proved]:
        """A logit l is off by u l, and so is its probability, relatively; the losses of the targets add up in float32."""
        logits = setting.unit * self.largest_logit
        wander = self.targets * setting.sum_unit
        summed = compare("loss", got["loss"], self.loss, relative=wander, absolute=2 * logits * math.sqrt(self.targets))
        gradients = [
            compare(
                name,
                got[name],
                want := getattr(self, name),
                relative=2 * setting.unit,
                absolute=(2 * setting.unit + logits + wander) * float(np.abs(want).max()),
            )
            for name in ("d_states", "d_head")
        ]
        return [summed, *gradients]


def loss_sample(setting: Setting) -> LossSample:
    rows, tokens, hidden, vocabulary = 2, 200, 256, 1000
    generator = np.random.default_rng(3)
    # Logits of size 1, or 3 where they are capped: enough for the cap to bend them.
    size = (3.0 if setting.softcap else 1.0) / math.sqrt(hidden)
    states = _normal(generator, (rows, tokens, hidden), setting.dtype)
    head = _normal(generator, (vocabulary, hidden), setting.dtype, size)
    labels = generator.integers(0, vocabulary, (rows, tokens))
    labels[generator.random((rows, tokens)) < 0.25] = IGNORED
    predicted = labels[:, 1:]
    row, before = np.nonzero(predicted != IGNORED)
    wide = states.astype(np.float64)
    want = references.cross_entropy(
        wide[row, before], head.astype(np.float64), predicted[row, before], softcap=setting.softcap
    )
    d_states = np.zeros(states.shape)
    d_states[row, before] = want.d_states
    return LossSample(
        states=states,
        head=head,
        labels=labels,
        loss=want.loss,
        d_states=d_states,
        d_head=want.d_head,
        largest_logit=want.largest_logit,
        targets=len(row),
    )


RATE, BETA1, BETA2, EPSILON, DECAY = 0.25, 0.9, 0.999, 1e-8, 0.5
"""Large enough that rate, decay and bias correction all show in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSample:
    """A matrix and a vector; gradients of two updates. The vector is not decayed.

    Two, because the first update of Adam is the same whatever the size of the gradient."""

    parameters: Mapping[str, Any]
    gradients: tuple[Mapping[str, Any], ...]
    want: Mapping[str, references.Adam]

    def judge(self, setting: Setting, got: Mapping[str, Mapping[str, Any]]) -> list[Proved]:
        """Moments are kept in the run's type: each update rounds them, and the next divides one by the other.

        The correction 1 - beta2^2 = 0.002, where it is computed in float32, is off by 500 units of its power and 500
        of its difference."""
        corrected = 2 * setting.sum_unit / (1 - BETA2**2)
        found = []
        for name, want in self.want.items():
            for part in ("parameter", "first", "second"):
                expected = getattr(want, part)
                size = RATE if part == "parameter" else float(np.abs(expected).max())
                found.append(
                    compare(
                        f"{name} {part}",
                        got[name][part],
                        expected,
                        relative=2 * setting.unit,
                        absolute=(8 * setting.unit + corrected) * size,
                    )
                )
        return found


def optimizer_sample(setting: Setting) -> OptimizerSample:
    generator = np.random.default_rng(4)
    shapes = {"matrix": (64, 96), "vector": (96,)}
    parameters = {name: _normal(generator, shape, setting.dtype) for name, shape in shapes.items()}

    def gradient(shape: tuple[int, ...]) -> Any:  # away from 0: the square of a small one vanishes in float16
        drawn = generator.uniform(0.5, 2.0, shape) * generator.choice([-1.0, 1.0], shape)
        return rounded(drawn, setting.dtype)

    gradients = tuple({name: gradient(shape) for name, shape in shapes.items()} for _ in range(2))
    want = {}
    for name, parameter in parameters.items():
        zero = np.zeros(parameter.shape)
        state = references.Adam(parameter=parameter.astype(np.float64), first=zero, second=zero, step=0)
        decay = DECAY if name == "matrix" else 0.0
        for one in gradients:
            state = references.adamw_step(
                state, one[name].astype(np.float64),
                rate=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, decay=decay,
            )  # fmt: skip
        want[name] = state
    return OptimizerSample(parameters=parameters, gradients=gradients, want=want)
