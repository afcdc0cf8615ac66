"""The kernel self-test (`doctor --prove`): starts the child process of an engine and reads its output.

No torch and no JAX here. A kernel that hangs, crashes or returns nonsense affects only the child, and is reported.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tunix_rt.doctor import child_process as child
from tunix_rt.progress import phase

SECONDS = 120.0
HEAD_SIZE = 64
"""Of most small models; used where no model is named."""
CHECK_NAMES = ("device", "product", "attention", "loss", "optimizer", "placement", "memory", "speed")
"""Every check of a device; output with fewer is a failure."""
COMPUTED = "GPU computation successful"
START = "the import of its engine"
"""The stage of the child before its first check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check. `detail` is for people, `figures` has the numbers."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The output of the child. `ok` only if it ended by itself and all of CHECK_NAMES passed."""

    backend: str
    device: str
    dtype: str
    head_size: int
    results: tuple[CheckResult, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine and the device: versions, name, capability, uuid, memory, architectures, warnings."""
    pid: int
    seconds: float
    problem: str | None = None
    """Why the output is incomplete: a hang, a crash, output that is malformed or lacks a check."""
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        held = all(result.ok for result in self.results)
        missing = [name for name in CHECK_NAMES if name not in {result.name for result in self.results}]
        if self.problem is None and held and missing:
            object.__setattr__(self, "problem", f"the child did not report {', '.join(missing)}")
        object.__setattr__(self, "ok", self.problem is None and held and not missing)


@phase("kernel self-test")
def run_selftest(
    *,
    backend: str,
    device: str,
    dtype: str,
    head_size: int = HEAD_SIZE,
    python: str = sys.executable,
    seconds: float = SECONDS,
    environment: Mapping[str, str] | None = None,
    **kernels: Any,
) -> SelfTest:
    """Compare the kernels of a run on `device` in `dtype` with float64, in a child process that is killed after `seconds`.

    `kernels` are the other fields of `engines.selftest.runner.Setting`. The defaults are those of most runs and models: float32
    weights, AdamW, no soft-capping, scores over the root of the head size, no sliding window and no attention dropout. The child
    chooses the attention implementation."""
    # -P: as with the installed program, a file torch.py in the current folder is not torch.
    command = [python, "-P", "-m", f"tunix_rt.engines.selftest.{backend}"]
    for name, value in {"device": device, "dtype": dtype, "head_size": head_size, **kernels}.items():
        option = f"--{name.replace('_', '-')}"
        command += [] if value is None or value is False else [option] if value is True else [option, str(value)]
    answer = run_child(command, seconds=seconds, environment=environment)
    return SelfTest(backend=backend, device=device, dtype=dtype, head_size=head_size, **answer)


def run_selftests(gpus: Sequence[str], **options: Any) -> tuple[SelfTest, ...]:
    """The self-test of each of `gpus`, named by UUID, all at the same time; of the device alone where there is one."""
    if len(gpus) < 2:
        return (run_selftest(**options),)

    def one(uuid: str) -> SelfTest:
        return run_selftest(**options, environment={**os.environ, "CUDA_VISIBLE_DEVICES": uuid})

    with ThreadPoolExecutor(max_workers=len(gpus)) as pool:
        return tuple(pool.map(one, gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTest:
    """The connections between the GPUs of this host: peer access, copies, a sum by NCCL."""

    results: tuple[CheckResult, ...] = ()
    problem: str | None = None

    @property
    def failure(self) -> str | None:
        """What is wrong; None: they work."""
        return self.problem or next((f"{one.name}: {one.detail}" for one in self.results if not one.ok), None)

    def describe(self) -> list[str]:
        lines = [f"  {one.name:<12} {'ok  ' if one.ok else 'FAIL'}  {one.detail}" for one in self.results]
        return ["Connections between the GPUs:", *lines, *([] if self.problem is None else [f"  {self.problem}"])]


@phase("connections between the GPUs")
def run_links(*, python: str = sys.executable, seconds: float = SECONDS) -> LinkTest:
    answer = run_child([python, "-P", "-m", "tunix_rt.engines.selftest.links"], seconds=seconds)
    return LinkTest(results=answer["results"], problem=answer["problem"])


# --- the child --------------------------------------------------------------------------------------------------------


def run_child(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields of a SelfTest that come from the child. At the limit its process group is killed."""
    ended = child.run_child(command, seconds=seconds, environment=environment)
    answer = read_answer(ended.out)
    stage, problem, whole = answer.pop("stage"), answer.pop("garbage"), answer.pop("whole")
    if ended.code is None:
        problem = f"{stage if ended.pid else 'the child'} {ended.words}"
    elif ended.code < 0:
        problem = f"the child {ended.words} during {stage}"
    elif ended.cut:  # and the stage with it
        problem = f"the child printed more than {child.MOST_READ >> 20} MiB, which is malformed"
    elif problem is None and not (whole and _exit_fits(ended.code, answer["results"])):
        reason = f": {ended.last_error[:300]}" if ended.last_error else " without an error message"
        problem = f"the child {ended.words} during {stage}{reason}"
    return {**answer, "pid": ended.pid, "seconds": ended.seconds, "problem": problem}


def _exit_fits(exit_code: int, results: Sequence[CheckResult]) -> bool:
    """A child that ends with an error although every check passed has failed in an unknown way."""
    return exit_code == 0 or not all(result.ok for result in results)


def read_answer(text: str) -> dict[str, Any]:
    """The child's lines: `results`, `about`, its `stage`, whether it is `whole`, and the first malformed line as `garbage`.

    Lines after a malformed one are not read.
    """
    answer: dict[str, Any] = {"results": (), "about": {}, "stage": START, "whole": False, "garbage": None}
    for line in text.splitlines():
        try:
            parsed = json.loads(line, parse_float=_finite, parse_constant=_finite)
            match parsed:
                case {"begun": str(stage)}:
                    answer["stage"] = stage
                case {"about": dict(about)}:
                    answer["about"] = about
                case {"result": dict(result)}:
                    answer["results"] += (_result(result),)
                case {"done": list(names)}:
                    answer["whole"] = bool(names) and names == [result.name for result in answer["results"]]
                    answer["stage"] = "its exit" if answer["whole"] else answer["stage"]
                case _:
                    raise ValueError(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            answer["garbage"] = f"the child printed {line[:200]!r} during {answer['stage']}, which is malformed"
            break
    return answer


def _finite(number: str | float) -> float:
    """JSON has no NaN and no infinity, so a report cannot contain them."""
    if not math.isfinite(value := float(number)):
        raise ValueError(number)
    return value


def _result(raw: Mapping[str, Any]) -> CheckResult:
    name, ok, detail, figures = raw["name"], raw["ok"], raw["detail"], raw["figures"]
    if not (isinstance(name, str) and isinstance(ok, bool) and isinstance(detail, str) and isinstance(figures, dict)):
        raise ValueError(raw)
    plain = {str(key): _finite(value) for key, value in figures.items()}
    return CheckResult(name=name, ok=ok, detail=detail, seconds=_finite(raw["seconds"]), figures=plain)


# --- text -------------------------------------------------------------------------------------------------------------

WRONG_NUMBERS = ("product", "attention", "loss", "optimizer")


def selftest_problem(proof: SelfTest) -> tuple[str, str] | None:
    """Problem and fix of the first check that failed; None if all passed."""
    again = f"tunix-rt doctor --device {proof.device} --backend {proof.backend} --prove"
    if proof.problem is not None:
        way = f"check whether another program uses the device, then run `{again}`; if it repeats, create the environment again"
        return f"{proof.device}: the kernel self-test did not finish: {proof.problem}", way
    failed = next((result for result in proof.results if not result.ok), None)
    if failed is None:
        return None
    problem = f"{proof.device} failed the self-test check `{failed.name}` in {proof.dtype}: {failed.detail}"
    if "capability" in failed.detail or "no kernel image" in failed.detail:
        return problem, f"install a wheel with code for this GPU: `tunix-rt doctor --device {proof.device}` names it"
    if failed.name in WRONG_NUMBERS and proof.device == "cuda":
        return problem, (
            f"results of this device cannot be trusted: run `{again}` again; if it repeats, check for memory errors "
            "(`nvidia-smi -q -d ECC,ROW_REMAPPER`), undo overclocking, reinstall the engine, or use another device"
        )
    return problem, f"run `{again}` again; if it repeats, reinstall {proof.backend} or use another device"


def selftest_lines(proof: SelfTest, peak: tuple[float | None, float | None] = (None, None)) -> list[str]:
    """A line per check; speed and bandwidth beside the published `peak` (TFLOP/s, GB/s) where one is given."""
    ended = "passed" if proof.ok else "FAILED"
    lines = [f"Kernel self-test on {proof.device} in {proof.dtype}: {ended} ({proof.seconds:.1f} s)"]
    for result in proof.results:
        detail = _beside(result.figures, peak) if result.name == "speed" and result.ok else result.detail
        lines.append(f"  {result.name:<10} {'ok  ' if result.ok else 'FAIL'}  {detail}")
    lines += [] if proof.problem is None else [f"  {proof.problem}"]
    return [*lines, COMPUTED] if _computed(proof) else lines


def _computed(proof: SelfTest) -> bool:
    """The matmul ran on the GPU, was waited for, and agrees with float64."""
    passed = {result.name for result in proof.results if result.ok}
    return proof.device == "cuda" and passed >= {"device", "product", "placement"}


def _beside(figures: Mapping[str, float], peak: tuple[float | None, float | None]) -> str:
    parts = []
    for key, unit, best in (("tflops", "TFLOP/s", peak[0]), ("gb_s", "GB/s", peak[1])):
        got = figures[key]
        share = f" of {best:,.4g} published ({got / best:.0%})" if best else ""
        parts.append(f"{got:,.4g} {unit}{share}")
    return ", ".join(parts)


def cuda_check_text(proof: SelfTest) -> str:
    """The text of `cuda_check.txt`: what the engine reports of CUDA, and every check with its figures."""
    about = proof.about
    names = {
        "torch.__version__": "torch",
        "torch.version.cuda": "cuda_build",
        "torch.cuda.is_available()": "is_available",
        "jax.__version__": "jax",
        "jaxlib": "jaxlib",
        "jax.devices()[0].platform": "platform",
        "devices": "devices",
        "device name": "name",
        "compute capability": "capability",
        "uuid": "uuid",
        "total memory (bytes)": "total_bytes",
        "memory jax may take (bytes)": "bytes_limit",
        "cuDNN": "cudnn",
        "architectures of the wheel": "arch_list",
        "attention": "attention",
        "warnings": "said",
    }
    lines = [f"{label}: {_plain_words(about[key])}" for label, key in names.items() if key in about]
    lines += ["", f"kernel self-test in {proof.dtype}, head size {proof.head_size}, process {proof.pid}:"]
    for result in proof.results:
        lines.append(f"{result.name}: {'ok' if result.ok else 'FAILED'}, {result.detail} ({result.seconds:.2f} s)")
        lines += [f"    {key}: {value:.6g}" for key, value in result.figures.items()]
    if proof.problem is not None:
        lines.append(f"not finished: {proof.problem}")
    return "\n".join([*lines, COMPUTED] if _computed(proof) else lines) + "\n"


def _plain_words(value: Any) -> str:
    if isinstance(value, list):
        if all(isinstance(part, int) for part in value) and value:
            return f"({', '.join(map(str, value))})"
        return " ".join(map(str, value)) or "none"
    return str(value)
