"""What a run was given that does not come with tunix-rt: whoever runs or replays it has to bring it, by these hashes."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt import assets
from tunix_rt.data.registry import KEY
from tunix_rt.rundir import sha256_file

COMES_ALONG = ("shipped", "preset")
"""Revisions of models that come with tunix-rt: with their weights, or as an architecture for random ones."""
QUANTISED = re.compile(r"(?i)(?:^|[-_.])(i?q[1-8](?:_[a-z0-9]+)*|mxfp4|nvfp4)(?=[-_.]|$)")


def to_bring(committed: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One object for each thing, from what the run committed to and its settings: `what`, `name`, and hashes."""
    return [thing for thing, comes_along in _things(committed, settings) if not comes_along]


def is_of_the_run(told: object, committed: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether `told` lists things of the run by their hashes. Which of them come along depends on who collects and which
    version verifies, so that both may differ about it."""
    things = [thing for thing, _ in _things(committed, settings)]
    return isinstance(told, list) and all(thing in things for thing in told)


def _things(committed: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    yield from _model(committed, settings)
    yield from _data(committed)


def bring_words(thing: Mapping[str, Any]) -> str:
    """One line of a list."""
    if "files" in thing:
        files = ", ".join(f"`{name}` sha256 `{digest}`" for name, digest in sorted(thing["files"].items()))
        said = f"the {thing['what']} `{thing['name']}`"
        said += f" (revision `{thing['revision']}`)" if "revision" in thing else ""
        if "converted_from" in thing:
            origin, _, digest = thing["converted_from"].partition(" sha256:")
            return f"{said}: the file `{origin}` sha256 `{digest}`, which converts to {files}"
        return f"{said}: {files}"
    if thing["what"] == "tokenizer":
        copied = "the run saved it with its final model, `final_model/tokenizer.json`"
        return f"the tokenizer `{thing['name']}`, whose hash by tunix-rt is `{thing['sha256']}`; {copied}"
    return f"the {thing['what']} `{thing['name']}` sha256 `{thing['sha256']}`"


def quantised(thing: Mapping[str, Any]) -> str:
    """The name of the format that the file of the base model is said to be quantised in; empty where none is."""
    found = QUANTISED.search(str(thing.get("converted_from", "")).partition(" sha256:")[0].removesuffix(".gguf"))
    return found[1] if found else ""


def _model(committed: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    told = committed.get("base_model")
    model: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    revision, files = model.get("revision"), model.get("files")
    if isinstance(revision, str) and isinstance(files, Mapping) and files:
        thing = {
            "what": "base model",
            "name": _name(model.get("name")),
            "files": {str(name): str(digest) for name, digest in files.items()},
            **({"revision": revision} if revision != "local" else {}),
            **({"converted_from": str(model["converted_from"])} if model.get("converted_from") else {}),
        }
        yield thing, revision in COMES_ALONG or _is_shipped(model.get("name"), files)
    part = settings.get("model")
    named = part.get("tokenizer_name_or_path") if isinstance(part, Mapping) else None
    if named is not None:
        thing = {"what": "tokenizer", "name": _name(named), "sha256": str(committed.get("tokenizer_sha256"))}
        yield thing, _comes_along("models", named)


def _is_shipped(name: object, files: Mapping[str, str]) -> bool:
    """A copy of a model that comes along, by its name and its bytes."""
    if not isinstance(name, str) or not KEY.fullmatch(name):
        return False
    folder = assets.shipped_folder("models") / name
    return all(
        KEY.fullmatch(str(file)) and (folder / file).is_file() and sha256_file(folder / file) == digest
        for file, digest in files.items()
    )


def _data(committed: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    for what, place, kind in (("dataset", "dataset", "datasets"), ("eval set", "evalset", "evalsets")):
        told = committed.get(place)
        if isinstance(told, Mapping) and told.get("sha256"):
            thing = {"what": what, "name": _name(told.get("key")), "sha256": str(told["sha256"])}
            yield thing, _comes_along(kind, told.get("key"))


def _comes_along(kind: str, key: object) -> bool:
    """Looked for among what is shipped alone: what lies in a working folder is somebody's own."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        return False
    return any(os.path.exists(assets.shipped_folder(kind) / name) for name in (key, f"{key}.jsonl"))


def _name(name: object) -> str:
    """Of a path in full the last part: where it lay is nobody's business."""
    said = str(name)
    return os.path.basename(said.rstrip("/")) if said.startswith(("/", "~")) else said
