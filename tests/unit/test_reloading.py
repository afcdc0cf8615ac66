"""The round-trip comparison on numbers written by hand; the fresh process itself is tested in e2e/test_export.py."""

from dataclasses import replace

import numpy as np

from tunix_rt.export import roundtrip
from tunix_rt.export.roundtrip import QUESTIONS, TEXTS, Reference, differences

TENSOR = ["float32", [2, 2], "aa"]
LOGITS = np.array([[10.0, 1.0, 0.0], [0.0, 8.0, 2.0], [1.0, 2.0, 3.0], [5.0, 5.0, 4.0]], dtype=np.float32)
OURS = Reference(
    prompts=[[1]] * 4, logits=LOGITS, greedy=[[0, 1, 1], [1], [2, 2], []], tensors={"a": TENSOR, "b": TENSOR},
    text_ids=[[7, 8, 9]] * len(TEXTS), prefix=(2,), vocabulary={"x": 0, "y": 1}, chat_template_sha256="f" * 64,
    conversation="<u>What is 17 + 25?", stop_ids=(5, 6), pad_id=0, device="cpu", compute="float32", autocast=None,
    merged=False, attention="sdpa",
)  # fmt: skip


def loaded(**changed) -> dict:
    """What a fresh process loads from an intact folder, except for what is changed."""
    tokens = [[0, 1, 1], [1, 5], [2, 2, 6], [5]]
    return {
        "loading": {}, "tensors": {"a": TENSOR, "b": TENSOR}, "vocabulary": {"x": 0, "y": 1},
        "texts": [[7, 8, 9]] * len(TEXTS), "texts_as_given": [[2, 7, 8, 9, 3]] * len(TEXTS),
        "chat_template_sha256": "f" * 64, "conversation": "<u>What is 17 + 25?", "eos_token_id": [6, 5],
        "logits": LOGITS.copy(), "greedy": [{"ids": ids, "margins": [1.0] * len(ids)} for ids in tokens], **changed,
    }  # fmt: skip


def greedy(number: int, ids: list[int], margin: float = 1.0) -> list[dict]:
    generations = loaded()["greedy"]
    generations[number] = {"ids": ids, "margins": [margin] * len(ids)}
    return generations


def test_an_intact_folder_differs_in_nothing():
    assert differences(OURS, loaded(), share=1e-4) == []


DIFFERENCES = [
    ({"loading": {"missing_keys": ["head", "norm"]}}, "2 missing keys, first head"),
    ({"loading": {"unexpected_keys": ["extra"]}}, "1 unexpected keys, first extra"),
    ({"tensors": {"a": TENSOR}}, "1 of 2 tensors are missing, first b"),
    ({"tensors": {"a": TENSOR, "b": TENSOR, "c": TENSOR}}, "1 tensors are in the folder alone, first c"),
    ({"tensors": {"a": TENSOR, "b": ["float32", [2, 2], "bb"]}}, "1 of 2 tensors differ, first b (other values)"),
    (
        {"tensors": {"a": ["bfloat16", [2, 2], "bb"], "b": TENSOR}},
        "1 of 2 tensors differ, first a (bfloat16 [2, 2] instead of float32 [2, 2])",
    ),
    ({"vocabulary": {"x": 1, "y": 0}}, "other ids for 2 of 2 tokens, first 'x': 1 instead of 0"),
    ({"vocabulary": {"x": 0}}, "other ids for 1 of 2 tokens, first 'y': none instead of 1"),
    ({"texts": [[7, 8, 9]] * 5 + [[7, 9, 9]]}, f"encodes {TEXTS[5]!r} differently from token 1 on: [9, 9] instead of [8, 9]"),
    ({"texts_as_given": [[7, 8, 9]] * 6}, "begins a text with [7, 8], the model was trained with [2, 7]"),
    ({"chat_template_sha256": None}, "its chat template differs: none instead of sha256 ffffffffffff"),
    ({"conversation": "<u>what is"}, "renders 'what is' from character 3 on, in training it was 'What is 17 + 25?'"),
    ({"eos_token_id": 5}, "eos_token_id in generation_config.json is [5] instead of [5, 6]"),
    ({"eos_token_id": None}, "eos_token_id in generation_config.json is [] instead of"),
    ({"logits": LOGITS[:, :2]}, "it has 2 logits for a token instead of 3"),
    ({"logits": LOGITS * np.float32(np.nan)}, "its logits are not finite"),
    ({"greedy": greedy(0, [0, 2, 1])}, "differs from token 1 on: [2, 1] instead of [1, 1], where the largest logit is 1"),
    ({"greedy": greedy(1, [5])}, f"greedy generation after {QUESTIONS[1]!r} differs from token 0 on: [] instead of [1]"),
    ({"greedy": greedy(1, [1, 1])}, f"greedy generation after {QUESTIONS[1]!r} differs from token 1 on: [1] instead of []"),
]  # fmt: skip


def test_each_difference_is_named_alone():
    for changed, words in DIFFERENCES:
        [difference] = differences(OURS, loaded(**changed), share=1e-4)
        assert words in difference


def test_a_folder_that_cannot_be_loaded_has_the_message_of_transformers():
    assert differences(OURS, {"error": "OSError: no file"}, share=1) == ["it cannot be loaded: OSError: no file"]


def test_logits_may_differ_by_the_stated_share_of_the_largest_and_not_by_more():
    moved = LOGITS.copy()
    moved[2, 0] += 0.01
    assert differences(OURS, loaded(logits=moved), share=0.0011) == []
    [found] = differences(OURS, loaded(logits=moved), share=0.0009)
    assert found.startswith("logits differ by up to 0.01, tolerance 0.009 (the largest is 10)")
    assert found.endswith(f"first after the prompt {QUESTIONS[2]!r}")


def test_another_token_is_forgiven_only_where_rounding_may_have_chosen_it():
    tied = loaded(greedy=greedy(0, [0, 2, 2], margin=0.0019))
    assert differences(OURS, tied, share=1e-4) == []
    assert len(differences(OURS, loaded(greedy=greedy(0, [0, 2, 2], margin=0.0021)), share=1e-4)) == 1
    assert roundtrip._equal_tokens(OURS, tied) == [1, 1, 2, 0], "what follows a near tie is not counted as compared"


def test_the_beginning_of_a_text_is_the_template_s_business_where_there_is_one():
    assert differences(replace(OURS, prefix=None), loaded(texts_as_given=[[7, 8, 9]] * 6), share=1e-4) == []


def test_a_conversation_with_the_date_in_it_is_known_by_its_template_alone():
    assert differences(replace(OURS, conversation=None), loaded(conversation="today"), share=1e-4) == []


def test_the_tolerance_follows_the_types_on_both_sides():
    gpu = replace(OURS, device="cuda", compute="bfloat16", autocast="bfloat16")
    own, host = roundtrip._targets(gpu)
    assert (own.device, own.compute, own.autocast, own.share) == ("cuda", None, "bfloat16", roundtrip.ROUNDED)
    assert (host.device, host.compute, host.autocast, host.share) == ("cpu", "float32", None, roundtrip.WIDENED)
    assert [place.share for place in roundtrip._targets(replace(gpu, compute="float32", autocast=None))] == [
        roundtrip.EXACT, roundtrip.MOVED,
    ]  # fmt: skip
    [merged] = roundtrip._targets(replace(OURS, compute="bfloat16", merged=True))
    assert merged.share == roundtrip.WIDENED
    for device in ("cpu", "cuda"):
        [alone] = roundtrip._targets(replace(gpu, device=device, autocast=None, other_engine=True))
        assert (alone.device, alone.compute, alone.share) == ("cpu", "float32", roundtrip.WIDENED)
    assert roundtrip._targets(replace(OURS, compute="float32", other_engine=True))[0].share == roundtrip.EXACT
