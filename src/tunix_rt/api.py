"""tunix-rt from Python: what the verbs `plan`, `train`, `evaluate` and `verify` compute, as objects.

    from tunix_rt.api import plan, train

Neither torch nor jax is imported before something is trained or generated. Errors are those of `tunix_rt.errors`, with a problem
and a fix; nothing is printed.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import TunixError

if TYPE_CHECKING:
    from tunix_rt.engines.base import Step
    from tunix_rt.evaluate.comparison import Comparison
    from tunix_rt.evidence.facts import Level, Verdict
    from tunix_rt.evidence.verify import Options
    from tunix_rt.inference import Evaluation
    from tunix_rt.plan.answer import Answer
    from tunix_rt.runs.record import RunRecord
    from tunix_rt.scoring.score import Scores

__all__ = ["TrainedRun", "configured", "evaluate", "plan", "train", "verify"]

Source = RunConfig | Mapping[str, Any] | str | os.PathLike[str]
"""A configuration: settings in sections, the path of a YAML file, or the name of a shipped one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A completed run."""

    folder: Path
    scores: Mapping[str, "Scores"]
    """`before` and `after` training; empty where nothing was evaluated."""
    comparison: "Comparison | None"

    @property
    def record(self) -> "RunRecord":
        """Every recorded fact: `record.result`, `record.metrics`, `record.config` and so on."""
        from tunix_rt.runs.record import RunRecord

        return RunRecord(self.folder)


def configured(config: Source, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """`config` with `settings` (`{"training.max_steps": 5}`) over it. A ConfigError lists every mistake."""
    from tunix_rt.config.load import build_config, find_config, load_config, modernise

    if not isinstance(config, RunConfig | Mapping):
        config = load_config(find_config(os.fspath(config)))
    raw = config.model_dump(exclude_unset=True) if isinstance(config, RunConfig) else modernise(config, "configuration")
    nested: dict[str, dict[str, Any]] = {}
    for name, value in (settings or {}).items():
        section, _, leaf = name.rpartition(".")
        nested.setdefault(section, {})[leaf] = value
    for section, inner in modernise(nested.pop("", {}) | nested, "settings").items():
        raw[section] = {**raw.get(section, {}), **inner}
    return build_config(raw, "configuration")


def plan(config: Source, *, on: str | None = None, settings: Mapping[str, Any] | None = None) -> "Answer":
    """The plan of `tunix-rt plan`: `answer.outlook.fit.fits`, `answer.outlook.plan.peak_bytes`. A run that does not fit is no
    error. `on` names a device as `--on` does; None is this computer."""
    from tunix_rt.doctor.probe import gather_facts
    from tunix_rt.plan.answer import PlanTarget, answer, refuse_engine, refuse_unrunnable
    from tunix_rt.plan.target import target_named
    from tunix_rt.train.plan_inputs import find_architecture, target_of_facts

    wanted = configured(config, settings)
    refuse_unrunnable(wanted)
    if on is None:
        target = target_of_facts(gather_facts(), wanted)
    else:
        target = PlanTarget(target=target_named(on))
        refuse_engine(target.target, wanted)
    source, shape = find_architecture(wanted)
    return answer(wanted, target, model=source.name, shape=shape)


def train(
    config: Source,
    output: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    on_step: "Callable[[Step], None] | None" = None,
) -> TrainedRun:
    """The whole pipeline into the folder `output`, verified as by `tunix-rt train`.

    `on_step` gets every step after its line is in `metrics.jsonl`. An exception in it ends the run as failed; the checkpoints
    stay, and `resume` continues it. Signals are listened for, so it runs in the main thread."""
    from tunix_rt.evidence.examine import require_verified
    from tunix_rt.pipeline import run_pipeline

    if threading.current_thread() is not threading.main_thread():
        raise TunixError("train() is called in a thread", fix="call it in the main thread, or start `tunix-rt train`")
    given = dict(settings or {}) | ({"training.resume_from_checkpoint": "auto"} if resume else {})
    found = run_pipeline(
        configured(config, given), Path(output), progress=_no_progress, verify=require_verified, stop_after=stop_after,
        on_step=on_step or _no_callback,
    )  # fmt: skip
    return TrainedRun(folder=Path(output), scores=found.scores, comparison=found.comparison)


def evaluate(
    model: str | os.PathLike[str],
    *,
    evalset: str | None = None,
    against: str | None = None,
    output: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    weights: str = "pretrained",
    batch_size: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> "Evaluation":
    """The answers and scores of `tunix-rt evaluate`: `evaluation.scores[-1].accuracy`, `evaluation.comparison`. Without
    `evalset`, the questions of the run `model`."""
    from tunix_rt.evaluate.evalsets import evalset_of_run, load_evalset
    from tunix_rt.inference import evaluate_models, model_spec

    name = os.fspath(model)
    spec = model_spec(name)
    questions = (
        load_evalset(evalset, limit=limit, seed=seed) if evalset else evalset_of_run(name, limit=limit, seed=seed)
    )
    return evaluate_models(
        spec, model_spec(against) if against else None, questions, output=Path(output) if output else None, device=device,
        dtype=dtype, weights=weights, batch_size=batch_size, progress=_no_progress, temperature=temperature, top_p=top_p,
        seed=seed, max_new_tokens=max_new_tokens or spec.max_new_tokens, max_seconds=None,
    )  # fmt: skip


def verify(folder: str | os.PathLike[str], *, require: "Level" = "L1", options: "Options | None" = None) -> "Verdict":
    """The verdict of `tunix-rt evidence verify`: a level, claims and findings. A bundle that does not verify is no error."""
    from tunix_rt.evidence.verify import verify as verify_folder

    return verify_folder(Path(folder), require, options)


def _no_progress(*_: Any) -> None:
    return None


def _no_callback(step: "Step") -> None:
    return None


logging.getLogger("tunix_rt").addHandler(logging.NullHandler())  # a program that configures no logging sees no lines
