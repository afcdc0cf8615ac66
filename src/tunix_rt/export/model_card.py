"""The model card of a run: every figure is read from its files. For people; nothing parses it but the hub its first lines."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from tunix_rt import __version__
from tunix_rt.errors import InputError
from tunix_rt.evaluate.report import table
from tunix_rt.export.origin import PROOF
from tunix_rt.models.secrets import redacted
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.schemas import Commitment, Result

COMMIT = re.compile(r"[0-9a-f]{40}")
BEFORE_EXPORT = "Of the final model in the run, before its export to the files below.\n\n"
PRETRAINED = "This page is made from the files of the run. The licences of the base model and of the data apply."
ANOTHER_STEP = "The run evaluated its final model; this is another checkpoint of it, which has no scores."
RANDOM = "**Its weights were drawn at random before training, not pretrained.** " + PRETRAINED


def model_card(record: RunRecord, name: str, files: Mapping[str, str], *, scored: bool) -> str:
    """The Markdown text, with metadata for the hub. `files` are the names and SHA-256 of what is uploaded; `scored` if the run
    evaluated this model."""
    facts, result, config = record.commitment, record.result, record.config
    if facts is None or result is None or config is None:
        problem = next((one for problems in record.problems.values() for one in problems), "a file is missing")
        raise InputError(f"{record.root}: no model card without the facts of the run: {problem}", fix="train it again")
    base, pretrained = facts.base_model, facts.base_model.weights == "pretrained"
    metadata: dict[str, Any] = {"pipeline_tag": "text-generation", "tags": ["tunix-rt"]}
    if any(file.endswith(".safetensors") for file in files):  # not of a GGUF file
        metadata["library_name"] = "peft" if "adapter_config.json" in files else "transformers"
    if pretrained and COMMIT.fullmatch(base.revision):  # on the hub
        metadata["base_model"] = base.name
    settings = json.dumps(config.training.model_dump(mode="json", exclude_defaults=True), indent=2)
    return redacted(
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {name.rpartition('/')[2]}\n\n"
        f"{_code(base.name)} trained on {_code(facts.dataset.key)} with tunix-rt {__version__}. "
        f"{PRETRAINED if pretrained else RANDOM}\n\n## Scores\n\n{_scores(record, files) if scored else ANOTHER_STEP}\n\n"
        f"## Training\n\n{_table(('', ''), _training(record, facts, result))}\n\n"
        f"Settings other than the defaults:\n\n```json\n{settings}\n```\n\n"
        f"## Files\n\n{_table(('file', 'SHA-256'), [(_code(file), _code(files[file])) for file in sorted(files)])}\n"
    )


def _code(text: Any) -> str:
    return f"`{re.sub('[`|]', '?', ' '.join(str(text).split()))}`"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))


def _scores(record: RunRecord, files: Mapping[str, str]) -> str:
    before, after, summary = record.scores("before"), record.scores("after"), record.summary
    if before is None or after is None or summary is None:
        return "The run has no answers before and after training."
    columns = (_code(summary.evalset), "questions", "before", "after", "gain, points")
    return BEFORE_EXPORT * (PROOF in files) + _table(columns, [row.cells for row in table(before, after)[:3]])


def _training(record: RunRecord, facts: Commitment, result: Result) -> Iterator[tuple[str, str]]:
    data, heldout = facts.dataset, record.heldout
    yield "optimizer steps, final loss", f"{result.steps_completed:,}, {result.final_loss:.4f}"
    if heldout:
        yield "held-out loss, before and after", f"{heldout[0].loss:.4f}, {heldout[-1].loss:.4f}"
    yield "traces, and held out", f"{data.traces:,}, {data.heldout_traces:,}"
    yield "SHA-256 of the data", _code(data.sha256)
    yield from (("data of the hub", _code(f"{key} at commit {commit}")) for key, commit in (data.commits or {}).items())
    yield "base model", _code(f"{facts.base_model.name}@{facts.base_model.revision}")
    yield "device, seconds", f"{_code(facts.device)}, {result.seconds:,.0f}"
    yield "reloaded by transformers", "equal" if (result.final_model or {}).get("proven") else "not checked"
    yield "hash of all settings", _code(facts.config_sha256)
