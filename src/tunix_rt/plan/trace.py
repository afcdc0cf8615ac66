"""The shape of a model whose family has no row: PyTorch traces one step of it in a child process, with fake tensors.

Needs torch and transformers, but no weights, no GPU and little memory. A trace holds for one precision; it is cached by
config.json, precision and the versions of both packages.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from tunix_rt.assets import cache_root
from tunix_rt.config.settings import Training
from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.secrets import redacted
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.shape import UNLIMITED, shape_of
from tunix_rt.plan.sizes import Cost, ModelShape, Trace
from tunix_rt.progress import phase
from tunix_rt.storage import write_json

TRACER = "tunix_rt.engines.torch.tracer"
FORMAT = "3"
"""Of a cached trace."""
SECONDS = 300.0
KNOWN = (
    f"use a causal language model that transformers builds without code of its own, or one of: {', '.join(FAMILIES)}"
)


def shape_of_any(source: ModelSource, training: Training) -> ModelShape:
    """The shape of `source`: by its row where its family has one, else traced in the precision of `training`."""
    if str(source.config.get("model_type")) in FAMILIES:
        return shape_of(source.config)
    recipe = recipe_of(training)
    return _traced(source, recipe.frozen or recipe.weights, recipe.compute, adapters=recipe.frozen is not None)


def _traced(source: ModelSource, weights: str, compute: str, *, adapters: bool) -> ModelShape:
    content = (source.folder / "config.json").read_bytes()
    try:
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(
            f"{source.name}: model_type {source.config.get('model_type')!r} has no exact plan, and tracing it needs {error.name}",
            fix=f"pip install 'tunix-rt[training]', or use one of: {', '.join(FAMILIES)}",
        ) from error
    key = hashlib.sha256(
        b"\0".join([content, *(part.encode() for part in (FORMAT, weights, compute, str(adapters), *versions))])
    ).hexdigest()
    request = {"folder": str(source.folder), "weights": weights, "compute": compute, "adapters": adapters}
    return _shape(source.name, key, tuple(request.items()))


@lru_cache(maxsize=32)
def _shape(name: str, key: str, request: tuple[tuple[str, str | bool], ...]) -> ModelShape:
    cached = cache_root() / "traces" / f"{key}.json"
    try:
        found = json.loads(cached.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = _run_tracer(name, dict(request))
        with contextlib.suppress(OSError):  # without a cache it is traced again
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_json(cached, found)
    return _shape_of_trace(found)


@phase("trace the model")
def _run_tracer(name: str, request: dict[str, str | bool]) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(prefix="tunix-rt-trace-") as scratch:
        asked, result = Path(scratch) / "request.json", Path(scratch) / "result.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-P", "-m", TRACER, str(asked), str(result)]
        try:
            ended = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise InputError(f"{name}: tracing a step took more than {SECONDS:.0f} s", fix=KNOWN) from error
        if ended.returncode or not result.is_file():
            reason = redacted(next(iter(ended.stderr.strip().splitlines()[-1:]), f"exit code {ended.returncode}"))
            raise InputError(
                f"{name}: its memory cannot be predicted, a trace of a step fails: {reason[:300]}", fix=KNOWN
            )
        return dict(json.loads(result.read_text(encoding="utf-8")))


def _shape_of_trace(found: dict[str, Any]) -> ModelShape:
    table = (found["vocab"], found["hidden"])
    parameters = [(tuple(shape), layer) for shape, layer in found["parameters"]]
    others = [shape for shape, layer in parameters if layer < 0]
    tables = min(others.count(table), 1 if found["tied"] else 2)
    for _ in range(tables):
        others.remove(table)
    layers = [tuple(shape for shape, at in parameters if at == layer) for layer in range(found["layers"])]
    costs = {name: Cost(*map(float, parts)) for name, parts in found["costs"].items()}
    return ModelShape(
        model_type=found["model_type"],
        layers=found["layers"],
        hidden=found["hidden"],
        heads=found["heads"],
        kv_heads=found["heads"],
        head_dim=max(1, found["hidden"] // found["heads"]),
        ffn=found["hidden"],
        vocab=found["vocab"],
        max_positions=found["positions"] or UNLIMITED,
        gated_mlp=False,
        tied_head=tables < 2,
        query_bias=False,
        output_bias=False,
        mlp_bias=False,
        trace=Trace(
            layers=tuple(layers),
            others=tuple(others),
            expert_parameters=found["expert_parameters"],
            active_experts=found["active_experts"],
            own_logits=found["own_logits"],
            **costs,
        ),
    )
