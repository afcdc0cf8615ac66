"""The samples of the proofs, the numbers expected of them, and how far a result may be off.

Samples are numpy's and exact in the run's type; no engine takes part. Expected numbers come from `references.py`.
"""

import math
from collections.abc import Mapping, Sequence
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
# u is the unit roundoff of the run's type, w that of its sums. Two things are allowed:
#
# 1. Roundings to the run's type: of the stored result, and of intermediate ones (weights of attention, logits, partial
#    sums of a split product). `relative` counts those of the result itself, in u.
# 2. Roundings of a sum. n terms of size s have partial sums of size sqrt(n) s; each addition is off by w times that,
#    and the errors wander: sqrt(n) * w * sqrt(n) s at the worst. Of a result of size S = sqrt(n) s that is sqrt(n) w S.
#
# So `absolute` is (c u + WALK sqrt(n) w) S. S is that of the element's own row, not of the whole: the first rows of
# causal attention are 17 times larger than the last ones, whose errors would hide behind them.


WALK = 16.0
"""The largest of millions of walks, twice over. Of a 4096 x 4096 product in float32 0.0039 is allowed; seen were 1.1e-4
on a CPU, 0.95e-3 and 1.13e-3 on an H200. Inputs with 14 bits after the point are off by up to 0.0067, with 13 by 0.014,
with the 10 of TF32 by 0.1.

Seen in float32 on an H200 at head size 64: causal out 9.0e-7, dq 2.7e-6, dk 2.7e-6, dv 1.6e-6, packed dk 3.9e-6; loss
4.9e-5 of a sum over 310 targets, d_states 1.4e-7, d_head 4.1e-6; after two updates parameters 1.1e-6, both moments
1.0e-7. On a CPU right kernels use up to 22 % of what is allowed in float32 (42 % with capped logits), and up to 59 % in
the half types, in which an updated parameter is rounded twice and may be off by little more."""


def _sums(setting: Setting, terms: int) -> float:
    return WALK * math.sqrt(terms) * setting.sum_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSample:
    """Two square matrices of standard normal numbers, and their product."""

    left: Any
    right: Any
    want: Any

    def judge(self, setting: Setting, got: Any) -> Proved:
        """An element has size sqrt(n): 64 for n = 4096. In float32 it may be off by 0.004, in bfloat16 by 0.5 + 0.8 %."""
        terms = len(self.want)
        absolute = (2 * setting.unit + _sums(setting, terms)) * math.sqrt(terms)
        found = compare("product", got, self.want, relative=2 * setting.unit, absolute=absolute)
        return replace(found, detail=f"{terms} x {terms} against float64; {found.detail}")


def product_sample(setting: Setting, *, size: int) -> ProductSample:
    generator = np.random.default_rng(1)
    left, right = (_normal(generator, (size, size), setting.dtype) for _ in range(2))
    want = references.product(left.astype(np.float64), right.astype(np.float64))
    return ProductSample(left=left, right=right, want=want)


SCORE_CAP = 2.0
"""Of scores of size 1, which it bends by a tenth. Models cap at 50: no half type holds scores that large well enough
to tell whether they were bent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """`examples` numbers the packed examples of a row; None is one example."""

    name: str
    q: Any
    k: Any
    v: Any
    upstream: Any
    examples: Any
    query_size: float
    want: references.Attention

    def judge(self, setting: Setting, got: Mapping[str, Any]) -> list[Proved]:
        """Softmax weights and their gradients are rounded to the run's type before they meet v, q and k. The gradients
        of a shared head are sums over its group, which kernels also round as they go: a random walk of their own."""
        if setting.attention == "eager" and setting.dtype == "float64":
            setting = replace(setting, dtype="float32")  # its softmax is
        walk = math.sqrt(self.q.shape[1] // self.k.shape[1])
        of_query, of_key = self.want.of_query, self.want.of_key
        out, dq = (13.0, 20.0) if setting.attention == "eager" else (8.0, 12.0)  # eager rounds each step
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
    # Whatever the scaling, scores have size 1: neither all the same nor one above all.
    query_size = 1.0 if setting.scaling is None else 1.0 / (setting.scaling * math.sqrt(setting.head_size))
    sizes = (query_size, 1.0, 1.0, 1.0)
    q, k, v, upstream = (
        _normal(generator, shape, setting.dtype, size) for shape, size in zip(shapes, sizes, strict=True)
    )
    examples = np.repeat([0, 1, 2], [70, 150, 80]) if packed else None
    want = references.attention(
        *(part.astype(np.float64) for part in (q, k, v, upstream)),
        examples=examples,
        scaling=setting.scaling,
        softcap=score_cap(setting),
    )
    return AttentionSample(
        name=name, q=q, k=k, v=v, upstream=upstream, examples=examples, query_size=query_size, want=want
    )


def score_cap(setting: Setting) -> float | None:
    """Of the scores: a run takes eager attention only for a model that caps them."""
    return SCORE_CAP if setting.attention == "eager" else None


def attention_words(setting: Setting, samples: Sequence[AttentionSample]) -> str:
    kinds = ", ".join(sample.name for sample in samples)
    scaled = "" if setting.scaling is None else f", scores times {setting.scaling:g}"
    capped = f" and soft-capped at {cap:g}" if (cap := score_cap(setting)) else ""
    return f"{kinds} with backward, {setting.attention}, head size {setting.head_size}{scaled}{capped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSample:
    """Hidden states [rows, tokens, hidden] and labels as the loop has them: the state at t - 1 predicts token t."""

    states: Any
    head: Any
    labels: Any
    loss: float
    d_states: Any
    d_head: Any
    of_state: Any
    of_token: Any
    largest_logit: float
    targets: int

    def judge(self, setting: Setting, got: Mapping[str, Any]) -> list[Proved]:
        """A logit l is off by u l, and so is its probability, relatively; the losses of the targets add up in float32.

        A capped logit is rounded four times: product, division, tanh, product."""
        logits = setting.unit * self.largest_logit
        wander = 2 * math.sqrt(self.targets) * setting.sum_unit  # of losses of one sign, each a part of the sum
        summed = compare("loss", got["loss"], self.loss, relative=wander, absolute=2 * logits * math.sqrt(self.targets))
        capped = 5.0 if setting.softcap else 2.0
        gradients = [
            compare(
                name,
                got[name],
                getattr(self, name),
                relative=2 * setting.unit + capped * logits,
                absolute=(4 * setting.unit + capped * logits + _sums(setting, self.targets)) * size,
            )
            for name, size in (("d_states", self.of_state), ("d_head", self.of_token))
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
    d_states, of_state = np.zeros(states.shape), np.zeros((rows, tokens, 1))
    d_states[row, before], of_state[row, before] = want.d_states, want.of_target * size
    return LossSample(
        states=states,
        head=head,
        labels=labels,
        loss=want.loss,
        d_states=d_states,
        d_head=want.d_head,
        of_state=of_state,
        of_token=want.of_token,
        largest_logit=want.largest_logit,
        targets=len(row),
    )


RATE, BETA1, BETA2, EPSILON, DECAY = 0.25, 0.9, 0.999, 0.25, 0.5
"""Large enough that rate, decay, bias correction and epsilon all show in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSample:
    """A matrix and a vector; gradients of two updates. The vector is not decayed.

    Two, because the first update of Adam is the same whatever the size of the gradient."""

    parameters: Mapping[str, Any]
    gradients: tuple[Mapping[str, Any], ...]
    want: Mapping[str, references.Adam]

    def judge(self, setting: Setting, got: Mapping[str, Mapping[str, Any]]) -> list[Proved]:
        """Moments are kept in the run's type: each update rounds them, and the next divides one by the other.

        Kernels subtract a beta in float32 from 1: off by half a unit of the beta, hence by 500 units of the
        difference 0.001. The second moment is that times a square, and its root is in the update."""
        short1, short2 = (setting.sum_unit / (1 - beta) for beta in (BETA1, BETA2))
        found = []
        for name, want in self.want.items():
            size = float(np.abs(want.first).max())
            allowed = {
                "parameter": (2 * setting.unit, (8 * setting.unit + short2 / 2) * RATE),
                "first": (2 * setting.unit, (4 * setting.unit + short1) * size),
                "second": (4 * setting.unit + short2, 0.0),
            }
            found += [
                compare(f"{name} {part}", got[name][part], getattr(want, part), relative=relative, absolute=absolute)
                for part, (relative, absolute) in allowed.items()
            ]
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
