"""What the checks of both engines share: the comparison of every element, checks that differ only in the library, and the child
process around them.

An engine only computes. The inputs and the expected results are in `cases.py`.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TextIO

import numpy as np

from tunix_rt.config.optimizers import OPTIMIZERS
from tunix_rt.config.settings import Training
from tunix_rt.doctor.selftest import HEAD_SIZE, CheckResult
from tunix_rt.doctor.wheels import MISFIT_WORDS
from tunix_rt.plan.precision import recipe_of

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: the largest relative error of rounding one number."""
BLOCK = 1 << 21
"""Elements compared at a time; a matmul has 16 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run computes: device, dtypes, attention heads, optimizer."""

    device: str
    dtype: str
    master_dtype: str | None = None
    """dtype of the weights, if configured."""
    optim: str = "adamw"
    deterministic: bool = False
    head_size: int = HEAD_SIZE
    query_heads: int | None = None
    kv_heads: int | None = None
    softcap: float | None = None
    """Of the logits (`final_logit_softcapping`)."""
    capped_scores: bool = False
    """The model soft-caps its attention scores."""
    scaling: float | None = None
    """Of the attention scores; None is one over the root of the head size."""
    window: int | None = None
    """Sliding window of some layers in tokens, the token itself included; None where every layer attends to its whole example."""
    dropout: bool = False
    """The model has attention dropout, which not every kernel supports."""

    @property
    def training(self) -> Training:
        """The settings of such a run."""
        return Training.model_validate(
            {name: getattr(self, name) for name in ("dtype", "master_dtype", "optim", "deterministic")}
        )

    @property
    def weights(self) -> str:
        """dtype in which weights are stored and updated."""
        return recipe_of(self.training).weights

    @property
    def unit(self) -> float:
        return UNIT[self.dtype]

    @property
    def sum_unit(self) -> float:
        """Of the dtype in which matmuls accumulate: 16-bit types accumulate in float32."""
        return min(self.unit, UNIT["float32"])


@dataclass(slots=True, kw_only=True)
class Bench:
    """What the checks of one child share."""

    setting: Setting
    home: str = ""
    """The device that every tensor must be on, as the engine spells it."""
    homes: dict[str, str] = field(default_factory=dict)
    """The device of each tensor."""
    about: dict[str, Any] = field(default_factory=dict)


CheckFunction = Callable[[Bench], CheckResult]


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(name: str, got: Any, want: Any, *, relative: float, absolute: Any) -> CheckResult:
    """Every element of `got` within `relative * |want| + absolute`. NaN never is. The worst element is named.

    `absolute` is a number, or an array with one for each row."""
    got, want = np.atleast_1d(np.asarray(got)), np.atleast_1d(np.asarray(want, dtype=np.float64))
    if got.shape != want.shape:
        return CheckResult(name=name, ok=False, detail=f"{name} has shape {got.shape}, not {want.shape}")
    worst, worst_at, wrong, largest, squares = -1.0, 0, 0, 0.0, 0.0
    flat_got, flat_want = got.reshape(-1), want.reshape(-1)
    spare = np.broadcast_to(np.asarray(absolute, dtype=np.float64), want.shape).flat
    for start in range(0, flat_want.size, BLOCK):
        expected = flat_want[start : start + BLOCK]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            error = np.abs(flat_got[start : start + BLOCK].astype(np.float64) - expected)
            allowed = relative * np.abs(expected) + spare[start : start + BLOCK]
            share = np.divide(error, allowed, out=np.zeros_like(error), where=error != 0.0)  # nothing allowed, none off
            share = np.nan_to_num(share, nan=np.inf, posinf=np.inf)
            squares += float(np.square(error).sum())
        wrong += int((share > 1.0).sum())
        place = int(share.argmax())
        largest = float(np.maximum(largest, error.max()))  # keeps a NaN
        if share[place] > worst:
            worst, worst_at = float(share[place]), start + place
    rms = math.sqrt(squares / flat_want.size)
    figures = {"largest error": largest, "rms error": rms, "share of allowed": worst}
    if not wrong:
        detail = f"{name}: largest error {largest:.2g}, {worst:.0%} of the tolerance"
    else:
        index = ", ".join(str(part) for part in np.unravel_index(worst_at, want.shape))
        expected_one = float(flat_want[worst_at])
        allowed_one = relative * abs(expected_one) + float(spare[worst_at])
        detail = (
            f"{name}[{index}] is {float(flat_got[worst_at]):.6g}, should be {expected_one:.6g} "
            f"within {allowed_one:.2g}; {wrong:,} of {want.size:,} elements wrong"
        )
    return CheckResult(name=name, ok=not wrong, detail=detail, figures=figures)


def together(name: str, parts: Iterable[CheckResult], *, words: str = "") -> CheckResult:
    """One result of several comparisons, with the first two failures."""
    parts = list(parts)
    failed = [part.detail for part in parts if not part.ok]
    shares = [part.figures.get("share of allowed", math.inf) for part in parts]
    figures = {f"{part.name} largest error": part.figures["largest error"] for part in parts if part.figures}
    if failed:
        detail = "; ".join(failed[:2]) + (f"; {len(failed) - 2} more" if len(failed) > 2 else "")
    else:
        worst = parts[shares.index(max(shares))]
        detail = f"{words}; largest error {max(shares):.0%} of the tolerance ({worst.name})"
    figures["share of allowed"] = max(shares)
    return CheckResult(name=name, ok=not failed, detail=detail, figures=figures)


# --- checks that are the same for both engines ------------------------------------------------------------------------


def added_up(total: float, words: str) -> CheckResult:
    """The device added up 1,024 ones."""
    detail = words if total == 1024.0 else f"1,024 ones add up to {total}"
    return CheckResult(name="device", ok=total == 1024.0, detail=detail)


def placement(bench: Bench) -> CheckResult:
    """Every tensor of the checks before: inputs, results, gradients, optimizer states."""
    strays = {name: home for name, home in bench.homes.items() if home != bench.home}
    if not bench.homes or not bench.home:
        return CheckResult(name="placement", ok=False, detail="no tensor was placed on any device")
    named = ", ".join(f"{name} on {home}" for name, home in list(strays.items())[:4])
    detail = f"{len(strays)} of {len(bench.homes)} tensors are not on {bench.home}: {named}"
    figures = {"tensors": float(len(bench.homes)), "strays": float(len(strays))}
    whole = f"{len(bench.homes)} tensors, all on {bench.home}"
    return CheckResult(name="placement", ok=not strays, detail=detail if strays else whole, figures=figures)


ALLOCATION = 512 << 20
SLACK = 16 << 20
"""Bytes that may be missing: counters are added up late and in pages."""


def resident_memory(take: Callable[[int], object]) -> CheckResult:
    """On a CPU: the resident memory of this process rises by what was allocated."""
    import psutil

    size = min(ALLOCATION, psutil.virtual_memory().available // 4)
    process = psutil.Process()
    before = process.memory_info().rss
    held = take(size)
    rise = process.memory_info().rss - before
    del held
    return CheckResult(
        name="memory",
        ok=rise >= size - SLACK,
        detail=f"{size:,} bytes allocated, resident memory rose by {rise:,}",
        figures={"allocated_bytes": float(size), "seen_bytes": float(rise)},
    )


def device_memory(size: int, *, before: int | None, after: int | None, rise: int, counter: str) -> CheckResult:
    """On an accelerator: the memory that NVML lists for this process rose by what was allocated. Only the rise counts: a
    context with its kernels may hold as much. Where NVML lists nothing (None), `rise` of `counter` counts."""
    figures = {"allocated_bytes": float(size), "under_our_pid": 0.0}
    words = f"{counter} rose by {rise:,}" if rise >= 0 else f"{counter} fell by {-rise:,}"
    if before is not None and after is not None:
        rise = after - before
        words = f"NVML has {after:,} under process {os.getpid()}, {rise:,} more than before"
        figures |= {"under_our_pid": 1.0, "before_bytes": float(before), "after_bytes": float(after)}
    figures["seen_bytes"] = float(rise)
    return CheckResult(
        name="memory", ok=rise >= size - SLACK, detail=f"{size:,} bytes allocated, {words}", figures=figures
    )


def affordable_size(seconds_of: Callable[[int], float], *, largest: int = 2048, limit: float = 4.0) -> int:
    """On a CPU: a matmul size that should take less than `limit` seconds. Some dtypes are emulated there, 500 times slower."""
    size = 256
    seconds_of(size)  # the first call starts threads
    while size < largest and 8 * seconds_of(size) < limit:
        size *= 2
    return size


def median_seconds(once: Callable[[], float], *, most: int = 15, limit: float = 1.0) -> float:
    """Median of up to `most` timings within `limit` seconds, without the first."""
    once()
    timings: list[float] = []
    started = time.perf_counter()
    while len(timings) < 3 or (len(timings) < most and time.perf_counter() - started < limit):
        timings.append(once())
        if time.perf_counter() - started > 4 * limit:
            break
    return statistics.median(timings)


class Ops(Protocol):
    """The library of an engine on the device of a run."""

    def put(self, name: str, values: Any, dtype: str | None = None) -> Any:
        """`values` on the device. Floats take `dtype`, by default the run's, in which they are exact."""

    def numbers(self, name: str, tensor: Any) -> Any:
        """The values of a result as NumPy's, once it is computed; its device is recorded."""

    def squares(self, size: int) -> tuple[Any, Any]:
        """Two matrices of normal numbers, not zeros: a device draws less power on zeros, and is faster."""

    def matmul(self, left: Any, right: Any) -> Any: ...

    def copy_of(self, size: int) -> Callable[[], Any]:
        """A function that copies so many bytes on the device."""

    def seconds(self, once: Callable[[], Any], times: int = 1) -> float:
        """Of one of `times` calls in a row, on the device."""


MATMUL_SIZE = 4096


def checked_matmul(bench: Bench, ops: Ops) -> CheckResult:
    """A whole 4096 x 4096 matmul. A CPU gets 2048, or less where it emulates the dtype."""
    from tunix_rt.engines.selftest import cases

    size = MATMUL_SIZE
    if bench.setting.device == "cpu":
        size = affordable_size(lambda trial: _matmul_seconds(ops, trial))
    case = cases.matmul_case(bench.setting, size=size)
    left, right = ops.put("product left", case.left), ops.put("product right", case.right)
    return case.judge(bench.setting, ops.numbers("product", ops.matmul(left, right)))


def _matmul_seconds(ops: Ops, size: int) -> float:
    left, right = ops.squares(size)
    return ops.seconds(lambda: ops.matmul(left, right))


def measured_speed(bench: Bench, ops: Ops, *, times: int) -> CheckResult:
    """A matmul and a copy, which reads and writes: twice its bytes. Always ok: a slow device still computes correctly."""
    on_cpu = bench.setting.device == "cpu"
    size, limit, times = (8192, 1.0, times) if not on_cpu else (0, 0.4, 1)
    size = size or affordable_size(lambda trial: _matmul_seconds(ops, trial), largest=1024, limit=0.2)
    left, right = ops.squares(size)
    matmul_seconds = median_seconds(lambda: ops.seconds(lambda: ops.matmul(left, right), times), limit=limit)
    copied = (64 if on_cpu else 512) << 20
    copy = ops.copy_of(copied)
    copy_seconds = median_seconds(lambda: ops.seconds(copy, times), limit=limit)
    tflops, bandwidth = 2 * size**3 / matmul_seconds / 1e12, 2 * copied / copy_seconds / 1e9
    return CheckResult(
        name="speed",
        ok=True,
        detail=f"{tflops:,.4g} TFLOP/s in a {size} x {size} matmul, {bandwidth:,.4g} GB/s in a copy",
        figures={"tflops": tflops, "gb_s": bandwidth, "size": float(size)},
    )


# --- the child process ------------------------------------------------------------------------------------------------


def read_setting(arguments: Sequence[str] | None = None) -> Setting:
    parser = argparse.ArgumentParser(description="Run kernels, compare them with float64, print a JSON line for each.")
    parser.add_argument("--device", required=True, choices=["cpu", "cuda", "tpu"])
    parser.add_argument("--dtype", required=True, choices=sorted(UNIT))
    parser.add_argument("--master-dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--optim", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--head-size", type=int, default=HEAD_SIZE)
    parser.add_argument("--query-heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--capped-scores", action="store_true")
    parser.add_argument("--scaling", type=float)
    parser.add_argument("--window", type=int)
    parser.add_argument("--dropout", action="store_true")
    return Setting(**vars(parser.parse_args(arguments)))


def run_checks(checks: Sequence[CheckFunction], setting: Setting) -> int:
    """Run all, a JSON line before and after each, and a last one with the names. 0 if all passed, else 1.

    Standard output is for these lines alone: what a library prints goes to standard error.
    """
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    bench = Bench(setting=setting)
    results = []
    for check in checks:
        _write(out, {"begun": check.__name__})
        result = _run_one(check, bench)
        results.append(result)
        _write(out, {"result": asdict(result)})
        _write(out, {"about": bench.about})
    _write(out, {"done": [result.name for result in results]})
    return 0 if all(result.ok for result in results) else 1


def _run_one(check: CheckFunction, bench: Bench) -> CheckResult:
    name, started = check.__name__, time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = check(bench)
        except Exception as error:  # noqa: BLE001  whatever a kernel raises is the result of this check; the next still runs
            words = " ".join(str(error).split())[:300]
            # CUDA errors are RuntimeErrors and name themselves; of others the type says more than the text
            text = words if isinstance(error, RuntimeError) and words else f"{type(error).__name__}: {words}"
            result = CheckResult(name=name, ok=False, detail=text)
    messages = [" ".join(str(warning.message).split()) for warning in caught]
    if messages:
        bench.about["said"] = [*bench.about.get("said", ()), *messages]
    unfit = [text for text in messages if any(sign in text for sign in MISFIT_WORDS)]
    if unfit:
        result = replace(result, ok=False, detail=unfit[0][:300] if result.ok else f"{result.detail}; {unfit[0][:300]}")
    figures = {key: value for key, value in result.figures.items() if math.isfinite(value)}  # JSON has no NaN
    return replace(result, name=name, seconds=time.perf_counter() - started, figures=figures)


def _write(out: TextIO, line: Mapping[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
