"""The proof that a device computes rightly: runs the proof child of an engine and reads its lines.

No torch and no jax here. A kernel that hangs, crashes or answers nonsense harms only the child, and becomes words.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunix_rt.doctor import child_process as child

SECONDS = 120.0
HEAD_SIZE = 64
"""Of most small models; taken where no model is named."""
PROOF_NAMES = ("device", "product", "attention", "loss", "optimizer", "placement", "memory", "speed")
"""All that a device is asked; an answer about fewer is no proof."""
COMPUTED = "GPU computation successful"
START = "the import of its engine"
"""What the child is at before its first proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What one proof found. `detail` has the numbers in words, `figures` as numbers."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Everything the child said. `ok` is true only for a child that ended by itself with all of PROOF_NAMES held."""

    backend: str
    device: str
    dtype: str
    head_size: int
    results: tuple[Proved, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine and the device: versions, name, capability, uuid, memory, architectures, warnings."""
    pid: int
    seconds: float
    problem: str | None = None
    """Why there is no whole answer: a hang, a crash, an answer that is none or lacks a proof."""
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        held = all(result.ok for result in self.results)
        missing = [name for name in PROOF_NAMES if name not in {result.name for result in self.results}]
        if self.problem is None and held and missing:
            object.__setattr__(self, "problem", f"the child said nothing of {', '.join(missing)}")
        object.__setattr__(self, "ok", self.problem is None and held and not missing)


def prove(
    *,
    backend: str,
    device: str,
    dtype: str,
    master_dtype: str | None = None,
    optim: str | None = None,
    deterministic: bool = False,
    head_size: int = HEAD_SIZE,
    query_heads: int | None = None,
    kv_heads: int | None = None,
    softcap: float | None = None,
    capped_scores: bool = False,
    scaling: float | None = None,
    window: int | None = None,
    dropout: bool = False,
    python: str = sys.executable,
    seconds: float = SECONDS,
) -> Proof:
    """Prove that `device` computes rightly in `dtype`, in a child process that is ended after `seconds`.

    What is left out is as in most runs and models: weights in float32, AdamW; no cap of logits or scores, scores over the
    root of the head size, no sliding window and no dropout in attention. Which attention serves that is the child's to
    find out."""
    # -P: as for the installed program, a file torch.py in the current folder is not torch.
    command = [python, "-P", "-m", f"tunix_rt.engines.selftest.{backend}", "--device", device, "--dtype", dtype]
    command += ["--head-size", str(head_size)]
    options = {
        "--master-dtype": master_dtype, "--optim": optim, "--query-heads": query_heads, "--kv-heads": kv_heads,
        "--softcap": softcap, "--scaling": scaling, "--window": window,
    }  # fmt: skip
    for option, value in options.items():
        command += [] if value is None else [option, str(value)]
    flags = {"--deterministic": deterministic, "--capped-scores": capped_scores, "--dropout": dropout}
    command += [flag for flag, asked in flags.items() if asked]
    answer = run_child(command, seconds=seconds)
    return Proof(backend=backend, device=device, dtype=dtype, head_size=head_size, **answer)


# --- the child --------------------------------------------------------------------------------------------------------


def run_child(command: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """The fields of a Proof that come from the child. At the limit its whole process group is killed."""
    ended = child.run_child(command, seconds=seconds)
    answer = read_answer(ended.out)
    stage, problem, whole = answer.pop("stage"), answer.pop("garbage"), answer.pop("whole")
    if ended.code is None:
        problem = f"{stage if ended.pid else 'the child'} {ended.words}"
    elif ended.code < 0:
        problem = f"the child {ended.words} while proving {stage}"
    elif ended.cut:  # and the stage with it
        problem = f"the child printed more than {child.MOST_READ >> 20} MiB, which is no answer"
    elif problem is None and not (whole and _exit_fits(ended.code, answer["results"])):
        said = f": {ended.last_error[:300]}" if ended.last_error else " and said nothing"
        problem = f"the child {ended.words} while proving {stage}{said}"
    return {**answer, "pid": ended.pid, "seconds": ended.seconds, "problem": problem}


def _exit_fits(exit_code: int, results: Sequence[Proved]) -> bool:
    """A child that ends with an error although every proof held has met one nobody has words for."""
    return exit_code == 0 or not all(result.ok for result in results)


def read_answer(text: str) -> dict[str, Any]:
    """The child's lines: `results`, `about`, the `stage` it was at, whether it is `whole`, and `garbage` in words.

    A line that is no answer spoils the rest: what a confused child says afterwards proves nothing.
    """
    answer: dict[str, Any] = {"results": (), "about": {}, "stage": START, "whole": False, "garbage": None}
    for line in text.splitlines():
        try:
            said = json.loads(line, parse_float=_finite, parse_constant=_finite)
            match said:
                case {"begun": str(stage)}:
                    answer["stage"] = stage
                case {"about": dict(about)}:
                    answer["about"] = about
                case {"proved": dict(proved)}:
                    answer["results"] += (_proved(proved),)
                case {"done": list(names)}:
                    answer["whole"] = bool(names) and names == [result.name for result in answer["results"]]
                    answer["stage"] = "nothing more" if answer["whole"] else answer["stage"]
                case _:
                    raise ValueError(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            answer["garbage"] = f"the child printed {line[:200]!r} while proving {answer['stage']}, which is no answer"
            break
    return answer


def _finite(number: str | float) -> float:
    """NaN and infinity are no figures: JSON has none, and no report could be written with them."""
    if not math.isfinite(found := float(number)):
        raise ValueError(number)
    return found


def _proved(raw: Mapping[str, Any]) -> Proved:
    name, ok, detail, figures = raw["name"], raw["ok"], raw["detail"], raw["figures"]
    if not (isinstance(name, str) and isinstance(ok, bool) and isinstance(detail, str) and isinstance(figures, dict)):
        raise ValueError(raw)
    plain = {str(key): _finite(value) for key, value in figures.items()}
    return Proved(name=name, ok=ok, detail=detail, seconds=_finite(raw["seconds"]), figures=plain)


# --- words ------------------------------------------------------------------------------------------------------------

WRONG_NUMBERS = ("product", "attention", "loss", "optimizer")


def proof_problem(proof: Proof) -> tuple[str, str] | None:
    """What is wrong and the way out, of the first proof that did not hold; None when all did."""
    again = f"tunix-rt doctor --device {proof.device} --backend {proof.backend} --prove"
    if proof.problem is not None:
        way = f"see whether another program holds the device, then run `{again}`; if it repeats, make the environment anew"
        return f"{proof.device} is not proven: {proof.problem}", way
    failed = next((result for result in proof.results if not result.ok), None)
    if failed is None:
        return None
    problem = f"{proof.device} failed the proof `{failed.name}` in {proof.dtype}: {failed.detail}"
    if _is_about_capability(failed.detail):
        return problem, f"install a wheel with code for this GPU: `tunix-rt doctor --device {proof.device}` names it"
    if failed.name in WRONG_NUMBERS and proof.device == "cuda":
        return problem, (
            f"no result of this device can be trusted: run `{again}` again; if it repeats, look for memory errors "
            "(`nvidia-smi -q -d ECC,ROW_REMAPPER`), take back overclocking, install the engine anew, or use another device"
        )
    return problem, f"run `{again}` again; if it repeats, install {proof.backend} anew or use another device"


def _is_about_capability(detail: str) -> bool:
    return "capability" in detail or "no kernel image" in detail


def proof_lines(proof: Proof, peak: tuple[float | None, float | None] = (None, None)) -> list[str]:
    """A line per proof; speed and bandwidth beside the published `peak` (TFLOP/s, GB/s) where one is given."""
    lines = [f"Proof on {proof.device} in {proof.dtype}: {'held' if proof.ok else 'FAILED'} ({proof.seconds:.1f} s)"]
    for result in proof.results:
        detail = _beside(result.figures, peak) if result.name == "speed" and result.ok else result.detail
        lines.append(f"  {result.name:<10} {'ok  ' if result.ok else 'FAIL'}  {detail}")
    lines += [] if proof.problem is None else [f"  {proof.problem}"]
    return [*lines, COMPUTED] if _computed(proof) else lines


def _computed(proof: Proof) -> bool:
    """The product ran on the GPU, was waited for, and agrees with float64."""
    held = {result.name for result in proof.results if result.ok}
    return proof.device == "cuda" and held >= {"device", "product", "placement"}


def _beside(figures: Mapping[str, float], peak: tuple[float | None, float | None]) -> str:
    parts = []
    for key, unit, best in (("tflops", "TFLOP/s", peak[0]), ("gb_s", "GB/s", peak[1])):
        got = figures[key]
        share = f" of {best:,.4g} published ({got / best:.0%})" if best else ""
        parts.append(f"{got:,.4g} {unit}{share}")
    return ", ".join(parts)


def cuda_check_text(proof: Proof) -> str:
    """The text of `cuda_check.txt`: what the engine says of CUDA, and every proof with its figures."""
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
    lines += ["", f"proofs in {proof.dtype}, head size {proof.head_size}, process {proof.pid}:"]
    for result in proof.results:
        lines.append(f"{result.name}: {'ok' if result.ok else 'FAILED'}, {result.detail} ({result.seconds:.2f} s)")
        lines += [f"    {key}: {value:.6g}" for key, value in result.figures.items()]
    if proof.problem is not None:
        lines.append(f"not proven: {proof.problem}")
    return "\n".join([*lines, COMPUTED] if _computed(proof) else lines) + "\n"


def _plain_words(value: Any) -> str:
    if isinstance(value, list):
        if all(isinstance(part, int) for part in value) and value:
            return f"({', '.join(map(str, value))})"
        return " ".join(map(str, value)) or "none"
    return str(value)
