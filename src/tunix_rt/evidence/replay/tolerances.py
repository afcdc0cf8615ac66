"""How far numbers that are computed again may lie from the recorded ones. In a bitwise comparison not at all.

Where the numbers come from: `python -m benchmarks.replay_noise` on a CPU and, with `--device cuda`, on an H200; raw output in
benchmarks/results/replay_noise.json and replay_noise_cuda.json, table in docs/concepts/evidence.md: 16 steps of the shipped model
on the CPU, 40 on the GPU. Same hardware means other threads or instructions, and nondeterministic GPU kernels against
deterministic ones. Other hardware means a GPU against a CPU, and on a CPU the other engine as a stand-in.

Each is at least three times the largest difference of all honest pairs. All were set from the CPU's figures, with its cheats in
view, before a GPU was measured. On same hardware, and on other hardware in float32, the GPU's honest pairs then left that factor
and nothing was changed: there the GPU is out of sample. On other hardware in 16 bits two did not (loss 0.039 of 0.11, weights
0.086 of 0.22) and were raised. One small model, one CPU, one GPU: they are no forecast for another model.
"""

from dataclasses import dataclass, replace

from tunix_rt.evidence.replay.machine import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest allowed difference between a recorded number and the one computed again."""

    loss: float
    """Of a step and of the held-out rows, relative to the loss, or to 1 where that is more."""
    grad_norm: float
    """Relative."""
    weights: float
    """Distance of the weights at a checkpoint, relative to how far they moved since the replay began."""
    texts: float
    """The least fraction of answers whose text must be the same."""


EXACT = Tolerance(loss=0.0, grad_norm=0.0, weights=0.0, texts=1.0)
LEARNING_RATE = 1e-12
"""Relative, unless bitwise: another mathematical library may round the last bit of a cosine differently."""

WIDE = ("float32", "float64")

FACTOR = 3.0
"""Times honest noise, the least that is allowed of any."""
MEASURED_STEPS = 16
"""Over which the noise was measured on a CPU; that of a GPU over 40 steps is held to the same, without growth. Further from its
start a replay may lie further away in proportion, up to `MOST_GROWTH`, which is a choice."""
MOST_GROWTH = {"float32": 10.0, "bfloat16": 2.0}

TOLERANCES: dict[tuple[Comparison, str], Tolerance] = {
    ("same hardware", "float32"): Tolerance(loss=3e-5, grad_norm=3e-4, weights=6e-4, texts=0.98),
    ("same hardware", "bfloat16"): Tolerance(loss=7.5e-2, grad_norm=0.85, weights=0.13, texts=0.98),
    ("other hardware", "float32"): Tolerance(loss=3e-4, grad_norm=3e-3, weights=6e-3, texts=0.98),
    ("other hardware", "bfloat16"): Tolerance(loss=0.12, grad_norm=0.85, weights=0.26, texts=0.98),
}

TIES = {"float32": 0.01, "bfloat16": 0.5}
"""How far the logit of a token of a greedy text may lie below the largest, where another machine gives another text. In 16 bits
honest texts of the shipped model lay up to 0.125 below, of the demo's up to 0.058 (`python -m benchmarks.answer_gaps`, on a CPU);
the last number of the demo's texts made larger by 1, at least 4.9. In float32 all honest texts were the same."""
REPLAYED_TIES = 2.0
"""The same for the weights of a replay in 16 bits, which lie a little beside the recorded ones. A choice between that and the
4.9 of a forged text."""
ROUNDED_HELDOUT = 0.02
"""Allowed relative difference between the held-out loss of the last state and that of weights saved in 16 bits."""


def precision(compute: str) -> str:
    """float32 and float64 round alike beside what is allowed; so do both 16-bit types."""
    return "float32" if compute in WIDE else "bfloat16"


def tolerance_of(name: Comparison, compute: str) -> Tolerance:
    return EXACT if name == "bitwise" else TOLERANCES[name, precision(compute)]


def grown(tolerance: Tolerance, compute: str, steps: int) -> Tolerance:
    """What is allowed `steps` after the replay began."""
    times = min(MOST_GROWTH[precision(compute)], max(1.0, steps / MEASURED_STEPS))
    return replace(
        tolerance, loss=tolerance.loss * times, grad_norm=tolerance.grad_norm * times, weights=tolerance.weights * times
    )
