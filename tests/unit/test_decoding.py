"""Where an answer ends, in which batches questions are asked, and what random tokens are drawn by."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SHIPPED
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.decoding import Answer, Decoding, Ending, batches, random_keys
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
    assert in_one([*WORDS, *tag, EOS, *WORDS]) == Answer(ids=[*WORDS, *tag], ended=STOP)


def test_a_stop_token_ends_an_answer_and_is_no_part_of_it():
    assert in_one([*WORDS, EOS, EOS]) == Answer(ids=WORDS, ended=STOP)
    assert in_one([EOS]) == Answer(ids=[], ended=STOP)


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


def test_a_random_key_depends_on_seed_prompt_and_place_alone():
    keys = random_keys(7, 3, 5)
    assert keys == random_keys(7, 3, 9)[:5]
    assert keys[0] == -1_838_394_643_401_355_720, "drawn answers of earlier runs can be drawn again"
    others = [*random_keys(8, 3, 5), *random_keys(7, 4, 5), *random_keys(73, 0, 5), *keys]
    assert len(set(others)) == len(others)
    assert all(-(2**63) <= key < 2**63 for key in others)


def test_settings_say_what_is_set_and_nothing_of_what_is_not():
    assert Decoding(max_new_tokens=8, seed=4).settings() == {"max_new_tokens": 8, "temperature": 0.0}
    drawn = Decoding(max_new_tokens=8, temperature=1.0, seed=4).settings()
    assert drawn == {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "seed": 4}
    full = Decoding(max_new_tokens=8, closing=CLOSING, max_seconds=2.5).settings()
    assert full["closing"] == CLOSING and full["max_seconds"] == 2.5
