"""The models that a page may name: presets, shipped models, runs of the index, and a pasted config.json.

No path and no hub id arrives from outside, and nothing here starts a process or a download.
"""

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_rt import assets
from tunix_rt.config.load import quoted
from tunix_rt.config.settings import Training
from tunix_rt.dashboard.site import Site
from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.multimodal import text_config
from tunix_rt.models.resolve import ModelSource, preset_names, resolve_architecture
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.runs.checksums import parse_object, read_file
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.index import Indexed
from tunix_rt.train.plan_inputs import trained_shape

RUN_ID = re.compile("[0-9a-f]{12}")
MOST_RUNS = 200
"""Of the index that a list offers, the newest."""
MOST_PASTED, MOST_CONFIG = 16 * 1024, 1024 * 1024
"""Bytes of a config.json: pasted, and of a run."""
MOST_PARAMETERS, MOST_LAYERS, MOST_SIZE, MOST_HEAD = 10**13, 1000, 2**24, 2**16
"""Of a whole model; of its layers, of one of its dimensions, and of an attention head."""
PASTED = "config.json"


def shipped_models() -> list[str]:
    found = assets.shipped_folder("models")
    return sorted(path.name for path in found.iterdir() if (path / "config.json").is_file())


def runs_with(site: Site, name: str) -> list[Indexed]:
    """The newest runs whose final model has the file `name`."""
    newest = sorted(site.index.runs(), key=lambda one: one.summary.when or "", reverse=True)[:MOST_RUNS]
    return [one for one in newest if _is_file(RunDir(one.root).final_model / name)]


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def source_named(site: Site, name: str) -> ModelSource:
    """The model that a list of this dashboard names; InputError for any other name."""
    if name in preset_names() or name in shipped_models():
        return resolve_architecture(name)
    if RUN_ID.fullmatch(name) and (run := site.index.find(name)) is not None:
        return source_of_run(run)
    raise InputError(
        f"{quoted(name)} is no preset, no shipped model and no run of this folder",
        fix="choose one of the list; a model folder or a hub model: tunix-rt plan --model NAME",
    )


def source_of_run(run: Indexed, *, exact: bool = True) -> ModelSource:
    """The architecture of a run's final model; unless `exact`, of any family. Links are not followed."""
    folder = RunDir(run.root).final_model
    data, problem = read_file(run.root, f"{folder.name}/config.json", MOST_CONFIG)
    if data is None:
        raise InputError(f"{run.name}: {problem}", fix="choose a complete run, or the preset of its model")
    return _source(data, name=str(folder), folder=folder, exact=exact)


def source_of_text(pasted: str) -> ModelSource:
    """The architecture in a pasted config.json."""
    data = pasted.encode("utf-8", "replace")
    if len(data) > MOST_PASTED:
        problem = f"a config.json of {len(data):,} bytes; at most {MOST_PASTED:,} are read here"
        raise InputError(problem, fix="use the command line: tunix-rt plan --model FOLDER")
    return _source(data, name=PASTED, folder=Path())


def _source(data: bytes, *, name: str, folder: Path, exact: bool = True) -> ModelSource:
    found = parse_object(data)
    if isinstance(found, str):
        raise InputError(f"{name}: {found}", fix="paste the whole content of a config.json")
    config: Mapping[str, Any] = text_config(found)
    kind = config.get("model_type")
    if not isinstance(kind, str) or (exact and kind not in FAMILIES):
        given = quoted(kind) if isinstance(kind, str) else "missing"
        raise InputError(
            f"{name}: model_type is {given}, which has no exact plan; PyTorch has to trace it",
            fix=f"use the command line: tunix-rt plan --model FOLDER; or one of: {', '.join(FAMILIES)}",
        )
    return ModelSource(name=name, folder=folder, revision="local", weights="random", config=config)


def shape_for(source: ModelSource, training: Training) -> ModelShape:
    """The shape of a model of an exact family that the engine of `training` supports, of a size that somebody may train."""
    shape = shape_of(source.config)
    sizes = (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab)
    too_large = max(sizes) > MOST_SIZE or shape.head_dim > MOST_HEAD or shape.layers > MOST_LAYERS
    if min(sizes) < 1 or too_large or shape.parameters > MOST_PARAMETERS:
        problem = f"{source.name}: its sizes are those of no model; at most {MOST_PARAMETERS:,} parameters are planned"
        raise InputError(problem, fix="paste the config.json of a model that exists")
    return trained_shape(source, training)
