"""The objects that the API answers with: one, or the chunks of a stream."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from tunix_rt.serve.batcher import Piece
from tunix_rt.serve.requests import ApiError, ChatRequest, GenerationRequest


class Reply:
    """The answer to one request. `send` takes the pieces of its generation, from another thread."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request, self._is_chat = request, isinstance(request, ChatRequest)
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Piece | ApiError]()
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": request.model}
        self.choices = self.prompt_tokens = self._new_tokens = 0

    def send(self, event: Piece | ApiError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def whole(self) -> dict[str, Any]:
        texts, reasons = [""] * self.choices, [""] * self.choices
        async for piece in self._pieces():
            texts[piece.choice] += piece.text
            reasons[piece.choice] = piece.reason or ""
        choices = [
            self._choice(index, {"role": "assistant", "content": text} if self._is_chat else text, reason, "message")
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._of_kind(""), "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[str]:
        """Server-sent events; an error after the first is one of them."""
        head, counts = self._of_kind(".chunk"), self._request.stream_options.include_usage
        no_usage = {"usage": None} if counts else {}
        for choice in range(self.choices if self._is_chat else 0):
            new = self._choice(choice, {"role": "assistant", "content": ""}, None, "delta")
            yield _event({**head, "choices": [new], **no_usage})
        try:
            async for piece in self._pieces():
                delta = {"content": piece.text} if piece.text else {}
                new = self._choice(piece.choice, delta if self._is_chat else piece.text, piece.reason, "delta")
                yield _event({**head, "choices": [new], **no_usage})
            if counts:
                yield _event({**head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())

    async def _pieces(self) -> AsyncIterator[Piece]:
        left = self.choices
        while left:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            left -= event.reason is not None
            self._new_tokens += event.tokens
            yield event

    def _of_kind(self, ending: str) -> dict[str, Any]:
        return {**self._head, "object": f"chat.completion{ending}" if self._is_chat else "text_completion"}

    def _choice(self, index: int, new: dict[str, str] | str, reason: str | None, key: str) -> dict[str, Any]:
        named = {key if self._is_chat else "text": new}
        return {"index": index, **named, "logprobs": None, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, self._new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
