"""The proof that a saved model is the one in memory: a fresh process loads its folder with plain transformers, and says what
it found. Weights are compared bit by bit, what is computed from them within a stated tolerance."""

import importlib.util
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.data.render import Style, prompt_ids
from tunix_rt.data.template import PLAIN, conversation_text
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import Turn
from tunix_rt.doctor.child_process import run_child
from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.decoding import Decoding
from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.plan.memory import PROOF_SPARE_BYTES, reloaded_bytes
from tunix_rt.storage import sha256_text, storage

logger = logging.getLogger(__name__)

CHILD = "tunix_rt.engines.torch.reload"
SECONDS, SECONDS_PER_GIB = 600.0, 60.0
"""How long the fresh process may take: an allowance, and more for what it has to read, hash and compute with."""
NEW_TOKENS = 16
SPARE_BYTES = PROOF_SPARE_BYTES
QUESTIONS = (
    "What is 17 + 25?",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost?",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers larger than 50.",
)
TEXTS = (*QUESTIONS, "Straße, naïve, 東京, 🙂 – 3.14 × 10⁻²\n\n\tindented  twice", "def f(x):\n    return x**2 # ok\n")
EXACT, MOVED, ROUNDED, WIDENED = 1e-4, 1e-3, 3e-2, 5e-2
"""How far logits may lie apart, as shares of the largest. The weights are the same bits, so only roundings are left. Measured
on a CPU: 2e-6 at most in float32, 0 in bfloat16, and 1.2 to 1.4 % between bfloat16 and float32 (tiny-gemma3, SmolLM2 135M,
Gemma 3 270M). EXACT is for float32 on one device, MOVED for float32 on a GPU and a CPU, ROUNDED for 16 bits on both sides by
kernels that may differ, WIDENED for 16 bits on one side alone. A wrong rotation, norm or scale moves logits by tens of per
cent."""
SAVE_AGAIN = (
    "the folder is not what was in memory: write it again to another disk; if it happens again, please report it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadProof:
    """What a fresh process found the same in the folder as in memory."""

    tensors: int
    """Equal bit by bit."""
    prompts: int
    largest_logit_difference: float
    tolerance: float
    largest_logit: float
    greedy_tokens: int
    """Equal, up to the end of each text or to the first near tie."""
    tokens_known: int
    """Of the vocabulary, each with its id."""
    chat_template_sha256: str | None
    stop_ids: tuple[int, ...]
    device: str
    dtype: str
    """In which the fresh process computed."""
    seconds: float

    @property
    def sentence(self) -> str:
        template = (
            f"chat template {self.chat_template_sha256[:12]}" if self.chat_template_sha256 else "no chat template"
        )
        return (
            f"reloaded by transformers in a fresh process on {self.device} ({self.dtype}): {self.tensors} tensors equal bit by "
            f"bit, logits of {self.prompts} prompts within {self.largest_logit_difference:.2g} (allowed {self.tolerance:.2g}), "
            f"{self.greedy_tokens} greedy tokens equal, {self.tokens_known:,} token ids equal, {template}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What the model in memory holds and says, and how its tokenizer writes: all that a folder is compared with."""

    prompts: Sequence[Sequence[int]]
    logits: npt.NDArray[np.float32]
    greedy: Sequence[Sequence[int]]
    tensors: Mapping[str, list[Any]]
    text_ids: Sequence[Sequence[int]]
    prefix: Sequence[int] | None
    """What stands before a plain text; None where a chat template writes the beginning."""
    vocabulary: Mapping[str, int]
    chat_template_sha256: str | None
    conversation: str | None
    """The first question as the chat template writes it; None where there is none, or it writes the date."""
    stop_ids: tuple[int, ...]
    pad_id: int
    device: str
    compute: str
    autocast: str | None
    merged: bool
    """Adapters stand beside the weights in memory, and were added to them in the folder."""
    attention: str
    weights: str | None = None
    """Type of the weights in memory, where the folder has another."""
    other_engine: bool = False
    """Other kernels than transformers' computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and how the fresh process computes, and how far apart logits may lie then."""

    device: str
    compute: str | None = None
    """None: in the type that the folder names."""
    weights: str | None = None
    """Type in which the weights are loaded to compute; None: that of the folder."""
    autocast: str | None = None
    share: float


def prove_reload(
    backend: Any, engine: Any, folder: Path, *, tokenizer: Tokenizer, style: Style, stop_ids: Sequence[int]
) -> ReloadProof | None:
    """Reload `folder`, saved from `engine`, and compare; an EvidenceError says what differs. Both are in memory for a while.

    None, after a warning, where there is no memory or no device for it."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        logger.warning(
            "%s is not proven: %s, by which a fresh process would load it, is not installed here; `tunix-rt export` proves it "
            "in an environment that has it",
            folder, " and ".join(missing),
        )  # fmt: skip
        return None
    remembered = remember(backend, engine, tokenizer=tokenizer, style=style, stop_ids=stop_ids)
    return prove_folder(remembered, folder, device_room=backend.room_beside(engine))


# --- in memory -------------------------------------------------------------------------------------------------------


def remember(backend: Any, engine: Any, *, tokenizer: Tokenizer, style: Style, stop_ids: Sequence[int]) -> Remembered:
    """Everything about the model in memory; it is not needed afterwards."""
    positions, known = _limits(engine)
    most = positions - NEW_TOKENS if isinstance(positions, int) and positions > NEW_TOKENS else None
    prompts = [prompt_ids(question, tokenizer, style)[:most] for question in QUESTIONS]
    highest = max(map(max, prompts))
    if highest >= known:
        raise InputError(
            f"{engine.source.name}: its tokenizer writes token {highest}, and the model knows {known:,}",
            fix="the tokenizer is of another model; put the right one into the folder",
        )
    answers = backend.generate(
        engine, prompts, decoding=Decoding(max_new_tokens=NEW_TOKENS), stop_ids=stop_ids, pad_id=tokenizer.pad_id,
        decode=tokenizer.decode, rows_at=lambda length: 1,
    )  # fmt: skip
    greedy = {index: answer.ids for index, answer in answers}
    template, recipe = style.template, engine.recipe
    own = template.jinja or tokenizer.chat_template
    asked = [Turn(role="user", text=QUESTIONS[0])]
    writes = template.name != PLAIN and template.today is None
    return Remembered(
        prompts=prompts,
        logits=backend.last_logits(engine, prompts),
        greedy=[greedy[index] for index in range(len(prompts))],
        tensors=backend.tensor_hashes(engine),
        text_ids=[tokenizer.encode(text) for text in TEXTS],
        prefix=tokenizer.prefix if template.name == PLAIN else None,
        vocabulary=tokenizer.inner.get_vocab(with_added_tokens=True),
        chat_template_sha256=sha256_text(own) if own else None,
        conversation=conversation_text(template, tokenizer, asked, add_generation_prompt=True) if writes else None,
        stop_ids=tuple(sorted(stop_ids)),
        pad_id=tokenizer.pad_id,
        device=str(engine.device),
        compute=recipe.compute,
        autocast=recipe.compute if recipe.casts and recipe.frozen is None else None,
        merged=recipe.frozen is not None,
        attention=engine.attention.generating,
        weights=None if engine.saved_dtype is None else recipe.weights,
        other_engine=hasattr(engine, "vocabulary"),
    )


def _limits(engine: Any) -> tuple[Any, int]:
    """Positions of the longest text, where the model names them, and tokens that it knows."""
    if hasattr(engine, "vocabulary"):  # the JAX engine has no model of transformers to ask
        return engine.positions, engine.vocabulary
    return (
        getattr(engine.model.config, "max_position_embeddings", None),
        engine.model.get_input_embeddings().weight.shape[0],
    )


# --- in a fresh process ----------------------------------------------------------------------------------------------


def prove_folder(remembered: Remembered, folder: Path, *, device_room: int | None = None) -> ReloadProof | None:
    """`prove_reload` with what was remembered. `device_room` is what a GPU has left; None: it is tried out."""
    began = time.monotonic()
    logger.info("Proving %s: a fresh process loads it with plain transformers", folder.name)
    lacks = []
    for place in _places(remembered):
        if short := _too_small(place, folder, device_room):
            lacks.append(short)
            continue
        with storage(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory(prefix="tunix-rt-reload-") as scratch:
            [seen] = ask_fresh_process(remembered, [folder], place, Path(scratch))
        if "unable" in seen:
            lacks.append(f"{place.device}: {seen['unable']}")
            continue
        if problems := differences(remembered, seen, share=place.share):
            raise EvidenceError(
                f"{folder}: what transformers loads is not the model in memory: " + "; ".join(problems), fix=SAVE_AGAIN
            )
        return _proof(remembered, seen, place, time.monotonic() - began)
    logger.warning("%s is not proven, since it could not be loaded once more: %s", folder, "; ".join(lacks))
    return None


def _proof(remembered: Remembered, seen: Mapping[str, Any], place: Place, seconds: float) -> ReloadProof:
    largest = _largest(remembered.logits)
    return ReloadProof(
        tensors=len(remembered.tensors),
        prompts=len(remembered.prompts),
        largest_logit_difference=float(np.abs(seen["logits"] - remembered.logits).max()),
        tolerance=place.share * largest,
        largest_logit=largest,
        greedy_tokens=sum(_compared(remembered, seen)),
        tokens_known=len(remembered.vocabulary),
        chat_template_sha256=remembered.chat_template_sha256,
        stop_ids=remembered.stop_ids,
        device=place.device,
        dtype=place.compute or place.autocast or place.weights or str(next(iter(remembered.tensors.values()))[0]),
        seconds=round(seconds, 3),
    )


def _places(remembered: Remembered) -> list[Place]:
    """The engine's own device, then the CPU in float32.

    Where another engine rounded to 16 bits, float32 alone: two that both round lie apart by both roundings."""
    exact = remembered.compute in ("float32", "float64")
    if remembered.other_engine and not exact:
        return [Place(device="cpu", compute="float32", share=WIDENED)]
    near = EXACT if exact else WIDENED if remembered.merged else ROUNDED
    places = [Place(device=remembered.device, weights=remembered.weights, autocast=remembered.autocast, share=near)]
    if remembered.device != "cpu":
        places.append(Place(device="cpu", compute="float32", share=MOVED if exact else WIDENED))
    return places


def _too_small(place: Place, folder: Path, device_room: int | None) -> str | None:
    """Why the folder cannot be loaded there, or None. On its way to a GPU it lies in the host's memory as well."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    host = host_facts().ram_available_bytes
    widest = 2 * weights if place.compute or place.weights else weights  # 16-bit weights widened to float32
    needed = {"the host": (widest + SPARE_BYTES, host)}
    if place.device != "cpu" and device_room is not None:
        there = reloaded_bytes(widest, device=place.device, autocast=place.autocast is not None)
        needed[place.device] = (there + SPARE_BYTES, device_room)
    for where, (most, free) in needed.items():
        if most > free:
            return f"{where} has {free / 2**30:.1f} GiB free, {most / 2**30:.1f} are needed"
    return None


def ask_fresh_process(
    remembered: Remembered, folders: Sequence[Path], place: Place, scratch: Path
) -> list[dict[str, Any]]:
    """What plain transformers finds in each of `folders`, in their order; `logits` as an array. Files go to `scratch`."""
    request, answer = scratch / "request.json", scratch / "answer.json"
    asked = {
        "parent": os.getpid(),
        "folders": [str(folder.absolute()) for folder in folders],
        "prompts": remembered.prompts,
        "texts": TEXTS,
        "conversation": [{"role": "user", "content": QUESTIONS[0]}],
        "new_tokens": NEW_TOKENS,
        "pad_id": remembered.pad_id,
        "device": place.device,
        "compute": place.compute,
        "weights": place.weights,
        "autocast": place.autocast,
        "attention": remembered.attention,
    }
    request.write_text(json.dumps(asked), encoding="utf-8")
    masked = {"CUDA_VISIBLE_DEVICES": ""} if place.device == "cpu" else {}  # no GPU is woken for it
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **masked}
    command = [sys.executable, "-P", "-m", CHILD, str(request), str(answer)]
    weights = sum(path.stat().st_size for folder in folders for path in folder.glob("*.safetensors"))
    seconds = SECONDS + SECONDS_PER_GIB * weights / 2**30
    ended = run_child(command, seconds=seconds, environment=environment)
    if ended.code is None or ended.code < 0:  # nothing was compared: that is no difference
        why = ", probably for want of memory" if ended.code == -signal.SIGKILL else ""
        return [{"unable": f"the process {ended.words}{why}"} for _ in folders]
    if ended.code != 0 or not answer.is_file():
        said = " / ".join(ended.err.strip().splitlines()[-3:])
        raise EvidenceError(
            f"{folders[0]}: the process that reloads it {ended.words}{': ' if said else ''}{said}",
            fix="what transformers says is the reason; without one, try again with --device cpu",
        )
    found: list[dict[str, Any]] = json.loads(answer.read_text(encoding="utf-8"))
    return [seen | {"logits": np.load(scratch / seen["logits"])} if "logits" in seen else seen for seen in found]


# --- the comparison --------------------------------------------------------------------------------------------------


def differences(remembered: Remembered, seen: Mapping[str, Any], *, share: float) -> list[str]:
    """Every way in which what was `seen` in a folder is not what is remembered; logits may differ by that share."""
    if "error" in seen:
        return [f"it cannot be loaded: {seen['error']}"]
    return [
        *_loading(seen["loading"]),
        *_tensors(remembered.tensors, seen["tensors"]),
        *_tokens(remembered, seen),
        *_template(remembered, seen),
        *_stops(remembered, seen),
        *_logits(remembered, seen, share),
        *_greedy(remembered, seen, share),
    ]


def _loading(info: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{len(names)} {kind.replace('_', ' ')}, first {names[0]}" for kind, names in info.items()]


def _tensors(ours: Mapping[str, list[Any]], theirs: Mapping[str, list[Any]]) -> list[str]:
    found = []
    if lost := sorted(ours.keys() - theirs.keys()):
        found.append(f"{len(lost)} of {len(ours)} tensors are missing, first {lost[0]}")
    if more := sorted(theirs.keys() - ours.keys()):
        found.append(f"{len(more)} tensors are in the folder alone, first {more[0]}")
    if other := [name for name in ours if name in theirs and list(ours[name]) != list(theirs[name])]:
        first = other[0]
        (kind, shape, _), (their_kind, their_shape, _) = ours[first], theirs[first]
        said = "other values"
        if (kind, list(shape)) != (their_kind, list(their_shape)):
            said = f"{their_kind} {list(their_shape)} instead of {kind} {list(shape)}"
        found.append(f"{len(other)} of {len(ours)} tensors differ, first {first} ({said})")
    return found


def _tokens(remembered: Remembered, seen: Mapping[str, Any]) -> list[str]:
    found, theirs = [], seen["vocabulary"]
    if other := [token for token, number in remembered.vocabulary.items() if theirs.get(token) != number]:
        first = min(other, key=remembered.vocabulary.__getitem__)
        now = theirs.get(first, "none")
        found.append(
            f"its tokenizer has {len(other):,} of {len(remembered.vocabulary):,} tokens under another id, "
            f"first {first!r}: {now} instead of {remembered.vocabulary[first]}"
        )
    for text, ours, read in zip(TEXTS, remembered.text_ids, seen["texts"], strict=True):
        if list(ours) != read:
            at = _first_difference(ours, read)
            found.append(
                f"its tokenizer reads {text!r} otherwise from token {at} on: {read[at : at + 4]} instead of "
                f"{list(ours[at : at + 4])}"
            )
            break
    if remembered.prefix is not None and not found:
        meant, given = [*remembered.prefix, *remembered.text_ids[0]], seen["texts_as_given"][0]
        if given[: len(meant)] != meant:
            found.append(
                f"its tokenizer begins a text with {given[:2]}, the model was given {meant[:2]}: a token that begins a text "
                "is lost or added (add_bos_token in tokenizer_config.json)"
            )
    return found


def _template(remembered: Remembered, seen: Mapping[str, Any]) -> list[str]:
    ours, theirs = remembered.chat_template_sha256, seen["chat_template_sha256"]
    if ours != theirs:
        named = [f"sha256 {one[:12]}" if one else "none" for one in (theirs, ours)]
        return [f"its chat template is another: {named[0]} instead of {named[1]}"]
    if remembered.conversation is not None and seen.get("conversation") != remembered.conversation:
        written, meant = str(seen.get("conversation")), remembered.conversation
        at = _first_difference(written, meant)
        return [
            f"its chat template writes {written[at : at + 40]!r} from character {at} on, in training it was "
            f"{meant[at : at + 40]!r}"
        ]
    return []


def _stops(remembered: Remembered, seen: Mapping[str, Any]) -> list[str]:
    named = seen["eos_token_id"]
    theirs = sorted(named if isinstance(named, list) else [] if named is None else [named])
    if theirs == list(remembered.stop_ids):
        return []
    return [
        f"its text ends at the tokens {theirs} (generation_config.json, eos_token_id), it should at "
        f"{list(remembered.stop_ids)}"
    ]


def _logits(remembered: Remembered, seen: Mapping[str, Any], share: float) -> list[str]:
    ours, theirs = remembered.logits, seen["logits"]
    if ours.shape != theirs.shape:
        return [f"it gives {theirs.shape[1]:,} logits for a token instead of {ours.shape[1]:,}"]
    if not np.isfinite(theirs).all():
        return ["its logits are not finite"]
    apart, allowed = np.abs(theirs - ours).max(axis=1), share * _largest(ours)
    if apart.max() <= allowed:
        return []
    first = int(np.argmax(apart > allowed))
    return [
        f"logits differ by up to {apart.max():.3g} where {allowed:.2g} is allowed (the largest is {_largest(ours):.3g}), "
        f"first after the prompt {QUESTIONS[first]!r}"
    ]


def _largest(logits: npt.NDArray[np.float32]) -> float:
    return float(np.abs(logits).max())


def _greedy(remembered: Remembered, seen: Mapping[str, Any], share: float) -> list[str]:
    for number, same in enumerate(_compared(remembered, seen)):
        ours, (theirs, margins) = remembered.greedy[number], _until_stop(remembered, seen["greedy"][number])
        if same == len(ours) == len(theirs) or _near_tie(margins, same, remembered, share):
            continue
        return [
            f"greedy text after {QUESTIONS[number]!r} differs from token {same} on: {theirs[same : same + 4]} instead of "
            f"{list(ours[same : same + 4])}, where the likeliest token is {margins[same]:.3g} above the second"
        ]
    return []


def _compared(remembered: Remembered, seen: Mapping[str, Any]) -> list[int]:
    """Of each prompt, how many greedy tokens are the same from the first on."""
    pairs = zip(remembered.greedy, seen["greedy"], strict=True)
    return [_first_difference(ours, _until_stop(remembered, said)[0]) for ours, said in pairs]


def _near_tie(margins: Sequence[float], at: int, remembered: Remembered, share: float) -> bool:
    """Whether rounding alone may have decided for another token: both sides may be off by what is allowed."""
    return margins[at] <= 2 * share * _largest(remembered.logits)


def _until_stop(remembered: Remembered, said: Mapping[str, list[Any]]) -> tuple[list[int], list[float]]:
    """Tokens before the first that ends a text, wherever the folder stops; margins of one more, which may be that one."""
    ids = said["ids"]
    end = next((at for at, number in enumerate(ids) if number in remembered.stop_ids), len(ids))
    return ids[:end], [*said["margins"], float("inf")]


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
