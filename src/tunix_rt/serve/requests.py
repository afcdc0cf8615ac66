"""Requests of the API, and its error objects. What is not supported is refused by the name of its parameter."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tunix_rt.data.readers import DECODER
from tunix_rt.data.records import Turn

MOST_NEW_TOKENS = 65_536
MOST_CHOICES = 16
"""Generations of one request: `n` for each of its prompts."""


class ApiError(Exception):
    """An answer with an error object."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None,
    ) -> None:  # fmt: skip
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
ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip


class Message(Closed):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @property
    def turn(self) -> Turn:
        return Turn(role=ROLES[self.role], text="".join(part.text for part in self.content))


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

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] | None = None
    """Replaces `max_tokens`."""
    logprobs: bool = False

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str], Texts, Field(min_length=1, max_length=MOST_CHOICES)]


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "logit_bias": ({},), "logprobs": (False,), "metadata": ({},), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0,), "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "web_search_options": (),
}  # fmt: skip
"""Parameters of the API that are not supported -> the values that ask for nothing."""
Request = TypeVar("Request", bound=GenerationRequest)


def parse_request(kind: type[Request], body: bytes) -> Request:
    """The request in a body; an ApiError names the parameter that is wrong."""
    given = _object(body)
    for name in NEUTRAL.keys() & given.keys() - kind.model_fields.keys():
        if given.pop(name) not in NEUTRAL[name]:
            raise ApiError(f"{name} is not supported here", param=name, code="unsupported_parameter")
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _first_error(error) from error
    if request.stream and getattr(request, "logprobs", False):
        raise ApiError("logprobs are not supported with stream", param="logprobs", code="unsupported_value")
    return request


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
    param = re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in found["loc"]))[
        :200
    ]
    match found["type"]:
        case "missing":
            return ApiError(f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            return ApiError(f"Unknown parameter: '{param}'", param=param, code="unknown_parameter")
    return ApiError(f"Invalid '{param}': {found['msg']}", param=param, code="invalid_value")
