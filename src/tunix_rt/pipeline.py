"""One run from configuration to verified folder: doctor, plan, data, train with an evaluation before and after, evidence."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tunix_rt
from tunix_rt.config.capabilities import refuse_unsupported
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import dump_yaml
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.facts import Facts
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Step
from tunix_rt.export.export import check_final_model, export_final
from tunix_rt.models.secrets import refuse_addresses, refuse_secrets
from tunix_rt.progress import Progress, close_displays, duration
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import RunJournal
from tunix_rt.storage import storage, write_text
from tunix_rt.train.commitment import settled_config
from tunix_rt.train.context import Options
from tunix_rt.train.device import check_kernels, settle_device
from tunix_rt.train.evaluation import (
    Evaluation,
    evaluate_after,
    evaluate_before,
    open_evaluation,
    samples_during_training,
)
from tunix_rt.train.hosts import all_hosts
from tunix_rt.train.loop import load_run, train_run
from tunix_rt.train.memory_report import explaining_oom, report_memory
from tunix_rt.train.preemption import Preemption
from tunix_rt.train.preflight import commit_run, load_to_try, plan_at_max_length, prepare_data, require_peft
from tunix_rt.train.ranks import Ranks, announce_run, ranks_of, record_ranks
from tunix_rt.train.resume import earlier_answering_seconds, refuse_occupied
from tunix_rt.train.trackers import require_trackers, tracked

logger = logging.getLogger(__name__)


def run_pipeline(
    config: RunConfig,
    output: Path,
    *,
    progress: Progress,
    profile: int = 0,
    oom_attempt: bool = False,
    stop_after: int | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    verify: Callable[[Path], None] = lambda folder: None,
) -> Evaluation:
    """Run everything into the folder `output`. Errors after the folder is opened are written to `result.json`, then raised.

    `profile` steps are profiled; no result depends on it. An `oom_attempt` trains even if the plan predicts that the run does
    not fit. After step `stop_after` the run stops as on SIGTERM. `on_step` is called after every step. A completed run in which
    `verify` raises is failed."""
    require_runnable(config)
    refuse_unsupported(config.training, profile_steps=profile, implementation=config.model.implementation)
    refuse_addresses(config.model_dump())
    refuse_secrets(config.model_dump())
    options = Options(progress=progress, profile=profile, oom_attempt=oom_attempt, on_step=on_step)
    with (
        ranks_of(config, profile=profile) as ranks,
        open_run(config, RunDir(output), stop_after) as (began, journal, stop),
    ):
        journal.verify, ranks.stop = verify, stop
        return run_stages(began, journal, stop, options, ranks)


@contextmanager
def open_run(
    config: RunConfig, run: RunDir, stop_after: int | None
) -> Iterator[tuple[RunConfig, RunJournal, Preemption]]:
    """Lock the folder, listen for signals, log, and write the result however the run ends. The configuration is the one that a
    resumed run began with."""
    training = config.training
    with run.locked():
        run.refuse_links()
        stop = Preemption(grace_seconds=training.grace_seconds, time_budget=training.time_budget, after_step=stop_after)
        with storage(run.root):
            began, continued, extensions = refuse_occupied(run, config)
        journal = RunJournal(run=run, continued=continued, extensions=extensions, ending=stop.ending)
        stop.on_forced_exit += [lambda error: close_displays(), journal.end_now]  # called last first
        with journal.logged(), stop.listening(), journal.ended():
            yield began, journal, stop


def run_stages(config: RunConfig, journal: RunJournal, stop: Preemption, options: Options, ranks: Ranks) -> Evaluation:
    """The stages in order. Each takes and returns plain values, and writes only into the run folder."""
    begin(config, journal, stop)
    # doctor
    facts, own_devices = settle_device(journal, config)
    stop.check(stop.saved_state(), starting=True)
    with all_hosts(config, stop, facts, own_devices) as device:
        return run_on(config, journal, stop, options, facts, device, ranks)


def run_on(
    config: RunConfig, journal: RunJournal, stop: Preemption, options: Options, facts: Facts, device: DeviceChoice, ranks: Ranks,
) -> Evaluation:  # fmt: skip
    """The stages on `device`, that of all processes of the run."""
    # plan
    draft = plan_at_max_length(journal, config, device, attempt=options.oom_attempt)
    gpus = check_kernels(journal, draft.committed, draft.model, draft.shape, facts, device)
    stop.check(stop.saved_state(), starting=True)
    # data; a model of an unknown family is loaded before, to see whether its rows may be packed
    loaded, draft = load_to_try(journal, draft, device, stop, options)
    tokenizer, data = prepare_data(journal, draft, stop, options)
    context = commit_run(journal, draft, device, gpus, tokenizer, data, stop, options)
    announce_run(ranks, context)
    # train and evaluate
    engine, metrics = load_run(context, loaded)
    record_ranks(ranks, context, engine)
    evaluation = open_evaluation(context)
    with tracked(config, journal.run) as trackers, explaining_oom(context, engine):
        evaluate_before(context, engine, evaluation)
        trackers.scores(0, evaluation.scores.get("before"))
        journal.training_began = True  # an error from here on is a failure, not a refusal
        sample = samples_during_training(context, engine, evaluation.questions)
        speed = train_run(context, engine, metrics, sample, trackers)
        if speed:
            logger.info("Trained at %s tokens/s", f"{speed:,.0f}")
        export_final(context, engine)
        evaluate_after(context, engine, evaluation)
        trackers.scores(journal.result.steps_completed or 0, evaluation.scores.get("after"))
        check_final_model(context, engine)
        record_ranks(ranks, context, engine)
    report_memory(context)  # evidence: on leaving `open_run`, the journal writes result.json and SHA256SUMS
    return evaluation


def begin(config: RunConfig, journal: RunJournal, stop: Preemption) -> None:
    """Log the start, and make the checks that need no facts about the computer."""
    run, training = journal.run, config.training
    logger.info("tunix-rt %s, run folder %s", tunix_rt.__version__, run.root)
    if training.time_budget is not None:
        logger.info("Time budget: %s, counted from the start of the program", duration(training.time_budget))
    require_trackers(config)
    require_peft(config)
    if journal.continued:
        journal.result.answering_seconds = earlier_answering_seconds(run)
        return
    if training.resume_from_checkpoint is not None:
        logger.info("No run in %s yet: starting at step 0", run.root)
    stop.saved_state = lambda: "nothing was trained yet"
    write_text(run.config, dump_yaml(settled_config(config)))
