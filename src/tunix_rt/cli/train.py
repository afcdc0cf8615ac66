"""`tunix-rt train`: the whole pipeline from one configuration."""

from pathlib import Path
from typing import Any

import click

MOST_RECORDED = 50
"""Steps of a profile: of a large model these are more than a million events."""


@click.command()
@click.argument("config", required=False)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the run.")
@click.option("--model", help="Local folder, GGUF file, shipped model, hub id; or a preset, with --weights random.")
@click.option("--data", "--dataset", "dataset", help="Dataset key, file, folder, or hub dataset in the local cache.")
@click.option("--device", help="auto, cpu, cuda (gpu) or tpu.")
@click.option("--backend", help="torch or jax.")
@click.option("--weights", help="pretrained or random.")
@click.option("--max-steps", type=int, help="Optimizer steps.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
@click.option("--resume", is_flag=True, help="Continue the run in the output folder.")
@click.option(
    "--profile", type=click.IntRange(1, MOST_RECORDED), metavar="N", help="Record N steps: where does their time go?"
)
@click.option(
    "--stop-after", type=click.IntRange(min=1), metavar="STEP", help="Keep that step and stop, to go on with --resume."
)
@click.option("--allow-oom-attempt", is_flag=True, help="Go on where the plan says that the run does not fit.")
@click.option("--json", "as_json", is_flag=True, help="Print result.json to standard output.")
def train(
    config: str | None, output: Path, overrides: tuple[str, ...], resume: bool, as_json: bool, **named: Any
) -> None:
    """Run doctor, plan, data, train, evaluate and evidence on CONFIG (a YAML file or the name of a shipped one)."""
    from tunix_rt.config.load import find_config, load_config

    flags = {
        "model.model_name_or_path": named["model"],
        "model.weights": named["weights"],
        "data.dataset": named["dataset"],
        "training.device": named["device"],
        "training.backend": named["backend"],
        "training.max_steps": named["max_steps"],
        "training.resume_from_checkpoint": "auto" if resume else None,
    }
    path = find_config(config) if config else None
    settled = load_config(path, overrides=overrides, flags=flags)
    run_and_show(
        settled, output, as_json=as_json, profile=named["profile"] or 0, oom_attempt=named["allow_oom_attempt"],
        stop_after=named["stop_after"],
    )  # fmt: skip


def run_and_show(config: Any, output: Path, *, as_json: bool, profile: int = 0, **how: Any) -> None:
    """Run the pipeline with progress on the terminal, then the before/after table and where everything lies."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.evaluate.report import remarks, table
    from tunix_rt.models.secrets import refuse_addresses, refuse_secrets
    from tunix_rt.pipeline import run_pipeline
    from tunix_rt.runs.folder import RunDir
    from tunix_rt.storage import read_json

    refuse_addresses(config.model_dump())  # before anything is written down
    refuse_secrets(config.model_dump())
    with watching() as progress:
        report = run_pipeline(config, output, progress=progress, profile=profile, **how)
    run = RunDir(output)
    if as_json:
        text.show_json(read_json(run.result))
        return
    if report.comparison is not None:
        _show_samples(run, report.comparison)
        scores = (report.scores["before"], report.scores["after"])
        text.show_before_after(table(*scores))
        setting = "evaluation.max_new_tokens"
        text.show_lines(remarks(*scores, weights=(config.model.weights,), tokens_setting=setting))
        text.show_lines([report.comparison.sentence])
    answers = f"; answers in {run.samples}" if run.samples.exists() else ""
    if profile:
        text.show_lines([f"Where the time went: {run.profile_page}; for https://ui.perfetto.dev: {run.profile_trace}"])
    text.show_lines([f"Run folder: {output}  (tunix-rt runs show {output}{answers})"])


SAMPLES_SHOWN = 2


def _show_samples(run: Any, comparison: Any) -> None:
    """A few of the answers that became right, before and after."""
    from tunix_rt.cli.views import text
    from tunix_rt.evaluate.summary import read_predictions

    before = {item.id: item for item in read_predictions(run.predictions("before"))}
    after = {item.id: item for item in read_predictions(run.predictions("after"))}
    for item_id in (*comparison.gained, *comparison.both_right, *comparison.both_wrong)[:SAMPLES_SHOWN]:
        lines = [f"Q: {after[item_id].prompt}"]
        for when, output in (("before", before[item_id].output), ("after", after[item_id].output)):
            flat = " / ".join(part for part in output.splitlines() if part.strip())
            lines.append(f"  {when:6}: {flat if len(flat) <= 160 else flat[:157] + '...'}")
        text.show_lines([*lines, ""])
