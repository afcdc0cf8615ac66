"""An answer as it is shown while it comes: the reasoning dim, the answer bright, the tags themselves left out."""

from collections.abc import Iterator
from dataclasses import dataclass, field

REASONING, ANSWER, OTHER = "reasoning", "answer", "other"
STYLES = {REASONING: "dim", ANSWER: "bold", OTHER: ""}


@dataclass(slots=True, kw_only=True)
class Parts:
    """Cuts a growing text into reasoning, answer and the rest. What could be the beginning of a tag waits for more."""

    reasoning_tag: str
    answer_tag: str
    kind: str = OTHER
    _shown: int = field(default=0, init=False)

    def more(self, text: str, *, whole: bool = False) -> Iterator[tuple[str, str]]:
        """(kind, piece) of what is new in `text`, which begins with all that was given before; `whole` when it is over.

        A letter whose bytes are not all there yet is the replacement character, and waits too."""
        marks = {
            f"<{self.reasoning_tag}>": REASONING, f"</{self.reasoning_tag}>": OTHER,
            f"<{self.answer_tag}>": ANSWER, f"</{self.answer_tag}>": OTHER,
        }  # fmt: skip
        if not whole:
            text = text.rstrip("\ufffd")
        start = self._shown
        while (start := text.find("<", start)) >= 0:
            mark = next((mark for mark in marks if text.startswith(mark, start)), None)
            if mark is not None:
                if start > self._shown:
                    yield self.kind, text[self._shown : start]
                self.kind, self._shown = marks[mark], start + len(mark)
                start = self._shown
            elif not whole and any(mark.startswith(text[start:]) for mark in marks):
                break
            else:
                start += 1
        end = len(text) if start < 0 else start
        if end > self._shown:
            yield self.kind, text[self._shown : end]
            self._shown = end


class Speaker:
    """Prints an answer to the terminal as it comes. Where there is none, the styles are left out."""

    def __init__(self, parts: Parts) -> None:
        from rich.console import Console

        self._parts = parts
        self._console = Console(highlight=False, soft_wrap=True)
        self._aside = Console(highlight=False, soft_wrap=True, stderr=True)
        self._last = ""

    def hear(self, text: str, *, whole: bool = False) -> None:
        """The text so far; `whole` when nothing more comes."""
        from rich.segment import Segment, Segments

        for kind, piece in self._parts.more(text, whole=whole):
            if self._last not in ("", kind):
                self._console.print("")
            self._last = kind
            # As a segment, because in a text rich would turn tabs into spaces and :names: into pictures.
            self._console.print(Segments([Segment(shown(piece))]), style=STYLES[kind] or None, end="")

    def end(self, words: str) -> None:
        """Close the line; `words` say why the answer is not whole. They are no part of it, so they go to stderr."""
        self._console.print("")
        if words:
            self._aside.print(f"({words})", style="yellow", markup=False)


def shown(text: str) -> str:
    """`text` with line breaks, and nothing that could steer a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
