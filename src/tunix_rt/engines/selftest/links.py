"""The connections between the GPUs of a host with PyTorch (`doctor --prove`): peer access, copies, and a sum by NCCL over all.

A child process: `python -m tunix_rt.engines.selftest.links`."""

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from tunix_rt.doctor.selftest import CheckResult
from tunix_rt.engines.selftest.runner import Bench, Setting, median_seconds, run_checks

COPIED_BYTES = 256 << 20


def gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def peer_access(bench: Bench) -> CheckResult:
    """Always ok: without peer access, NCCL goes through host memory, which is slower."""
    pairs = list(itertools.permutations(gpus(), 2))
    reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(pair[0].index, pair[1].index)]
    detail = f"{len(reached)} of {len(pairs)} pairs of GPUs reach each other's memory"
    return CheckResult(name="peer_access", ok=True, detail=detail, figures={"pairs": len(pairs), "peers": len(reached)})


def copies(bench: Bench) -> CheckResult:
    """A copy between each pair, compared with its source."""
    return copies_between(gpus(), COPIED_BYTES)


def copies_between(devices: list[torch.device], size: int) -> CheckResult:
    rates: dict[str, float] = {}
    for number, (one, other) in enumerate(itertools.permutations(devices, 2)):
        source = torch.arange(number, size // 8 + number, dtype=torch.int64, device=one)
        target = torch.empty_like(source, device=other)
        rates[f"{one} to {other}"] = size / median_seconds(partial(_copied, source, target)) / 1e9
        if not torch.equal(target.cpu(), source.cpu()):
            return CheckResult(name="copies", ok=False, detail=f"a copy from {one} to {other} has other values")
    slowest = min(rates, key=lambda pair: rates[pair])
    detail = f"{rates[slowest]:,.3g} to {max(rates.values()):,.3g} GB/s, the slowest from {slowest}"
    return CheckResult(name="copies", ok=True, detail=detail, figures=rates)


def _timed(act: Callable[[], object], devices: list[torch.device]) -> float:
    """Seconds until `act` is done on every device."""
    _synchronize(devices)
    began = time.perf_counter()
    act()
    _synchronize(devices)
    return time.perf_counter() - began


def _synchronize(devices: list[torch.device]) -> None:
    for one in devices:
        if one.type == "cuda":
            torch.cuda.synchronize(one)


def _copied(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one copy."""
    return _timed(lambda: target.copy_(source, non_blocking=True), [source.device, target.device])


def all_reduce(bench: Bench) -> CheckResult:
    """A sum over all GPUs by NCCL, and its bus bandwidth as nccl-tests defines it."""
    devices = gpus()
    tensors = [torch.full((COPIED_BYTES // 4,), 2.0**index, device=one) for index, one in enumerate(devices)]
    sums = [torch.empty_like(one) for one in tensors]
    seconds = median_seconds(lambda: _timed(lambda: torch.cuda.nccl.all_reduce(tensors, sums), devices))
    wrong = [str(one.device) for one in sums if not bool((one == 2.0 ** len(devices) - 1).all())]
    rate = 2 * (len(devices) - 1) / len(devices) * COPIED_BYTES / seconds / 1e9
    detail = f"wrong sums on {', '.join(wrong)}" if wrong else f"{rate:,.3g} GB/s over {len(devices)} GPUs"
    return CheckResult(name="all_reduce", ok=not wrong, detail=detail, figures={"gb_s": rate})


CHECKS = (peer_access, copies, all_reduce)

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, Setting(device="cuda", dtype="float32")))
