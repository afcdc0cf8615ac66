"""Whether the training step fits on TPUs that are not present: ahead-of-time compilation with the TPU compiler (libtpu).

The step of the JAX engine is lowered from shapes alone and compiled for a named topology, in a child process with its own
environment (`aot_worker.py`): variables for CUDA, the allocator of XLA or a local TPU have no effect. Verdicts are cached by the
hash of everything that decides them. This file does not import jax.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tunix_rt.accelerators import accelerators_named
from tunix_rt.assets import cache_root
from tunix_rt.config.settings import Training
from tunix_rt.doctor.packages import version_of
from tunix_rt.errors import ConfigError, HardwareError, StorageError, TunixError
from tunix_rt.storage import json_text, sha256_text, write_text

CHILD = "tunix_rt.engines.jax.aot_worker"
SCHEMA = 1
LIMIT_SECONDS = 1800.0
REPORT_EVERY_SECONDS = 15.0
INHERITED_VARIABLES = ("PATH", "HOME", "PYTHONPATH", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
"""Environment of the child. LD_LIBRARY_PATH is for a Python that cannot start without."""
TPU_VARIABLES = {
    "JAX_PLATFORMS": "cpu",  # of the process; the topology names the compiler
    "TPU_SKIP_MDS_QUERY": "1",  # no query of the metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a run on a local TPU may hold the library
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
TOPOLOGY = re.compile(r"(?P<kind>[a-z0-9]+):(?P<chips>\d{1,3}x\d{1,3}(x\d{1,3})?)")
STEP_SOURCES = (
    *(f"engines/jax/{name}.py" for name in (
        "architecture", "model", "chunked_loss", "attention", "mesh", "optim", "step", "tunix", "weights", "aot_worker",
    )),
    *(f"engines/optimizers/{name}.py" for name in ("__init__", "adamw", "adafactor")),
    *(f"plan/{name}.py" for name in ("precision", "shape", "sizes", "attention_kernels")),
    "config/optimizers.py", "models/families.py",
)  # fmt: skip
"""Files of the package that decide the compiled step."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to compile. Besides it, versions and source decide the verdict."""

    config: Mapping[str, Any]
    """The model's `config.json`."""
    training: Training
    tokens: int
    """Of a row."""
    topology: str
    """As `v5e:2x4`: kind of TPU, and the grid of its chips."""
    implementation: str = "auto"
    """`auto` for the models of this package, `tunix` for those of google-tunix."""
    child: str = CHILD
    """The module that compiles. Benchmarks use another one, which changes the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipMemory:
    """Memory of the compiled step on each device, in bytes."""

    arguments: int
    """State and batch."""
    outputs: int
    aliased: int
    """Outputs that reuse the memory of an argument."""
    temporaries: int
    code: int
    peak: int
    """Peak, by the analysis of the compiler."""

    @property
    def total(self) -> int:
        """The sum, or the peak where a small program has a higher one. Not what a device must have: the compiler accepts steps
        whose total exceeds its memory, and none whose peak does (`docs/reference/plan-tpu.md`)."""
        return max(self.peak, self.arguments + self.outputs - self.aliased + self.temporaries + self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The out-of-memory message of the compiler, in bytes; 0 for what it does not contain."""

    needed: int
    """Everything; of a message about temporaries only, those alone."""
    usable: int
    over: int
    temporaries: int
    arguments: int
    largest: tuple[str, ...]
    """The largest allocations: size, shape and operation."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result for one case: either `memory` or `refusal`."""

    topology: str
    device_kind: str
    devices: int
    replicas: int
    rows: int
    """Of a micro-batch, over all devices."""
    tokens: int
    accumulation: int
    parameters: int
    step: str
    """The settings that decide the step, for people."""
    usable: int | None
    """Bytes of a device that a program may use, from the refusal or the table of accelerators; None: unknown."""
    memory: ChipMemory | None
    refusal: Refusal | None
    seconds: float
    """Compile time on the computer that compiled."""
    versions: Mapping[str, str]

    @property
    def fits(self) -> bool:
        return self.memory is not None


def topology_parts(topology: str) -> tuple[str, tuple[int, ...]]:
    """Kind of TPU and chips along each direction, `v5e:2x4` as ("v5e", (2, 4)), or a ConfigError."""
    if not (match := TOPOLOGY.fullmatch(topology)) or "0" in match["chips"].split("x"):
        raise ConfigError(
            f"{topology!r} names no TPU topology",
            fix="write kind and chips, as v5e:2x4 (Kaggle's v5e-8), v5e:1x1 (Colab's v5e-1), v6e:2x4, v4:2x2x1 or v5p:2x2x1",
        )
    return match["kind"], tuple(int(part) for part in match["chips"].split("x"))


def compiler_versions() -> dict[str, str]:
    """Versions of jax and libtpu, or a HardwareError with what to install."""
    versions = {}
    for package in ("jax", "jaxlib", "libtpu"):
        if (version := version_of(package)) is None:
            raise HardwareError(
                f"the TPU compiler is not available: {package} is not installed",
                fix='pip install "tunix-rt[tpu]" (no TPU is needed to compile for one; libtpu takes 0.7 GB of disk)',
                cause="libtpu-missing" if package == "libtpu" else "jax-missing",
            )
        versions[package] = version
    return versions


def ask_compiler(
    case: Case,
    *,
    say: Callable[[str], None] = lambda line: None,
    limit_seconds: float = LIMIT_SECONDS,
    fresh: bool = False,
) -> Verdict:
    """The verdict of the compiler on `case`, from the cache unless `fresh`.

    A refusal takes seconds, an acceptance minutes; `say` is called with a progress line every 15 seconds."""
    topology_parts(case.topology)
    versions = compiler_versions()
    cached = kept_at(case, versions)
    if not fresh and (known := _read_cached(cached)) is not None:
        say(f"{case.topology}: cached, compiled in {known.seconds:.0f} s ({cached})")
        return known
    verdict = verdict_of(_compile(case, say, limit_seconds), versions)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, json_text({"schema": SCHEMA, "verdict": asdict(verdict)}))
    except (OSError, StorageError) as error:
        say(f"the verdict cannot be cached: {error}")
    return verdict


def kept_at(case: Case, versions: Mapping[str, str]) -> Path:
    """The cache file of the verdict on `case` by the compiler of these `versions`."""
    return cache_root() / "topology" / f"{case_hash(case, versions)}.json"


def case_hash(case: Case, versions: Mapping[str, str]) -> str:
    """The hash of everything that decides the verdict: the case, the versions, and the source of the step."""
    folder = Path(__file__).parents[2]
    sources = {name: sha256_text((folder / name).read_text(encoding="utf-8")) for name in STEP_SOURCES}
    if case.child != CHILD and (spec := importlib.util.find_spec(case.child)) and spec.origin:
        sources[case.child] = sha256_text(Path(spec.origin).read_text(encoding="utf-8"))
    decided = {"schema": SCHEMA, "case": _request(case), "versions": dict(versions), "sources": sources}
    return sha256_text(json.dumps(decided, sort_keys=True))[:32]


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: `INHERITED_VARIABLES` of `inherited`, and those for the compiler."""
    return {name: inherited[name] for name in INHERITED_VARIABLES if name in inherited} | TPU_VARIABLES


# --- the result of the child ------------------------------------------------------------------------------------------


def verdict_of(answer: Mapping[str, Any], versions: Mapping[str, str]) -> Verdict:
    """The JSON `answer` of the child as a value."""
    memory = None if answer["memory"] is None else ChipMemory(**answer["memory"])
    refusal = None if answer["message"] is None else read_refusal(answer["message"])
    usable = refusal.usable if refusal and refusal.usable else usable_bytes(answer["device_kind"])
    plain = {name: value for name, value in answer.items() if name not in ("memory", "message")}
    return Verdict(**plain, usable=usable, memory=memory, refusal=refusal, versions=dict(versions))


def usable_bytes(device_kind: str) -> int | None:
    """Of one device of jax, from the table of accelerators, which lists half chips too."""
    sizes = [one.memory_gib for one in accelerators_named(device_kind) if "= 1 jax device" in one.name]
    return int(sizes[0] * 2**30) if sizes and sizes[0] else None


def read_refusal(message: str) -> Refusal:
    """The numbers in an out-of-memory message. The compiler has two: one about temporaries (`the total memory required for HLO
    temporaries (23.04G) exceeds available HBM (15.75G)`), and one with all parts."""
    size = r"([\d.]+[KMGT]?)"
    temporaries = _size(_one(rf"HLO temp(?:oraries)?\s+\(?{size}", message))
    needed = _size(_one(rf"Used {size} of", message)) or temporaries
    usable = _size(_one(rf"Used {size} of {size} hbm", message, group=2) or _one(rf"available HBM \({size}\)", message))
    return Refusal(
        needed=needed,
        usable=usable,
        over=_size(_one(rf"Exceeded hbm capacity by {size}", message)) or max(0, needed - usable),
        temporaries=temporaries,
        arguments=_size(_one(rf"^\s*arguments\s+{size}", message)),
        largest=tuple(_largest(message)),
        message=message,
    )


def _largest(message: str) -> Iterator[str]:
    """`4.00G f32[512000,2048] jit(step)/add`, the allocations in the order of the message."""
    for part in re.split(r"^\s*\d+\. Size: ", message, flags=re.MULTILINE)[1:]:
        size = part.split(maxsplit=1)[0]
        shape = _one(r"Shape: (\w+\[[\d,]*\])", part)
        name = _one(r'op_name="([^"]*)"', part) or _one(r"Operator: (\S+)", part)
        yield " ".join(word for word in (size, shape, name) if word)


def _one(pattern: str, text: str, *, group: int = 1) -> str:
    match = re.search(pattern, text, flags=re.MULTILINE)
    return match[group] if match else ""


def _size(text: str) -> int:
    """`20.91G` in bytes; 0 for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.rstrip("."))
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


# --- the child --------------------------------------------------------------------------------------------------------


def _request(case: Case) -> dict[str, Any]:
    training = case.training.model_dump()
    return {"config": dict(case.config), "training": training} | {
        name: getattr(case, name) for name in ("tokens", "topology", "implementation")
    }


def _compile(case: Case, say: Callable[[str], None], limit: float) -> dict[str, Any]:
    """Run the child on `case`. It reads a request from standard input, and writes its result as the last line of output."""
    command, pipe = [sys.executable, "-P", "-m", case.child], subprocess.PIPE
    with subprocess.Popen(
        command, env=child_environment(os.environ), stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8"
    ) as child:
        try:
            out, err = _wait(child, json.dumps(_request(case)), case.topology, say, limit)
        finally:
            child.kill()
    return _result(child.returncode, out, err)


def _wait(
    child: "subprocess.Popen[str]", request: str | None, topology: str, say: Callable[[str], None], limit: float
) -> tuple[str, str]:
    """What the child writes until it ends: standard output and standard error."""
    started = time.monotonic()
    while True:
        passed = time.monotonic() - started
        try:
            return child.communicate(request, timeout=min(REPORT_EVERY_SECONDS, max(0.0, limit - passed)))
        except subprocess.TimeoutExpired:
            passed, request = time.monotonic() - started, None  # it was sent; what was read is kept
        if passed >= limit:
            raise TunixError(
                f"compiling for {topology} took more than {limit:.0f} s",
                fix="give it more time (--time-limit SECONDS), or compile on a computer with more and faster cores",
            )
        say(
            f"compiling the training step for {topology}: {passed:.0f} s; a refusal takes seconds, an acceptance minutes"
        )


def _result(code: int, out: str, err: str) -> dict[str, Any]:
    last = next(iter(out.strip().splitlines()[-1:]), "")
    result = json.loads(last) if last.startswith("{") else {}
    if code == 0 and "device_kind" in result:
        return dict(result)
    if "problem" in result:  # a setting that the engine refuses, or an unknown topology
        raise ConfigError(result["problem"], fix=result["fix"])
    message = next(iter(err.strip().splitlines()[-1:]), "") or f"exit code {code}"
    raise TunixError(
        f"the TPU compiler failed: {message[:500]}",
        fix="install the libtpu that this jax requires (pip install 'jax[tpu]'); a compiler that was killed needs more memory "
        "than this computer has",
    )


def _read_cached(file: Path) -> Verdict | None:
    """A verdict from the cache; None when there is none, or it is corrupt."""
    try:
        return TypeAdapter(Verdict).validate_python(json.loads(file.read_text(encoding="utf-8"))["verdict"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
