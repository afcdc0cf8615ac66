"""`tunix-rt generate` and `tunix-rt chat`: try a model out."""

from typing import TYPE_CHECKING, Any

import click

from tunix_rt.cli.evaluate import asking

if TYPE_CHECKING:
    from tunix_rt.data.trace import Turn
    from tunix_rt.engines.decoding import Decoding
    from tunix_rt.inference import OpenModel


@click.command()
@click.argument("model")
@click.argument("question")
@click.option("--against", help="Another model, asked the same, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print prompt, text, reasoning and answer as JSON.")
@asking
def generate(model: str, question: str, against: str | None, as_json: bool, **how: Any) -> None:
    """Ask MODEL one QUESTION. The answer comes as it is written: reasoning dim, answer bright."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.data.trace import Turn

    turns = (Turn(role="user", text=question),)
    with watching():
        models, decoding = _opened([model] if against is None else [against, model], how)
    if as_json:
        said = [_said(opened, turns, decoding) for opened in models]
        text.show_json(said[0] if against is None else {"question": question, "answers": said})
    elif against is None:
        if _speak(models[0], turns, decoding) is None:
            raise click.Abort
    else:
        _side_by_side(models, turns, decoding)


@click.command()
@click.argument("model")
@click.option("--against", help="Another model, asked the same, side by side.")
@asking
def chat(model: str, against: str | None, **how: Any) -> None:
    """Talk with MODEL. An empty line or Ctrl-D ends it, Ctrl-C ends an answer, /new begins anew."""
    from tunix_rt.cli.main import report
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.data.template import PLAIN
    from tunix_rt.data.trace import Turn
    from tunix_rt.errors import InputError

    with watching():
        models, decoding = _opened([model] if against is None else [against, model], how)
    alone = against is not None or models[0].style.template.name == PLAIN
    text.show_lines(
        [
            "An empty line ends it. Each question is asked alone."
            if alone
            else "An empty line ends it; /new begins anew."
        ]
    )
    turns: tuple[Turn, ...] = ()
    while question := _next_question():
        if question == "/new":
            turns = ()
            continue
        asked = (*(() if alone else turns), Turn(role="user", text=question))
        try:
            if against is not None:
                _side_by_side(models, asked, decoding)
            # What was interrupted or could not be asked is no turn that another could follow.
            elif (answer := _speak(models[0], asked, decoding)) is not None:
                turns = (*asked, Turn(role="assistant", text=answer))
        except InputError as error:
            report(error)


def _next_question() -> str:
    """What is typed next; nothing when that is the end."""
    while True:
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return ""
        except UnicodeDecodeError:
            click.echo("That is no UTF-8 text.", err=True)


def _opened(names: list[str], how: dict[str, Any]) -> "tuple[list[OpenModel], Decoding]":
    """The models, the last one being the one that decides how all are spoken to."""
    from tunix_rt.evaluate.generate import decoding_of
    from tunix_rt.inference import find_model, load_found, name_model, settle_device

    choice, dtype = settle_device(how["device"], how["dtype"])
    first = find_model(name_model(names[-1], how["overrides"]), choice, dtype, weights=how["weights"])
    others = [
        find_model(name_model(name, how["overrides"]), choice, dtype, like=first, beside=True) for name in names[:-1]
    ]
    settings = {key: how[key] for key in ("max_new_tokens", "temperature", "top_p", "seed", "max_seconds")}
    return [load_found(found) for found in (*others, first)], decoding_of(first.style, **settings)


def _parts(opened: "OpenModel") -> Any:
    from tunix_rt.cli.views.progress import Parts

    return Parts(reasoning_tag=opened.style.reasoning_tag, answer_tag=opened.style.answer_tag)


def _speak(opened: "OpenModel", turns: "tuple[Turn, ...]", decoding: "Decoding") -> str | None:
    """Print the answer as it comes. None when it was interrupted."""
    from tunix_rt.cli.views.progress import Speaker

    speaker = Speaker(_parts(opened))
    try:
        said, answer = opened.answer(opened.prompt(turns, decoding), decoding, heard=speaker.hear)
    except KeyboardInterrupt:
        speaker.end("interrupted")
        return None
    speaker.hear(said, whole=True)
    speaker.end(ENDINGS.get(answer.ended, "" if said.strip() else "the model ended its answer without a word"))
    return said


def _side_by_side(models: "list[OpenModel]", turns: "tuple[Turn, ...]", decoding: "Decoding") -> None:
    """Every model's answer in a column of its own, none when they were interrupted. Nothing is remembered of them."""
    from tunix_rt.cli.views import text

    try:
        said = [(opened.name, _said(opened, turns, decoding)["text"]) for opened in models]
    except KeyboardInterrupt:
        click.echo("(interrupted)", err=True)
        return
    text.show_side_by_side(said, _parts(models[0]))


ENDINGS = {
    "length": "cut off: --max-new-tokens allows no more",
    "time": "cut off: --max-seconds is over",
    "context": "cut off: the model has no further position",
}


def _said(opened: "OpenModel", turns: "tuple[Turn, ...]", decoding: "Decoding") -> dict[str, Any]:
    from tunix_rt.scoring.score import Tags, read_answer

    said, answer = opened.answer(opened.prompt(turns, decoding), decoding)
    tagged = read_answer(said, Tags(reasoning=opened.style.reasoning_tag, answer=opened.style.answer_tag))
    return {
        "model": opened.name,
        "question": turns[-1].text,
        "text": said,
        "reasoning": tagged.reasoning if tagged else None,
        "answer": tagged.answer if tagged else None,
        "tokens": len(answer.ids),
        "ended": answer.ended,
        "decoding": decoding.settings(),
    }
