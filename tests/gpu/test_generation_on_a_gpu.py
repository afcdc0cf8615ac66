"""Answers on a real NVIDIA GPU: those of one-by-one asking and of the CPU, looked at seldom, within the memory at hand."""

import json

import pytest
import torch

from tests.device_waits import nothing_waits
from tests.invariant.test_generation import drawn_prompts, generated
from tests.invariant.test_static_cache import LENGTHS, small_engine
from tunix_rt.engines.decoding import NOT_A_TOKEN, Decoding, prompt_of, random_keys
from tunix_rt.engines.torch import generate as torch_generate
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.engines.torch.sampling import choose
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.generation import rows_that_fit
from tunix_rt.plan.shape import shape_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")]

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.4,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "llama": {},
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps({"model_type": request.param, **SIZES, **KINDS[request.param]}))
    model = torch_backend.load_for_inference(
        resolve_model(str(folder), weights="random"), device="cpu", dtype="float32"
    ).model
    model.save_pretrained(folder)
    return resolve_model(str(folder))


@pytest.fixture(scope="module")
def prompts():
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(3, 511, (1 + 7 * (place % 9),), generator=drawn).tolist() for place in range(200)]


@pytest.fixture
def choose_next():
    return pytest.importorskip("tunix_rt.engines.torch.triton.decode").choose_next


def asked(engine, prompts, rows, **decoding):
    return dict(
        torch_backend.generate(
            engine, prompts, decoding=Decoding(**{"max_new_tokens": 40, **decoding}), stop_ids=range(1, 9), pad_id=0, decode=str,
            batch_size_at=lambda length: rows,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}],
    ids=["greedy", "drawn", "top-p"],
)
def test_200_prompts_are_answered_together_as_one_by_one_and_as_on_the_cpu(source, prompts, how):
    torch.set_float32_matmul_precision("highest")
    engine = torch_backend.load_for_inference(source, device="cuda", dtype="float32")
    together = asked(engine, prompts, 64, **how)
    assert together == asked(engine, prompts, 3, **how)
    assert {index: together[index] for index in range(20)} == asked(engine, prompts[:20], 1, **how)
    on_cpu = asked(torch_backend.load_for_inference(source, device="cpu", dtype="float32"), prompts, 64, **how)
    # The last digits of logits differ on two devices: once in thousands of tokens (8,000 here) they decide.
    differ = sum(together[index] != on_cpu[index] for index in together)
    assert together.keys() == on_cpu.keys() and differ <= (2 if how else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_every_family_answer_as_the_cpu_does(tmp_path, family):
    """Prompts and answers are beyond the window of 6 tokens; rows leave by buckets."""
    torch.set_float32_matmul_precision("highest")
    on_cpu = small_engine(tmp_path, family)
    on_cpu.model.save_pretrained(tmp_path / "saved")
    engine = torch_backend.load_for_inference(resolve_model(str(tmp_path / "saved")), device="cuda", dtype="float32")
    drawn = drawn_prompts(512, count=60, lengths=LENGTHS)
    for how in ({}, {"temperature": 1.0, "seed": 5}):
        found = generated(engine, drawn, 64, **how)
        expected = generated(on_cpu, drawn, 64, **how)
        assert found.keys() == expected.keys()
        assert sum(found[index].ids != expected[index].ids for index in found) <= (1 if how else 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_between_two_looks_nobody_waits_for_the_gpu(source, prompts, temperature):
    engine = torch_backend.load_for_inference(source, device="cuda", dtype="bfloat16")
    decoding = Decoding(max_new_tokens=32, temperature=temperature)
    rows = [prompt_of(index, prompts[index], engine.positions, decoding, [1], str) for index in range(8)]
    batch = torch_generate._begin(engine, rows, decoding, 0)
    torch_generate._use_graphs(engine, batch, [], decoding, 32, logprobs=True)
    torch_generate._more_tokens(engine, batch, decoding, 0, 4, logprobs=True)
    (graph,) = batch.graphs._graphs.values()
    before = batch.graphs.state.tolist()
    with nothing_waits():
        for _ in range(8):  # past the window of those that have one
            graph.replay()
    assert batch.graphs.state.tolist() == [count + 8 for count in before]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_fused_choice_is_that_of_the_cpu_and_its_scores_are_those_of_float64(choose_next, temperature):
    drawn = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(64, 262_144, generator=drawn)
    decoding = Decoding(max_new_tokens=2, temperature=temperature)
    keys = torch.tensor([random_keys(7, row, 2) for row in range(64)]) if temperature else None
    ids, tokens, scores = torch.zeros(64, 1).long(), torch.zeros(64, 2).long(), torch.zeros(64, 2, 2).double()
    ids, tokens, scores, state = (part.cuda() for part in (ids, tokens, scores, torch.tensor([9, 1])))
    on_gpu = None if keys is None else keys.cuda()
    choose_next(logits.cuda(), on_gpu, state, temperature=temperature, ids=ids, tokens=tokens, scores=scores)
    chosen, expected = choose(logits, decoding, None if keys is None else keys[:, 1], logprobs=True)
    assert ids[:, 0].tolist() == tokens[:, 1].tolist() == chosen.tolist()
    torch.testing.assert_close(scores[:, 1].cpu(), expected, rtol=1e-5, atol=1e-5)
    logits[3, 100_000] = torch.nan
    choose_next(logits.cuda(), on_gpu, state, temperature=temperature, ids=ids, tokens=tokens, scores=None)
    assert (tokens[:, 1] == NOT_A_TOKEN).nonzero().tolist() == [[3]]


def test_ten_million_draws_have_the_probabilities_of_the_softmax(choose_next):
    rows, rounds, vocabulary = 2**16, 160, 48
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2))
    logits = row.expand(rows, -1).contiguous().cuda()
    ids, tokens = torch.zeros(rows, 1, device="cuda").long(), torch.zeros(rows, 1, device="cuda").long()
    state, counts = torch.zeros(2, device="cuda").long(), torch.zeros(vocabulary, dtype=torch.long)
    for number in range(rounds):  # neighbouring integers for keys: the mixing function has to do
        keys = torch.arange(number * rows, (number + 1) * rows, device="cuda")[:, None]
        choose_next(logits, keys, state, temperature=1.0, ids=ids, tokens=tokens, scores=None)
        counts += torch.bincount(ids[:, 0], minlength=vocabulary).cpu()
    expected = rows * rounds * row.double().softmax(0)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert counts.sum() == rows * rounds > 10**7
    assert 20 < chi_square < 95, "47 degrees of freedom: outside with a probability of 1e-4"


def test_what_answers_leave_behind_can_be_trained_on(source, prompts):
    engine = torch_backend.load_for_inference(source, device="cuda", dtype="float32")
    asked(engine, prompts[:8], 8, max_new_tokens=4)
    assert not torch.is_inference_mode_enabled()
    engine.model(input_ids=torch.tensor([[3, 4, 5]], device="cuda")).logits.sum().backward()
    assert any(parameter.grad is not None for parameter in engine.model.parameters())


def test_bfloat16_never_goes_through_attention_of_cudnn(source, prompts):
    engine = torch_backend.load_for_inference(source, device="cuda", dtype="bfloat16")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        asked(engine, prompts[:8], 8, max_new_tokens=4)
    names = {event.key for event in profile.key_averages()}
    attention = {name for name in names if "scaled_dot_product" in name}
    assert bool(attention) is (engine.attention.generating == "sdpa") and not [
        name for name in names if "cudnn" in name
    ]


def test_as_many_are_asked_as_fit_and_a_burst_is_halved(source, prompts):
    engine = torch_backend.load_for_inference(source, device="cuda", dtype="float32")
    free = torch_backend.free_bytes(engine)
    shape = shape_of(source.config)
    fit = {"dtype": "float32", "device": "cuda", "length": 64, "max_new_tokens": 40}
    assert rows_that_fit(shape, **fit, free_bytes=free) == 512
    expected = asked(engine, prompts, 64)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 80 * 2**20) / total)
    try:
        assert asked(engine, prompts, 200) == expected
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
