"""How turns become one text: the tokenizer's chat template, a built-in one, or plain lines.

A chat template is an untrusted program. It runs in jinja2's sandbox with the settings of transformers, so that training
renders a conversation as serving does.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tunix_rt.data.records import Turn
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.errors import InputError

PLAIN = "plain"

# Gemma has no system role: the system turn opens the first user turn. The text is that of Gemma 3's own template.
# A tokenizer with a beginning-of-sequence token puts it before. The text is part of a hash, so it does not change.
GEMMA = (
    "{% set told = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if told else messages %}"
    "{% for message in turns %}"
    "{% if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('the turns of user and assistant must alternate, and the user begins') }}"
    "{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ (told if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BUILT_IN = {"gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>")), "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"))}
OTHER_WAYS = "--set data.chat_template=plain, or gemma or chatml where the tokenizer has their control tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A way to render a conversation. `jinja` is empty for `plain`, which `render.py` implements."""

    name: str
    jinja: str
    source: str
    """Where it comes from, for errors."""
    end_id: int = -1
    """The control token that ends an assistant turn; -1 when the template has none."""
    end_token: str = ""
    opens_turns_with_bos: bool = False
    """The beginning-of-sequence token also begins each turn (SmolLM2 uses ChatML's `<|im_start|>` for both)."""
    today: date | None = None
    """The date that the template renders; None when it renders none."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.name == PLAIN, self.jinja, str(self.today)]).encode()).hexdigest()


class TemplateRefusal(Exception):
    """The template's reason to reject a conversation."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def choose_template(wanted: str, tokenizer: Tokenizer, *, today: date | None = None) -> Template:
    """The template `wanted` (auto, tokenizer, gemma, chatml, plain), parsed and rendered once, or an InputError.

    Some templates write the date into every conversation: `today`, or the current date. A resumed run must be given the
    date it began with, or its tokens differ.
    """
    if wanted == PLAIN or (wanted == "auto" and tokenizer.chat_template is None):
        return _ending_in(Template(name=PLAIN, jinja="", source=PLAIN), tokenizer.eos_id, tokenizer)
    if wanted in ("auto", "tokenizer"):
        if tokenizer.chat_template is None:
            raise InputError(f"the tokenizer in {tokenizer.folder} has no chat template", fix=OTHER_WAYS)
        name, jinja, source = "tokenizer", tokenizer.chat_template, str(tokenizer.chat_template_file)
        spelled = jinja  # a template that only begins a sequence uses `bos_token`
    else:
        name, (jinja, markers), source = wanted, BUILT_IN[wanted], f"the template {wanted!r}"
        _require_markers(wanted, markers, tokenizer)
        spelled = "".join(markers)
        if tokenizer.bos_token and (wanted == "gemma" or tokenizer.adds_bos):
            jinja = f"{{{{ {json.dumps(tokenizer.bos_token)} }}}}{jinja}"
    rendered_date = (today or date.today()) if "strftime_now" in jinja else None
    template = Template(name=name, jinja=jinja, source=source, today=rendered_date)
    if tokenizer.bos_token and tokenizer.bos_token in spelled:
        template = replace(template, opens_turns_with_bos=_has_bos_twice(template, tokenizer))
    return _ending_in(template, _find_end(template, tokenizer), tokenizer)


def _has_bos_twice(template: Template, tokenizer: Tokenizer) -> bool:
    """Whether a conversation of two turns contains the beginning-of-sequence token more than once."""
    turns = [Turn(role="user", text="a"), Turn(role="assistant", text="b")]
    try:
        return conversation_text(template, tokenizer, turns).count(str(tokenizer.bos_token)) > 1
    except TemplateRefusal:
        return False


def _ending_in(template: Template, end_id: int, tokenizer: Tokenizer) -> Template:
    return replace(template, end_id=end_id, end_token="" if end_id < 0 else str(tokenizer.inner.id_to_token(end_id)))


def _require_markers(name: str, markers: Sequence[str], tokenizer: Tokenizer) -> None:
    missing = [marker for marker in markers if marker not in tokenizer.control_tokens]
    if missing:
        known = {marker: tokenizer.inner.token_to_id(marker) for marker in missing}
        lacking = [text if number is None else f"{text} (only as word {number})" for text, number in known.items()]
        raise InputError(
            f"the template {name!r} needs {' and '.join(markers)} as control tokens; "
            f"the tokenizer in {tokenizer.folder} lacks {' and '.join(lacking)}",
            fix="--set data.chat_template=plain, or use a tokenizer that has them",
        )


def conversation_text(
    template: Template, tokenizer: Tokenizer, turns: Sequence[Turn], *, add_generation_prompt: bool = False
) -> str:
    """`turns` as the template renders them. Raises TemplateRefusal when it rejects them, InputError when it fails."""
    try:
        return _program(template.jinja, template.today, template.source).render(
            messages=[{"role": turn.role, "content": turn.text} for turn in turns],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens,
        )
    except (TemplateRefusal, InputError):
        raise
    except Exception as error:  # whatever an untrusted program raises is its own failure
        raise InputError(f"{template.source}: the chat template fails: {_first_line(error)}", fix=OTHER_WAYS) from error


def _find_end(template: Template, tokenizer: Tokenizer) -> int:
    """The first control token after the reply in a conversation of one question; -1 when there is none."""
    question, reply = Turn(role="user", text="What is said?"), Turn(role="assistant", text="This is what is said.")
    try:
        text = conversation_text(template, tokenizer, [question, reply])
    except TemplateRefusal as error:
        raise InputError(
            f"{template.source}: the chat template rejects a question and its answer: {error.reason}", fix=OTHER_WAYS
        ) from error
    _, separator, after = text.rpartition(reply.text)
    if not separator:
        raise InputError(f"{template.source}: the chat template leaves out the assistant's turn", fix=OTHER_WAYS)
    ids = tokenizer.encode_conversation(after)
    return next((number for number in ids if number in tokenizer.control_ids), -1)


# --- the sandbox -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _program(jinja: str, today: date | None, source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = (today or date.today()).strftime
    try:
        return environment.from_string(jinja)
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise InputError(
            f"{source}: the chat template cannot be parsed: {where}{_first_line(error)}", fix=OTHER_WAYS
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _refuse(reason: object) -> None:
    raise TemplateRefusal(str(reason))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's turn; the text inside is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
