"""The objects that the API answers with: one, or the chunks of a stream."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tunix_rt.serve.batcher import Choice, Event, Piece
from tunix_rt.serve.requests import ApiError, ChatRequest, GenerationRequest
from tunix_rt.serve.text import UNFINISHED


class Reply:
    """The answer to one request. `send` takes the events of its generation, from another thread."""

    def __init__(self, model: str, asked: GenerationRequest, decode: Callable[[list[int]], str]) -> None:
        self._asked, self._decode, self.prompt_tokens = asked, decode, 0
        self._is_chat = isinstance(asked, ChatRequest)
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": id, "created": int(time.time()), "model": model}

    def send(self, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def whole(self, choices: int) -> dict[str, Any]:
        ended = [event async for event in self._until_ended(choices) if isinstance(event, Choice)]
        ended.sort(key=lambda one: one.choice)
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(map(self._choice, ended)), "usage": self._usage(ended)}

    async def chunks(self, choices: int) -> AsyncIterator[str]:
        """Server-sent events; an error after the first is one of them."""
        ended: list[Choice] = []
        if self._is_chat:
            for choice in range(choices):
                yield self._chunk(choice, {"role": "assistant", "content": ""})
        try:
            async for event in self._until_ended(choices):
                if text := event.text if isinstance(event, Piece) else event.rest:
                    yield self._chunk(event.choice, {"content": text} if self._is_chat else text)
                if isinstance(event, Choice):
                    ended.append(event)
                    yield self._chunk(event.choice, {} if self._is_chat else "", event.reason)
        except ApiError as error:
            yield _sent(error.body())
            return
        if self._asked.stream_options.include_usage:
            yield _sent({**self._head, "object": self._chunk_kind, "choices": [], "usage": self._usage(ended)})
        yield "data: [DONE]\n\n"

    async def _until_ended(self, choices: int) -> AsyncIterator[Piece | Choice]:
        while choices:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            choices -= isinstance(event, Choice)
            yield event

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, index: int, new: dict[str, str] | str, reason: str | None = None) -> str:
        choice = {"index": index, "delta" if self._is_chat else "text": new, "logprobs": None, "finish_reason": reason}
        no_usage = {"usage": None} if self._asked.stream_options.include_usage else {}
        return _sent({**self._head, "object": self._chunk_kind, "choices": [choice], **no_usage})

    def _choice(self, one: Choice) -> dict[str, Any]:
        has_logprobs = isinstance(self._asked, ChatRequest) and self._asked.logprobs
        logprobs = {"content": [self._scored(*pair) for pair in one.scored], "refusal": None} if has_logprobs else None
        message = {"role": "assistant", "content": one.text, "refusal": None}
        new = {"message": message} if self._is_chat else {"text": one.text}
        return {"index": one.choice, **new, "logprobs": logprobs, "finish_reason": one.reason}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token])
        whole = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": whole, "top_logprobs": []}

    def _usage(self, ended: list[Choice]) -> dict[str, int]:
        new = sum(one.tokens for one in ended)
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": new, "total_tokens": self.prompt_tokens + new,
        }  # fmt: skip


def _sent(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
