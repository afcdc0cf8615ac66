"""`tunix-rt train`: the whole pipeline from one configuration. And the scripts in training/ and training_pt/."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tunix_rt.cli.launch import Ranks, launch, without_launch
from tunix_rt.ranks import process_exit_code, world

MOST_RECORDED = 50
"""Steps of a profile: more than a million events of a large model."""
FLAGS = {
    "model": "model.model_name_or_path", "weights": "model.weights", "dataset": "data.dataset", "device": "training.device",
    "backend": "training.backend", "max_steps": "training.max_steps", "columns": "data.columns", "skip_bad": "data.skip_bad",
}  # fmt: skip
"""Flag -> setting."""
MAP = "OURS=THEIRS,..."
RESUME = "training.resume_from_checkpoint"


@click.command()
@click.argument("config", required=False)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.")
@click.option(
    "--model", help="Local folder, run, GGUF file, shipped model, hub id; or a preset, with --weights random."
)
@click.option(
    "--data", "--dataset", "dataset", multiple=True,
    help="Dataset key, file, folder, or dataset of the hub; may be repeated.",
)  # fmt: skip
@click.option("--map", "columns", multiple=True, metavar=MAP, help="Columns under other names; case never matters.")
@click.option("--skip-bad", is_flag=True, help="Leave out records that validation refuses, and count them.")
@click.option("--device", help="auto, cpu, cuda (gpu) or tpu.")
@click.option("--backend", help="torch or jax.")
@click.option("--weights", help="pretrained or random.")
@click.option("--max-steps", type=int, help="Optimizer steps.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
@click.option("--resume", is_flag=True, help="Continue the run in the output folder.")
@click.option(
    "--profile", type=click.IntRange(1, MOST_RECORDED), metavar="N", help="Profile N steps: where their time goes."
)
@click.option(
    "--stop-after", type=click.IntRange(min=1), metavar="STEP", help="Save that step and stop; --resume continues."
)
@click.option("--dry-run", is_flag=True, help="Check settings, folder, data and memory, and train nothing.")
@click.option("--on", metavar="NAME", help="With --dry-run: another device, as of `tunix-rt plan --on`.")
@click.option("--allow-oom-attempt", is_flag=True, help="Start a run that is predicted not to fit.")
@click.option("--nproc", type=Ranks(), metavar="N|gpu", help="Train on N processes, one for each GPU, by torchrun.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="With --nproc: resume as often after a crash.",
)
@click.option("--json", "as_json", is_flag=True, help="Print result.json, or the checks, to standard output.")
def train(
    config: str | None, output: Path | None, overrides: tuple[str, ...], resume: bool, as_json: bool, nproc: str | None,
    max_restarts: int, **named: Any,
) -> None:  # fmt: skip
    """Run doctor, plan, data, train, evaluate and evidence on CONFIG (a YAML file or the name of a shipped one)."""
    from tunix_rt.cli.convert import show_conversion
    from tunix_rt.config.load import find_config, load_config

    named |= data_flags(named)
    if output is None and not named["dry_run"]:
        here = click.get_current_context()
        raise click.MissingParameter(ctx=here, param=next(one for one in here.command.params if one.name == "output"))
    resume = resume or world().restarts > 0  # torchrun has started the same command again
    flags = {setting: named[flag] for flag, setting in FLAGS.items()} | {RESUME: "auto" if resume else None}
    path = find_config(config) if config else None
    settled = load_config(path, overrides=overrides, flags=flags, report=show_conversion)
    if named["dry_run"]:
        from tunix_rt.cli.dry_run import check_and_show

        return check_and_show(settled, output, named["on"], as_json=as_json)
    if named["on"]:
        raise click.UsageError("--on names a device for --dry-run; a run trains on this computer")
    if max_restarts and nproc is None:
        raise click.UsageError("--max-restarts is for --nproc; a run that crashed continues with --resume")
    if nproc is not None:
        here = click.get_current_context()
        here.exit(launch(without_launch(sys.argv[1:]), nproc, max_restarts, settled.training.grace_seconds))
    assert output is not None
    run_and_show(
        settled, output, as_json=as_json, profile=named["profile"] or 0, oom_attempt=named["allow_oom_attempt"],
        stop_after=named["stop_after"],
    )  # fmt: skip


def data_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """`--data`, `--map` and `--skip-bad` as settings; None where they are not given."""
    pairs = [pair.partition("=") for text in given["columns"] for pair in text.split(",")]
    if wrong := [own for own, equals, theirs in pairs if not (own.strip() and equals and theirs.strip())]:
        raise click.UsageError(f"--map {wrong[0]!r}: write --map question=Problem,answer=Solution")
    columns = {own.strip(): theirs.strip() for own, _, theirs in pairs}
    return {"dataset": given["dataset"] or None, "columns": columns or None, "skip_bad": given["skip_bad"] or None}


def run_and_show(config: Any, output: Path, *, as_json: bool, profile: int = 0, **how: Any) -> None:
    """Run the pipeline with progress on the terminal, then show scores before and after, and the files."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.models.secrets import refuse_addresses, refuse_secrets
    from tunix_rt.progress import phase
    from tunix_rt.runs.folder import RunDir, model_of_run
    from tunix_rt.storage import read_json

    refuse_addresses(config.model_dump())  # before anything is written
    refuse_secrets(config.model_dump())
    model = model_of_run(config.model.model_name_or_path or "") or None
    config = config.model_copy(update={"model": config.model.model_copy(update={"model_name_or_path": model})})
    process_exit_code(0)  # of the run, until it ends with another: a restarted one has that of its predecessor
    if not world().is_lead:
        from tunix_rt.train import hosts, ranks

        return hosts.follow(config) if hosts.follows(config) else ranks.follow(config)
    with watching() as progress:
        with phase("start"):
            from tunix_rt.evaluate.report import remarks, table
            from tunix_rt.evidence.examine import require_verified
            from tunix_rt.pipeline import run_pipeline
        report = run_pipeline(config, output, progress=progress, profile=profile, verify=require_verified, **how)
    run = RunDir(output)
    if as_json:
        text.show_json(read_json(run.result))
        return
    if report.comparison is not None:
        text.show_lines(["", report.comparison.describe(), ""])
        _show_samples(run, report.comparison)
        scores = (report.scores["before"], report.scores["after"])
        text.show_before_after([row for row in table(*scores) if not row.measure.startswith(text.BY_KIND)])
        setting = "evaluation.max_new_tokens"
        text.show_lines(remarks(*scores, weights=(config.model.weights,), tokens_setting=setting))
    if profile:
        text.show_lines([f"Where the time went: {run.profile_page}; for https://ui.perfetto.dev: {run.profile_trace}"])
    _show_next(run)


def _show_next(run: Any) -> None:
    """What to try with a finished run."""
    from tunix_rt.cli.views import text

    tool = text.program()
    answers = [f"  {'answers':14}{run.samples}"] if run.samples.exists() else []
    text.show_lines([
        f"Run folder: {run.root}", *answers,
        f"  {'every score':14}{tool} runs show {run.root}",
        f"  {'one prompt':14}{tool} generate {run.root} {_prompt(run)}",
        f"  {'chat':14}{tool} chat {run.root}",
    ])  # fmt: skip


def _prompt(run: Any) -> str:
    """A question of the run for the shell: a short one of those it answered."""
    from tunix_rt.runs.record import RunRecord

    asked = (
        [one.prompt for one in RunRecord(run.root).predictions("after")] if run.predictions("after").exists() else []
    )
    simple = [one for one in asked if one.isprintable() and not set(one) & set('"$`\\!')]
    return f'"{min(simple, key=len)}"' if simple else '"What is 17 + 25?"'


SAMPLES_SHOWN = 2


def _show_samples(run: Any, comparison: Any) -> None:
    """A few of the answers that became right, before and after."""
    from tunix_rt.cli.views import text
    from tunix_rt.evaluate.generate import read_predictions

    before = {item.id: item for item in read_predictions(run.predictions("before"))}
    after = {item.id: item for item in read_predictions(run.predictions("after"))}
    for item_id in (*comparison.gained, *sorted(after, key=lambda key: not after[key].strict))[:SAMPLES_SHOWN]:
        lines = [f"Q: {after[item_id].prompt}"]
        for when, output in (("before", before[item_id].output), ("after", after[item_id].output)):
            flat = " / ".join(part for part in output.splitlines() if part.strip())
            lines.append(f"  {when:6}: {flat if len(flat) <= 160 else flat[:157] + '...'}")
        text.show_lines([*lines, ""])


# --- the scripts of the founding documents, flag for flag; and the flags that error messages recommend -----------------

SCRIPTS = {"torch": "training_pt/train.py", "jax": "training/run_train_jax.py"}
"""The script of each engine. A script runs its own engine only."""


def script_options(argv: list[str] | None) -> argparse.Namespace:
    about = "Train from a configuration (see: tunix-rt train)."
    parser = argparse.ArgumentParser(allow_abbrev=False, description=about)
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--dataset", "--data")
    parser.add_argument("--device")
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--smoke_config", help="settings that override --config; only when given")
    parser.add_argument("--smoke_steps", type=int, help="like --max_steps; only when given")
    parser.add_argument("--model", help="hub id, local folder, or a shipped model")
    parser.add_argument("--weights", help="pretrained or random")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="resume the run in the output folder")
    return parser.parse_args(argv)


def run_script(backend: str, argv: list[str] | None = None) -> int:
    """Parse the flags of a script, run the pipeline, return the exit code."""
    options = script_options(argv)
    from tunix_rt.cli.main import report
    from tunix_rt.errors import TunixError

    try:
        run_and_show(script_config(options, backend), options.output, as_json=False)
    except TunixError as error:
        report(error)
        return process_exit_code(error.exit_code)
    return 0


def script_config(options: argparse.Namespace, backend: str) -> Any:
    """The configuration on the engine of the script; one that names the other engine is refused."""
    from tunix_rt.config.load import find_config, load_config, read_settings
    from tunix_rt.errors import ConfigError

    steps = [number for number in (options.smoke_steps, options.max_steps) if number is not None]
    if len(set(steps)) > 1:
        raise ConfigError("--max_steps and --smoke_steps differ", fix="give one of them")
    flags: dict[str, Any] = {}
    if options.smoke_config:
        smoke = find_config(options.smoke_config)
        for section, settings in read_settings(smoke).items():
            flags |= {f"{section}.{name}": value for name, value in settings.items()}
    given = {setting: getattr(options, flag, None) for flag, setting in FLAGS.items()}
    given |= {FLAGS["max_steps"]: steps[0] if steps else None, RESUME: "auto" if options.resume else None}
    flags |= {name: value for name, value in given.items() if value is not None}
    config = load_config(find_config(options.config), overrides=tuple(options.overrides), flags=flags)
    if "backend" in config.training.model_fields_set and config.training.backend != backend:
        other = config.training.backend
        raise ConfigError(
            f"training.backend is {other}, and {SCRIPTS[backend]} runs the {backend} engine only",
            fix=f"run python {SCRIPTS[other]} with the same flags, or remove training.backend from the configuration",
        )
    return config.model_copy(update={"training": config.training.model_copy(update={"backend": backend})})
