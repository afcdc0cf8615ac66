"""What the address of a page says after its `?`. The address is the whole state of a page."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from tunix_rt.errors import InputError

MOST_FIELDS = 200
LONGEST = 24 * 1024


@dataclass(frozen=True, slots=True)
class Query:
    """Names and values in their order; a name may come several times."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Query":
        if len(text) > LONGEST:
            raise InputError(f"an address of {len(text):,} characters", fix=f"use at most {LONGEST:,}")
        try:
            found = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
        except (ValueError, UnicodeDecodeError) as error:
            raise InputError("the address cannot be read", fix="follow a link of this page") from error
        return cls(tuple(found))

    def get(self, name: str, default: str = "") -> str:
        return next((value for key, value in self.pairs if key == name), default)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.pairs if key == name and value]

    def choice(self, name: str, choices: Mapping[str, str] | tuple[str, ...]) -> str:
        """One of `choices`; the first where another is given or none."""
        given = self.get(name)
        return given if given in choices else next(iter(choices))

    def whole(self, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
        """A whole number, brought into its limits."""
        given = self.get(name)
        return min(max(int(given), least), most) if given.isascii() and given.isdigit() and len(given) < 17 else default

    def with_(self, **changed: object) -> str:
        """The address after the `?` with these values instead; None takes a name out."""
        kept = [(key, value) for key, value in self.pairs if key not in changed]
        return urlencode([*kept, *((key, str(value)) for key, value in changed.items() if value is not None)])

    def hidden(self, *but: str) -> Iterator[tuple[str, str]]:
        """What a form repeats so that it is not lost; without the names that it asks for itself."""
        return ((key, value) for key, value in self.pairs if key not in but)
