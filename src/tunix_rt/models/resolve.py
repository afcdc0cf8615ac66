"""From the name of a model to a local folder, before anything is loaded.

A model is a local folder, a GGUF file, a shipped one, a hub id in the local cache or on the hub, or, with random weights,
a preset. It is never replaced by another one.
"""

import contextlib
import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt import assets
from tunix_rt.errors import ConfigError, InputError, TunixError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.gguf import converted, only_gguf
from tunix_rt.models.hub import cached_config, from_hub
from tunix_rt.models.multimodal import has_towers, text_config
from tunix_rt.models.safetensors import no_safetensors, refuse_incomplete
from tunix_rt.models.secrets import redacted, refuse_address
from tunix_rt.storage import read_json

logger = logging.getLogger(__name__)

LOCAL_FOLDER = "give the path of a local model folder"
RANDOM = "or keep the name and add --weights random"
TOY_TOKENIZER = "--set model.tokenizer_name_or_path=tiny-gemma3"
TWO_WAYS_ON = f"{LOCAL_FOLDER}, {RANDOM} (real architecture and size)"
PRESET_WAYS_ON = f"{LOCAL_FOLDER}, {RANDOM} {TOY_TOKENIZER} (real architecture and size, with the shipped tokenizer)"
A_TOKENIZER = (
    "set model.tokenizer_name_or_path: a folder with tokenizer.json, a hub id, or tiny-gemma3 (it comes with tunix-rt)"
)

MOST_CONFIG_BYTES = 16 * 2**20
"""Of a config.json, which has a few thousand."""

# Hub id -> the preset of the same architecture and size. Chat versions differ from it in special tokens alone.
PRESET_OF = {
    hub_id: preset
    for preset, hub_ids in {
        "gpt2": ("gpt2", "openai-community/gpt2"),
        "gemma-2b": ("google/gemma-2b", "google/gemma-2b-it"),
        "gemma-2-2b": ("google/gemma-2-2b", "google/gemma-2-2b-it"),
        "gemma-3-270m": ("google/gemma-3-270m", "google/gemma-3-270m-it"),
        "gemma-3-1b": ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
        "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B-Base"),
        "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
        "qwen-3-0.6b": ("Qwen/Qwen3-0.6B",),
        "gemma-3-4b": ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"),
        "gemma-3-12b": ("google/gemma-3-12b-pt", "google/gemma-3-12b-it"),
        "gemma-4-e2b": ("google/gemma-4-E2B", "google/gemma-4-E2B-it"),
        "gemma-4-e4b": ("google/gemma-4-E4B", "google/gemma-4-E4B-it"),
        "gemma-4-31b": ("google/gemma-4-31B", "google/gemma-4-31B-it"),
        "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it"),
        "mistral-7b": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
        "ministral-3-3b": ("mistralai/Ministral-3-3B-Base-2512", "mistralai/Ministral-3-3B-Instruct-2512"),
        "phi-4": ("microsoft/phi-4",),
        "phi-4-mini": ("microsoft/Phi-4-mini-instruct",),
        "olmo-2-1b": ("allenai/OLMo-2-0425-1B", "allenai/OLMo-2-0425-1B-Instruct"),
        "olmo-3-7b": ("allenai/Olmo-3-1025-7B",),
        "granite-3.3-2b": ("ibm-granite/granite-3.3-2b-base", "ibm-granite/granite-3.3-2b-instruct"),
        "qwen-3-4b": ("Qwen/Qwen3-4B",),
        "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"),
        "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    }.items()
    for hub_id in hub_ids
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model folder that exists, and where it came from."""

    name: str
    folder: Path
    revision: str
    """Commit of a hub model; `local` for a folder, `shipped` for a model that comes with tunix-rt, `preset` for a preset."""
    weights: str
    config: Mapping[str, Any]
    """Of the text model, where the checkpoint is multimodal."""
    converted_from: str | None = None
    """Name and hash of the GGUF file that the folder was converted from, with dequantized weights."""

    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def multimodal(self) -> bool:
        """The file has other parts than the text model, which are neither loaded nor trained."""
        return self.weights == "pretrained" and has_towers(self.folder)


def preset_names() -> list[str]:
    return sorted(path.name for path in _presets().iterdir() if (path / "config.json").is_file())


def type_is_known(name: str, revision: str = "main") -> bool:
    """Whether the model needs no code of its repository: its config.json is here and names none, or the family has a row.

    Nothing is downloaded."""
    with _redacted_errors():
        if name in PRESET_OF or name in preset_names():
            return True
        here = Path(os.path.expanduser(name))
        folder = here if here.is_dir() else assets.find("models", name) or cached_config(name, revision)
        if folder is None or not (folder / "config.json").is_file():
            return False
        of_text = _read_config(folder, name)
        whole = read_json(folder / "config.json", InputError, fix="fetch the model again")
        return "auto_map" not in {**whole, **of_text} or of_text["model_type"] in FAMILIES


def resolve_model(
    name: str, *, revision: str = "main", weights: str = "pretrained", or_random: bool = True
) -> ModelSource:
    """The folder of model `name`. Raises InputError when it is not available or not supported; its fix offers random weights
    only where a verb has them (`or_random`).

    A revision of a model without revisions is a ConfigError: it would be ignored."""
    with _redacted_errors():
        found, commit, origin = _find(name, revision, with_weights=weights == "pretrained", or_random=or_random)
        _refuse_revision(name, commit, revision)
        config = _read_config(found, name)
        source = ModelSource(
            name=name, folder=found, revision=commit, weights=weights, config=config, converted_from=origin
        )
        if weights == "pretrained":
            if not source.weight_files():
                files = [path.name for path in found.iterdir()]
                raise no_safetensors(name, f"in {found}", files, fix=_ways_on(name, found, or_random))
            refuse_incomplete(name, found)
        return source


def refuse_unavailable(name: str, *, revision: str = "main", weights: str = "pretrained") -> None:
    """Raise what `resolve_model` would raise. No weights are downloaded, no GGUF file is converted."""
    here = os.path.expanduser(name)
    if os.path.isfile(here) or (os.path.isdir(here) and only_gguf(Path(here)) is not None):
        return
    if os.path.exists(here) or assets.find("models", name) is not None:
        resolve_model(name, revision=revision, weights=weights)
        return
    with _redacted_errors():
        _find(name, revision, with_weights=weights == "pretrained", download=False)


def resolve_architecture(name: str, *, revision: str = "main") -> ModelSource:
    """Model `name` for its config.json alone: a preset is used instead of the hub where there is one."""
    is_here = os.path.exists(os.path.expanduser(name)) or assets.find("models", name) is not None
    if name not in PRESET_OF or revision != "main" or is_here:
        return resolve_model(name, revision=revision, weights="random")
    folder = _presets() / PRESET_OF[name]
    return ModelSource(name=name, folder=folder, revision="preset", weights="random", config=_read_config(folder, name))


def resolve_tokenizer(name: str, *, revision: str = "main") -> Path:
    """The folder with the tokenizer `name`: a folder, a GGUF file, a shipped model, a hub id. It needs no config.json."""
    with _redacted_errors():
        here = os.path.expanduser(name)
        if os.path.isdir(here) and os.path.isfile(os.path.join(here, "tokenizer.json")):
            _refuse_revision(name, "local", revision)
            return Path(here).resolve()
        found, commit, _ = _find(name, revision, with_weights=False)
        _refuse_revision(name, commit, revision)
        if commit == "preset":
            raise InputError(f"{name} is a preset, which has no tokenizer", fix=A_TOKENIZER)
        return found


@contextlib.contextmanager
def _redacted_errors() -> Iterator[None]:
    """A name, a path or a message of the hub may contain a token."""
    try:
        yield
    except TunixError as error:
        error.problem, error.fix = redacted(error.problem), redacted(error.fix)
        error.args = (error.problem,)
        raise


def _find(
    name: str, revision: str, *, with_weights: bool, or_random: bool = True, download: bool = True
) -> tuple[Path, str, str | None]:
    """Folder, revision, and the GGUF file it was converted from. The branches are in the order of the lookup."""
    here = os.path.expanduser(name)  # unlike pathlib, os.path does not raise for an invalid name
    if os.path.exists(here):
        path = Path(here).resolve()
        file = path if path.is_file() else only_gguf(path)
        folder, origin = (path, None) if file is None else converted(file, with_weights=with_weights)
        return folder, "local", origin
    if (known := assets.find("models", name)) is not None:
        shipped = known.parent.resolve() == assets.shipped_folder("models").resolve()
        return known, "shipped" if shipped else "local", None
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(".gguf"):
        _refuse_path(name)
    if name in preset_names() and name not in PRESET_OF:
        if with_weights:
            hub_ids = ", ".join(sorted(hub_id for hub_id, preset in PRESET_OF.items() if preset == name))
            raise InputError(
                f"{name} is a preset: an architecture and its size, without weights and tokenizer",
                fix=f"give a model with weights: a local model folder, or its hub id ({hub_ids})"
                + (f"; or add --weights random {TOY_TOKENIZER}" if or_random else ""),
            )
        return _presets() / name, "preset", None
    return _of_hub(name, revision, with_weights=with_weights, or_random=or_random, download=download)


def _ways_on(name: str, folder: Path | None, or_random: bool) -> str:
    """The ways on that work: random weights need the config.json and a tokenizer, in `folder` or with the flag."""
    if or_random and folder is not None and (folder / "config.json").is_file():
        return TWO_WAYS_ON if (folder / "tokenizer.json").is_file() else PRESET_WAYS_ON
    return PRESET_WAYS_ON if or_random and name in PRESET_OF else LOCAL_FOLDER


def _of_hub(name: str, revision: str, *, with_weights: bool, or_random: bool, download: bool) -> tuple[Path, str, None]:
    """A hub model; without weights, the architecture of its preset where the hub is not available."""

    def ways_on(cached: Path | None) -> str:
        if with_weights:
            return _ways_on(name if revision == "main" else "", cached, or_random)
        return "give the path of a local folder with config.json and tokenizer.json"

    try:
        folder, commit = from_hub(name, revision, with_weights=with_weights, ways_on=ways_on, download=download)
        return folder, commit, None
    except InputError as error:
        if with_weights or name not in PRESET_OF or revision != "main":
            error.fix = _similar(name) + error.fix
            raise
        logger.warning(
            "%s; using the architecture of the preset %s, which has no tokenizer",
            redacted(error.problem), PRESET_OF[name],
        )  # fmt: skip
        return _presets() / PRESET_OF[name], "preset", None


def _similar(name: str) -> str:
    """A question for the fix: folders beside a path that does not exist, or the nearest model names; empty without any."""
    beside = Path(name).parent
    folders = sorted(path.name for path in beside.iterdir() if path.is_dir()) if "/" in name and beside.is_dir() else []
    known = [str(beside / folder) for folder in folders] or [*PRESET_OF, *preset_names()]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.7) or [str(beside / folder) for folder in folders[:5]]
    return f"did you mean {' or '.join(close)}? Else: " if close else ""


def _presets() -> Path:
    return assets.shipped_folder("models").with_name("presets")


def _refuse_path(name: str) -> None:
    refuse_address("the model", name)
    what = "GGUF file" if name.lower().endswith(".gguf") else "model folder"
    raise InputError(f"{what} {name!r} does not exist", fix="check the path")


def _refuse_revision(name: str, commit: str, revision: str) -> None:
    if revision != "main" and commit in ("local", "shipped", "preset"):
        raise ConfigError(
            f"model.revision is {revision!r}, but {name} is a {commit} model, which has no revisions",
            fix="leave model.revision out, or give a hub model",
        )


def _read_config(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not os.path.exists(path):
        raise InputError(f"{name}: no config.json in {folder}", fix="point at a Hugging Face model folder")
    if not os.path.isfile(path) or os.path.getsize(path) > MOST_CONFIG_BYTES:
        problem = f"{path} is no file of at most {MOST_CONFIG_BYTES / 2**20:.0f} MiB"
        raise InputError(problem, fix="fetch the model again")
    config = read_json(path, InputError, fix="fetch the model again")
    if not isinstance(config, dict) or not config.get("model_type"):
        raise InputError(f"{path}: model_type is missing", fix="point at a Hugging Face model folder")
    return text_config(config)
