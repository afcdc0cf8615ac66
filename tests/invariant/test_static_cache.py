"""The preallocated KV cache: the answers of transformers' growing cache for every family, in any batch, order and number of
samples and threads; and the log-probabilities of what was generated."""

import pytest
import torch

from tests.invariant.test_generation import drawn_prompts, generated, random_engine
from tunix_rt.engines.decoding import Decoding, bucket, rows_left
from tunix_rt.engines.torch import generate as torch_generate
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.engines.torch import static_cache
from tunix_rt.models.families import FAMILIES

OWN = {
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "smollm3": {"use_sliding_window": True, "no_rope_layer_interval": 2},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    "gemma2": {"query_pre_attn_scalar": 16},
    "cwm": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
LENGTHS = (1, 3, 5, 9, 17, 30, 47)
DRAWN = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
DEFAULT = ("gpt2", "gemma2", "gemma3_text", "smollm3")
some_families = pytest.mark.parametrize(
    "family", [one if one in DEFAULT else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)


def small_engine(folder, model_type):
    window = {"sliding_window": 6} if FAMILIES[model_type].slides else {}
    return random_engine(folder, {"model_type": model_type, **window, **OWN.get(model_type, {})})


def all_at_once(engine, prompts, rows, **how):
    found = generated(engine, prompts, rows, **how)
    return [(found[index].ids, found[index].ended, found[index].end) for index in range(len(found))]


@some_families
@pytest.mark.parametrize("count", [28, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_are_those_of_the_growing_cache_alone_and_in_any_batch(tmp_path, family, count, monkeypatch):
    """Prompts and answers are beyond the window of 6 tokens."""
    engine = small_engine(tmp_path, family)
    windows = static_cache.static_windows(engine.model)
    assert windows is not None and (FAMILIES[family].slides is None) == (6 not in windows)
    prompts = drawn_prompts(512, count=count, lengths=LENGTHS)
    for how in ({}, DRAWN):
        static = all_at_once(engine, prompts, 64, **how)
        assert static == all_at_once(engine, prompts, 1, **how)
        monkeypatch.setattr(torch_generate, "rows_left", lambda alive, every: rows_left(alive, every=False))
        assert static == all_at_once(engine, prompts, 13, **how), "rows leave by buckets"
        monkeypatch.undo()
        with monkeypatch.context() as patch:
            patch.setattr(torch_generate, "static_windows", lambda model: None)
            assert static == all_at_once(engine, prompts, 64, **how)
        assert len({tuple(ids) for ids, _, _ in static}) > count / 2, "equal generations show nothing"


@pytest.mark.slow
def test_drawn_answers_do_not_depend_on_the_number_of_threads(tmp_path):
    engine = small_engine(tmp_path, "gemma3_text")
    prompts, before = drawn_prompts(512, count=60), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(all_at_once(engine, prompts, 32, max_new_tokens=40, **DRAWN))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_samples_of_one_prompt_share_its_prefill_and_are_those_of_the_prompt_alone(tmp_path, monkeypatch):
    engine = small_engine(tmp_path, "gemma3_text")
    prompts, prefilled, real = drawn_prompts(512, count=6), [], static_cache.StaticCache.fill

    def counted(cache, held, rows, of, begins):
        prefilled.append((len(rows), len(begins)))
        return real(cache, held, rows, of, begins)

    monkeypatch.setattr(static_cache.StaticCache, "fill", counted)
    how = {"temperature": 1.0, "seed": 5, "step": 3, "samples": 4}
    together = all_at_once(engine, prompts, 64, **how)
    assert (sum(rows for rows, _ in prefilled), sum(of for _, of in prefilled)) == (24, 6)
    assert together == all_at_once(engine, prompts, 5, **how)
    assert together[:4] == all_at_once(engine, prompts[:1], 1, **how)
    assert together != all_at_once(engine, prompts, 64, **{**how, "step": 4})
    assert len({tuple(ids) for ids, _, _ in together[:4]}) > 1


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "seed": 2}], ids=["greedy", "drawn"])
def test_log_probabilities_are_those_of_a_forward_pass_over_prompt_and_answer(tmp_path, how):
    engine = small_engine(tmp_path, "gemma3_text")
    prompts = drawn_prompts(512, count=12)
    found = dict(
        torch_backend.generate(
            engine, prompts, decoding=Decoding(max_new_tokens=12, **how), stop_ids=range(1, 100), pad_id=0, decode=str,
            batch_size_at=lambda length: 5, logprobs=True,
        )
    )  # fmt: skip
    assert {answer.ended for answer in found.values()} == {"stop", "length"}
    for index, prompt in enumerate(prompts):
        answer = found[index]
        new = [*answer.ids, *([] if answer.end is None else [answer.end])]
        with torch.no_grad():
            logits = engine.model(input_ids=torch.tensor([[*prompt, *new]]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(answer.gaps) == len(new) and min(answer.gaps) >= 0
        if not how:
            best = logits.topk(2).values
            assert answer.gaps == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)


def test_prompts_are_prefilled_in_groups_of_few_tokens_and_little_padding():
    lengths = [300, 60, 45, 40, 20, 20, 20, 20, 20, 9, 5, 4]
    groups = list(static_cache.prefill_groups(lengths, 100))
    assert [place for group in groups for place in group] == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * lengths[group.start] <= 100
        assert 2 * lengths[group.stop - 1] >= lengths[group.start]


def test_rows_leave_in_buckets_and_move_only_into_the_places_of_ended_ones():
    assert [bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 300, 513)] == [1, 2, 4, 4, 8, 8, 16, 512, 1024]
    alive = [True, False, True, False, False, True, True, False]
    assert rows_left(alive, every=True) == [0, 5, 2, 6]
    assert rows_left([True] * 7 + [False], every=False) == []
    assert rows_left([True, False, False, True, False, False, True, True], every=False) == [0, 6, 7, 3]
    assert rows_left([False, False], every=True) == []
