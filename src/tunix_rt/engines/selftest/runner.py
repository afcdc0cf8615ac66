"""What the proofs of every engine share: the comparison of every element, and the child process around them.

An engine only computes; what it computes, and what should come out, is in `proof_samples.py`.
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
from typing import Any, TextIO

import numpy as np

from tunix_rt.config.settings import Training
from tunix_rt.doctor.selftest import HEAD_SIZE, Proved
from tunix_rt.doctor.wheels import MISFIT_WORDS
from tunix_rt.plan.optimizers import OPTIMIZERS
from tunix_rt.plan.precision import recipe_of

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: the largest relative error of rounding one number."""
SUM_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-24, "bfloat16": 2.0**-24}
"""Of the type in which products add up: the half types are summed in float32."""
BLOCK = 1 << 21
"""Elements compared at a time; a product has 16 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run is about to do: where, in which types, with which heads and which optimizer."""

    device: str
    dtype: str
    master_dtype: str | None = None
    """Type of the weights where the run names one."""
    optim: str = "adamw"
    deterministic: bool = False
    head_size: int = HEAD_SIZE
    query_heads: int | None = None
    kv_heads: int | None = None
    softcap: float | None = None
    """Of the logits (`final_logit_softcapping`)."""
    capped_scores: bool = False
    """The model caps the scores of its attention."""
    scaling: float | None = None
    """Of the scores; None is one over the root of the head size."""
    window: int | None = None
    """Tokens that some layers see, the token itself among them; None where every layer sees its whole example."""
    dropout: bool = False
    """The model drops attention weights at random, which not every kernel does."""

    @property
    def training(self) -> Training:
        """The settings of such a run, as the engine takes them."""
        return Training.model_validate(
            {name: getattr(self, name) for name in ("dtype", "master_dtype", "optim", "deterministic")}
        )

    @property
    def weights(self) -> str:
        """Type in which weights are kept and updated."""
        return recipe_of(self.training).weights

    @property
    def unit(self) -> float:
        return UNIT[self.dtype]

    @property
    def sum_unit(self) -> float:
        return SUM_UNIT[self.dtype]


@dataclass(slots=True, kw_only=True)
class Bench:
    """What the proofs of one child know together."""

    setting: Setting
    home: str = ""
    """The device every tensor must be on, as the engine writes it."""
    homes: dict[str, str] = field(default_factory=dict)
    """Where each tensor was found."""
    about: dict[str, Any] = field(default_factory=dict)


ProofFunction = Callable[[Bench], Proved]


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(name: str, got: Any, want: Any, *, relative: float, absolute: Any) -> Proved:
    """Every element of `got` within `relative * |want| + absolute`. NaN never is. The worst element is named.

    `absolute` is a number, or an array that says it for each row."""
    got, want = np.atleast_1d(np.asarray(got)), np.atleast_1d(np.asarray(want, dtype=np.float64))
    if got.shape != want.shape:
        return Proved(name=name, ok=False, detail=f"{name} has shape {got.shape}, not {want.shape}")
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
        detail = f"{name}: largest error {largest:.2g}, {worst:.0%} of what is allowed"
    else:
        index = ", ".join(str(part) for part in np.unravel_index(worst_at, want.shape))
        expected_one = float(flat_want[worst_at])
        allowed_one = relative * abs(expected_one) + float(spare[worst_at])
        detail = (
            f"{name}[{index}] is {float(flat_got[worst_at]):.6g}, should be {expected_one:.6g} "
            f"within {allowed_one:.2g}; {wrong:,} of {want.size:,} elements wrong"
        )
    return Proved(name=name, ok=not wrong, detail=detail, figures=figures)


def together(name: str, parts: Iterable[Proved], *, words: str = "") -> Proved:
    """One result of several comparisons; of the failed ones the first two are told."""
    parts = list(parts)
    failed = [part.detail for part in parts if not part.ok]
    shares = [part.figures.get("share of allowed", math.inf) for part in parts]
    figures = {f"{part.name} largest error": part.figures["largest error"] for part in parts if part.figures}
    if failed:
        detail = "; ".join(failed[:2]) + (f"; {len(failed) - 2} more" if len(failed) > 2 else "")
    else:
        detail = f"{words}; largest error {max(shares):.0%} of what is allowed"
    figures["share of allowed"] = max(shares)
    return Proved(name=name, ok=not failed, detail=detail, figures=figures)


# --- proofs that are the same for every engine ------------------------------------------------------------------------


def placement(bench: Bench) -> Proved:
    """Every tensor of the proofs before: inputs, results, gradients, optimizer state."""
    strays = {name: home for name, home in bench.homes.items() if home != bench.home}
    if not bench.homes or not bench.home:
        return Proved(name="placement", ok=False, detail="no tensor was seen on any device")
    named = ", ".join(f"{name} on {home}" for name, home in list(strays.items())[:4])
    detail = f"{len(strays)} of {len(bench.homes)} tensors are not on {bench.home}: {named}"
    figures = {"tensors": float(len(bench.homes)), "strays": float(len(strays))}
    whole = f"{len(bench.homes)} tensors, all on {bench.home}"
    return Proved(name="placement", ok=not strays, detail=detail if strays else whole, figures=figures)


ALLOCATION = 512 << 20
SLACK = 16 << 20
"""Bytes that may be missing: counters are added up late and in pages."""


def resident_memory(take: Callable[[int], object]) -> Proved:
    """On a CPU: the resident memory of this process rises by what was taken."""
    import psutil

    size = min(ALLOCATION, psutil.virtual_memory().available // 4)
    process = psutil.Process()
    before = process.memory_info().rss
    held = take(size)
    rise = process.memory_info().rss - before
    del held
    return Proved(
        name="memory",
        ok=rise >= size - SLACK,
        detail=f"{size:,} bytes taken, resident memory rose by {rise:,}",
        figures={"allocated_bytes": float(size), "seen_bytes": float(rise)},
    )


def device_memory(size: int, *, before: int | None, after: int | None, rise: int, counter: str) -> Proved:
    """On an accelerator: what NVML lists under our process id rose by what was taken. The rise alone counts: a context
    with its kernels may hold as much. Where NVML lists nothing (None), `rise` of the device as `counter` has it."""
    figures = {"allocated_bytes": float(size), "under_our_pid": 0.0}
    words = f"{counter} rose by {rise:,}" if rise >= 0 else f"{counter} fell by {-rise:,}"
    if before is not None and after is not None:
        rise = after - before
        words = f"NVML has {after:,} under process {os.getpid()}, {rise:,} more than before"
        figures |= {"under_our_pid": 1.0, "before_bytes": float(before), "after_bytes": float(after)}
    figures["seen_bytes"] = float(rise)
    return Proved(name="memory", ok=rise >= size - SLACK, detail=f"{size:,} bytes allocated, {words}", figures=figures)


def affordable_size(seconds_of: Callable[[int], float], *, largest: int = 2048, limit: float = 4.0) -> int:
    """On a CPU: a size whose product should take less than `limit` seconds. Some types are emulated there, 500 times slower."""
    size = 256
    seconds_of(size)  # the first call starts threads
    while size < largest and 8 * seconds_of(size) < limit:
        size *= 2
    return size


def median_seconds(once: Callable[[], float], *, most: int = 15, limit: float = 1.0) -> float:
    """Median of up to `most` timings that end when `limit` seconds are over; the first one is left out."""
    once()
    timings: list[float] = []
    started = time.perf_counter()
    while len(timings) < 3 or (len(timings) < most and time.perf_counter() - started < limit):
        timings.append(once())
        if time.perf_counter() - started > 4 * limit:
            break
    return statistics.median(timings)


def speed_of(product_seconds: float, size: int, copy_seconds: float, copied: int) -> Proved:
    """A copy reads and writes: twice its bytes."""
    tflops, rate = 2 * size**3 / product_seconds / 1e12, 2 * copied / copy_seconds / 1e9
    return Proved(
        name="speed",
        ok=True,
        detail=f"{tflops:,.4g} TFLOP/s in a {size} x {size} product, {rate:,.4g} GB/s in a copy",
        figures={"tflops": tflops, "gb_s": rate, "size": float(size)},
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


def run_proofs(proofs: Sequence[ProofFunction], setting: Setting) -> int:
    """Run all, a JSON line before and after each, and a last one with the names. 0 when all held, else 1.

    Standard output belongs to these lines alone: what a library prints goes to standard error.
    """
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    bench = Bench(setting=setting)
    results = []
    for proof in proofs:
        _say(out, {"begun": proof.__name__})
        result = _run_one(proof, bench)
        results.append(result)
        _say(out, {"proved": asdict(result)})
        _say(out, {"about": bench.about})
    _say(out, {"done": [result.name for result in results]})
    return 0 if all(result.ok for result in results) else 1


def _run_one(proof: ProofFunction, bench: Bench) -> Proved:
    name, started = proof.__name__, time.perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = proof(bench)
        except Exception as error:  # noqa: BLE001  whatever a kernel throws is this proof's answer; the next still runs
            words = " ".join(str(error).split())[:300]
            # CUDA's errors are RuntimeErrors and name themselves; of others the type says more than the text
            text = words if isinstance(error, RuntimeError) and words else f"{type(error).__name__}: {words}"
            found = Proved(name=name, ok=False, detail=text)
    said = [" ".join(str(warning.message).split()) for warning in heard]
    if said:
        bench.about["said"] = [*bench.about.get("said", ()), *said]
    unfit = [text for text in said if any(sign in text for sign in MISFIT_WORDS)]
    if unfit:
        found = replace(found, ok=False, detail=unfit[0][:300] if found.ok else f"{found.detail}; {unfit[0][:300]}")
    figures = {key: value for key, value in found.figures.items() if math.isfinite(value)}  # JSON knows no NaN
    return replace(found, name=name, seconds=time.perf_counter() - started, figures=figures)


def _say(out: TextIO, line: Mapping[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
