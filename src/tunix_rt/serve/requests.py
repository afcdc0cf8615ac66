"""Requests of the API, and its error objects. What is not supported is refused by the name of its parameter."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tunix_rt.data.readers import DECODER
from tunix_rt.data.records import Turn

MOST_NEW_TOKENS = 65_536
MOST_CHOICES = 16
"""`n` for each prompt, and prompts of a request."""


class ApiError(Exception):
    """An answer with an error object."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Closed):
    type: Literal["text"]
    text: str


Content = Annotated[
    list[TextPart],
    BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
]
Texts = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class Message(Closed):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @property
    def turn(self) -> Turn:
        role = "system" if self.role == "developer" else self.role
        return Turn(role=role, text="".join(part.text for part in self.content))


class StreamOptions(Closed):
    include_usage: bool = False


class GenerationRequest(Closed):
    """What chat completions and completions have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Texts, Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    """Has no effect."""


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] | None = None
    """Replaces `max_tokens`."""


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str], Texts, Field(min_length=1, max_length=MOST_CHOICES)]


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "logit_bias": ({},), "logprobs": (False,), "metadata": ({},), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0,), "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "web_search_options": (),
}  # fmt: skip
"""Parameters of the API that are not supported -> the values without effect."""


def parse_request(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> ChatRequest | CompletionRequest:
    """The request in a body; an ApiError names the parameter that is wrong."""
    given = _object(body)
    for name in NEUTRAL.keys() & given.keys():
        value = given.pop(name)  # in completions, `logprobs: 0` requests log-probabilities: it is not False
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]):
            raise ApiError(f"{name} is not supported here", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _first_error(error) from error


def _object(body: bytes) -> dict[str, Any]:
    """The parameters that are not null."""
    try:
        value = DECODER.decode(body.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError("The body is not a JSON object", code="invalid_json")
    return {name: item for name, item in value.items() if item is not None}


def _first_error(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False)[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]]
    param, problem = "".join(parts).removeprefix(".")[:200], found["msg"]
    known = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
    return ApiError(f"{param}: {problem}", param=param, code=known.get(found["type"], "invalid_value"))
