"""The plan: exact parameters, an honest count of what a step keeps, a verdict with a way out."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tunix_rt.cli.main import cli
from tunix_rt.config import RunConfig, load_config
from tunix_rt.doctor.choose import DeviceChoice
from tunix_rt.errors import DoesNotFitError, InputError
from tunix_rt.plan.fit import (
    SAFETY_SHARE,
    disk_needed_bytes,
    estimate_time,
    judge,
    measure_rate,
    refuse_if_too_big,
    training_flops_per_token,
)
from tunix_rt.plan.memory import kept_by_layer, predict
from tunix_rt.plan.shape import ModelShape, shape_of
from tunix_rt.rundir import to_plain

GIB = 2**30
SMALL = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
GEMMA_2B = {
    "model_type": "gemma", "vocab_size": 256_000, "hidden_size": 2048, "intermediate_size": 16_384,
    "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
}  # fmt: skip
GEMMA3_270M = {
    "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "gpt2"},
    {
        "model_type": "gpt2",
        "n_embd": 96,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 100,
        "n_positions": 64,
        "vocab_size": 99,
    },
    {"model_type": "gpt2", "tie_word_embeddings": False, "n_layer": 1},
    GEMMA_2B,
    GEMMA3_270M,
    SMOLLM2_135M,
    {"model_type": "llama"},
    {"model_type": "gemma"},
    {"model_type": "gemma2"},
    {"model_type": "gemma3_text"},
    {"model_type": "qwen2"},
    {"model_type": "qwen3"},
    *({"model_type": kind, **SMALL} for kind in ("llama", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3")),
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": None},
    {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": None},
    {"model_type": "gemma", **SMALL, "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "qwen3", **SMALL, "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "gemma3_text", **SMALL, "attention_bias": True},
]


def transformers_config(config: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**{**config, "bos_token_id": None, "eos_token_id": None})


def chosen(free_bytes: int, device: str = "cpu") -> DeviceChoice:
    return DeviceChoice(
        device=device, kind="a", count=1, memory_bytes=free_bytes, free_bytes=free_bytes, reason="for the test"
    )


def settings_of(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(sections)


# --- shape -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{len(config)}")
def test_parameters_are_counted_as_transformers_counts_them(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(config))
    assert shape_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GEMMA_2B, 2_506_172_416),
        (GEMMA3_270M, 268_098_176),
        ({"model_type": "gpt2"}, 124_439_808),
        (SMOLLM2_135M, 134_515_008),
    ],
)
def test_published_sizes_come_out_exactly(config: dict[str, Any], parameters: int) -> None:
    assert shape_of(config).parameters == parameters


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "gemma3"}, "'gemma3'"),
        ({}, "None"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"model_type": "llama", "vocab_size": True}, "vocab_size is True"),
        ({"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 4}, "6 attention heads"),
        ({"model_type": "gpt2", "n_head": 5}, "n_embd 768"),
        ({"model_type": "gpt2", "attn_pdrop": 2}, "attn_pdrop is 2"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross attention"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_of(config)


# --- what a step keeps -----------------------------------------------------------------------------------------------


def saved_elements(config: dict[str, Any], *, layers: int, rows: int, length: int, packed: bool) -> int:
    """Elements of the distinct tensors that autograd keeps over the body of the model, parameters left out."""
    torch.manual_seed(0)
    shape = shape_of(config)
    full = transformers_config({**config, "n_layer" if shape.learned_positions else "num_hidden_layers": layers})
    attention = "eager" if shape.capped_scores else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(full, attn_implementation=attention).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holding the tensor keeps its address from being used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    positions = torch.arange(length).repeat(rows, 1)
    if packed:
        positions[:, length // 2 :] -= length // 2
    ids = torch.randint(shape.vocab, (rows, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in kept.values())


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2_SMALL = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 99}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": kind, **SMALL} for kind in ("llama", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3")),
        GPT2_SMALL,
        {**GPT2_SMALL, **NO_DROPOUT},
        {**GPT2_SMALL, **NO_DROPOUT, "activation_function": "gelu_pytorch_tanh"},
    ],
    ids=lambda config: f"{config['model_type']}-{len(config)}",
)
def test_what_a_layer_keeps_is_counted_as_autograd_counts_it(config: dict[str, Any], packed: bool) -> None:
    rows, length = 2, 40
    one = saved_elements(config, layers=1, rows=rows, length=length, packed=packed)
    three = saved_elements(config, layers=3, rows=rows, length=length, packed=packed)
    counted = sum(kept_by_layer(shape_of(config), rows=rows, length=length, packed=packed, device="cpu"))
    assert counted == pytest.approx((three - one) / 2, rel=0.01)


# --- the prediction --------------------------------------------------------------------------------------------------

shapes = st.sampled_from([shape_of(config) for config in CONFIGS])


@st.composite
def run_settings(draw: st.DrawFn) -> RunConfig:
    return settings_of(
        model={"weights": draw(st.sampled_from(["random", "pretrained"]))},
        data={"max_length": draw(st.integers(8, 8192)), "packing": draw(st.booleans())},
        training={
            "per_device_train_batch_size": draw(st.integers(1, 512)),
            "gradient_accumulation_steps": draw(st.integers(1, 8)),
            "gradient_checkpointing": draw(st.booleans()),
            "dtype": draw(st.sampled_from(["float32", "float64"])),
        },
        evaluation={
            "per_device_eval_batch_size": draw(st.integers(1, 512)),
            "max_new_tokens": draw(st.integers(1, 2048)),
        },
    )


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    plain = config.model_dump()
    plain[section] |= values
    return RunConfig.model_validate(plain)


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), device=st.sampled_from(["cpu", "cuda"]))
def test_no_part_is_negative_and_the_parts_are_the_whole(shape: ModelShape, config: RunConfig, device: str) -> None:
    plan = predict(shape, config, device=device)
    assert all(size >= 0 for phase in plan.phases for size in phase.parts.values())
    assert all(sum(phase.parts.values()) == phase.total_bytes for phase in plan.phases)
    assert plan.peak_bytes == plan.peak.total_bytes == max(phase.total_bytes for phase in plan.phases)
    assert plan.peak_bytes > 4 * shape.parameters * 4, "weights, gradients and two moments are always there"
    assert json.loads(json.dumps(to_plain(plan), allow_nan=False))["peak_bytes"] == plan.peak_bytes


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), device=st.sampled_from(["cpu", "cuda"]), more=st.integers(1, 600))
def test_more_rows_longer_rows_and_longer_answers_never_need_less(
    shape: ModelShape, config: RunConfig, device: str, more: int
) -> None:
    before = predict(shape, config, device=device).peak_bytes
    training, evaluation = config.training, config.evaluation
    for larger in (
        changed(config, "training", per_device_train_batch_size=training.per_device_train_batch_size + more),
        changed(config, "data", max_length=config.data.max_length + more),
        changed(config, "evaluation", per_device_eval_batch_size=evaluation.per_device_eval_batch_size + more),
        changed(config, "evaluation", max_new_tokens=evaluation.max_new_tokens + more),
    ):
        assert predict(shape, larger, device=device).peak_bytes >= before


@settings(deadline=None)
@given(shape=shapes, config=run_settings())
def test_double_precision_needs_more_and_shorter_rows_less(shape: ModelShape, config: RunConfig) -> None:
    single = predict(shape, changed(config, "training", dtype="float32"), device="cpu")
    double = predict(shape, changed(config, "training", dtype="float64"), device="cpu")
    assert 1.0 < double.peak_bytes / single.peak_bytes <= 2.0
    assert predict(shape, config, device="cpu", row_tokens=8, target_share=0.5).peak_bytes <= double.peak_bytes


def test_checkpointing_saves_most_of_the_activations_of_a_deep_model() -> None:
    config = settings_of(data={"max_length": 1024}, training={"per_device_train_batch_size": 4})
    plain = predict(shape_of(SMOLLM2_135M), config, device="cpu")
    saving = predict(shape_of(SMOLLM2_135M), changed(config, "training", gradient_checkpointing=True), device="cpu")
    assert saving.peak.parts["activations"] < 0.2 * plain.peak.parts["activations"]
    assert saving.peak_bytes < plain.peak_bytes


def test_only_rows_of_one_example_end_with_the_positions_of_the_model() -> None:
    """Packed rows hold several examples, each within the positions, and are as long as asked for."""
    shape, alone = shape_of({"model_type": "gpt2"}), settings_of(data={"max_length": 4096, "packing": False})
    packed = changed(alone, "data", packing=True)
    assert predict(shape, alone, device="cpu").row_tokens == 1024
    assert predict(shape, alone, device="cpu", row_tokens=2048).row_tokens == 1024
    assert predict(shape, packed, device="cpu").row_tokens == 4096
    assert predict(shape, packed, device="cpu", row_tokens=2048).row_tokens == 2048
    assert training_flops_per_token(shape, packed) > training_flops_per_token(shape, alone)


def test_questions_are_never_longer_than_the_positions_of_the_model() -> None:
    shape, config = shape_of({"model_type": "gpt2"}), settings_of(data={"max_length": 1024})
    longer = changed(config, "data", max_length=4096)
    short, long = (predict(shape, each, device="cpu").phases for each in (config, longer))
    assert {a.name for a, b in zip(short, long, strict=True) if a != b} == {"loss", "backward"}


def test_the_safety_share_covers_every_case_that_was_measured() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "memory_cpu.json").read_text())["cases"]
    assert len(cases) >= 20
    assert max(case["measured_bytes"] / case["predicted_bytes"] - 1 for case in cases) < SAFETY_SHARE


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_a_2b_model_in_float32_is_refused_on_16_gib_with_parts_and_a_way_out() -> None:
    shape = shape_of(GEMMA_2B)
    config = settings_of(data={"max_length": 1024}, training={"per_device_train_batch_size": 8})
    plan = predict(shape, config, device="cpu")
    with pytest.raises(DoesNotFitError) as refused:
        refuse_if_too_big(plan, chosen(16 * GIB), shape, config)
    assert refused.value.exit_code == 5
    assert f"{plan.peak_bytes / GIB:.2f} GiB predicted" in refused.value.problem
    assert "16.00 GiB free on cpu" in refused.value.problem
    assert "weights 9.34" in refused.value.problem
    assert "2,506,172,416 parameters alone are 37.34 GiB" in refused.value.fix


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [(60, "batch_size=8 "), (30, "batch_size=4 "), (5, "checkpointing=true"), (4, "max_length=")],
)
def test_the_advised_line_is_as_small_a_change_as_fits(free_gib: int, expected: str) -> None:
    shape, free = shape_of(SMOLLM2_135M), chosen(free_gib * GIB)
    asked = ["data.max_length=2048", "training.per_device_train_batch_size=24", "evaluation.max_new_tokens=512"]
    config = load_config(None, overrides=asked)
    fit = judge(predict(shape, config, device="cpu"), free, shape, config)
    assert not fit.fits
    assert fit.margin_bytes < 0
    (line,) = fit.advice
    assert expected in line
    overrides = [word for word in line.partition("  (")[0].split() if word != "--set"]
    advised = load_config(None, overrides=asked + overrides)
    assert judge(predict(shape, advised, device="cpu"), free).fits
    assert advised.training.per_device_train_batch_size * advised.training.gradient_accumulation_steps == 24


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), free=st.integers(0, 2**40))
def test_what_is_judged_to_fit_is_never_refused_and_the_other_way_round(
    shape: ModelShape, config: RunConfig, free: int
) -> None:
    plan = predict(shape, config, device="cpu")
    fit = judge(plan, chosen(free))
    assert fit.fits == (plan.peak_bytes + fit.safety_bytes <= free)
    with contextlib.nullcontext() if fit.fits else pytest.raises(DoesNotFitError):
        refuse_if_too_big(plan, chosen(free), shape, config)


# --- time and disk ---------------------------------------------------------------------------------------------------


def test_time_grows_with_steps_tokens_and_questions() -> None:
    shape, config = shape_of(GEMMA3_270M), settings_of()

    def of(tokens: int, steps: int, items: int) -> float:
        return estimate_time(
            shape, config, tokens_per_step=tokens, steps=steps, eval_items=items, flops_per_second=1e11
        ).seconds_high

    assert of(1024, 10, 0) < of(2048, 10, 0) < of(2048, 20, 0) < of(2048, 20, 100)
    estimate = estimate_time(shape, config, tokens_per_step=1024, steps=10, flops_per_second=1e11)
    assert 0 < estimate.seconds_low < estimate.seconds_high


def test_the_rate_of_this_cpu_is_measured_in_a_moment() -> None:
    assert 1e8 < measure_rate() < 1e14


def test_disk_holds_the_kept_checkpoints_one_more_and_the_final_model() -> None:
    shape = shape_of({"model_type": "gpt2"})
    weights = 4 * shape.parameters
    small = disk_needed_bytes(shape, settings_of(training={"save_total_limit": 2}))
    large = disk_needed_bytes(shape, settings_of(training={"save_total_limit": 5}))
    assert small > 3 * 3 * weights + weights
    assert large - small == 3 * 3 * weights


# --- the command -----------------------------------------------------------------------------------------------------


def model_folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_the_command_says_that_a_small_model_fits_from_its_config_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", {"model_type": "llama", **SMALL})
    asked = ["plan", "--model", folder, "--device", "cpu", "--set", "data.max_length=64"]
    said = CliRunner().invoke(cli, asked)
    assert said.exit_code == 0, said.stderr
    assert said.stdout.startswith("fits: ")
    assert "activations" in said.stdout
    assert "disk: up to" in said.stdout
    plan = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)
    assert plan["fit"]["fits"] is True
    assert plan["memory"]["peak_bytes"] == plan["fit"]["predicted_bytes"]


def test_the_command_refuses_a_model_that_cannot_fit_with_exit_5(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", {**GEMMA_2B, "num_hidden_layers": 2000})
    asked = ["plan", "--model", folder, "--device", "cpu", "--set", "training.per_device_train_batch_size=512"]
    said = CliRunner().invoke(cli, asked)
    assert said.exit_code == 5
    assert said.stdout.startswith("does not fit: ")
    assert "--set training.per_device_train_batch_size=1 --set training.gradient_accumulation_steps=512" in said.stderr
    assert json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)["fit"]["fits"] is False


def test_the_command_names_a_model_it_does_not_know(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", {"model_type": "mamba"})
    said = CliRunner().invoke(cli, ["plan", "--model", folder, "--device", "cpu"])
    assert (said.exit_code, "'mamba'" in said.stderr) == (3, True)
    assert CliRunner().invoke(cli, ["plan", "--device", "cpu"]).exit_code == 2
