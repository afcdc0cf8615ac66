"""The `Modelfile` of Ollama: the chat template in Ollama's language, the system prompt, and the tokens that end a generation.

Ollama does not run the template in the GGUF file. Its own is derived from what the chat template renders, and is written only if
it renders a conversation of several turns to the same text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunix_rt.data.records import Role, Turn
from tunix_rt.data.render import Style
from tunix_rt.data.template import PLAIN, TemplateRefusal, conversation_text
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.errors import InputError

CONTEXT = 4096
"""Tokens of context, unless the model has fewer. More take more memory: PARAMETER num_ctx."""
SYSTEM, FIRST, REPLY, SECOND = "qsystemq", "qfirstq", "qreplyq", "qsecondq"
UNWRITABLE = ('"""', "{{")
"""In a text of the Modelfile, and in a text of a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What the template writes around the texts of a turn and its reply."""

    before_system: str | None
    """None: the template has no system turn."""
    after_system: str
    before: str
    """Of a user turn without a system turn."""
    after: str
    end: str
    """After a reply."""
    default_system: str | None = None

    def turn(self, system: str, prompt: str, reply: str | None) -> str:
        """As Ollama renders a turn; None for the reply that is generated next."""
        head = self.before if not system else f"{self.before_system}{system}{self.after_system}"
        return f"{head}{prompt}{self.after}" + ("" if reply is None else f"{reply}{self.end}")

    def go_template(self) -> str:
        head = self.before
        if self.before_system is not None:
            system = f"{self.before_system}{{{{ .System }}}}{self.after_system}"
            head = f"{{{{ if .System }}}}{system}{{{{ else }}}}{head}{{{{ end }}}}"
        return f"{head}{{{{ .Prompt }}}}{self.after}{{{{ .Response }}}}{self.end}"


def modelfile(
    file_name: str, tokenizer: Tokenizer, style: Style, *, adds_bos: bool, ends: Sequence[int], positions: int | None
) -> str:
    """The text of the file. Without TEMPLATE, as its first line says, if Ollama's language cannot express the chat template."""
    pieces = pieces_of(tokenizer, style, adds_bos=adds_bos)
    system = style.system_instruction or (pieces.default_system if pieces else None)
    if system and '"""' in system:
        raise InputError(
            "the system prompt has three quotes in a row, which a Modelfile cannot contain", fix="export with --to hf"
        )
    lines = [f"FROM ./{file_name}"]
    if pieces is None:
        lines.insert(
            0, "# No TEMPLATE: Ollama's language cannot express the chat template. Send rendered prompts with raw=true."
        )
    else:
        lines.append(f'TEMPLATE """{pieces.go_template()}"""')
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{tokenizer.inner.id_to_token(number)}"' for number in ends]
    lines += [
        f"PARAMETER num_ctx {min(positions or CONTEXT, CONTEXT)}",
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
    ]
    return "\n".join(lines) + "\n"


def pieces_of(tokenizer: Tokenizer, style: Style, *, adds_bos: bool) -> Pieces | None:
    """The pieces, or None where no pieces give what the template renders."""
    if style.template.name == PLAIN:
        end = str(tokenizer.inner.id_to_token(tokenizer.eos_id))
        return Pieces(before_system="", after_system="\n", before="", after="\n", end=end)

    def rendered(system: str | None, *texts: str) -> str:
        roles: tuple[Role, Role] = ("user", "assistant")
        turns = [Turn(role="system", text=system)] if system else []
        turns += [Turn(role=roles[at % 2], text=text) for at, text in enumerate(texts)]
        text = conversation_text(style.template, tokenizer, turns, add_generation_prompt=True)
        return text.removeprefix(tokenizer.bos_token or "") if adds_bos else text  # Ollama adds it by its id

    try:
        pieces = _derived(rendered)
        systems = (None,) if pieces.before_system is None else (None, SYSTEM)
        equal = rendered(None, FIRST) == _as_ollama(pieces, None) and all(
            rendered(system, FIRST, REPLY, SECOND) == _as_ollama(pieces, system, REPLY) for system in systems
        )
    except (TemplateRefusal, ValueError):
        return None
    written = "".join((pieces.before_system or "", pieces.after_system, pieces.before, pieces.after, pieces.end))
    return pieces if equal and not any(text in written for text in UNWRITABLE) else None


def _derived(rendered: Callable[..., str]) -> Pieces:
    """ValueError where a text is not rendered exactly once."""
    first, after = rendered(None, FIRST).split(FIRST)
    between, _ = rendered(None, FIRST, REPLY, SECOND).split(REPLY)[1].split(SECOND)
    try:
        before_system, rest = rendered(SYSTEM, FIRST).split(SYSTEM)
    except TemplateRefusal:
        before_system, rest = None, FIRST
    after_system = rest.split(FIRST)[0]
    if between.endswith(first):
        end = between.removesuffix(first)
        return Pieces(before_system=before_system, after_system=after_system, before=first, after=after, end=end)
    if before_system is None or not (first.startswith(before_system) and first.endswith(after_system)):
        raise ValueError(first)
    default = first[len(before_system) : len(first) - len(after_system)]  # the template's own system prompt
    return Pieces(
        before_system=before_system,
        after_system=after_system,
        before=between,
        after=after,
        end="",
        default_system=default,
    )


def _as_ollama(pieces: Pieces, system: str | None, reply: str | None = None) -> str:
    text = pieces.turn(system or pieces.default_system or "", FIRST, reply)
    return text if reply is None else text + pieces.turn("", SECOND, None)
