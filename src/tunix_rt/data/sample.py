"""The one normal form of a training record: what was said, by whom, and for a trace its steps and its answer."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One record, whatever format it came in.

    With `steps` it is a reasoning trace: what the model is to say is made of `steps` and `answer`, in the configured tags,
    and comes after `turns`. Without, the turns of the assistant are in `turns`.
    """

    turns: tuple[Turn, ...]
    steps: tuple[str, ...] = ()
    answer: str | None = None

    @property
    def question(self) -> str:
        """All that the user said: samples with the same question are the same question."""
        return "\n".join(turn.text for turn in self.turns if turn.role == "user")

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the record, as it arrived."""
        said = (*(turn.text for turn in self.turns), *self.steps)
        return said if self.answer is None else (*said, self.answer)
