"""`/try`: ask the model of one run and its base model, side by side. Off unless the dashboard was started with --chat."""

import json
from dataclasses import dataclass

from tunix_rt.dashboard.chat import Chat
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.errors import InputError, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPage:
    run: str
    questions: tuple[str, ...]
    """Some of the run's own, to begin with."""


def page(site: Site, query: Query, run_id: str = "") -> Page:
    _chat(site)
    return Page(
        template="chat.html", title="Try it", values=ChatPage(run=str(site.chat_run), questions=_questions(site))
    )


def ask(site: Site, run_id: str, body: bytes) -> dict[str, object]:
    """The action: `{"question": ...}` -> the answers of both models."""
    chat = _chat(site)
    try:
        question = json.loads(body)["question"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("no question in the request", fix="ask on the page") from error
    if not isinstance(question, str):
        raise InputError("the question is no text", fix="ask on the page")
    return chat.ask(question)


def _chat(site: Site) -> Chat:
    if site.chat is None:
        raise NotFound("there is no model to try", fix="start the dashboard with --chat RUN")
    return site.chat


def _questions(site: Site) -> tuple[str, ...]:
    from tunix_rt.runs.record import RunRecord

    assert site.chat_run is not None
    return tuple(line.prompt for line in RunRecord(site.chat_run).predictions("after")[:3])
