"""Updates of all tensors of Gemma-1 2B on a GPU: AdamW with moments of 8 bits by its kernel and without it, beside the others.

    python -m benchmarks.eight_bit_updates

Random weights and gradients in the shapes of the model. A line has the median of the steps after the first, on the GPU's clock,
the speed that it comes to in bytes that have to be moved, and the memory that was taken besides. Prints a table, writes nothing.
"""

import statistics
from typing import Any

import torch

from tunix_rt.engines.torch import optim_rules
from tunix_rt.engines.torch.optim import Optimizer

LAYER = [
    (2048, 2048),
    (256, 2048),
    (256, 2048),
    (2048, 2048),
    (16_384, 2048),
    (16_384, 2048),
    (2048, 16_384),
    (2048,),
    (2048,),
]
SHAPES = [(256_000, 2048), *LAYER * 18, (2048,)]
STEPS = 6
CASES = [
    ("adamw", torch.bfloat16, "step", True, {}),
    ("adafactor", torch.bfloat16, "clipped", True, {}),
    ("adamw_8bit", torch.bfloat16, "step", True, {}),
    ("adamw_8bit", torch.bfloat16, "step", True, {"maxnreg": 128}),
    ("adamw_8bit", torch.bfloat16, "step", True, {"maxnreg": 64}),
    ("adamw_8bit", torch.bfloat16, "clipped", True, {}),
    ("adamw_8bit", torch.bfloat16, "step", False, {}),
    ("adamw_8bit", torch.float32, "step", True, {}),
    ("adamw_8bit", torch.float32, "step", True, {"maxnreg": 128}),
    ("adamw_8bit", torch.float32, "step", False, {}),
]
"""Rule, type of the weights, how they are updated, whether by kernels, and other launches than ours of moments of 8 bits."""


def measured(kind: str, dtype: torch.dtype, way: str) -> tuple[float, int]:
    """Milliseconds of an update of all, and bytes that it took besides."""
    named = {
        str(place): torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype))
        for place, shape in enumerate(SHAPES)
    }
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = Optimizer(
        named, kind=kind, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, seed=1, stochastic_rounding=True
    )
    scale, finite, times, besides = (
        torch.ones((), device="cuda"),
        torch.ones((), dtype=torch.bool, device="cuda"),
        [],
        0,
    )
    for step in range(1, STEPS + 1):
        optimizer.begin(step, 1e-5)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        started.record()
        if way == "step":
            optimizer.step(scale=scale, finite=finite)
        else:
            for parameter in named.values():
                optimizer.update_clipped(parameter, limit=1.0, finite=finite)
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended))
        besides = torch.cuda.max_memory_allocated() - held
    assert all(bool(parameter.isfinite().all()) for parameter in named.values())
    return statistics.median(times[1:]), besides


def moved(kind: str, dtype: torch.dtype, way: str) -> int:
    """Bytes for a weight: in and out, its gradient, its states in and out, the gradient again for a norm."""
    width = 2 if dtype == torch.bfloat16 else 4
    if kind == "adafactor":
        return 5 * width
    return (4 if way == "clipped" else 3) * width + (16 if kind == "adamw" else 4)


def main() -> None:
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    triton = optim_rules.triton_kernels
    device = torch.empty(0, device="cuda").device
    assert triton(device) is not None, "no kernels: see the log"
    from tunix_rt.engines.torch.triton import adamw_8bit as triton_eight_bit

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {elements:,} weights")
    print(f"{'rule':<11} {'weights':<9} {'way':<8} {'by':<7} {'launch':<16} {'ms':>8} {'GB/s':>7} {'MiB besides':>12}")
    launch: dict[str, Any] = dict(triton_eight_bit._LAUNCH)
    for kind, dtype, way, kernels, other in CASES:
        optim_rules.triton_kernels = triton if kernels else (lambda device: None)  # type: ignore[assignment]
        triton_eight_bit._LAUNCH.update(launch | other)
        took, besides = measured(kind, dtype, way)
        torch.cuda.empty_cache()
        speed = moved(kind, dtype, way) * elements / 1e6 / took
        words = ", ".join(f"{name} {value}" for name, value in other.items())
        type_ = str(dtype).removeprefix("torch.")
        by = "kernel" if kernels else "plain"
        print(
            f"{kind:<11} {type_:<9} {way:<8} {by:<7} {words:<16} {took:8.1f} {speed:7,.0f} {besides / 2**20:12,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
