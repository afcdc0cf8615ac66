"""`tunix-rt generate` and `tunix-rt chat`: generations on the terminal."""

from typing import TYPE_CHECKING, Any

import click

from tunix_rt.cli.evaluate import generation_options

if TYPE_CHECKING:
    from tunix_rt.data.records import Turn
    from tunix_rt.engines.decoding import Decoding
    from tunix_rt.inference import LoadedModel


@click.command()
@click.argument("model")
@click.argument("question")
@click.option("--against", help="Another model with the same prompt, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print prompt, text, reasoning and answer as JSON.")
@generation_options
def generate(model: str, question: str, against: str | None, as_json: bool, **how: Any) -> None:
    """Generate with MODEL for one QUESTION. The text streams: reasoning dim, answer bright."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.data.records import Turn

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
    """Chat with MODEL. An empty line or Ctrl-D ends it, Ctrl-C ends a generation, /new begins anew."""
    from tunix_rt.cli.main import report
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.data.records import Turn
    from tunix_rt.data.template import PLAIN
    from tunix_rt.errors import InputError

    with watching():
        models, decoding = _load([model] if against is None else [against, model], how)
    alone = against is not None or models[0].style.template.name == PLAIN
    memory = "Each question is a conversation of its own." if alone else "/new begins a new conversation."
    text.show_lines([f"An empty line ends it. {memory}"])
    turns: tuple[Turn, ...] = ()
    while question := _next_question():
        if question == "/new":
            turns = ()
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
    from tunix_rt.inference import inference_device, load_resolved, model_spec, resolve_spec

    choice, dtype = inference_device(how["device"], how["dtype"])
    first = resolve_spec(model_spec(names[-1], how["overrides"]), choice, dtype, weights=how["weights"])
    others = [
        resolve_spec(model_spec(name, how["overrides"]), choice, dtype, like=first, beside=True) for name in names[:-1]
    ]
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
