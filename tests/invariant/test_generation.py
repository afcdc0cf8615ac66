"""A generation does not depend on the other prompts of its batch: greedy or sampled, short or past a sliding window."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from tests.tables import tables
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.decoding import Answer, Decoding, prompt_of
from tunix_rt.engines.torch import generate as torch_generate
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.engines.torch import sampling as torch_sampling
from tunix_rt.engines.torch import static_cache
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import resolve_model

PROMPTS = 40
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.4,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
STORY = "Once upon a time there was a little girl named Lily who liked to play in the park with her big dog"


def opened(folder: Path, weights: str):
    source = resolve_model(str(folder), weights=weights)
    return torch_backend.load_for_inference(source, device="cpu", dtype="float32"), load_tokenizer(
        folder, str(source.config["model_type"])
    )


def drawn_prompts(vocabulary: int, *, count: int = PROMPTS, lengths=(1, 3, 5, 9, 17, 30, 47)):
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, vocabulary - 1, (lengths[place % len(lengths)],), generator=generator).tolist()
        for place in range(count)
    ]


def generated(engine, prompts, rows, *, stop_ids=(1,), decode=str, **decoding) -> dict[int, Answer]:
    settings = Decoding(**{"max_new_tokens": 12, **decoding})
    return dict(
        torch_backend.generate(
            engine, prompts, decoding=settings, stop_ids=stop_ids, pad_id=0, decode=decode,
            batch_size_at=lambda length: rows,
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=["gemma3", "llama", "gpt2", "gemma2", "qwen3"])
def small(request, tmp_path_factory):
    """Two layers; the Gemmas have a window of 6 tokens, which most prompts are beyond."""
    kinds = {
        "gemma3": {"model_type": "gemma3_text", "sliding_window": 6, "query_pre_attn_scalar": 16,
                   "layer_types": ["sliding_attention", "full_attention"]},
        "gemma2": {"model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 16},
        "gpt2": {"model_type": "gpt2", "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2},
        "llama": {"model_type": "llama"}, "qwen3": {"model_type": "qwen3"},
    }  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param)
    of_gpt2 = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    settings = {key: SIZES[key] for key in of_gpt2} if request.param == "gpt2" else SIZES
    (folder / "config.json").write_text(json.dumps(settings | kinds[request.param]))
    source = resolve_model(str(folder), weights="random")
    return torch_backend.load_for_inference(source, device="cpu", dtype="float32")


def test_prompts_of_mixed_lengths_generate_the_same_in_a_batch_and_alone(small):
    prompts = drawn_prompts(512)
    alone = generated(small, prompts, 1)
    assert alone == generated(small, prompts, 64) == generated(small, prompts, 7)
    assert len({tuple(answer.ids) for answer in alone.values()}) > PROMPTS / 2, "equal generations show nothing"


def test_drawn_answers_are_a_function_of_seed_and_prompt_alone(small):
    prompts = drawn_prompts(512)
    how = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    alone = generated(small, prompts, 1, **how)
    assert alone == generated(small, prompts, 32, **how)
    other = generated(small, prompts, 32, **how | {"seed": 6})
    assert sum(alone[index] != other[index] for index in alone) > PROMPTS / 2


def test_greedy_answers_are_those_of_transformers_own_generate(small):
    prompts = drawn_prompts(512, count=14)
    ours = generated(small, prompts, 16)
    settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            theirs = small.model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        assert ours[index].ids == [token for token in theirs if token != 1]


@pytest.mark.reference
def test_a_real_pretrained_llama_generates_the_same_in_a_batch_and_alone(reference_model):
    engine, tokenizer = opened(reference_model, "pretrained")
    words = STORY.split()
    prompts = [
        [*tokenizer.prefix, *tokenizer.encode(" ".join(words[place % 5 : place % 5 + 1 + place % 13]))]
        for place in range(PROMPTS)
    ]
    assert generated(engine, prompts, 1, max_new_tokens=20) == generated(engine, prompts, 64, max_new_tokens=20)


def test_how_often_answers_are_looked_at_changes_nothing(small, monkeypatch):
    """A GPU's answers are looked at every few tokens; what came after an end is dropped."""
    prompts = drawn_prompts(512)
    often = generated(small, prompts, 16, stop_ids=range(1, 60))
    assert {answer.ended for answer in often.values()} == {"stop", "length"}
    monkeypatch.setitem(torch_generate.LOOK_EVERY, "cpu", 5)
    assert generated(small, prompts, 16, stop_ids=range(1, 60)) == often


def test_a_full_context_ends_an_answer_and_no_position_is_beyond_it(small):
    prompts = drawn_prompts(512, count=4, lengths=(250, 255, 256, 300))
    found = generated(small, prompts, 4)
    assert [len(found[index].ids) for index in range(4)] == [6, 1, 0, 0]
    assert {answer.ended for answer in found.values()} == {"context"}


def test_an_answer_is_over_at_the_closing_tag_and_says_whether_the_model_stopped_there(small):
    def decode(ids):
        return "".join("</answer>" if token % 7 == 3 else "." for token in ids)

    for answer in generated(small, drawn_prompts(512), 8, closing="</answer>", decode=decode).values():
        text = decode(answer.ids)
        assert text.count("</answer>") <= 1 and ("</answer>" not in text or text.endswith("</answer>"))
        assert answer.ended in (("tag", "stop") if "</answer>" in text else ("length", "stop"))


@pytest.mark.parametrize(
    "small", ["gemma3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gpt2", "gemma2", "qwen3"))],
    indirect=True,
)  # fmt: skip
@pytest.mark.parametrize(
    ("where", "after"),
    [("_begin", 0), ("_more_tokens", 0), ("_more_tokens", 3), ("keep", 0)],
    ids=["the prompts", "the first token", "a later token, with some answered", "when rows leave"],
)
def test_where_memory_runs_out_half_as_many_are_asked_and_it_is_said(small, monkeypatch, caplog, where, after):
    prompts, stops = drawn_prompts(512, count=21), range(1, 250)
    expected = generated(small, prompts, 1, stop_ids=stops)
    owner = static_cache.StaticBatch if where == "keep" else torch_generate
    real, calls = getattr(owner, where), []

    def scarce(*args):
        rows = len(args[1]) if where == "_begin" else (args[0] if where == "keep" else args[1]).cache.rows
        calls.append(rows)
        if rows > 3 and len(calls) > after:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args)

    def named(*args):  # as the real one does, around its own body
        with torch_generate.memory_errors_named("generation"):
            return scarce(*args)

    monkeypatch.setattr(owner, where, named if where == "_more_tokens" else scarce)
    assert generated(small, prompts, 16, stop_ids=stops) == expected
    assert "out of memory with batch size" in caplog.text


def test_tokens_drawn_a_few_rows_at_a_time_are_those_drawn_at_once(small, monkeypatch):
    how = {"temperature": 0.7, "top_p": 0.8, "seed": 1}
    at_once = generated(small, drawn_prompts(512, count=30), 30, **how)
    monkeypatch.setattr(torch_sampling, "DRAWN_AT_ONCE", 3 * 512)
    assert generated(small, drawn_prompts(512, count=30), 30, **how) == at_once


def test_tokens_are_drawn_by_their_shares_and_none_beyond_top_p():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).repeat(20_000, 1)
    keys = torch.arange(20_000) * 7919
    for top_p, shares in ((1.0, [0.5, 0.25, 0.15, 0.1]), (0.7, [2 / 3, 1 / 3, 0, 0])):
        drawn, _ = torch_sampling.choose(logits, Decoding(max_new_tokens=1, temperature=1.0, top_p=top_p), keys)
        found = torch.bincount(drawn, minlength=4) / len(drawn)
        assert found.tolist() == pytest.approx(shares, abs=0.015)
    cold = Decoding(max_new_tokens=1, temperature=1e-300)
    assert torch_sampling.choose(logits, cold, keys)[0].unique().tolist() == [0]


def test_a_rotation_that_moves_with_the_batch_is_asked_one_by_one(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}  # fmt: skip
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
             "initializer_range": 0.4, "rope_parameters": rope, "rope_scaling": rope}
        )
    )  # fmt: skip
    engine = torch_backend.load_for_inference(
        resolve_model(str(tmp_path), weights="random"), device="cpu", dtype="float32"
    )
    prompts = drawn_prompts(512, count=12, lengths=(5, 60))
    assert generated(engine, prompts, 12) == generated(engine, prompts, 1)


def test_a_model_of_nan_is_refused(small):
    head = small.model.get_output_embeddings().weight
    before = head.detach().clone()
    with torch.no_grad():
        head[5] = torch.nan
    try:
        with pytest.raises(InputError, match="its logits are NaN"):
            generated(small, [[3, 4, 5]], 1)
    finally:
        with torch.no_grad():
            head.copy_(before)


def test_answers_leave_torch_as_it_was_between_two_of_them(small):
    for _ in torch_backend.generate(
        small, drawn_prompts(512, count=3), decoding=Decoding(max_new_tokens=2), stop_ids=[1], pad_id=0, decode=str,
        batch_size_at=lambda length: 1,
    ):  # fmt: skip
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert small.model.config._attn_implementation == small.attention.training


WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MASKED = tables(__file__)["masked"]


def random_engine(folder: Path, settings):
    (folder / "config.json").write_text(json.dumps(SIZES | settings))
    engine = torch_backend.load_for_inference(
        resolve_model(str(folder), weights="random"), device="cpu", dtype="float32"
    )
    engine.model.eval()
    return engine


def begun(engine, lengths, new_tokens=16):
    decoding = Decoding(max_new_tokens=new_tokens)
    prompts = drawn_prompts(512, count=len(lengths), lengths=lengths)
    rows = [prompt_of(place, prompt, engine.positions, decoding, [1], str) for place, prompt in enumerate(prompts)]
    return torch_generate._growing(engine, rows, None, 0), decoding


def masks_of_transformers(engine, batch, seen):
    """By type of layer, never left out: where all is seen, transformers would rather have none."""
    asked_for = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    with torch.no_grad(), engine.attending(engine.attention.generating):
        embedded = engine.model.get_input_embeddings()(batch.ids)
        return {
            kind: asked_for[kind](
                config=engine.model.config, inputs_embeds=embedded, attention_mask=seen, past_key_values=batch.cache,
                allow_is_causal_skip=False,
            )
            for kind in batch.windows
        }  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_new_tokens_are_those_that_transformers_makes(name, tmp_path):
    """Short of the window, past it, and after rows have left, the longest of them among others."""
    engine = random_engine(tmp_path, MASKED[name])
    lengths, width = [5, 3, 1, 4, 3], 5
    batch, decoding = begun(engine, lengths)
    layer_types = getattr(engine.model.config, "layer_types", None)
    assert batch.ready is not None and (layer_types is None or set(layer_types) == set(batch.windows))
    torch_generate._more_tokens(engine, batch, decoding, 0, 1)
    for number in range(1, 16):
        if number in (3, 9):
            kept = [1, 2, 4] if number == 3 else [0, 1]
            batch.keep(kept)
            lengths = [lengths[place] for place in kept]
        columns = torch.arange(width + number)
        seen = torch.stack([columns >= width - length for length in lengths]).long()
        ours, theirs = batch.masks(), masks_of_transformers(engine, batch, seen)
        for kind, mask in theirs.items():
            made = ours if isinstance(ours, torch.Tensor) else ours[kind]
            assert made.dtype == mask.dtype and torch.equal(made, mask), (kind, number)
        positions = torch.tensor(lengths)[:, None] + number - 1
        with torch.no_grad(), engine.attending(engine.attention.generating):
            left_to_it = engine.model(
                input_ids=batch.ids,
                attention_mask=seen,
                position_ids=positions,
                past_key_values=copy.deepcopy(batch.cache),
            ).logits[:, -1]
        found = torch_generate._more_tokens(engine, batch, decoding, number, 1)
        assert [token for (token,), _ in found] == left_to_it.argmax(dim=-1).tolist()


def test_masks_of_a_model_that_is_not_known_are_left_to_transformers(tmp_path):
    engine = random_engine(tmp_path, {"model_type": "stablelm"})
    batch, decoding = begun(engine, [3, 5])
    torch_generate._more_tokens(engine, batch, decoding, 0, 2)
    assert batch.ready is None and batch.masks().tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]


def test_a_model_that_looks_ahead_keeps_its_own_masks(tmp_path):
    ahead = {"model_type": "gemma3_text", "query_pre_attn_scalar": 16, "use_bidirectional_attention": True, **WINDOWED}
    assert begun(random_engine(tmp_path, ahead), [3, 5])[0].ready is None


def test_no_answer_takes_attention_of_cudnn_and_the_switch_is_put_back(small, monkeypatch):
    real, seen = torch_generate._step, []

    def noted(*args):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return real(*args)

    monkeypatch.setattr(torch_generate, "_step", noted)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    generated(small, [[3, 4, 5]], 1, max_new_tokens=3)
    assert set(seen) == {(False, True)} and torch.backends.cuda.cudnn_sdp_enabled() is before


def test_what_answers_leave_behind_can_be_trained_on(small):
    generated(small, [[3, 4, 5], [6, 7]], 2, max_new_tokens=3)
    assert not torch.is_inference_mode_enabled()
    small.model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert any(parameter.grad is not None for parameter in small.model.parameters())
    small.model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("own", [None, "active"])
def test_threads_sleep_while_they_wait_unless_the_user_has_them_spin(own):
    """Spinning threads take the cores of another program: OpenMP reads the policy when torch is imported."""
    code = "import os, sys, tunix_rt.cli.inference, tunix_rt.pipeline\nfrom tunix_rt.engines.base import load_backend\n"
    code += "assert 'torch' not in sys.modules\nload_backend('torch')\nprint(os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if own is None else {"OMP_WAIT_POLICY": own}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (own or "passive")
