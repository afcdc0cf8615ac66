"""`tunix-rt evaluate` and `tunix-rt compare`: scores of a model, and paired comparisons."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click


class Finite(click.FloatRange):
    """A finite number; click's range lets NaN pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{number} is not a finite number.", param, ctx)


GENERATION = (
    click.option("--device", default="auto", help="auto, cpu, cuda (gpu) or tpu."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Unset: the best for the device."),
    click.option("--weights", type=click.Choice(["pretrained", "random"]), default="pretrained", help="Of MODEL."),
    click.option("--max-new-tokens", type=click.IntRange(1, 65_536), default=256, show_default=True, help="Longest generation."),
    click.option("--temperature", type=Finite(0, 100), default=0.0, help="0, the default: greedy."),
    click.option("--top-p", type=Finite(0, 1, min_open=True), default=1.0, help="Nucleus sampling: its probability mass."),
    click.option("--seed", type=click.IntRange(0), default=0, help="Of sampling, and of --limit."),
    click.option("--max-seconds", type=Finite(0, min_open=True), help="Time limit of a batch."),
    click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Rendering of prompts (data.*)."),
)  # fmt: skip


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that decide a generation, the same for every verb that generates."""
    for option in reversed(GENERATION):
        command = option(command)
    return command


@click.command()
@click.argument("model")
@click.option("--evalset", required=True, help="Key, JSONL file, dataset key, or GSM8K as published.")
@click.option("--against", help="Another model, with the same prompts: the paired comparison of both.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for predictions and scores.")
@click.option("--limit", type=click.IntRange(1), help="A random but fixed subset of this many questions.")
@click.option("--batch-size", type=click.IntRange(1), help="Batch size. Unset: as much as fits into free memory.")
@click.option("--json", "as_json", is_flag=True, help="Print eval_summary.json to standard output.")
@generation_options
def evaluate(
    model: str, evalset: str, against: str | None, output: Path | None, limit: int | None, as_json: bool, **how: Any
) -> None:
    """Generate with MODEL (a run folder, model folder, GGUF file, shipped model or hub id) for every question, and score it."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.errors import ConfigError
    from tunix_rt.evaluate.evalsets import load_evalset
    from tunix_rt.evaluate.report import paragraph, remarks, table
    from tunix_rt.inference import evaluate_models, model_spec

    if output is not None and output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty", fix="choose another --output")
    overrides = how.pop("overrides")
    spec, other = model_spec(model, overrides), None if against is None else model_spec(against, overrides)
    questions = load_evalset(evalset, limit=limit, seed=how["seed"])
    with watching() as progress:
        result = evaluate_models(spec, other, questions, output=output, progress=progress, **how)
    if as_json:
        text.show_json(result.summary)
        return
    text.show_lines([questions.describe()])
    names = [side.name for side in result.sides]
    text.show_before_after(table(*result.scores), names)
    weights = [*("pretrained" for _ in names[1:]), how["weights"]]  # --against is always a model that was trained
    text.show_lines(remarks(*result.scores, names=names, weights=weights))
    text.show_lines([paragraph(result.comparison)] if result.comparison else [])
    text.show_lines([f"Predictions: {output}"] if output else [])


@click.command()
@click.argument("first", type=click.Path(file_okay=False, path_type=Path))
@click.argument("second", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(first: Path, second: Path | None, as_json: bool) -> None:
    """Compare two runs question by question: what SECOND gained and lost over FIRST.

    Each is the folder of `tunix-rt train` (its predictions after training) or the --output of `tunix-rt evaluate`. With one run
    alone, its predictions before and after training are compared."""
    from tunix_rt.cli.views import text
    from tunix_rt.errors import EvidenceError
    from tunix_rt.evaluate.comparison import compare_runs
    from tunix_rt.evaluate.generate import read_both, read_side
    from tunix_rt.evaluate.report import computing_remarks, paragraph, remarks, summary_of, table
    from tunix_rt.evidence.data_checks import tags_in, verdict_problems
    from tunix_rt.scoring.score import score_predictions

    sides = read_both(first) if second is None else (read_side(first), read_side(second))
    if second is not None and sides[0].name == sides[1].name:
        sides = (replace(sides[0], name=str(first)), replace(sides[1], name=str(second)))
    for side in sides:
        for one in side.predictions:
            for problem in verdict_problems(one, tags_in(side.decoding)):
                raise EvidenceError(
                    f"{side.name}: question {one.id!r}: {problem}",
                    fix="evaluate again; verdicts follow from the outputs alone",
                )
    comparison = compare_runs(*sides)
    old, new = (score_predictions(side.predictions, when=when) for side, when in zip(sides, SIDES, strict=True))
    if as_json:
        names = list(comparison.names)
        text.show_json(summary_of(old, new, comparison, names=names, remarks=computing_remarks(*sides)))
        return
    text.show_before_after(table(old, new), comparison.names)
    text.show_lines([*remarks(old, new, names=comparison.names), *computing_remarks(*sides)])
    text.show_lines([paragraph(comparison), *(f"{title}: {_listed(ids)}" for title, ids in comparison.changes)])


SIDES = ("first", "second")
LISTED = 20


def _listed(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - LISTED:,} more (--json has all)" if len(ids) > LISTED else ""
    return (", ".join(ids[:LISTED]) or "none") + more
