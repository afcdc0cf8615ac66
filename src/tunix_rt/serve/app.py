"""The endpoint as a Starlette application: `/v1/models`, `/v1/chat/completions`, `/v1/completions`."""

import copy
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from anyio import CapacityLimiter, create_task_group, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tunix_rt.engines.decoding import Decoding
from tunix_rt.errors import InputError
from tunix_rt.evaluate.generate import decoding_of
from tunix_rt.inference import LoadedModel
from tunix_rt.loopback import refusal, values
from tunix_rt.serve.batcher import Batcher, Event, Generation
from tunix_rt.serve.reply import Reply
from tunix_rt.serve.requests import (
    MOST_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)

MOST_BODY = 2**20
SMALLEST_TOP_P = 1e-9
"""In place of 0, which the API takes: the most likely token."""
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


@dataclass(slots=True, kw_only=True)
class Served:
    """The model under its name in the API."""

    model: LoadedModel
    name: str
    batcher: Batcher
    max_new_tokens: int
    """Of a request that sets none."""
    is_busy: Callable[[], bool]
    """Whether a run holds the device."""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, model: LoadedModel, name: str, max_new_tokens: int, is_busy: Callable[[], bool]) -> "Served":
        # A tokenizer has state while it encodes, and the thread that decodes uses the other one.
        own = replace(model.tokenizer, inner=copy.deepcopy(model.tokenizer.inner))
        batcher = Batcher(model)
        model = replace(model, tokenizer=own)
        return cls(model=model, name=name, batcher=batcher, max_new_tokens=max_new_tokens, is_busy=is_busy)

    def about(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "tunix-rt"}

    def generation(self, asked: GenerationRequest, send: Callable[[Event], None]) -> Generation:
        """An ApiError where the prompt cannot be generated for, or a run holds the device."""
        if self.is_busy():
            raise ApiError("A run is training, and needs the device", status=503, code="device_busy")
        is_chat, most = isinstance(asked, ChatRequest), asked.new_tokens or self.max_new_tokens
        try:
            prompts = self._prompts(asked)
        except InputError as error:
            param = "messages" if is_chat else "prompt"
            code = "context_length_exceeded" if "positions" in error.problem else "invalid_value"
            raise ApiError(error.problem, param=param, code=code) from error
        settings: dict[str, Any] = {"max_new_tokens": most, "temperature": asked.temperature}
        if asked.temperature:
            settings["top_p"] = max(asked.top_p, SMALLEST_TOP_P)
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        draws = tuple((seed, sample) for _ in prompts for sample in range(asked.n))
        decoding = decoding_of(self.model.style, **settings) if is_chat else Decoding(**settings)
        return Generation(
            prompts=[prompt for prompt in prompts for _ in range(asked.n)], decoding=replace(decoding, draws=draws),
            send=send, stops=tuple(asked.stop), logprobs=isinstance(asked, ChatRequest) and asked.logprobs,
        )  # fmt: skip

    def _prompts(self, asked: GenerationRequest) -> list[list[int]]:
        if isinstance(asked, ChatRequest):
            return [self.model.prompt(tuple(message.turn for message in asked.messages))]
        assert isinstance(asked, CompletionRequest)
        if len(asked.prompt) * asked.n > MOST_CHOICES:
            raise ApiError(f"At most {MOST_CHOICES} choices, n for each prompt", param="n", code="invalid_value")
        return [self.model.text_prompt(text) for text in asked.prompt]


def make_app(served: Served) -> Starlette:
    alone: list[CapacityLimiter] = []

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served.about()]})

    async def one_model(request: Request) -> Response:
        _refuse_other(served, request.path_params["name"])
        return JSONResponse(served.about())

    async def generate(kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        asked: GenerationRequest = parse_request(kind, await _body(request))
        _refuse_other(served, asked.model)
        if not alone:
            alone.append(CapacityLimiter(1))  # made inside the event loop
        reply = Reply(served.name, asked, served.model.tokenizer.decode)
        generation = await to_thread.run_sync(served.generation, asked, reply.send, limiter=alone[0])
        reply.prompt_tokens = sum(map(len, generation.prompts[:: asked.n]))
        served.batcher.submit(generation)
        if asked.stream:
            return EventStream(reply.chunks(len(generation.prompts)), generation)
        try:
            return JSONResponse(await _unless_gone(request, reply.whole(len(generation.prompts))))
        finally:
            generation.cancelled = True

    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", partial(generate, ChatRequest), methods=["POST"]),
        Route("/v1/completions", partial(generate, CompletionRequest), methods=["POST"]),
    ]
    handlers: Any = {ApiError: _error_answer, HTTPException: _no_such_address, ClientDisconnect: _nobody}
    made = Starlette(routes=routes, middleware=[Middleware(Guarded)], exception_handlers=handlers)
    made.router.redirect_slashes = False
    return made


class Guarded:
    """Refuses what no program on this computer sends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += HEADERS
            await send(message)

        refused = _refused(scope)
        answer = JSONResponse(refused.body(), refused.status) if refused else self._app
        await answer(scope, receive, send_guarded)


def _refused(scope: Scope) -> ApiError | None:
    address = (scope.get("raw_path") or b"") + scope["query_string"]
    if found := refusal(scope["method"], address, scope["headers"]):
        return ApiError(found.text, status=found.status)
    kinds = [kind.partition(";")[0].strip().lower() for kind in values(scope["headers"], b"content-type")]
    if scope["method"] == "POST" and kinds != ["application/json"]:  # a page of another site can send other types
        return ApiError("Send the header Content-Type: application/json", status=415)
    return None


def _refuse_other(served: Served, name: str) -> None:
    if name != served.name:
        message = f"The model '{name[:200]}' does not exist; '{served.name}' is served"
        raise ApiError(message, status=404, param="model", code="model_not_found")


async def _body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY:
            raise ApiError(f"The body has more than {MOST_BODY:,} bytes", status=413)
    return body


async def _error_answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "Invalid URL" if error.status_code == 404 else "Not allowed"
    found = ApiError(f"{what} ({request.method} {request.scope['path'][:200]})", status=error.status_code)
    return JSONResponse(found.body(), found.status, headers=error.headers)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


async def _unless_gone(request: Request, work: Any) -> Any:
    """What `work` returns; ClientDisconnect as soon as the client has gone."""
    found: list[Any] = []
    async with create_task_group() as group:

        async def finish() -> None:
            try:
                found.append(await work)
            except ApiError as error:
                found.append(error)
            group.cancel_scope.cancel()

        group.start_soon(finish)
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()
    if not found:
        raise ClientDisconnect
    if isinstance(found[0], ApiError):
        raise found[0]
    return found[0]


class EventStream(StreamingResponse):
    """Server-sent events, which end the generation when they end: it is over, or the client has gone."""

    def __init__(self, events: AsyncIterator[str], generation: Generation) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancelled = True
