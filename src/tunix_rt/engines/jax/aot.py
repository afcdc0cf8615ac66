"""Would the training step fit on TPUs that are not here? Asked of the TPU's own compiler, which needs no TPU (libtpu).

The exact step of the JAX engine is lowered from shapes alone and compiled for a named topology, in a child process with an
environment of its own (`aot_worker.py`): variables that steer CUDA, XLA's allocator or a TPU of this computer
change nothing. What the compiler says is kept, by the hash of everything that decides it. Nothing here imports jax.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tunix_rt.accelerators import accelerators_named
from tunix_rt.assets import cache_root
from tunix_rt.config.settings import Training
from tunix_rt.errors import ConfigError, HardwareError, StorageError, TunixError
from tunix_rt.storage import json_text, sha256_text, write_text

CHILD = "tunix_rt.engines.jax.aot_worker"
SCHEMA = 1
LIMIT_SECONDS = 1800.0
SAY_EVERY_SECONDS = 15.0
KEPT_VARIABLES = ("PATH", "HOME", "PYTHONPATH", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
"""All that the child inherits: where programs and files lie. LD_LIBRARY_PATH is for a Python that cannot start without."""
TPU_VARIABLES = {
    "JAX_PLATFORMS": "cpu",  # arrays of this process; the compiler is named apart
    "TPU_SKIP_MDS_QUERY": "1",  # asks no server what kind of TPU this computer is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a run on a TPU of this computer may hold the library
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
TOPOLOGY = re.compile(r"(?P<kind>[a-z0-9]+):(?P<chips>\d{1,3}x\d{1,3}(x\d{1,3})?)")
STEP_SOURCES = (
    *(f"engines/jax/{name}.py" for name in (
        "architecture", "model", "chunked_loss", "attention", "mesh", "optim", "fsdp", "step", "tunix", "weights", "aot_worker",
    )),
    *(f"plan/{name}.py" for name in ("precision", "shape", "optimizers")),
)  # fmt: skip
"""What decides the compiled code, beside jax and libtpu: files of the package."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be compiled: nothing else decides what the compiler says, besides versions and source."""

    config: Mapping[str, Any]
    """The model's `config.json`."""
    training: Training
    tokens: int
    """Of a row."""
    topology: str
    """As `v5e:2x4`: kind of TPU, and how its chips are laid out."""
    implementation: str = "auto"
    """Whose model: ours, or google-tunix's (`tunix`)."""
    child: str = CHILD
    """The module that compiles. Another one may change the step first, to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipMemory:
    """What the compiler reserves on each device, in bytes, by kind."""

    arguments: int
    """State and batch as they come in."""
    outputs: int
    aliased: int
    """Of the outputs, what lies where an argument lay."""
    temporaries: int
    code: int
    peak: int
    """The most that is in use at once, as the compiler counts it."""

    @property
    def total(self) -> int:
        """All of it together, or the peak, where a small program's is more than that. Not what a device must have: the compiler
        accepts steps whose total is above it, and none whose peak is (`docs/reference/plan-tpu.md`)."""
        return max(self.peak, self.arguments + self.outputs - self.aliased + self.temporaries + self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The compiler's out-of-memory message, read into bytes; 0 where it does not say."""

    needed: int
    """All that it counted when it gave up; where it stopped at the temporaries, those alone."""
    usable: int
    over: int
    temporaries: int
    arguments: int
    largest: tuple[str, ...]
    """The largest allocations: size, shape and operation."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the compiler says of one case. Either `memory` or `refusal` is there."""

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
    """The settings that decide the step, in words."""
    usable: int | None
    """Bytes of a device that a program may use, by the compiler's refusal or the table of accelerators; None: unknown."""
    memory: ChipMemory | None
    refusal: Refusal | None
    seconds: float
    """Of compiling, on the computer that compiled."""
    versions: Mapping[str, str]

    @property
    def fits(self) -> bool:
        return self.memory is not None


def topology_parts(topology: str) -> tuple[str, tuple[int, ...]]:
    """Kind of TPU and chips along each direction, `v5e:2x4` as ("v5e", (2, 4)), or a ConfigError."""
    if not (found := TOPOLOGY.fullmatch(topology)) or "0" in found["chips"].split("x"):
        raise ConfigError(
            f"{topology!r} names no TPU topology",
            fix="write kind and chips, as v5e:2x4 (Kaggle's v5e-8), v5e:1x1 (Colab's v5e-1), v6e:2x4, v4:2x2x1 or v5p:2x2x1",
        )
    return found["kind"], tuple(int(part) for part in found["chips"].split("x"))


def compiler_versions() -> dict[str, str]:
    """Versions of jax and libtpu, or a HardwareError that says what to install."""
    found = {}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise HardwareError(
                f"the TPU's compiler is not here: {package} is not installed",
                fix='pip install "tunix-rt[tpu]" (no TPU is needed to compile for one; libtpu takes 0.7 GB of disk)',
                cause="libtpu-missing" if package == "libtpu" else "jax-missing",
            ) from None
    return found


def ask_compiler(
    case: Case,
    *,
    say: Callable[[str], None] = lambda line: None,
    limit_seconds: float = LIMIT_SECONDS,
    fresh: bool = False,
) -> Verdict:
    """The compiler's verdict on `case`; of one that was asked before, what it said then, unless `fresh`.

    A refusal takes seconds, an acceptance minutes; `say` hears of it every 15 seconds."""
    topology_parts(case.topology)
    versions = compiler_versions()
    kept = kept_at(case, versions)
    if not fresh and (known := _read_kept(kept)) is not None:
        say(f"{case.topology}: compiled before, in {known.seconds:.0f} s ({kept})")
        return known
    found = verdict_of(_answer(case, say, limit_seconds), versions)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json_text({"schema": SCHEMA, "verdict": asdict(found)}))
    except (OSError, StorageError) as error:
        say(f"the verdict cannot be kept, and will be asked for again: {error}")
    return found


def kept_at(case: Case, versions: Mapping[str, str]) -> Path:
    """Where the verdict on `case` is kept once the compiler of these `versions` was asked."""
    return cache_root() / "topology" / f"{case_hash(case, versions)}.json"


def case_hash(case: Case, versions: Mapping[str, str]) -> str:
    """Of everything that decides the verdict: the case, the versions, and the source of the step."""
    folder = Path(__file__).parents[2]
    sources = {name: sha256_text((folder / name).read_text(encoding="utf-8")) for name in STEP_SOURCES}
    if case.child != CHILD:
        sources[case.child] = sha256_text(_source_of(case.child))
    decided = {"schema": SCHEMA, "case": _question(case), "versions": dict(versions), "sources": sources}
    return sha256_text(json.dumps(decided, sort_keys=True))[:32]


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment in which is compiled: of `inherited` only where things lie."""
    return {name: inherited[name] for name in KEPT_VARIABLES if name in inherited} | TPU_VARIABLES


# --- what the child says ----------------------------------------------------------------------------------------------


def verdict_of(answer: Mapping[str, Any], versions: Mapping[str, str]) -> Verdict:
    """The child's `answer` as a value."""
    memory = None if answer["memory"] is None else ChipMemory(**answer["memory"])
    refusal = None if answer["message"] is None else read_refusal(answer["message"])
    usable = refusal.usable if refusal and refusal.usable else usable_bytes(answer["device_kind"])
    plain = {name: value for name, value in answer.items() if name not in ("memory", "message")}
    return Verdict(**plain, usable=usable, memory=memory, refusal=refusal, versions=dict(versions))


def usable_bytes(device_kind: str) -> int | None:
    """Of one device as jax counts them, by the table of accelerators, which lists halves of chips beside them."""
    sizes = [found.memory_gib for found in accelerators_named(device_kind) if "= 1 jax device" in found.name]
    return int(sizes[0] * 2**30) if sizes and sizes[0] else None


def read_refusal(message: str) -> Refusal:
    """The numbers in an out-of-memory message, of which the compiler has two: one that stops at the temporaries (`the total
    memory required for HLO temporaries (23.04G) exceeds available HBM (15.75G)`), and one with all parts."""
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
    found = re.search(pattern, text, flags=re.MULTILINE)
    return found[group] if found else ""


def _size(text: str) -> int:
    """`20.91G` in bytes; 0 for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.rstrip("."))
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


# --- the child --------------------------------------------------------------------------------------------------------


def _question(case: Case) -> dict[str, Any]:
    return {
        "config": dict(case.config),
        "training": case.training.model_dump(),
        "tokens": case.tokens,
        "topology": case.topology,
        "implementation": case.implementation,
    }


def _answer(case: Case, say: Callable[[str], None], limit: float) -> dict[str, Any]:
    """Run the child on `case`. It reads the question from a file that is its standard input, and answers in its last line."""
    with contextlib.ExitStack() as open_files:
        asked, out, err = (open_files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3))
        json.dump(_question(case), asked)
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", case.child],
            env=child_environment(os.environ), stdin=asked, stdout=out, stderr=err,
        )  # fmt: skip
        try:
            _wait(child, case.topology, say, limit)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        return _heard(child.returncode, _content(out), _content(err))


def _wait(child: "subprocess.Popen[Any]", topology: str, say: Callable[[str], None], limit: float) -> None:
    started = time.monotonic()
    while True:
        passed = time.monotonic() - started
        try:
            child.wait(timeout=min(SAY_EVERY_SECONDS, max(0.0, limit - passed)))
            return
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - started
        if passed >= limit:
            raise TunixError(
                f"the compiler had no answer for {topology} within {limit:.0f} s",
                fix="give it more time (--time-limit SECONDS), or compile on a computer with more and faster cores",
            )
        say(
            f"compiling the training step for {topology}: {passed:.0f} s; a refusal takes seconds, an acceptance minutes"
        )


def _heard(code: int, out: str, err: str) -> dict[str, Any]:
    last = next(iter(out.strip().splitlines()[-1:]), "")
    said = json.loads(last) if last.startswith("{") else {}
    if code == 0 and "device_kind" in said:
        return dict(said)
    if "problem" in said:  # a setting that the engine refuses, or a topology that the compiler does not know
        raise ConfigError(said["problem"], fix=said["fix"])
    words = next(iter(err.strip().splitlines()[-1:]), "") or f"exit code {code}"
    raise TunixError(
        f"the TPU's compiler ended without an answer: {words[:500]}",
        fix="compare the installed libtpu with the one that this jax asks for (pip install 'jax[tpu]'); a killed compiler "
        "wanted more memory than this computer has",
    )


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _source_of(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise TunixError(f"no module {module}", fix="name one that Python can import")
    return Path(found.origin).read_text(encoding="utf-8")


def _read_kept(file: Path) -> Verdict | None:
    """A verdict from an earlier question; None when there is none, or none that can be read."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))["verdict"]
        memory = None if kept["memory"] is None else ChipMemory(**kept.pop("memory"))
        refusal = kept.pop("refusal", None)
        if refusal is not None:
            refusal = Refusal(**{**refusal, "largest": tuple(refusal["largest"])})
        return Verdict(**{**kept, "memory": memory, "refusal": refusal})
    except (OSError, ValueError, KeyError, TypeError):
        return None
