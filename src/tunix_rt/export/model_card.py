"""The model card of a run: every figure is read from its files. For people; nothing parses it but the hub its first lines."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tunix_rt import __version__
from tunix_rt.errors import InputError
from tunix_rt.evaluate.report import table
from tunix_rt.models.secrets import redacted
from tunix_rt.runs.record import RunRecord

COMMIT = re.compile(r"[0-9a-f]{40}")
RANDOM = "**Random weights: this model was not trained from the pretrained one, and its answers are no measure of it.**"
COLUMNS = ("measure", "questions", "before", "after", "gain, points")


def model_card(record: RunRecord, name: str, files: Mapping[str, str]) -> str:
    """The Markdown text, with metadata for the hub. `files` are the names and SHA-256 of what is uploaded."""
    facts, result, config = record.commitment, record.result, record.config
    if facts is None or result is None or config is None:
        problem = next((one for problems in record.problems.values() for one in problems), "result.json is missing")
        raise InputError(f"{record.root}: no model card without the facts of the run: {problem}", fix="train it again")
    base, data = facts.base_model, facts.dataset
    on_hub = COMMIT.fullmatch(base.revision)
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tunix-rt"]}
    metadata |= {"base_model": base.name} if on_hub and base.weights == "pretrained" else {}
    settings = config.training.model_dump(mode="json", exclude_defaults=True)
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {name.rpartition('/')[2]}",
        f"{_code(base.name)} trained on {_code(data.key)} with [tunix-rt](https://pypi.org/project/tunix-rt/) {__version__}. "
        "This page is made from the files of the run. The licences of the base model and of the data apply.",
        *([RANDOM] if base.weights == "random" else []),
        "## Scores",
        "\n".join(_scores(record)),
        "## Training",
        _table(("", ""), _training(record)),
        "Settings other than the defaults:\n\n```json\n" + json.dumps(settings, indent=2) + "\n```",
        "## Files",
        _table(("file", "SHA-256"), [(_code(file), _code(sha256)) for file, sha256 in sorted(files.items())]),
    ]
    return redacted("\n\n".join(parts) + "\n")


def _code(text: Any) -> str:
    return f"`{re.sub('[`|]', '?', ' '.join(str(text).split()))}`"


def _table(columns: tuple[str, ...], rows: Any) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))


def _scores(record: RunRecord) -> Iterator[str]:
    before, after = record.scores("before"), record.scores("after")
    if before is None or after is None:
        yield "The run has no answers before and after training."
        return
    summary = record.summary
    yield f"Greedy or as recorded, on {_code(summary.evalset if summary else 'its eval set')}.\n"
    yield _table(COLUMNS, [row.cells for row in table(before, after)[:3]])


def _training(record: RunRecord) -> Iterator[tuple[str, str]]:
    facts, result = record.commitment, record.result
    if facts is None or result is None:
        return
    data, heldout = facts.dataset, record.heldout
    yield "optimizer steps", f"{result.steps_completed:,}"
    yield "final loss", f"{result.final_loss:.4f}"
    if heldout:
        yield (
            "held-out loss",
            f"{heldout[0].loss:.4f} at step {heldout[0].step}, {heldout[-1].loss:.4f} at step {heldout[-1].step}",
        )
    yield "traces", f"{data.traces:,}, and {data.heldout_traces:,} held out"
    yield "SHA-256 of the data", _code(data.sha256)
    yield "base model", _code(f"{facts.base_model.name}@{facts.base_model.revision}")
    yield "device", f"{_code(facts.device)}, {result.seconds:,.0f} s"
    yield (
        "versions",
        ", ".join(
            f"{_code(name)} {_code(version)}" for name, version in facts.versions.items() if isinstance(version, str)
        ),
    )
    yield (
        "reloaded by transformers in a fresh process",
        "equal" if (result.final_model or {}).get("proven") else "not checked",
    )
    yield "hash of all settings", _code(facts.config_sha256)
