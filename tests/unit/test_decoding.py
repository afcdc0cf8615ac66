"""Where an answer ends, in which batches questions are asked, and what random tokens are drawn by."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SHIPPED
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.decoding import (
    Answer,
    Decoding,
    Ending,
    batches,
    prompt_of,
    random_bits,
    random_keys,
    uniform,
)
from tunix_rt.scoring.score import CONTEXT, LENGTH, STOP, TAG, TIME

CLOSING = "</answer>"
TOKENIZER = load_tokenizer(SHIPPED, "gemma3_text")
EOS = TOKENIZER.eos_id
WHOLE = TOKENIZER.encode(CLOSING)
SPELLED = [token for letter in CLOSING for token in TOKENIZER.encode(letter)]
"""The same text, as a model that does not know the word writes it."""
WORDS = TOKENIZER.encode("<answer>37 ü")


def ending() -> Ending:
    return Ending(stop_ids=frozenset({EOS}), closing=CLOSING, decode=TOKENIZER.decode)


def answered(ids: list[int], cuts: list[int], ended: str = LENGTH) -> Answer:
    """What comes of `ids` when they are looked at up to each of `cuts`, and no more of them are allowed."""
    looked = ending()
    for cut in [*cuts, len(ids)]:
        found = looked.find(ids[:cut])
        if found is not None:
            return found
    return looked.cut(ids, ended)


def in_one(ids: list[int]) -> Answer:
    return answered(ids, [])


one_by_one_parts = st.lists(
    st.one_of(
        st.sampled_from([[EOS], WHOLE, SPELLED, SPELLED[:4], SPELLED[4:], WORDS, TOKENIZER.encode("日")[:1]]),
        st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=3),
    ),
    max_size=6,
)


@given(parts=one_by_one_parts, cuts=st.lists(st.integers(0, 60)))
def test_an_answer_ends_at_the_same_place_however_many_tokens_are_looked_at_together(parts, cuts):
    ids = [token for part in parts for token in part]
    one_by_one = answered(ids, list(range(len(ids))))
    assert answered(ids, sorted(min(cut, len(ids)) for cut in cuts)) == one_by_one == in_one(ids)


def test_the_spelled_tag_is_many_tokens_and_the_word_is_one():
    assert len(WHOLE) == 1 and len(SPELLED) == len(CLOSING)


@pytest.mark.parametrize("tag", [WHOLE, SPELLED])
def test_an_answer_is_over_with_its_closing_tag_though_the_model_writes_on(tag):
    found = in_one([*WORDS, *tag, *WORDS])
    assert found == Answer(ids=[*WORDS, *tag], ended=TAG)
    assert TOKENIZER.decode(found.ids) == "<answer>37 ü</answer>"


@pytest.mark.parametrize("tag", [WHOLE, SPELLED])
def test_a_model_that_stops_right_after_the_tag_stopped_by_itself(tag):
    assert in_one([*WORDS, *tag, EOS, *WORDS]) == Answer(ids=[*WORDS, *tag], ended=STOP, end=EOS)


def test_a_stop_token_ends_an_answer_and_is_no_part_of_it():
    assert in_one([*WORDS, EOS, EOS]) == Answer(ids=WORDS, ended=STOP, end=EOS)
    assert in_one([EOS]) == Answer(ids=[], ended=STOP, end=EOS)


@pytest.mark.parametrize("reason", [LENGTH, TIME, CONTEXT])
@pytest.mark.parametrize("tag", [WHOLE, SPELLED])
def test_an_answer_cut_right_after_the_tag_is_whole(tag, reason):
    assert answered([*WORDS, *tag], [], reason) == Answer(ids=[*WORDS, *tag], ended=TAG)
    assert answered([*WORDS, *tag[:-1]], [], reason) == Answer(ids=[*WORDS, *tag[:-1]], ended=reason)


def test_an_answer_that_got_no_token_is_not_whole():
    assert ending().cut([], CONTEXT) == Answer(ids=[], ended=CONTEXT)


def test_without_a_closing_text_only_a_stop_token_ends_an_answer():
    ids = [*WORDS, *WHOLE, *WORDS]
    looked = Ending(stop_ids=frozenset({EOS}), closing=None, decode=TOKENIZER.decode)
    assert looked.find(ids) is None
    assert looked.cut(ids, LENGTH).ended == LENGTH


def test_an_ending_that_is_reset_remembers_nothing():
    used = ending()
    assert used.find([*WORDS, *WHOLE]) is None
    assert replace(used).find([*WORDS, *WORDS[:1]]) is None
    assert used.find([*WORDS, *WHOLE, *WORDS]) is not None


@given(lengths=st.lists(st.integers(1, 400), max_size=40), memory=st.integers(0, 2_000))
def test_every_prompt_is_in_one_batch_the_longest_come_first_and_no_batch_is_too_large(lengths, memory):
    found = list(batches(lengths, lambda length: memory // length))
    order = [index for batch in found for index in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    for place, batch in enumerate(found):
        allowed = max(1, memory // lengths[batch[0]])
        assert len(batch) <= allowed
        assert len(batch) == allowed or place == len(found) - 1, "a batch that is not the last one is full"


def test_prompts_of_one_length_keep_their_order():
    assert list(batches([5, 5, 9, 5], lambda length: 2)) == [[2, 0], [1, 3]]


def test_a_random_key_depends_on_seed_step_prompt_sample_and_place_alone():
    keys = random_keys(7, 3, 5)
    assert keys == random_keys(7, 3, 9)[:5]
    assert keys[0] == 4_008_800_483_285_119_969, "drawn answers of earlier runs can be drawn again"
    others = [*random_keys(8, 3, 5), *random_keys(7, 4, 5), *random_keys(73, 0, 5), *keys]
    for step, sample in ((0, 0), (0, 1), (1, 0), (None, 1), (None, 2), (10, 0), (1, 30)):
        others += random_keys(7, 3, 5, step=step, sample=sample)
    assert len(set(others)) == len(others)
    assert all(-(2**63) <= key < 2**63 for key in others)


def test_the_first_of_several_samples_is_the_only_one_of_an_evaluation():
    one, eight = (Decoding(max_new_tokens=8, temperature=1.0, samples=samples) for samples in (1, 8))
    assert one.keys(3, 5) == eight.keys(3 * 8, 5) == random_keys(0, 3, 5)
    assert eight.keys(3 * 8 + 1, 5) == random_keys(0, 3, 5, sample=1)
    assert "samples" not in one.settings() and eight.settings()["samples"] == 8


def gumbel_noise(keys, tokens):
    """[keys, tokens], by numpy."""
    bits = random_bits(np.array(keys, np.int64)[:, None], np.arange(tokens, dtype=np.int64))
    return -np.log(-np.log(uniform(bits.astype(np.float64))))


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("draws", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_noise_draws_every_token_by_its_probability_whatever_the_prompt_sample_step_and_position(draws):
    """Chi-square with 15 degrees of freedom for each of the four coordinates: 37.7 is exceeded once in a thousand."""
    shares = np.arange(1, 17) / 136
    for coordinate in ("prompt", "sample", "step", "position"):
        counts, left = np.zeros(16), draws // 4
        if coordinate == "position":
            keys = random_keys(11, 0, left)
        else:
            of = {"prompt": 5, "sample": 2, "step": 3}
            keys = [random_keys(11, **{**of, coordinate: place}, count=1)[0] for place in range(left)]
        for start in range(0, left, 250_000):
            noise = gumbel_noise(keys[start : start + 250_000], 16)
            counts += np.bincount((np.log(shares) + noise).argmax(axis=1), minlength=16)
        assert chi_square(counts, shares * left) < 37.7, coordinate


def test_the_noise_of_neighbouring_tokens_and_of_neighbouring_keys_is_independent():
    for noise in (gumbel_noise(random_keys(1, 0, 300), 300), gumbel_noise(range(300), 300)):
        for one, other in ((noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])):
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / 300


def test_log_probabilities_are_kept_for_the_answer_and_its_stop_token_and_for_nothing_after_them():
    for tokens, end in (([*WORDS, EOS, *WORDS], EOS), (WORDS, None)):
        row = prompt_of(0, [3], None, Decoding(max_new_tokens=len(tokens)), [EOS], TOKENIZER.decode)
        answer = row.append(
            tokens, late=False, model="m", scores=[(-float(place), 0.5) for place in range(len(tokens))]
        )
        kept = len(WORDS) + (end is not None)
        assert answer is not None and (answer.ids, answer.end) == (WORDS, end)
        assert answer.logprobs == [-float(place) for place in range(kept)] and answer.gaps == [0.5] * kept


def test_settings_say_what_is_set_and_nothing_of_what_is_not():
    assert Decoding(max_new_tokens=8, seed=4).settings() == {"max_new_tokens": 8, "temperature": 0.0}
    drawn = Decoding(max_new_tokens=8, temperature=1.0, seed=4).settings()
    assert drawn == {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "seed": 4}
    full = Decoding(max_new_tokens=8, closing=CLOSING, max_seconds=2.5).settings()
    assert full["closing"] == CLOSING and full["max_seconds"] == 2.5
