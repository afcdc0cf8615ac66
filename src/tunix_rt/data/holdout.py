"""Which examples of a dataset are held out, and its records as questions with answers."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import RunConfig
from tunix_rt.data.records import EvalItem, Sample
from tunix_rt.data.render import Style, prompt_ids
from tunix_rt.data.text import fold
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.errors import InputError

MOST_HELDOUT = 500
"""Held-out questions in an evaluation without an eval set; of more, as many evenly spaced."""
MOST_ALARM_ITEMS = 100
"""The same for the alarms of a run on rollouts, which is evaluated while it trains."""


def hash8(text: str) -> int:
    """A 64-bit hash of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def question_hash(sample: Sample) -> int:
    """Equal for samples with the same question; case, spaces and punctuation do not count."""
    return hash8(fold(sample.question))


def hold_out(questions: npt.NDArray[np.uint64], *, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which examples are held out, by the hashes of their questions. All examples of one question are on one side.

    Questions are taken in an order shuffled by `seed` as long as they fit into `fraction`. At least one is held out, the
    rarest, and one is left to train on; with a single question, none is held out.
    """
    _, first, group_of = np.unique(questions, return_index=True, return_inverse=True)
    heldout = np.zeros(len(questions), dtype=np.bool_)
    if not fraction or len(first) < 2:
        return heldout
    in_file_order = np.argsort(first)
    sizes = np.bincount(group_of)[in_file_order]
    shuffled = np.random.Generator(np.random.PCG64([seed, len(first)])).permutation(len(first))
    wanted = min(max(1, round(fraction * len(heldout))), len(heldout) - 1)
    chosen: list[int] = []
    count = 0
    for group in shuffled.tolist():
        if count + sizes[group] <= wanted:
            chosen.append(group)
            count += int(sizes[group])
    if not chosen:
        chosen = [int(shuffled[np.argmin(sizes[shuffled])])]
    return np.isin(group_of, in_file_order[chosen])


def as_question(sample: Sample, answer_tag: str) -> tuple[str, str] | None:
    """(question, answer) of a sample that is one question with one answer; None for a chat or an open text."""
    before = [turn for turn in sample.turns if turn.role != "assistant"]
    replies = [turn.text for turn in sample.turns if turn.role == "assistant"]
    if [turn.role for turn in before] != ["user"]:
        return None
    answer = sample.answer
    if answer is None and len(replies) == 1:
        _, opened, rest = replies[0].rpartition(f"<{answer_tag}>")
        text, closed, _ = rest.partition(f"</{answer_tag}>")
        answer = text.strip() if opened and closed else None
    return (before[0].text, answer) if answer else None


def items_of(pairs: Sequence[tuple[str, str]], most: int = MOST_HELDOUT) -> tuple[EvalItem, ...]:
    """Evaluation items of held-out (question, answer) pairs; of more than `most`, as many evenly spaced."""
    if len(pairs) > most:
        pairs = [pairs[place * len(pairs) // most] for place in range(most)]
    return tuple(
        EvalItem(id=f"heldout-{number}", prompt=prompt, answer=answer, section="heldout")
        for number, (prompt, answer) in enumerate(pairs, start=1)
    )


def longest_update(
    prompts: Sequence[EvalItem], tokenizer: Tokenizer, style: Style, most: int, config: RunConfig
) -> int:
    """Tokens of the longest row of an update on rollouts of `prompts`; 0 without rollouts. A prompt and its rollout are in one
    row, of at most `most` tokens."""
    rollouts = config.training.rollouts
    if rollouts is None:
        return 0
    lengths = [len(prompt_ids(item.prompt, tokenizer, style)) for item in prompts]
    if (longest := max(lengths) + rollouts.max_new_tokens) > most:
        raise InputError(
            f"the prompt of {prompts[int(np.argmax(lengths))].id} has {max(lengths)} tokens; with {rollouts.max_new_tokens} new "
            f"ones that is more than the {most} of a row",
            fix="raise data.max_length if the model has more positions, or lower training.rollouts.max_new_tokens",
        )
    return config.data.max_length if config.data.packing else longest
