"""From a trace to token ids and a mask of what is trained: never the question, always reasoning, answer and end-of-sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import Trace
from tunix_rt.errors import InputError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One rendered trace. `trained[i]` says whether token i is a target of the loss."""

    ids: Ids
    trained: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """All examples, and what happened to the traces that were too long."""

    examples: tuple[Example, ...]
    kept: tuple[int, ...]
    """Which trace each example was made of."""
    dropped: int
    truncated: int


def prompt_text(prompt: str, system_instruction: str | None = None) -> str:
    """What the model is given; the same in training and in evaluation."""
    return f"{system_instruction}\n{prompt}\n" if system_instruction else f"{prompt}\n"


def completion_text(trace: Trace) -> str:
    """What the model is to say: the steps, one per line, then the answer."""
    steps = "\n".join(step.content for step in trace.steps)
    return f"<reasoning>{steps}</reasoning><answer>{trace.final_answer}</answer>"


def prompt_ids(prompt: str, tokenizer: Tokenizer, system_instruction: str | None = None) -> list[int]:
    return [*tokenizer.prefix, *tokenizer.encode(prompt_text(prompt, system_instruction))]


def render(
    trace: Trace, tokenizer: Tokenizer, *, system_instruction: str | None = None, completion_only_loss: bool = True
) -> Example:
    """Prompt and completion are encoded apart, so the boundary of the mask is the boundary at generation too."""
    question = prompt_ids(trace.prompt, tokenizer, system_instruction)
    completion = [*tokenizer.encode(completion_text(trace)), tokenizer.eos_id]
    trained = np.ones(len(question) + len(completion), dtype=np.bool_)
    # The first token of a row has nothing before it to predict it from; the rest of the question only when asked.
    trained[: len(question) if completion_only_loss else 1] = False
    return Example(ids=np.asarray(question + completion, dtype=np.int32), trained=trained)


def render_all(
    traces: Sequence[Trace],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    on_overflow: str = "error",
    system_instruction: str | None = None,
    completion_only_loss: bool = True,
    places: Sequence[str] | None = None,
) -> Rendered:
    """Every trace as an Example of at most `max_length` tokens. Too long is refused, unless the caller said what to do.

    `places` says where each trace stands (`file:line`), for the words of a refusal.
    """
    where = places or [f"trace {number}" for number in range(1, len(traces) + 1)]
    examples: list[Example] = []
    kept: list[int] = []
    too_long: list[tuple[int, int]] = []
    for index, trace in enumerate(traces):
        example = render(
            trace, tokenizer, system_instruction=system_instruction, completion_only_loss=completion_only_loss
        )
        if len(example.ids) > max_length:
            too_long.append((index, len(example.ids)))
            if on_overflow == "drop":
                continue
            if on_overflow == "truncate":
                example = Example(ids=example.ids[:max_length], trained=example.trained[:max_length])
                if not example.trained.any():
                    raise InputError(
                        f"{where[index]} has no token to train on after truncation to {max_length}",
                        fix="raise data.max_length, or --set data.on_overflow=drop",
                    )
        examples.append(example)
        kept.append(index)
    if too_long and on_overflow == "error":
        index, length = max(too_long, key=lambda pair: pair[1])
        raise InputError(
            f"{len(too_long)} of {len(traces)} traces are longer than max_length {max_length}; "
            f"the longest is {where[index]} with {length} tokens",
            fix=f"--set data.max_length={length}, or say what to do: --set data.on_overflow=drop (or truncate)",
        )
    if not examples:
        raise InputError(f"no trace is left at max_length {max_length}", fix="raise data.max_length")
    return Rendered(
        examples=tuple(examples),
        kept=tuple(kept),
        dropped=len(too_long) if on_overflow == "drop" else 0,
        truncated=len(too_long) if on_overflow == "truncate" else 0,
    )
