"""Whether a run may be collected: it is complete, and each of its evidence files shows what it is there to show."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.doctor.prove import COMPUTED
from tunix_rt.doctor.wheels import MISFIT_WORDS
from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.claims import (
    AGAIN,
    KINDS,
    UNPRINTED,
    RunFiles,
    cuda_versions,
    engine_of,
    engine_versions,
    gpu_memory,
    gpu_of,
    memory_samples,
    value_at,
)
from tunix_rt.evidence.doubtful import read_bytes, shown
from tunix_rt.evidence.source import combined_hash

ENGINES = ("torch", "jax")
HAS_CODE = "jax-plugin-lacks-architecture"
"""The check of the doctor that passes where JAX's CUDA plugin has code for the GPU; JAX gives no warning to look for."""


def require_whole(run: RunFiles) -> None:
    """Refuse a run that is not complete, or whose evidence files are missing, empty, or lack what they are there to show;
    of the files all at once."""
    if run.result.get("status") != "completed":
        raise run.fault(
            f"result.json: the run is {shown(run.result.get('status'))}, not completed",
            fix="finish it with --resume, or run it again",
        )
    if run.need("result.json", "device", str) not in KINDS:
        raise run.fault(
            f"result.json: it ran on {shown(run.result['device'])}; bundles are made of runs on {' and '.join(KINDS)}",
            fix="collect a run on one of these",
        )
    if (engine := engine_of(run)) not in ENGINES:
        raise run.fault(
            f"config.yaml: training.backend is {engine}; bundles are made of runs of {' and '.join(ENGINES)}",
            fix="collect one of those",
        )
    lacking = [*_faults_of_inputs(run), *(_lacking_cuda(run) if run.result["device"] == "cuda" else _lacking_cpu(run))]
    if lacking:
        raise EvidenceError(
            "the run's evidence is not whole\n" + "\n".join(f"  {run.where}{line}" for line in lacking), fix=AGAIN
        )


def whole_problems(run: RunFiles) -> Iterator[str]:
    """What `require_whole` refuses, and files of a GPU beside a run that had none."""
    require_whole(run)
    if run.result["device"] != "cuda":
        for name in ("cuda_check.txt", "nvidia_smi.txt"):
            if (run.folder / name).exists():
                yield f"{run.where}{name} in a run on {run.result['device']}"


def _faults_of_inputs(run: RunFiles) -> Iterator[str]:
    """The source against the files it is made of; the checks that a run can only have passed."""
    files = run.need("precommit.json", "source_files", dict)
    hashed = all(
        not UNPRINTED.search(name) and type(digest) is str and digest.isalnum() for name, digest in files.items()
    )
    if not hashed or combined_hash(files) != run.need("precommit.json", "source_sha256", str):
        yield "precommit.json: source_sha256 is not the hash of source_files"
    for check in run.need("doctor.json", "checks", list):
        if value_at(check, "verdict") not in ("pass", "warn", "skip"):
            yield f"doctor.json: the check {shown(value_at(check, 'cause'))} says {shown(value_at(check, 'verdict'))}"


def _lacking_cpu(run: RunFiles) -> Iterator[str]:
    memory = {"the host's memory": r"(?im)^.*\b(ram|memory)\b.*[1-9].*$"}
    versions = _version_words(run)
    if engine_of(run) == "torch":
        yield from _lacks(run, "env_info.txt", memory)
        yield from _lacks(run, "torch_version.txt", versions)
    else:
        yield from _lacks(run, "env_info.txt", memory | {"jax's version": versions["jax's version"]})
    yield from _lacks(run, "training_log.txt", {}, _device_lines("cpu"))


def _lacking_cuda(run: RunFiles) -> Iterator[str]:
    gpu = gpu_of(run)
    driver = {"the driver's version": _word(gpu["driver"])}
    yield from _lacks(run, "env_info.txt", driver | {"the CUDA version the driver reports": _word(gpu["driver_cuda"])})
    yield from _lacking_jax(run, gpu) if engine_of(run) == "jax" else _lacking_torch(run, gpu)
    yield from _lacks(run, "training_log.txt", {}, _device_lines("cuda"))
    wanted = dict(driver)
    if gpu_memory(run)["by"] == "nvml":  # elsewhere process ids are hidden, from nvidia-smi as well
        pids = sorted({sample["pid"] for sample in memory_samples(run, "nvml")})
        any_of = "|".join(_word(str(pid)) for pid in pids)
        # Not the line above the output in which we say which process is ours: nvidia-smi itself must list it.
        wanted[f"our process ({' or '.join(map(str, pids))})"] = rf"(?m)^(?!.*our process id).*(?:{any_of})"
    yield from _lacks(run, "nvidia_smi.txt", wanted)


def _lacking_torch(run: RunFiles, gpu: Mapping[str, Any]) -> Iterator[str]:
    versions = _version_words(run)
    cuda = {"the CUDA version of the wheel": _word(cuda_versions(run)["cuda"])}
    yield from _lacks(run, "torch_version.txt", versions | cuda)
    uuid = {"the device's uuid": _word(gpu["uuid"])}
    available = {"is_available": ("torch.cuda.is_available(): True", r"torch\.cuda\.is_available\(\): True")}
    yield from _lacks(run, "cuda_check.txt", versions | uuid | _checked(gpu), available)
    yield from _misfit_warnings(run, "training_log.txt")
    yield from _misfit_warnings(run, "cuda_check.txt")


def _lacking_jax(run: RunFiles, gpu: Mapping[str, Any]) -> Iterator[str]:
    cuda_versions(run)
    sign = "jax.devices()[0].platform"
    platform = {sign: (f"{sign}: gpu", rf"{re.escape(sign)}: gpu")}
    yield from _lacks(run, "cuda_check.txt", _version_words(run) | _checked(gpu), platform)
    verdicts = [value_at(one, "verdict") for one in run.doctor["checks"] if value_at(one, "cause") == HAS_CODE]
    if verdicts != ["pass"]:
        yield f"doctor.json: the check {HAS_CODE}, once, does not say 'pass'"


def _version_words(run: RunFiles) -> dict[str, str]:
    return {f"{name}'s version": _word(version) for name, version in engine_versions(run).items()}


def _checked(gpu: Mapping[str, Any]) -> dict[str, str]:
    """What `cuda_check.txt` shows of any engine."""
    major, minor = gpu["compute_capability"].split(".")
    return {
        "the device's name": _word(gpu["name"]),
        "the compute capability": rf"\({major}, *{minor}\)|{_word(f'{major}.{minor}')}|\bsm_{major}{minor}\b",
        f"the line `{COMPUTED}`": rf"(?m)^\s*{COMPUTED}\s*$",
    }


def _device_lines(device: str) -> dict[str, tuple[str, str]]:
    """A continued run says them again; none may say another device."""
    return {
        "Using device:": (f"Using device: {device}", rf"(?:.* )?Using device: {device}\s*"),
        "Preflight:": (f"device={device}", rf".*(?<!\w)device={device}(?!\S).*"),
    }


def _word(text: str) -> str:
    """A pattern for `text` that is not a piece of a longer number or name: 13.0 is not in 13.05."""
    return rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)"


def _lacks(
    run: RunFiles, name: str, wanted: Mapping[str, str], lines: Mapping[str, tuple[str, str]] | None = None
) -> Iterator[str]:
    """What the file does not show: a pattern under its name in `wanted`; in `lines`, a sign and what each line with it
    must be, in words and as a pattern."""
    data, unread = read_bytes(run.folder / name)
    shows = ", ".join([*wanted, *(f"`{words}`" for words, _ in (lines or {}).values())])
    if data is None:
        yield f"{unread}: it shows {shows}"
        return
    if not data.strip():
        yield f"{name} is empty: it shows {shows}"
        return
    text = data.decode("utf-8", "replace")
    yield from (f"{name} lacks {what}" for what, pattern in wanted.items() if not re.search(pattern, text))
    for sign, (words, pattern) in (lines or {}).items():
        signed = [line for line in text.splitlines() if sign in line]
        others = [line for line in signed if not re.fullmatch(pattern, line)]
        if len(others) == len(signed):
            yield f"{name} lacks a line with `{words}`"
        yield from (f"{name} says otherwise than `{words}`: {shown(line)}" for line in others[:1])


def _misfit_warnings(run: RunFiles, name: str) -> Iterator[str]:
    """The first of the warnings by which torch says that it has no code for this GPU."""
    text = (read_bytes(run.folder / name)[0] or b"").decode("utf-8", "replace")
    flowing = " ".join(text.split()).casefold()
    found = [warning for warning in MISFIT_WORDS if warning.casefold() in flowing]
    yield from (f"{name} warns of an unsupported compute capability: `{warning}`" for warning in found[:1])
