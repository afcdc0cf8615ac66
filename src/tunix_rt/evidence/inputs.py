"""What a run was given and a verifier has to supply: dataset, eval set, base model, tokenizer. Each is looked up by hash among
what ships with tunix-rt and what the reviewer names; a name or path in a bundle is never opened."""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tunix_rt import assets
from tunix_rt.data.sources import find_dataset
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import InputError, TunixError
from tunix_rt.models.resolve import preset_names, resolve_model
from tunix_rt.runs.schemas import Commitment
from tunix_rt.storage import sha256_file
from tunix_rt.train.commitment import model_hashes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the reviewer names beside what ships: files, folders or patterns of data; a folder, file or hub id of a model."""

    data: tuple[str, ...] = ()
    model: str | None = None
    tokenizer: str | None = None

    def absolute(self) -> "Inputs":
        """The same for a process with another working folder and little memory: a GGUF file is converted here."""
        model, tokenizer = (_absolute(name) for name in (self.model, self.tokenizer))
        if model is not None and os.path.isfile(model):
            model = str(resolve_model(model).folder)
        if missing := [path for path in self.data if "*" not in path and not os.path.exists(path)]:
            raise InputError(f"--data {missing[0]}: no such file", fix="name a file, a folder or a pattern with *")
        return Inputs(data=tuple(map(os.path.abspath, self.data)), model=model, tokenizer=tokenizer)

    def files(self) -> list[str]:
        """What the reviewer supplies and a process has to read as a whole."""
        folders = [folder for folder in (self.model, self.tokenizer) if folder is not None]
        return [*self.data, *(os.path.join(folder, "tokenizer.json") for folder in folders)]

    def dataset(self, sha256: str) -> str | None:
        """The path of the dataset with this hash."""
        for path in (*_shipped("datasets", "*/dataset.jsonl"), *self.data):
            if _hash_of_dataset(path) == sha256:
                return path
        return None

    def evalset(self, sha256: str) -> str | None:
        files = (*_shipped("evalsets", "*.jsonl"), *(path for path in self.data if os.path.isfile(path)))
        return next((path for path in files if _hash_of_file(path) == sha256), None)

    def base_model(self, files: Mapping[str, str], weights: str) -> str | None:
        """The name of the model whose files have these hashes."""
        presets = assets.shipped_folder("models").with_name("presets")
        architectures = [str(presets / name) for name in preset_names()] if weights == "random" else []
        for name in (*([self.model] if self.model else []), *_shipped("models", "*/"), *architectures):
            if _has_files(name, files, weights):
                return name
        return None

    def tokenizer_folder(self, sha256: str, model_type: str) -> str | None:
        for name in (self.tokenizer, self.model, *_shipped("models", "*/")):
            if name is not None and os.path.isfile(os.path.join(name, "tokenizer.json")):
                try:
                    if load_tokenizer(Path(name), model_type).sha256 == sha256:
                        return name
                except TunixError as error:
                    logger.warning("%s: %s", name, error.problem)
        return None


def _absolute(name: str | None) -> str | None:
    return os.path.abspath(os.path.expanduser(name)) if name and os.path.exists(os.path.expanduser(name)) else name


def _shipped(kind: str, pattern: str) -> list[str]:
    return sorted(map(str, assets.shipped_folder(kind).glob(pattern)))


@lru_cache(maxsize=256)
def _hash_of_file(path: str) -> str:
    return sha256_file(Path(path))


@lru_cache(maxsize=256)
def _hash_of_dataset(path: str) -> str:
    """Of a file, or over all files that a folder or pattern means; empty where it means no dataset."""
    try:
        return find_dataset(path).sha256
    except TunixError as error:
        logger.warning("%s: %s", path, error.problem)
        return ""


@lru_cache(maxsize=64)
def _hashes_of_model(name: str, weights: str) -> Mapping[str, str]:
    try:
        return model_hashes(resolve_model(name, weights=weights))
    except TunixError as error:
        logger.warning("%s: %s", name, error.problem)
        return {}


def _has_files(name: str, files: Mapping[str, str], weights: str) -> bool:
    if os.path.isfile(config := os.path.join(name, "config.json")) and _hash_of_file(config) != files.get(
        "config.json"
    ):
        return False  # the weights need not be read
    return _hashes_of_model(name, weights) == dict(files)


def needed(committed: Commitment) -> Iterator[tuple[str, str, str]]:
    """(kind, name, description of its hashes) of every input of the run."""
    model = committed.base_model
    hashes = ", ".join(f"{name} sha256 {digest}" for name, digest in sorted(model.files.items()))
    origin = f", converted from {model.converted_from}" if model.converted_from else ""
    yield "base model", model.name, f"{model.weights} weights, {hashes}{origin}"
    yield (
        "tokenizer",
        "of the base model or model.tokenizer_name_or_path",
        f"hash by tunix-rt {committed.tokenizer_sha256}",
    )
    yield "dataset", committed.dataset.key, f"sha256 {committed.dataset.sha256}"
    if committed.evalset is not None:
        yield "eval set", committed.evalset.key, f"sha256 {committed.evalset.sha256}"
