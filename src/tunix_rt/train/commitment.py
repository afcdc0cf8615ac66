"""What a run commits to before its first step: configuration, source, data, eval set, base model by hash; seeds, device,
versions by name."""

import logging
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import tunix_rt
from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.load import SETTINGS, dump_yaml, quoted, with_settings
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.config.strict_yaml import read_yaml
from tunix_rt.data.prepare import Prepared
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.doctor.packages import version_of
from tunix_rt.engines.base import NUMERICS
from tunix_rt.errors import ConfigError, InputError, TunixError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.progress import phase
from tunix_rt.runs.folder import FORMAT, RunDir
from tunix_rt.runs.journal import RunJournal
from tunix_rt.runs.ledger import has_rows
from tunix_rt.runs.schemas import Batch, Commitment, problems_of
from tunix_rt.runs.source import package_hash
from tunix_rt.storage import (
    json_text,
    read_json,
    sha256_file,
    sha256_text,
    to_plain,
    write_json,
    write_lines,
    write_text,
)

logger = logging.getLogger(__name__)

SCHEMA = "tunix-rt/precommit/1"
COMPUTING = {"torch": ("torch", "transformers"), "jax": ("jax", "jaxlib")}
"""Packages whose versions decide what an engine computes."""


def settled_config(config: RunConfig) -> RunConfig:
    """The configuration without what may differ between the processes of one run: whether it is a continuation, how long
    a process may take, how long it may take to end, and how much of the device it may take."""
    free = ("resume_from_checkpoint", "time_budget", "grace_seconds", "memory_limit_gib")
    training = config.training.model_copy(update={name: Training.model_fields[name].default for name in free})
    return config.model_copy(update={"training": training})


@phase("hash the inputs")
def build_precommit(
    config: RunConfig,
    model: ModelSource,
    tokenizer: Tokenizer,
    data: Prepared,
    *,
    device: str,
    batch: Batch | None = None,
    fitting: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that determines the run. The same inputs give the same values, but for `created`. `batch` belongs to a run
    over several devices, that of a continued one to how it began; so does `fitting`, what `memory: auto` settled on."""
    source_sha256, source_files = package_hash(Path(tunix_rt.__file__).parent)
    seeds = {"seed": config.training.seed, "data_seed": config.training.resolved_data_seed}
    committed: dict[str, Any] = {
        "schema": SCHEMA,
        "format": FORMAT,
        "numerics": NUMERICS[config.training.backend],
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": _versions(config.training.backend),
        "config_sha256": config_hash(config),
        "source_sha256": source_sha256,
        "source_files": source_files,
        "dataset": _dataset_facts(data),
        "base_model": {
            "name": model.name,
            "revision": model.revision,
            "weights": model.weights,
            "files": model_hashes(model),
        },
        "tokenizer_sha256": tokenizer.sha256,
        "seeds": seeds,
    }
    if batch is not None and (CAPABILITIES[config.training.backend].multi_device or batch.devices > 1):
        committed["batch"] = {"rows": batch.rows, "devices": batch.devices}
    if fitting is not None:
        committed["fitting"] = fitting
    if model.converted_from is not None:
        committed["base_model"]["converted_from"] = model.converted_from
    if data.evalset is not None:
        committed["evalset"] = {"key": data.evalset.key, "sha256": data.evalset.sha256, "items": len(data.items)}
    _require_readable(committed)
    return committed


def _dataset_facts(data: Prepared) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "key": data.dataset.key,
        "sha256": data.dataset.sha256,
        "traces": data.traces,
        "heldout_traces": data.heldout_traces,
        "rows": len(data.rows),
        "format": data.format,
        "template": data.style.template.name,
        "style_sha256": data.style.sha256,
        "merkle_root": data.merkle_root,
    }
    if data.mixture:
        facts["mixture"] = to_plain(data.mixture)
    if data.style.template.today is not None:
        facts["today"] = data.style.template.today.isoformat()
    if data.skipped:
        facts["skipped"] = data.skipped
    out = data.heldout_from
    if commits := {**data.dataset.commits, **(out.dataset.commits if out else {})}:
        facts["commits"] = commits
    if out is not None:
        facts["validation"] = {"key": out.dataset.key, "sha256": out.dataset.sha256, "items": data.heldout_traces}
        if out.skipped:
            facts["validation"]["skipped"] = out.skipped
    return facts


def write_commitment(journal: RunJournal, committed: dict[str, Any], data: Prepared, config: RunConfig) -> None:
    """Write `rows.jsonl` and `precommit.json` before the first step, or hold a resumed run to those it wrote.

    The rows first: where a commitment exists, the rows it refers to exist too. Rows and settings have the committed hashes, so
    that a file that has not is written again."""
    run = journal.run
    if run.precommit.exists():
        before = read_precommit(run)
        refuse_another_run(before, committed, run.root)
        if before.get("source_sha256") != committed["source_sha256"]:
            journal.warn(f"resuming with another source of tunix-rt; numerics {committed['numerics']} is the same")
        if not has_rows(run.rows, data.row_facts):
            logger.warning("%s is missing or corrupt; writing it again from the committed rows", run.rows)
            journal.write(write_lines, run.rows, data.row_facts.lines())
        if not run.config.is_file() or sha256_file(run.config) != before["config_sha256"]:
            logger.warning("%s is missing or corrupt; writing it again from the committed settings", run.config)
            journal.write(write_text, run.config, dump_yaml(settled_config(config)))
    else:
        write_lines(run.rows, data.row_facts.lines())
        write_json(run.precommit, committed)
    journal.result.run_id = sha256_file(run.precommit)


def _require_readable(committed: dict[str, Any]) -> None:
    """Refuse before the first step what no reader of the run would accept: such as a model or dataset name with markup."""
    try:
        Commitment.model_validate_json(json_text(committed))
    except ValidationError as error:
        problem = "precommit.json cannot be written: " + "; ".join(problems_of(error))
        raise ConfigError(problem, fix="use a plain, shorter name or path") from error


def read_precommit(run: RunDir) -> dict[str, Any]:
    """What the run in that folder committed to."""
    committed = read_json(run.precommit)
    if not isinstance(committed, dict):
        raise TunixError(
            f"{run.precommit} is corrupt: a {type(committed).__name__}, not an object",
            fix="restore it from a copy, or choose another --output",
        )
    return committed


def began_on(committed: dict[str, Any]) -> date | None:
    """The date that a chat template renders; a resumed run keeps the first."""
    dataset = committed.get("dataset")
    written = dataset.get("today") if isinstance(dataset, dict) else None
    try:
        return date.fromisoformat(written) if isinstance(written, str) else None
    except ValueError:
        return None  # then the dataset is not the one committed to, and the run is refused for that


def batch_of_run(committed: dict[str, Any]) -> Batch | None:
    """The micro-batch that a run began with; None where it is missing, for which the run is refused."""
    try:
        return Batch.model_validate(committed.get("batch"))
    except ValidationError:
        return None


def fitting_of_run(committed: dict[str, Any]) -> dict[str, Any] | None:
    """What `memory: auto` chose when the run began; None where it was not set. A corrupt one
    ends the run: the settings of the steps taken are unknown."""
    fitting = committed.get("fitting")
    if fitting is None:
        return None
    chosen, written = (fitting.get(name) if isinstance(fitting, dict) else None for name in ("chosen", "written"))
    if isinstance(chosen, dict) and isinstance(written, dict) and chosen.keys() == written.keys() <= SETTINGS:
        return dict(fitting)
    raise TunixError(
        "precommit.json is corrupt: `fitting`, the choice of training.memory: auto, cannot be read",
        fix="restore it from a copy, or choose another --output",
    )


def as_it_began(committed: dict[str, Any], config: RunConfig) -> RunConfig:
    """`config` with what `memory: auto` and self-tests of the model chose when the run began. Where a setting is neither what
    was written then nor what was chosen, somebody has changed it: it stays, for `refuse_another_config` to name."""
    if (fitting := fitting_of_run(committed)) is None:
        return config
    auto = config.training.memory == "auto"
    chosen = {name: value for name, value in fitting["chosen"].items() if auto or name.startswith("data.")}
    if not chosen:
        return config
    now = {
        f"{section}.{name}": value for section, inner in config.model_dump().items() for name, value in inner.items()
    }
    written = fitting["written"]
    return with_settings(config, {name: value for name, value in chosen.items() if now[name] in (written[name], value)})


def config_hash(config: RunConfig) -> str:
    return sha256_text(dump_yaml(settled_config(config)))


def refuse_another_format(before: dict[str, Any], folder: Path) -> None:
    """A run of another format has files of another meaning: it cannot be resumed here."""
    if (found := before.get("format")) != FORMAT:
        named = f"format {found}" if type(found) is int else "no format"
        raise InputError(
            f"{folder}: precommit.json has {named}, this version of tunix-rt writes format {FORMAT}",
            fix="resume the run with the version of tunix-rt that began it, or choose another --output",
        )


def refuse_another_config(before: dict[str, Any], config: RunConfig, folder: Path) -> None:
    """The cheap half of `refuse_another_run`, before anything in the folder is touched.

    What `memory: auto` chose when the run began counts as given. A setting that an older config.yaml lacks is
    named only where it differs from its default.
    """
    config = as_it_began(before, config)
    if before.get("config_sha256") == config_hash(config):
        return
    path = RunDir(folder).config
    if not path.exists():
        raise TunixError(
            f"{folder} contains another run, or one without its config.yaml: the configuration differs from its precommit.json",
            fix="restore config.yaml from a copy, or choose another --output",
        )
    now, defaults = (one.model_dump(mode="json") for one in (settled_config(config), RunConfig()))
    then = {name: section for name, section in read_yaml(path).items() if isinstance(section, dict)}
    differing = [
        f"{section}.{name} is {_shown(value)}, {_shown(began)} in its config.yaml"
        for section, settings in now.items()
        for name, value in settings.items()
        if (began := then.get(section, {}).get(name, defaults[section][name])) != value
    ]
    raise ConfigError(
        f"{folder} contains another run: {'; '.join(differing) or 'the configuration differs from its config.yaml'}",
        fix="resume it with the settings it began with, or choose another --output",
    )


def _shown(value: object) -> str:
    return "not set" if value is None else quoted(value) if isinstance(value, str) else str(value)


def refuse_another_run(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """A run may only be resumed as itself: names what differs, such as `device` or `versions.torch`.

    Another source and version of tunix-rt may resume it: `numerics` is what decides the bits."""
    skip = {"created", "source_files", "source_sha256", "versions.tunix-rt", "dataset.commits"}  # its files have hashes
    then, today = ({k: v for k, v in _flat(one).items() if not skip & {k, k.split(".")[0]}} for one in (before, now))
    changed = sorted(key for key in then.keys() | today.keys() if then.get(key) != today.get(key))
    if changed:
        raise ConfigError(
            f"{folder} contains another run: {', '.join(changed)} differ(s) from its precommit.json",
            fix="resume it with the configuration, data, model, device and versions it began with, "
            "or choose another --output",
        )


def _flat(committed: dict[str, Any]) -> dict[str, Any]:
    """`committed` with the keys of its inner objects joined to their own: `versions.torch`."""
    flat: dict[str, Any] = {}
    for key, value in committed.items():
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _versions(backend: str) -> dict[str, str]:
    """Installed versions of the packages that compute, without importing them."""
    found = {name: version_of(name) or "not installed" for name in COMPUTING[backend]}
    return {"tunix-rt": tunix_rt.__version__, **found}


def model_hashes(model: ModelSource) -> dict[str, str]:
    """By name, of every file that decides the weights that training begins with."""
    weights = model.weight_files() if model.weights == "pretrained" else []
    return {path.name: sha256_file(path) for path in (model.folder / "config.json", *weights)}
