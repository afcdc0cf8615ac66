"""From the name of a model to a folder on this computer, before anything is loaded.

A model is a shipped one, a local folder, or a hub id found in the local cache or on the hub. It is never swapped for another.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt import assets
from tunix_rt.errors import ConfigError, InputError

# What a run reads of a model: safetensors and JSON only. No pickle, no code.
WANTED = ("*.safetensors", "*.json", "*.jinja")
TWO_WAYS_ON = (
    "give the path of a local model folder, or keep the name and add --weights random "
    "(real architecture and size; needs its config.json and tokenizer.json)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model folder that exists, and where it came from."""

    name: str
    folder: Path
    revision: str
    """Commit of a hub model; `local` for a folder, `shipped` for a model that comes with tunix-rt."""
    weights: str
    config: Mapping[str, Any]

    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def resolve_model(name: str, *, revision: str = "main", weights: str = "pretrained") -> ModelSource:
    """The folder of model `name`. Raises InputError when it cannot be had or is no model we can read.

    A revision of a folder is a ConfigError: it would be ignored."""
    if os.path.isdir(folder := os.path.expanduser(name)):  # unlike their twins in pathlib, these never raise
        found, commit = Path(folder).resolve(), "local"
    elif (known := assets.find("models", name)) is not None:
        came_with_us = known.parent.resolve() == assets.shipped_folder("models").resolve()
        found, commit = known, "shipped" if came_with_us else "local"
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"model folder {name!r} does not exist", fix="check the path")
    else:
        found, commit = _from_hub(name, revision, weights)
    if commit in ("local", "shipped") and revision != "main":
        raise ConfigError(
            f"model.revision: {revision!r} is asked for, but {name} is a {commit} model, which has no revisions",
            fix="leave model.revision out, or name a hub model",
        )
    source = ModelSource(name=name, folder=found, revision=commit, weights=weights, config=_read_config(found, name))
    if weights == "pretrained" and not source.weight_files():
        raise InputError(f"{name}: no *.safetensors in {found}", fix=TWO_WAYS_ON)
    return source


def _from_hub(name: str, revision: str, weights: str) -> tuple[Path, str]:
    """Folder and commit of a hub model: the local cache first, then the hub."""
    import huggingface_hub
    from huggingface_hub import errors

    ways_on = (
        TWO_WAYS_ON
        if weights == "pretrained"
        else "give the path of a local folder with config.json and tokenizer.json"
    )
    patterns = list(WANTED if weights == "pretrained" else WANTED[1:])
    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True)
        )
        if weights == "random" or any(folder.glob("*.safetensors")):
            return folder, folder.name
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        folder = None
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise InputError(
            f"model {name!r} is gated", fix="accept its licence on the hub and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"model {name!r} has no revision {revision!r}", fix="set model.revision: main") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(f"no model named {name!r} on the hub, in the cache or shipped", fix=ways_on) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise InputError(
            f"model {name!r} is not in the local cache and the hub cannot be reached", fix=ways_on
        ) from error
    return folder, folder.name


def _read_config(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{name}: no config.json in {folder}", fix="point at a Hugging Face model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}", fix="fetch the model again") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise InputError(f"{path} names no model_type", fix="point at a Hugging Face model folder")
    return config
