"""What a run commits to before its first step: configuration, source, data, eval set, base model, seeds; by hash."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.config import RunConfig, dump_yaml
from tunix_rt.data.prepare import Prepared
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.errors import ConfigError
from tunix_rt.evidence.source import source_hash
from tunix_rt.models import ModelSource
from tunix_rt.rundir import sha256_file, sha256_text

SCHEMA = "tunix-rt/precommit/1"


def settled_config(config: RunConfig) -> RunConfig:
    """The configuration without `resume_from_checkpoint`: a run and its continuation are one run."""
    training = config.training.model_copy(update={"resume_from_checkpoint": None})
    return config.model_copy(update={"training": training})


def build_precommit(config: RunConfig, model: ModelSource, tokenizer: Tokenizer, data: Prepared) -> dict[str, Any]:
    """Everything that determines the run. The same inputs give the same values, but for `created`."""
    source_sha256, source_files = source_hash(Path(tunix_rt.__file__).parent)
    seeds = {"seed": config.training.seed, "data_seed": _data_seed(config)}
    committed: dict[str, Any] = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": tunix_rt.__version__,
        "config_sha256": sha256_text(dump_yaml(settled_config(config))),
        "source_sha256": source_sha256,
        "source_files": source_files,
        "dataset": {
            "key": data.dataset.key,
            "sha256": data.dataset.sha256,
            "traces": data.traces,
            "heldout_traces": data.heldout_traces,
            "rows": len(data.rows),
            "rows_sha256": data.sha256,
        },
        "base_model": {
            "name": model.name,
            "revision": model.revision,
            "weights": model.weights,
            "files": {path.name: sha256_file(path) for path in _model_files(model)},
        },
        "tokenizer_sha256": tokenizer.sha256,
        "seeds": seeds,
    }
    if data.evalset is not None:
        committed["evalset"] = {"key": data.evalset.key, "sha256": data.evalset.sha256, "items": len(data.items)}
    return committed


def refuse_another_run(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """A run may only be continued as itself: names what differs otherwise."""
    skip = {"created", "source_files"}
    changed = sorted(key for key in before.keys() | now.keys() if key not in skip and before.get(key) != now.get(key))
    if changed:
        raise ConfigError(
            f"{folder} holds another run: {', '.join(changed)} differ(s) from its precommit.json",
            fix="continue it with the configuration, data, model and version it began with, or choose another --output",
        )


def _model_files(model: ModelSource) -> list[Path]:
    weights = model.weight_files() if model.weights == "pretrained" else []
    return [model.folder / "config.json", *weights]


def _data_seed(config: RunConfig) -> int:
    return config.training.seed if config.training.data_seed is None else config.training.data_seed
