"""What a folder says of its answers beside them: settings, hashes, the summary; and where two tellings differ."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.backends.decoding import Decoding
from tunix_rt.errors import TunixError
from tunix_rt.evaluate.report import NAMES
from tunix_rt.evaluate.score import TAGS, Tags
from tunix_rt.evidence.doubtful import parse_object, read_bytes, shown
from tunix_rt.evidence.source import source_hash
from tunix_rt.rundir import RunDir, to_plain
from tunix_rt.strict_yaml import read_yaml

OLDER_SCHEMA = "tunix-rt/scores/1"
WITH_SUMMARY = "evaluate/summary.py"
"""A source that has this file writes scores of the newer schema, and `eval_summary.json`."""
OF_EVALUATION = ("base", "answers")


def is_evaluation(run: RunDir) -> bool:
    """Whether the folder is the `--output` of `tunix-rt evaluate`: answers, and nothing of a run."""
    of_run = (run.precommit, run.metrics, run.result, run.config)
    return os.path.exists(run.predictions("answers")) and not any(map(os.path.lexists, of_run))


@dataclass(frozen=True, kw_only=True)
class Told:
    """The files of a folder beside its answers, read when they are needed; one that cannot be read is empty."""

    run: RunDir

    @cached_property
    def alone(self) -> bool:
        return is_evaluation(self.run)

    @property
    def whens(self) -> tuple[str, str]:
        return OF_EVALUATION if self.alone else NAMES

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            found = read_yaml(self.run.config) if os.path.isfile(self.run.config) else {}
        except TunixError:
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def precommit(self) -> dict[str, Any]:
        return object_in(self.run.precommit)

    @cached_property
    def result(self) -> dict[str, Any]:
        return object_in(self.run.result)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return object_in(self.run.eval_summary)

    @property
    def whole(self) -> bool:
        """Whether nothing may lack: the run says that it completed, or there is no run."""
        return self.alone or self.result.get("status") == "completed"

    @property
    def has_summary(self) -> bool:
        """Whether what made it writes one. A run names its source by hash, so that it cannot pass for an older one."""
        return WITH_SUMMARY in part(self.precommit, "source_files") or any(
            object_in(self.run.scores(when)).get("schema") != OLDER_SCHEMA for when in self.whens
        )

    @property
    def tags(self) -> Tags:
        """As the run was set, or as an evaluation says that it asked."""
        return tags_in(part(self.summary, "decoding") if self.alone else part(self.config, "data"))


def tags_in(settings: Mapping[str, Any]) -> Tags:
    """As the `data` of a configuration or the `decoding` of a summary names them; one that is not named is our own."""
    reasoning, answer = settings.get("reasoning_tag"), settings.get("answer_tag")
    return Tags(
        reasoning=reasoning if isinstance(reasoning, str) and reasoning else TAGS.reasoning,
        answer=answer if isinstance(answer, str) and answer else TAGS.answer,
    )


def object_in(path: Path) -> dict[str, Any]:
    found = parse_object(read_bytes(path)[0] or b"")
    return found if isinstance(found, dict) else {}


def part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def run_facts(told: Told) -> dict[str, Any]:
    """How the model was asked, by the settings and hashes that the run committed to."""
    model, training = part(told.config, "model"), part(told.config, "training")
    evalset = part(told.precommit, "evalset")
    named = {"evalset": evalset.get("key"), "evalset_sha256": evalset.get("sha256")} if evalset else {}
    asked = Decoding(
        max_new_tokens=part(told.config, "evaluation").get("max_new_tokens", 0), closing=f"</{told.tags.answer}>"
    )
    style = part(told.summary, "decoding").get("style")  # of the chat template, which no file of the run has
    rows = told.summary.get("rows")
    return {
        **({"rows": rows} if type(rows) is int else {}),  # answered at once: as many as there was memory for
        "models": [model.get("model_name_or_path")],
        "weights": model.get("weights"),
        **(named or {"evalset": "held out"}),
        "device": told.precommit.get("device"),
        "dtype": training.get("dtype"),
        "decoding": {
            **asked.settings(),
            "reasoning_tag": told.tags.reasoning,
            "answer_tag": told.tags.answer,
            "style": style if isinstance(style, str) and style else "a hash",
            "tokenizer": told.precommit.get("tokenizer_sha256"),
        },
    }


def evaluation_facts(summary: Mapping[str, Any], sides: int) -> dict[str, Any]:
    """Nothing else in the folder tells them, so they need only be there: whoever doubts them asks again."""
    computed = ("schema", "questions", "comparison", *OF_EVALUATION)
    told = {name: value for name, value in _plain(summary).items() if name not in computed}
    models, decoding = summary.get("models"), _plain(part(summary, "decoding"))
    known = isinstance(models, list) and len(models) == sides and all(isinstance(one, str) for one in models)
    return {
        **dict.fromkeys(("weights", "evalset", "evalset_sha256", "device", "dtype"), "a text"),
        **told,
        "models": models if known else [f"{sides} name(s)"],
        "decoding": dict.fromkeys(("max_new_tokens", "temperature", "reasoning_tag", "answer_tag"), "a setting")
        | decoding,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, str | int | float) and value != ""}


def other_version(told: Told) -> list[str]:
    """What to do about problems that another version may account for, where it judges by other files."""
    made_by = part(told.precommit, "source_files")
    if not made_by:
        return []
    ours = source_hash(Path(tunix_rt.__file__).parent)[1]
    if all(made_by.get(name) == ours[name] for name in ours if name.startswith("evaluate/")):
        return []
    return [
        "the rules of this version may judge otherwise than those of the run: check with the version that wrote it, "
        f"precommit.json names it (source_sha256 {shown(told.precommit.get('source_sha256'))})"
    ]


def differences(
    file: str, told: Mapping[str, Any], given: Mapping[str, Any], source: str, *, to_the_bit: bool = True
) -> list[str]:
    """Figure by figure, where `told` in `file` is not what `source` gives; and what nothing gives."""
    said, wanted = flat(told), flat(given)
    problems = []
    for name, value in wanted.items():
        found = said.get(name, MISSING)
        if found is MISSING:
            problems.append(f"{file}: {name} is missing, {source} give {shown(value)}")
        elif type(found) is not type(value) or (
            not _is_same(found, value) and (to_the_bit or not _is_close(found, value))
        ):
            differs = f"is {shown(found)}, {source} give {shown(value)}"
            problems.append(
                f"{file}: {name} {differs if shown(found) != shown(value) else f'is not what {source} give'}"
            )
    problems += [f"{file}: {shown(name)} is said by no file" for name in sorted(said.keys() - wanted.keys())]
    if not problems and to_the_bit and told != given:  # the same names, nested otherwise
        problems.append(f"{file}: not in the shape that tunix-rt writes")
    return problems


def _is_same(found: Any, value: Any) -> bool:
    """Equal, and of floats the same bits: -0.0 is equal to 0.0."""
    return bool(found == value and (not isinstance(found, float) or found.hex() == value.hex()))


def _is_close(found: Any, value: Any) -> bool:
    """Roots and logarithms differ in the last bits between mathematical libraries."""
    return isinstance(found, float) and math.isclose(found, value, rel_tol=1e-9, abs_tol=1e-12)


def flat(values: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value and len(before) < 100  # deeper than anything we write
        found |= flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return found


def as_json(value: Any) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(to_plain(value)))
    return plain
