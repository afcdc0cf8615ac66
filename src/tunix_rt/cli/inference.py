"""`tunix-rt evaluate` and `tunix-rt compare`: scores of a model, and paired comparisons."""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunix_rt.cli.main import Dtype

if TYPE_CHECKING:
    from tunix_rt.data.records import Turn
    from tunix_rt.engines.decoding import Decoding
    from tunix_rt.export.gguf import GgufExport
    from tunix_rt.inference import LoadedModel


class Finite(click.FloatRange):
    """A finite number; click's range lets NaN pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{number} is not a finite number.", param, ctx)


GENERATION = (
    click.option("--device", default="auto", help="auto, cpu, cuda (gpu) or tpu."),
    click.option("--dtype", type=Dtype(), help="Unset: the best for the device."),
    click.option("--weights", type=click.Choice(["pretrained", "random"]), default="pretrained", help="Of MODEL."),
    click.option("--max-new-tokens", type=click.IntRange(1, 65_536), help="Longest generation [256; evaluate RUN: its own]."),
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
@click.option("--evalset", help="Key, JSONL file, dataset key, or GSM8K as published [the questions of the run].")
@click.option("--against", help="Another model, with the same prompts: the paired comparison of both.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for predictions and scores.")
@click.option("--limit", type=click.IntRange(1), help="A random but fixed subset of this many questions.")
@click.option("--batch-size", type=click.IntRange(1), help="Batch size. Unset: as much as fits into free memory.")
@click.option("--json", "as_json", is_flag=True, help="Print eval_summary.json to standard output.")
@generation_options
def evaluate(
    model: str,
    evalset: str | None,
    against: str | None,
    output: Path | None,
    limit: int | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Generate with MODEL (a run folder, model folder, GGUF file, shipped model or hub id) for every question, and score it."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.errors import ConfigError
    from tunix_rt.evaluate.evalsets import evalset_of_run, load_evalset
    from tunix_rt.evaluate.report import paragraph, remarks, table
    from tunix_rt.inference import evaluate_models, model_spec

    if output is not None and output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty", fix="choose another --output")
    overrides = how.pop("overrides")
    spec, other = model_spec(model, overrides), None if against is None else model_spec(against, overrides)
    how["max_new_tokens"] = how["max_new_tokens"] or spec.max_new_tokens
    part = {"limit": limit, "seed": how["seed"]}
    questions = load_evalset(evalset, **part) if evalset else evalset_of_run(model, **part)
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
                fix = "evaluate again; verdicts follow from the outputs alone"
                raise EvidenceError(f"{side.name}: question {one.id!r}: {problem}", fix=fix)
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


@click.command()
@click.argument("model")
@click.argument("question")
@click.option("--against", help="Another model with the same prompt, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print prompt, text, reasoning and answer as JSON.")
@generation_options
def generate(model: str, question: str, against: str | None, as_json: bool, **how: Any) -> None:
    """Generate with MODEL for one QUESTION (`-`: read from standard input). The text streams: reasoning dim, answer bright."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.data.records import Turn
    from tunix_rt.errors import InputError

    if question == "-":
        question = sys.stdin.buffer.read().decode(errors="surrogateescape").strip()
    if not question:
        raise InputError("the question is empty", fix="give a question, or pipe one into `tunix-rt generate MODEL -`")
    turns = (Turn(role="user", text=question),)
    with watching():
        models, decoding = _load([model] if against is None else [against, model], how)
    if as_json:
        outputs = [_output(model, turns, decoding) for model in models]
        text.show_json(outputs[0] if against is None else {"question": question, "answers": outputs})
    elif against is None:
        if _stream(models[0], turns, decoding) is None:
            raise click.Abort
    else:
        _side_by_side(models, turns, decoding)


@click.command()
@click.argument("model")
@click.option("--against", help="Another model with the same prompt, side by side.")
@generation_options
def chat(model: str, against: str | None, **how: Any) -> None:
    """Chat with MODEL. Ctrl-C ends a generation; an empty line, Ctrl-D or /quit ends the chat; /help lists the commands."""
    from tunix_rt.cli.main import report
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.data.records import Turn
    from tunix_rt.data.template import PLAIN
    from tunix_rt.errors import InputError

    with watching():
        models, decoding = _load([model] if against is None else [against, model], how)
    alone = against is not None or models[0].style.template.name == PLAIN
    memory = "Each question is a conversation of its own." if alone else "/reset begins a new conversation."
    text.show_lines([f"An empty line ends it. {memory} /help lists more."])
    turns: tuple[Turn, ...] = ()
    while (question := _next_question()) and question.lower() not in LEAVE:
        if question in ("/reset", "/new"):
            turns = ()
            continue
        if question.startswith("/"):
            wrong = [] if question == "/help" else [f"no command {question.split()[0]}"]
            text.show_lines([*wrong, *COMMANDS])
            continue
        conversation = (*(() if alone else turns), Turn(role="user", text=question))
        try:
            if against is not None:
                _side_by_side(models, conversation, decoding)
            # An interrupted generation is not part of the conversation.
            elif (answer := _stream(models[0], conversation, decoding)) is not None:
                turns = (*conversation, Turn(role="assistant", text=answer))
        except InputError as error:
            report(error)


LEAVE = ("/quit", "/exit", "quit", "exit")
COMMANDS = (
    "/reset  begin a new conversation",
    "/quit   end the chat, as an empty line and Ctrl-D do",
    "/help   this list; a system prompt is given at the start: --set data.system_instruction=TEXT",
)


def _next_question() -> str:
    """The next line; empty at the end of the input."""
    while True:
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return ""
        except UnicodeDecodeError:
            click.echo("not valid UTF-8", err=True)


def _load(names: list[str], how: dict[str, Any]) -> "tuple[list[LoadedModel], Decoding]":
    """The models; the last one decides how prompts are rendered for all."""
    from tunix_rt.evaluate.generate import decoding_of
    from tunix_rt.inference import MAX_NEW_TOKENS, inference_device, load_resolved, model_spec, resolve_spec

    choice, dtype = inference_device(how["device"], how["dtype"])
    first = resolve_spec(model_spec(names[-1], how["overrides"]), choice, dtype, weights=how["weights"])
    specs = [model_spec(name, how["overrides"]) for name in names[:-1]]
    others = [resolve_spec(spec, choice, dtype, like=first, beside=True) for spec in specs]
    how["max_new_tokens"] = how["max_new_tokens"] or MAX_NEW_TOKENS
    settings = {key: how[key] for key in ("max_new_tokens", "temperature", "top_p", "seed", "max_seconds")}
    return [load_resolved(model) for model in (*others, first)], decoding_of(first.style, **settings)


def _parts(model: "LoadedModel") -> Any:
    from tunix_rt.cli.views.progress import Parts

    return Parts(reasoning_tag=model.style.reasoning_tag, answer_tag=model.style.answer_tag)


def _stream(model: "LoadedModel", turns: "tuple[Turn, ...]", decoding: "Decoding") -> str | None:
    """Print a generation as it grows. None when it was interrupted."""
    from tunix_rt.cli.views.progress import StreamPrinter

    printer = StreamPrinter(_parts(model))
    try:
        output, answer = model.generate(model.prompt(turns), decoding, on_text=printer.update)
    except KeyboardInterrupt:
        printer.end("interrupted")
        return None
    printer.update(output, whole=True)
    printer.end(ENDINGS.get(answer.ended, "" if output.strip() else "the generation is empty"))
    return output


def _side_by_side(models: "list[LoadedModel]", turns: "tuple[Turn, ...]", decoding: "Decoding") -> None:
    """The generation of every model in a column of its own; none when one was interrupted."""
    from tunix_rt.cli.views import text

    try:
        outputs = [(model.name, _output(model, turns, decoding)["text"]) for model in models]
    except KeyboardInterrupt:
        click.echo("(interrupted)", err=True)
        return
    text.show_side_by_side(outputs, _parts(models[0]))


ENDINGS = {
    "length": "cut off at --max-new-tokens",
    "time": "cut off at --max-seconds",
    "context": "cut off: the context is full",
}


def _output(model: "LoadedModel", turns: "tuple[Turn, ...]", decoding: "Decoding") -> dict[str, Any]:
    from tunix_rt.scoring.score import Tags, read_answer

    output, answer = model.generate(model.prompt(turns), decoding)
    tagged = read_answer(output, Tags(reasoning=model.style.reasoning_tag, answer=model.style.answer_tag))
    return {
        "model": model.name,
        "question": turns[-1].text,
        "text": output,
        "reasoning": tagged.reasoning if tagged else None,
        "answer": tagged.answer if tagged else None,
        "tokens": len(answer.ids),
        "ended": answer.ended,
        "decoding": decoding.settings(),
    }


GGUF = ["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
GGUF_MEANS = "the kind of file decides the types, the whole model is written, and the CPU quantizes it"


@click.command()
@click.argument("model")
@click.option(
    "--to", "layout", type=click.Choice(["hf"]), default="hf", show_default=True, help="Layout of the folder."
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder that does not exist yet.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device to load it on.",
)
@click.option("--dtype", type=Dtype(), help="Type of the weights. Unset: unchanged.")
@click.option(
    "--step", type=click.IntRange(min=1), help="Of a run: the checkpoint of this step instead of the final model."
)
@click.option("--best", is_flag=True, help="Of a run: the checkpoint with the lowest held-out loss.")
@click.option("--adapter", is_flag=True, help="Of a LoRA run: the adapters alone, as a folder that peft loads.")
@click.option("--gguf", "kind", type=click.Choice(GGUF), help="One GGUF file instead, with an Ollama Modelfile.")
@click.option("--json", "as_json", is_flag=True, help="Print the round-trip check as JSON.")
def export(model: str, output: Path, layout: str, kind: str | None, as_json: bool, **how: Any) -> None:
    """Write MODEL (a run folder, model folder, GGUF file, shipped model or hub id) for transformers, with a round-trip check.

    A fresh process reloads the folder with plain transformers, or an adapter with plain peft, and compares weights, logits,
    greedy generations, tokens and chat template with the model in memory. A difference is exit 6, and the folder is removed.
    """
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.export.export import export_model
    from tunix_rt.storage import to_plain

    with watching():
        done = export_model(model, output, **how) if kind is None else _export_gguf(model, output, kind, **how)
    if as_json:
        text.show_json(to_plain(asdict(done)) | {"layout": layout if kind is None else "gguf"})
    else:
        text.show_lines([done.describe(), *done.commands])


def _export_gguf(
    model: str, output: Path, kind: str, *, device: str, dtype: str | None, adapter: bool, step: int | None, best: bool
) -> "GgufExport":
    from tunix_rt.errors import ConfigError
    from tunix_rt.models.gguf import require_packages

    if given := [
        name for name, used in (("--dtype", dtype), ("--adapter", adapter), ("--device", device == "cuda")) if used
    ]:
        raise ConfigError(f"--gguf and {given[0]}: {GGUF_MEANS}", fix=f"remove {given[0]}")
    require_packages("--gguf")
    from tunix_rt.export.gguf import export_gguf

    return export_gguf(model, output, kind=kind, step=step, best=best)
