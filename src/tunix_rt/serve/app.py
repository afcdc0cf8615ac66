"""The endpoint as a Starlette application: `/v1/models`, `/v1/chat/completions`, `/v1/completions`."""

import asyncio
import copy
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunix_rt import loopback
from tunix_rt.engines.decoding import Decoding
from tunix_rt.errors import InputError, PromptTooLong
from tunix_rt.evaluate.generate import decoding_of
from tunix_rt.inference import LoadedModel
from tunix_rt.serve.batcher import Batcher, Generation
from tunix_rt.serve.reply import Reply
from tunix_rt.serve.requests import ApiError, ChatRequest, CompletionRequest, parse_request

MOST_BODY = 2**20
SMALLEST_TOP_P = 1e-9
"""In place of 0, which the API takes: the most likely token."""


class Served:
    """The model under its name in the API. `max_new_tokens` is for a request that sets none; `is_busy` while a run holds the
    device."""

    def __init__(self, model: LoadedModel, name: str, max_new_tokens: int, is_busy: Callable[[], bool]) -> None:
        self.name, self._max_new_tokens, self._is_busy = name, max_new_tokens, is_busy
        self.batcher = Batcher(model)
        # A tokenizer has state while it encodes: one thread at a time, and not the one that decodes.
        self._encoding = threading.Lock()
        tokenizer = replace(model.tokenizer, inner=copy.deepcopy(model.tokenizer.inner))
        self._model = replace(model, tokenizer=tokenizer)
        self.about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tunix-rt"}

    def refuse_other(self, name: str) -> None:
        if name != self.name:
            message = f"The model '{name[:200]}' does not exist; '{self.name}' is served"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def generation(self, request: ChatRequest | CompletionRequest, reply: Reply) -> Generation:
        """An ApiError where the prompt cannot be generated for, or a run holds the device."""
        if self._is_busy():
            raise ApiError("A run is training, and needs the device", status=503, code="device_busy")
        is_chat = isinstance(request, ChatRequest)
        try:
            prompts = self._prompts(request)
        except InputError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else "invalid_value"
            raise ApiError(error.problem, param="messages" if is_chat else "prompt", code=code) from error
        reply.prompt_tokens, reply.choices = sum(map(len, prompts)), len(prompts) * request.n
        most = getattr(request, "max_completion_tokens", None) or request.max_tokens or self._max_new_tokens
        decoding = decoding_of(self._model.style, max_new_tokens=most) if is_chat else Decoding(max_new_tokens=most)
        if request.temperature:
            decoding = replace(decoding, temperature=request.temperature, top_p=max(request.top_p, SMALLEST_TOP_P))
        seed = secrets.randbits(32) if request.seed is None else request.seed
        return Generation(
            prompts=[prompt for prompt in prompts for _ in range(request.n)],
            draws=[(seed, sample) for _ in prompts for sample in range(request.n)], decoding=decoding, stops=request.stop,
            send=reply.send,
        )  # fmt: skip

    def _prompts(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        with self._encoding:
            if isinstance(request, ChatRequest):
                return [self._model.prompt(tuple(message.turn for message in request.messages))]
            return [self._model.text_prompt(text) for text in request.prompt]


def make_app(served: Served) -> ASGIApp:
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served.about]})

    async def model(request: Request) -> Response:
        served.refuse_other(request.path_params["name"])
        return JSONResponse(served.about)

    async def generate(kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        parameters = parse_request(kind, await _body(request))
        served.refuse_other(parameters.model)
        reply = Reply(parameters)
        generation = await to_thread.run_sync(served.generation, parameters, reply)
        served.batcher.submit(generation)
        return _Answer(reply, generation, is_stream=parameters.stream)

    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", partial(generate, ChatRequest), methods=["POST"]),
        Route("/v1/completions", partial(generate, CompletionRequest), methods=["POST"]),
    ]
    handlers: Any = {ApiError: _refused, HTTPException: _no_such_address}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        refused = _refusal(scope) if scope["type"] == "http" else None
        await (JSONResponse(refused.body(), refused.status) if refused else made)(scope, receive, send)

    return guarded


def _refusal(scope: Scope) -> ApiError | None:
    """Of what no program on this computer sends."""
    address = (scope.get("raw_path") or b"") + scope["query_string"]
    if found := loopback.refusal(scope["method"], address, scope["headers"]):
        return ApiError(found.text, status=found.status)
    kinds = [kind.partition(";")[0].strip().lower() for kind in loopback.values(scope["headers"], b"content-type")]
    if scope["method"] == "POST" and kinds != ["application/json"]:  # a page of another site can send other types
        return ApiError("Send the header Content-Type: application/json", status=415)
    return None


class _Answer(StreamingResponse):
    """The generation ends with its answer: it is over, or the client has gone."""

    def __init__(self, reply: Reply, generation: Generation, *, is_stream: bool) -> None:
        super().__init__(reply.chunks(), media_type="text/event-stream")
        self._reply, self._generation, self._is_stream = reply, generation, is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancelled = True

    async def stream_response(self, send: Send) -> None:
        async def with_a_turn(message: Message) -> None:
            await send(message)
            await asyncio.sleep(0)  # the loop learns that the client has gone, however many chunks are ready

        if self._is_stream:
            await super().stream_response(with_a_turn)
            return
        try:
            answer = JSONResponse(await self._reply.whole())
        except ApiError as error:
            answer = JSONResponse(error.body(), error.status)
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body})


async def _body(request: Request) -> bytes:
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY:
                raise ApiError(f"The body has more than {MOST_BODY:,} bytes", status=413)
    except ClientDisconnect as error:
        raise ApiError("The request ended early") from error
    return body


async def _refused(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


async def _no_such_address(request: Request, error: HTTPException) -> Response:
    what = "Invalid URL" if error.status_code == 404 else "Not allowed"
    found = ApiError(f"{what} ({request.method} {request.scope['path'][:200]})", status=error.status_code)
    return JSONResponse(found.body(), found.status, headers=error.headers)
