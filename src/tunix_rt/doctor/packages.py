"""The installed torch and jax: their metadata, and their own report in a child process with a time limit.

Neither is imported in this process: a probe must not initialise CUDA in the trainer, or hang it."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tunix_rt.doctor.child_process import run_child
from tunix_rt.doctor.facts import Jax, Torch

TORCH_SECONDS = 30.0
JAX_SECONDS = 60.0  # a TPU takes long to start
PYTHON = (sys.executable, "-P", "-c")  # -P: do not import a torch.py of the working folder

# --- a child with a time limit ---------------------------------------------------------------------------------------


class NoAnswer(Exception):
    """A child printed no result; the message has the reason."""


def ask_child(
    command: Sequence[str], *, who: str, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The last JSON object that the child printed on a line. NoAnswer for a hang, a crash, an error, or other output."""
    ended = run_child(command, seconds=seconds, environment=environment)
    if ended.code is None:
        raise NoAnswer(plain_words(f"{who} {ended.words}"))
    if ended.code != 0:
        raise NoAnswer(f"{who} {ended.words}: {plain_words(ended.last_error) or 'no output'}")
    text = ended.out.strip()
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(answer := json.loads(line), dict):
                return answer
    raise NoAnswer(f"{who}: malformed output {plain_words(text[-200:])!r}" if text else f"{who}: no output")


def plain_words(text: str, limit: int = 300) -> str:
    """`text` in one printable line of at most `limit` characters, with `~` for the home folder: facts are shared."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:limit]


# --- metadata --------------------------------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """The installed version; None also for the remains of an installation without one."""
    try:
        return metadata.version(package) or None
    except (metadata.PackageNotFoundError, KeyError):
        return None


def installed_torch() -> Torch | None:
    """torch by its metadata alone: version, CUDA or ROCm by the tag (`+cu130`, `+rocm6.4`, `+cpu`) or `torch/version.py`."""
    version = version_of("torch")
    if version is None:
        return None
    tag = version.partition("+")[2]
    cuda = hip = None
    if match := re.fullmatch(r"cu(\d+)(\d)", tag):
        cuda = f"{match[1]}.{match[2]}"
    elif match := re.fullmatch(r"rocm([\d.]+)", tag):
        hip = match[1]
    elif tag != "cpu":
        cuda, hip = _builds_in_version_file()
    cudnn = version_of(f"nvidia-cudnn-cu{cuda.partition('.')[0]}") if cuda else None
    return Torch(version=version, cuda_build=cuda, hip_build=hip, cudnn=cudnn)


def _builds_in_version_file() -> tuple[str | None, str | None]:
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, None
    builds = dict(re.findall(r"^(cuda|hip)\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, flags=re.MULTILINE))
    return builds.get("cuda"), builds.get("hip")


def installed_jax() -> Jax | None:
    """jax by its metadata alone, with its accelerator plugins. libtpu is a fact of the TPU."""
    version = version_of("jax")
    if version is None:
        return None
    plugins: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if re.fullmatch(r"jax-cuda\d*-(plugin|pjrt)|jax-rocm.*", name):
            plugins.setdefault(name, distribution.version)  # the first on the path is the one imported
    return Jax(version=version, jaxlib=version_of("jaxlib"), plugins=dict(sorted(plugins.items())))


# --- their own report ------------------------------------------------------------------------------------------------

# The flags instead of `get_arch_list()`, which before torch 2.13 is empty if CUDA does not start.
TORCH_SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    facts = {
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "arch_list": flags.split() if flags else [],
        "cuda_available": torch.cuda.is_available(),
        "cuda_devices": torch.cuda.device_count(),
        "cudnn": None,
        "nccl": "",
    }
    if torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.version.cuda:
        try:
            facts["cudnn"] = torch.backends.cudnn.version()
        except RuntimeError as error:  # another cuDNN than torch was built with
            warnings.warn(str(error))
facts["said"] = [str(warning.message) for warning in said if issubclass(warning.category, UserWarning)]
print(json.dumps(facts))
"""


def ask_torch(torch: Torch, *, script: str = TORCH_SCRIPT, seconds: float = TORCH_SECONDS) -> Torch:
    """`torch` completed by its report in a child process, or with the `problem` that prevented one."""
    # With that variable `is_available()` queries NVML only, whether or not CUDA starts.
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    try:
        answer = ask_child([*PYTHON, script], who="torch", seconds=seconds, environment=environment)
    except NoAnswer as none:
        return replace(torch, problem=str(none))
    try:
        return replace(
            torch,
            cuda_build=_text(answer["cuda_build"]),
            hip_build=_text(answer["hip_build"]),
            cudnn=_cudnn_version(answer["cudnn"]) or torch.cudnn,
            arch_list=tuple(str(arch) for arch in answer["arch_list"]),
            cuda_available=bool(answer["cuda_available"]),
            cuda_devices=int(answer["cuda_devices"]),
            nccl=_text(answer["nccl"]),
            said=_joined(answer["said"]),
        )
    except (ValueError, KeyError, TypeError):
        return replace(torch, problem=f"torch: malformed output {plain_words(str(answer))!r}")


# jax falls back to the CPU with a line in its log at most, so the log is kept. Preallocation would take most of the GPU.
JAX_SCRIPT = """
import json, logging, warnings
heard = []
class Ear(logging.Handler):
    def emit(self, record):
        cause = record.exc_info[1] if record.exc_info else None
        heard.append(f"{record.getMessage()}: {cause}" if cause else record.getMessage())
logging.getLogger("jax").addHandler(Ear(logging.WARNING))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import jax
    try:
        devices = jax.devices()
        facts = {"platform": devices[0].platform, "devices": [device.device_kind for device in devices]}
    except (RuntimeError, AssertionError, ValueError, OSError) as error:
        facts = {"error": type(error).__name__, "words": str(error)}
facts["said"] = heard + [str(warning.message) for warning in said if issubclass(warning.category, UserWarning)]
print(json.dumps(facts))
"""


def ask_jax(jax: Jax, platform: str, *, script: str = JAX_SCRIPT, seconds: float = JAX_SECONDS) -> Jax:
    """`jax` completed by its report with exactly one platform (cuda, tpu or cpu), in a child process."""
    started = replace(jax, asked_for=platform)
    environment = {**os.environ, "JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("JAX_PLATFORM_NAME", None)  # it would choose another default among the platforms
    try:
        answer = ask_child([*PYTHON, script], who="jax", seconds=seconds, environment=environment)
    except NoAnswer as none:
        return replace(started, problem=str(none))
    try:
        said = _joined(answer["said"])
        if "error" in answer:
            problem = _jax_problem(platform, str(answer["error"]), str(answer["words"]))
            return replace(started, said=said, problem=problem)
        kinds = tuple(str(kind) for kind in answer["devices"])
        return replace(started, platform=str(answer["platform"]), devices=kinds, said=said)
    except (KeyError, TypeError):
        return replace(started, problem=f"jax: malformed output {plain_words(str(answer))!r}")


def _jax_problem(platform: str, error: str, words: str) -> str:
    if words.strip():
        return plain_words(f"{error}: {words}")
    return f"jax with JAX_PLATFORMS={platform} raised {error} without a message, as it does if there is no device node"


def _joined(messages: Sequence[Any]) -> str | None:
    """The warnings, each once. Anything but a list of texts is a TypeError."""
    if not isinstance(messages, list):
        raise TypeError(f"{messages!r} is not a list")
    return " | ".join(dict.fromkeys(plain_words(str(one), 1000) for one in messages)) or None


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _cudnn_version(number: int | None) -> str | None:
    """91002 is 9.10.2; before version 9 it was 8907 for 8.9.7."""
    if not number:
        return None
    major, rest = divmod(number, 10_000) if number >= 90_000 else divmod(number, 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"
