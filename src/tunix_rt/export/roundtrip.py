"""The round-trip check: a fresh process loads a saved model with plain transformers, and both models are compared. Weights must
be bitwise equal, logits and greedy tokens within a stated tolerance."""

import importlib.util
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.data.records import Turn
from tunix_rt.data.render import Style, prompt_ids
from tunix_rt.data.template import PLAIN, conversation_text
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.doctor.child_process import run_child
from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import Backend, Engine
from tunix_rt.engines.decoding import Decoding
from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.plan.memory import PROOF_SPARE_BYTES as SPARE_BYTES
from tunix_rt.plan.memory import reloaded_bytes
from tunix_rt.storage import scratch_folder, sha256_text

logger = logging.getLogger(__name__)

CHILD = "tunix_rt.engines.torch.reload"
SECONDS, SECONDS_PER_GIB = 600.0, 60.0
"""Time limit of the fresh process: a constant, and more for every GiB that it reads, hashes and computes with."""
NEW_TOKENS = 16
QUESTIONS = (
    "What is 17 + 25?",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost?",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers larger than 50.",
)
TEXTS = (*QUESTIONS, "Straße, naïve, 東京, 🙂 – 3.14 × 10⁻²\n\n\tindented  twice", "def f(x):\n    return x**2 # ok\n")
EXACT, MOVED, ROUNDED, WIDENED = 1e-4, 1e-3, 3e-2, 5e-2
"""Tolerance of logits, as a fraction of the largest. The weights are the same bits, so only rounding is left. Measured on a CPU:
2e-6 at most in float32, 0 in bfloat16, and 1.2 to 1.4 % between bfloat16 and float32 (tiny-gemma3, SmolLM2 135M, Gemma 3 270M).
EXACT is for float32 on one device, MOVED for float32 on a GPU and a CPU, ROUNDED for 16 bits on both sides with kernels that may
differ, WIDENED for 16 bits on one side alone. A wrong rotation, norm or scale moves logits by tens of per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """What is equal in the folder, as a fresh process loads it, and in memory."""

    tensors: int
    """Bitwise equal."""
    prompts: int
    largest_logit_difference: float
    tolerance: float
    largest_logit: float
    greedy_tokens: int
    """Equal, up to the end of each generation or to the first near tie."""
    tokens_known: int
    """Of the vocabulary, each with its id."""
    chat_template_sha256: str | None
    stop_ids: tuple[int, ...]
    device: str
    dtype: str
    """Compute dtype of the fresh process."""
    seconds: float

    def describe(self, loader: str = "transformers") -> str:
        template = f"chat template {(self.chat_template_sha256 or 'none')[:12]}"
        return (
            f"reloaded by {loader} in a fresh process on {self.device} ({self.dtype}): {self.tensors} tensors bitwise "
            f"equal, logits of {self.prompts} prompts within {self.largest_logit_difference:.2g} (tolerance "
            f"{self.tolerance:.2g}), {self.greedy_tokens} greedy tokens equal, {self.tokens_known:,} token ids equal, {template}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The model in memory and its tokenizer: everything that a folder is compared with."""

    prompts: Sequence[Sequence[int]]
    logits: npt.NDArray[np.float32]
    greedy: Sequence[Sequence[int]]
    tensors: Mapping[str, list[Any]]
    text_ids: Sequence[Sequence[int]]
    prefix: Sequence[int] | None
    """Tokens before a plain text; None where a chat template writes the beginning."""
    vocabulary: Mapping[str, int]
    chat_template_sha256: str | None
    conversation: str | None
    """The first question as the chat template renders it; None without a template, or where it writes the date."""
    stop_ids: tuple[int, ...]
    pad_id: int
    device: str
    compute: str
    autocast: str | None
    merged: bool
    """Adapters are beside the weights in memory, and merged into them in the folder."""
    attention: str
    weights: str | None = None
    """Type of the weights in memory, where the folder has another."""
    other_engine: bool = False
    """Computed by other kernels than those of transformers."""
    base: str | None = None
    """The folder of the model that an adapter folder is loaded with."""

    @property
    def largest_logit(self) -> float:
        return float(np.abs(self.logits).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how the fresh process computes, and the tolerance of logits there."""

    device: str
    compute: str | None = None
    """None: in the type of the folder."""
    weights: str | None = None
    """Type in which the weights are loaded; None: that of the folder."""
    autocast: str | None = None
    share: float


def check_round_trip(
    backend: Backend, engine: Engine, folder: Path, *, tokenizer: Tokenizer, style: Style, stop_ids: Sequence[int]
) -> RoundTrip | None:
    """Reload `folder`, saved from `engine`, and compare; a difference is an EvidenceError. Both models are in memory.

    None, after a warning, where the libraries, the memory or the device for it are missing."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        way_out = "`tunix-rt export` checks it in an environment that has it"
        logger.warning("%s was not reloaded: %s is not installed; %s", folder, " and ".join(missing), way_out)
        return None
    reference = reference_of(backend, engine, tokenizer=tokenizer, style=style, stop_ids=stop_ids)
    return check_folder(reference, folder, device_room=backend.room_beside(engine))


# --- in memory -------------------------------------------------------------------------------------------------------


def reference_of(
    backend: Backend, engine: Engine, *, tokenizer: Tokenizer, style: Style, stop_ids: Sequence[int],
    adapter: Mapping[str, list[Any]] | None = None,
) -> Reference:  # fmt: skip
    """Everything about the model in memory; it is not needed afterwards. `adapter` has the tensors of an adapter folder."""
    most = engine.positions - NEW_TOKENS if engine.positions and engine.positions > NEW_TOKENS else None
    prompts = [prompt_ids(question, tokenizer, style)[:most] for question in QUESTIONS]
    highest = max(map(max, prompts))
    if highest >= engine.vocabulary:
        raise InputError(
            f"{engine.source.name}: the tokenizer has token {highest}, the embedding {engine.vocabulary:,} tokens",
            fix="the tokenizer is of another model; put the right one into the folder",
        )
    generated = backend.generate(
        engine, prompts, decoding=Decoding(max_new_tokens=NEW_TOKENS), stop_ids=stop_ids, pad_id=tokenizer.pad_id,
        decode=tokenizer.decode, batch_size_at=lambda length: 1,
    )  # fmt: skip
    greedy = dict(generated)
    template, recipe = style.template, engine.recipe
    jinja, turns = template.jinja or tokenizer.chat_template, [Turn(role="user", text=QUESTIONS[0])]
    renders = template.name != PLAIN and template.today is None
    return Reference(
        prompts=prompts,
        logits=backend.last_logits(engine, prompts),
        greedy=[greedy[index].ids for index in range(len(prompts))],
        tensors=adapter or backend.tensor_hashes(engine),
        text_ids=[tokenizer.encode(text) for text in TEXTS],
        prefix=tokenizer.prefix if template.name == PLAIN else None,
        vocabulary=tokenizer.inner.get_vocab(with_added_tokens=True),
        chat_template_sha256=sha256_text(jinja) if jinja else None,
        conversation=conversation_text(template, tokenizer, turns, add_generation_prompt=True) if renders else None,
        stop_ids=tuple(sorted(stop_ids)),
        pad_id=tokenizer.pad_id,
        device=engine.device_type,
        compute=recipe.compute,
        autocast=recipe.compute if recipe.casts and recipe.frozen is None else None,
        merged=recipe.frozen is not None and adapter is None,
        attention=engine.attention.generating,
        weights=recipe.frozen if adapter else None if engine.saved_dtype is None else recipe.weights,
        other_engine=not engine.runs_transformers,
        base=str(engine.source.folder) if adapter else None,
    )


# --- in a fresh process ----------------------------------------------------------------------------------------------


def check_folder(reference: Reference, folder: Path, *, device_room: int | None = None) -> RoundTrip | None:
    """`check_round_trip` against a reference. `device_room` is the free memory of the GPU; None: it is tried."""
    began, obstacles = time.monotonic(), []
    loader = "transformers" if reference.base is None else "peft"
    logger.info("Round-trip check: a fresh process loads %s with plain %s", folder.name, loader)
    for target in _targets(reference):
        if short := _too_small(target, Path(reference.base or folder), device_room):
            obstacles.append(short)
            continue
        with scratch_folder("tunix-rt-reload-") as scratch:
            [loaded] = reload_in_child(reference, [folder], target, scratch)
        if "unable" in loaded:
            obstacles.append(f"{target.device}: {loaded['unable']}")
            continue
        if problems := differences(reference, loaded, share=target.share):
            raise EvidenceError(
                f"{folder}: what transformers loads is not the model in memory: " + "; ".join(problems),
                fix="write the folder again to another disk; if it happens again, please report it",
            )
        return RoundTrip(
            tensors=len(reference.tensors),
            prompts=len(reference.prompts),
            largest_logit_difference=float(np.abs(loaded["logits"] - reference.logits).max()),
            tolerance=target.share * reference.largest_logit,
            largest_logit=reference.largest_logit,
            greedy_tokens=sum(_equal_tokens(reference, loaded)),
            tokens_known=len(reference.vocabulary),
            chat_template_sha256=reference.chat_template_sha256,
            stop_ids=reference.stop_ids,
            device=target.device,
            dtype=target.compute or target.autocast or target.weights or next(iter(reference.tensors.values()))[0],
            seconds=round(time.monotonic() - began, 3),
        )
    logger.warning("%s was not reloaded: %s", folder, "; ".join(obstacles))
    return None


def _targets(reference: Reference) -> list[Target]:
    """The engine's own device, then the CPU in float32.

    Where another engine rounded to 16 bits, float32 alone: two that both round differ by both roundings."""
    exact = reference.compute in ("float32", "float64")
    if reference.other_engine and not exact:
        return [Target(device="cpu", compute="float32", share=WIDENED)]
    near = EXACT if exact else WIDENED if reference.merged else ROUNDED
    targets = [Target(device=reference.device, weights=reference.weights, autocast=reference.autocast, share=near)]
    if reference.device != "cpu":
        targets.append(Target(device="cpu", compute="float32", share=MOVED if exact else WIDENED))
    return targets


def _too_small(target: Target, folder: Path, device_room: int | None) -> str | None:
    """Why the folder cannot be loaded there, or None. On its way to a GPU it is in host memory as well."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    widest = 2 * weights if target.compute or target.weights else weights  # 16-bit weights widened to float32
    needed = {"the host": (widest + SPARE_BYTES, host_facts().ram_available_bytes)}
    if target.device != "cpu" and device_room is not None:
        there = reloaded_bytes(widest, device=target.device, autocast=target.autocast is not None)
        needed[target.device] = (there + SPARE_BYTES, device_room)
    for where, (most, free) in needed.items():
        if most > free:
            return f"{where} has {free / 2**30:.1f} GiB free, {most / 2**30:.1f} are needed"
    return None


def reload_in_child(
    reference: Reference, folders: Sequence[Path], target: Target, scratch: Path
) -> list[dict[str, Any]]:
    """What plain transformers loads from each of `folders`, in their order; `logits` as an array. Files go to `scratch`."""
    request, answer = scratch / "request.json", scratch / "answer.json"
    content = {
        "parent": os.getpid(), "folders": [str(folder.absolute()) for folder in folders], "texts": TEXTS,
        "conversation": [{"role": "user", "content": QUESTIONS[0]}], "new_tokens": NEW_TOKENS, **asdict(target),
        **{name: getattr(reference, name) for name in ("prompts", "pad_id", "attention", "base", "stop_ids")},
    }  # fmt: skip
    request.write_text(json.dumps(content), encoding="utf-8")
    masked = {"CUDA_VISIBLE_DEVICES": ""} if target.device == "cpu" else {}  # no GPU is woken for it
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **masked}
    command = [sys.executable, "-P", "-m", CHILD, str(request), str(answer)]
    read = [Path(reference.base)] if reference.base else folders
    gib = sum(path.stat().st_size for folder in read for path in folder.glob("*.safetensors")) / 2**30
    ended = run_child(command, seconds=SECONDS + SECONDS_PER_GIB * gib, environment=environment)
    if ended.code is None or ended.code < 0:  # nothing was compared: that is no difference
        why = ", probably out of memory" if ended.code == -signal.SIGKILL else ""
        return [{"unable": f"the process {ended.words}{why}"} for _ in folders]
    if ended.code != 0 or not answer.is_file():
        last = " / ".join(ended.err.strip().splitlines()[-3:])
        raise EvidenceError(
            f"{folders[0]}: the process that reloads it {ended.words}{': ' if last else ''}{last}",
            fix="the message of transformers is the reason; without one, try again with --device cpu",
        )
    loaded: list[dict[str, Any]] = json.loads(answer.read_text(encoding="utf-8"))
    return [one | {"logits": np.load(scratch / one["logits"])} if "logits" in one else one for one in loaded]


# --- the comparison --------------------------------------------------------------------------------------------------


def differences(reference: Reference, loaded: Mapping[str, Any], *, share: float) -> list[str]:
    """Every way in which the loaded folder is not the reference; logits may differ by that fraction of the largest."""
    if "error" in loaded:
        return [f"it cannot be loaded: {loaded['error']}"]
    return [
        *(f"{len(names)} {kind.replace('_', ' ')}, first {names[0]}" for kind, names in loaded["loading"].items()),
        *_tensors(reference.tensors, loaded["tensors"]),
        *_tokens(reference, loaded),
        *_template(reference, loaded),
        *_logits(reference, loaded, share),
        *_greedy(reference, loaded, share),
    ]


def _tensors(ours: Mapping[str, list[Any]], theirs: Mapping[str, list[Any]]) -> Iterator[str]:
    if lost := sorted(ours.keys() - theirs.keys()):
        yield f"{len(lost)} of {len(ours)} tensors are missing, first {lost[0]}"
    if more := sorted(theirs.keys() - ours.keys()):
        yield f"{len(more)} tensors are in the folder alone, first {more[0]}"
    if other := [name for name in ours if name in theirs and list(ours[name]) != list(theirs[name])]:
        (kind, shape, _), (their_kind, their_shape, _) = ours[other[0]], theirs[other[0]]
        how = "other values"
        if (kind, list(shape)) != (their_kind, list(their_shape)):
            how = f"{their_kind} {list(their_shape)} instead of {kind} {list(shape)}"
        yield f"{len(other)} of {len(ours)} tensors differ, first {other[0]} ({how})"


def _tokens(reference: Reference, loaded: Mapping[str, Any]) -> Iterator[str]:
    ids, theirs = reference.vocabulary, loaded["vocabulary"]
    if other := [token for token, number in ids.items() if theirs.get(token) != number]:
        first = min(other, key=ids.__getitem__)
        yield (
            f"its tokenizer has other ids for {len(other):,} of {len(ids):,} tokens, first {first!r}: "
            f"{theirs.get(first, 'none')} instead of {ids[first]}"
        )
    encoded = zip(TEXTS, map(list, reference.text_ids), loaded["texts"], strict=True)
    wrong = [(text, _first_difference(ours, read), ours, read) for text, ours, read in encoded if ours != read]
    for text, at, ours, read in wrong[:1]:
        yield f"its tokenizer encodes {text!r} differently from token {at} on: {read[at : at + 4]} instead of {ours[at : at + 4]}"
    if reference.prefix is not None and not other and not wrong:
        expected, actual = [*reference.prefix, *reference.text_ids[0]], loaded["texts_as_given"][0]
        if actual[: len(expected)] != expected:
            yield (
                f"its tokenizer begins a text with {actual[:2]}, the model was trained with {expected[:2]}: a token that begins "
                "a text is lost or added (add_bos_token in tokenizer_config.json)"
            )


def _template(reference: Reference, loaded: Mapping[str, Any]) -> Iterator[str]:
    """The chat template, and the tokens that end a generation."""
    hashes = loaded["chat_template_sha256"], reference.chat_template_sha256
    expected, actual = reference.conversation, str(loaded.get("conversation"))
    if hashes[0] != hashes[1]:
        theirs, ours = (f"sha256 {one[:12]}" if one else "none" for one in hashes)
        yield f"its chat template differs: {theirs} instead of {ours}"
    elif expected is not None and actual != expected:
        at = _first_difference(actual, expected)
        was = expected[at : at + 40]
        yield f"its chat template renders {actual[at : at + 40]!r} from character {at} on, in training it was {was!r}"
    ends = loaded["eos_token_id"]
    ends = sorted(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if ends != list(reference.stop_ids):
        yield f"eos_token_id in generation_config.json is {ends} instead of {list(reference.stop_ids)}"


def _logits(reference: Reference, loaded: Mapping[str, Any], share: float) -> Iterator[str]:
    ours, theirs, tolerance = reference.logits, loaded["logits"], share * reference.largest_logit
    if ours.shape != theirs.shape:
        yield f"it has {theirs.shape[1]:,} logits for a token instead of {ours.shape[1]:,}"
    elif not np.isfinite(theirs).all():
        yield "its logits are not finite"
    elif (apart := np.abs(theirs - ours).max(axis=1)).max() > tolerance:
        yield (
            f"logits differ by up to {apart.max():.3g}, tolerance {tolerance:.2g} (the largest is "
            f"{reference.largest_logit:.3g}), first after the prompt {QUESTIONS[int(np.argmax(apart > tolerance))]!r}"
        )


def _greedy(reference: Reference, loaded: Mapping[str, Any], share: float) -> Iterator[str]:
    """The first generation that differs, unless rounding alone may have chosen another token: both sides may be off by the
    tolerance."""
    for number, same in enumerate(_equal_tokens(reference, loaded)):
        ours, theirs = reference.greedy[number], _until_stop(reference, loaded["greedy"][number]["ids"])
        margin = [*loaded["greedy"][number]["margins"], float("inf")][same]
        if same == len(ours) == len(theirs) or margin <= 2 * share * reference.largest_logit:
            continue
        yield (
            f"greedy generation after {QUESTIONS[number]!r} differs from token {same} on: {theirs[same : same + 4]} instead of "
            f"{list(ours[same : same + 4])}, where the largest logit is {margin:.3g} above the second"
        )
        return


def _equal_tokens(reference: Reference, loaded: Mapping[str, Any]) -> list[int]:
    """Of each prompt, how many greedy tokens are equal from the first on."""
    pairs = zip(reference.greedy, loaded["greedy"], strict=True)
    return [_first_difference(ours, _until_stop(reference, theirs["ids"])) for ours, theirs in pairs]


def _until_stop(reference: Reference, ids: Sequence[int]) -> list[int]:
    """Tokens before the first that ends a generation, wherever the folder stops."""
    return list(takewhile(lambda number: number not in reference.stop_ids, ids))


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
