"""The plan: exact parameters, an honest count of what a step keeps, a prediction that is the sum of its parts."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.attention_checks import choose_attention
from tests.conftest import ROOT
from tests.tables import parametrize, tables
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.plan import activations
from tunix_rt.plan.adapters import adapters_of, chosen_modules, modules_of
from tunix_rt.plan.fit import SAFETY_SHARE
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.memory import PROOF_SPARE_BYTES, MemoryPlan, predict
from tunix_rt.plan.phases import layers_of
from tunix_rt.plan.precision import loss_rows, recipe_of
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.tensors import elements, tensors_of
from tunix_rt.plan.timing import training_flops_per_token
from tunix_rt.storage import to_plain

GIB = 2**30
SMALL, GEMMA_2B, GEMMA3_270M, SMOLLM2_135M = tables(__file__)["shapes"].values()
CONFIGS: list[dict[str, Any]] = [
    *tables(__file__)["configurations"],
    *(GEMMA_2B, GEMMA3_270M, SMOLLM2_135M),
    *({"model_type": kind, **SMALL} for kind, family in FAMILIES.items() if family.layout == "llama"),
    *(SMALL | changed for changed in tables(__file__)["variants of the small shape"]),
    *(more for more, _ in tables(__file__)["one more layer of Gemma 4"].values()),
]


def transformers_config(config: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**{**config, "bos_token_id": 1, "eos_token_id": 1})


def settings_of(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(sections)


# --- shape -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{len(config)}")
def test_parameters_are_counted_as_transformers_counts_them(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(config))
    assert shape_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@parametrize("config", "words")
def test_a_config_that_cannot_be_counted_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_of(config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{len(config)}")
def test_the_tensors_of_a_model_are_those_of_transformers(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(config))
    shape = shape_of(config)
    found = tensors_of(shape)
    all_of_them = [*found.embeddings, *(found.stack or found.layer * shape.layers), *found.others]
    assert sorted(all_of_them) == sorted(tuple(parameter.shape) for parameter in model.parameters())
    assert elements(all_of_them) == shape.parameters
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    inner = {name: tuple(one.weight.shape) for name, one in model.named_modules() if isinstance(one, kinds)}
    modules = {name: one for layer in modules_of(shape) for name, one in layer.items()}
    assert modules == {name: of for name, of in inner.items() if name != "lm_head"}


# --- what a step keeps -----------------------------------------------------------------------------------------------


def saved_bytes(config: dict[str, Any], training: Training, *, layers: int, batch: activations.Batch) -> int:
    """Bytes of the distinct tensors that autograd keeps over the body of the model; parameters and their casts left out."""
    torch.manual_seed(0)
    shape, recipe = shape_of(config), recipe_of(training)
    full = transformers_config({**config, "n_layer" if shape.learned_positions else "num_hidden_layers": layers})
    attention = "eager" if shape.capped_scores else "sdpa"
    kept_in = getattr(torch, recipe.frozen or recipe.weights)
    model = transformers.AutoModelForCausalLM.from_config(full, attn_implementation=attention, dtype=kept_in).train()
    if training.lora_rank is not None:
        from tunix_rt.engines.torch.adapters import add_adapters

        model = add_adapters(model, training, name="small")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {tuple(sorted(parameter.shape)) for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holding the tensor keeps its address from being used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tuple(sorted(tensor.shape)) not in sizes:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    positions = torch.arange(batch.length).repeat(batch.rows, 1)
    if batch.packed:
        positions[:, batch.length // 2 :] -= batch.length // 2
    ids = torch.randint(shape.vocab, (batch.rows, batch.length))
    casting = torch.autocast("cpu", dtype=getattr(torch, recipe.compute), enabled=recipe.casts)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casting:
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2_SMALL = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 99}
SMALL_MODELS = [
    *({"model_type": kind, **SMALL} for kind, family in FAMILIES.items() if family.layout == "llama"),
    GPT2_SMALL,
    {**GPT2_SMALL, **NO_DROPOUT},
    {**GPT2_SMALL, **NO_DROPOUT, "activation_function": "gelu_pytorch_tanh"},
]
each_small_model = pytest.mark.parametrize(
    "config", SMALL_MODELS, ids=lambda config: f"{config['model_type']}-{len(config)}"
)


def assert_kept_is_counted(config: dict[str, Any], training: Training, *, packed: bool) -> None:
    batch = activations.Batch(rows=2, length=40, packed=packed, device="cpu")
    two, three = (saved_bytes(config, training, layers=layers, batch=batch) for layers in (2, 3))
    shape = shape_of(config)
    adapters = adapters_of(tensors_of(shape).matrices, shape, training)
    widths = activations.widths_of(recipe_of(training), adapters)
    counted = sum(activations.saved_by_layer(shape, widths, batch).all)
    assert counted == pytest.approx(three - two, rel=0.01)


@pytest.mark.parametrize("packed", [True, False])
@each_small_model
def test_what_a_layer_keeps_is_counted_as_autograd_counts_it(config: dict[str, Any], packed: bool) -> None:
    assert_kept_is_counted(config, Training(), packed=packed)


QUERY_VALUE = r".*\.(q_proj|v_proj|qkv_proj|c_attn)"
MLP = r".*\.mlp\.\w+_(proj|fc)"
RECIPES = {
    "bfloat16 weights": Training(dtype="bfloat16", master_dtype="bfloat16"),
    "bfloat16 products": Training(dtype="bfloat16"),
    "LoRA": Training(lora_rank=8),
    "LoRA in bfloat16": Training(dtype="bfloat16", lora_rank=8),
    "LoRA of query and value": Training(lora_rank=8, lora_target_modules=QUERY_VALUE),
    "LoRA of query and value in bfloat16, dropout": Training(
        dtype="bfloat16", lora_rank=8, lora_target_modules=QUERY_VALUE, lora_dropout=0.1
    ),
    "LoRA of the MLP in bfloat16": Training(dtype="bfloat16", lora_rank=8, lora_target_modules=MLP),
    "LoRA of the MLP, dropout": Training(lora_rank=8, lora_target_modules=MLP, lora_dropout=0.1),
    "LoRA, dropout": Training(lora_rank=8, lora_dropout=0.1),
}


@pytest.mark.parametrize("kind", RECIPES)
@each_small_model
def test_what_a_layer_keeps_is_counted_in_the_types_of_the_recipe(config: dict[str, Any], kind: str) -> None:
    if "LoRA" in kind:
        pytest.importorskip("peft")
    assert_kept_is_counted(config, RECIPES[kind], packed=True)


def counted_bytes(config: dict[str, Any], training: Training, batch: activations.Batch) -> int:
    run = footprint_of(shape_of(config), training, batch.device)
    once = sum(activations.saved_once(run.shape, run.widths, batch))
    return once + sum(layer.saved_bytes for layer in layers_of(run, batch))


FIRST = ("float32", "bfloat16 weights", "bfloat16 products", "LoRA")


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        *((kind, True) for kind in FIRST),
        ("float32", False),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in RECIPES if kind not in FIRST),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in RECIPES),
    ],
)
@pytest.mark.parametrize("layer", tables(__file__)["one more layer of Gemma 4"])
def test_what_one_more_layer_of_a_kind_keeps_is_counted_where_layers_differ(
    layer: str, kind: str, packed: bool
) -> None:
    if "LoRA" in kind:
        pytest.importorskip("peft")
    training = RECIPES.get(kind, Training())
    batch = activations.Batch(rows=2, length=40, packed=packed, device="cpu")
    pair = tables(__file__)["one more layer of Gemma 4"][layer]
    more, fewer = (saved_bytes(one, training, layers=one["num_hidden_layers"], batch=batch) for one in pair)
    expected = counted_bytes(pair[0], training, batch) - counted_bytes(pair[1], training, batch)
    assert expected == pytest.approx(more - fewer, rel=0.002)


def test_experts_are_counted_as_active_and_in_all() -> None:
    shape = shape_of(json.loads((ROOT / "presets" / "gemma-4-26b-a4b" / "config.json").read_text()))
    assert (shape.parameters, shape.parameters - shape.idle_parameters) == (25_233_141_760, 3_822_530_560)


ONE_LAYER = r".*\.1\.\w+\.(q_proj|qkv_proj|c_attn)"
TARGETS = ["all-linear", QUERY_VALUE, MLP, ONE_LAYER, ("o_proj", "down_proj"), ("attn.c_proj", "c_fc")]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_adapters_are_counted_module_by_module_as_the_engine_adds_them(
    kind: str, targets: str | tuple[str, ...]
) -> None:
    pytest.importorskip("peft")
    from tunix_rt.engines.torch.adapters import add_adapters

    config = {**GPT2_SMALL, "n_layer": 3} if kind == "gpt2" else {"model_type": kind, **SMALL, "num_hidden_layers": 3}
    training = Training(lora_rank=4, lora_target_modules=targets)
    model = transformers.AutoModelForCausalLM.from_config(transformers_config(config))
    if isinstance(targets, tuple) and (kind == "gpt2") != ("c_fc" in targets):
        for count in (
            lambda: footprint_of(shape_of(config), training, "cpu"),
            lambda: add_adapters(model, training, name="x"),
        ):
            with pytest.raises(ConfigError, match=rf"lora_target_modules: '{targets[0]}' matches no projection of"):
                count()
        return
    trained = {n: p for n, p in add_adapters(model, training, name="x").named_parameters() if p.requires_grad}
    run = footprint_of(shape_of(config), training, "cpu")
    assert sorted(map(sorted, run.adapters)) == sorted(sorted(p.shape) for p in trained.values())
    assert run.trained_elements == sum(p.numel() for p in trained.values()) < shape_of(config).parameters
    names = [name for layer in modules_of(shape_of(config)) for name in layer]
    assert set(chosen_modules(names, targets, "x")) == {name.split(".lora_")[0] for name in trained}


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", ["gemma2", "gemma", "llama"])
def test_scores_are_counted_for_answers_where_the_engine_spells_attention_out(
    kind: str, dtype: str, capability: tuple[int, int]
) -> None:
    """Answers are generated by another attention than rows are trained with."""
    config = {"model_type": kind, **SMALL}
    shape, widths = shape_of(config), activations.widths_of(recipe_of(Training(dtype=dtype)), None)
    chosen = choose_attention(
        device="cuda", dtype=dtype, capability=capability, softcap=shape.capped_scores, dropout=False,
        head_dim=shape.head_dim, deterministic=False,
    )  # fmt: skip
    batch = activations.Batch(rows=2, length=1024, packed=True, device="cuda", capability=capability)
    kernel = activations.generation_kernel(shape, widths, batch)
    assert (kernel == "capped") == (chosen.generating == "eager")
    assert kernel != "fused", "padding is masked"
    assert (activations.attention_kernel(shape, widths, batch) == "eager") == (chosen.training == "eager")
    whole = sum(activations.forward_of_one_layer(shape, widths, batch, kernel))
    scores = batch.tokens * shape.heads * batch.length * widths.norm
    assert (whole > scores) == (kernel in ("capped", "math"))


# --- the prediction --------------------------------------------------------------------------------------------------

shapes = st.sampled_from([shape_of(config) for config in CONFIGS])


BFLOAT16 = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
SMALLEST = {**BFLOAT16, "optim": "adafactor", "optim_in_backward": True, "gradient_checkpointing": True}
recipes = st.sampled_from(
    [
        {},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "optim": "adamw_8bit"},
        {"optim": "adafactor"},
        BFLOAT16,
        {**BFLOAT16, "optim": "adamw_8bit", "optim_in_backward": True},
        {"dtype": "bfloat16", "optim_in_backward": True},
        SMALLEST,
        {"lora_rank": 16},
        {"dtype": "bfloat16", "lora_rank": 16},
        {"lora_rank": 16, "lora_target_modules": QUERY_VALUE, "lora_dropout": 0.1},
        {"dtype": "bfloat16", "lora_rank": 16, "lora_target_modules": MLP},
    ]
)


@st.composite
def run_settings(draw: st.DrawFn) -> RunConfig:
    recipe = draw(recipes)
    training = {
        "per_device_train_batch_size": draw(st.integers(1, 512)),
        "gradient_accumulation_steps": draw(st.integers(1, 8)) if "optim_in_backward" not in recipe else 1,
        "gradient_checkpointing": draw(st.sampled_from([False, 0.3, 0.5, True])),
        "save_steps": draw(st.sampled_from([None, 10])),
    }
    return settings_of(
        model={"weights": draw(st.sampled_from(["random", "pretrained"]))},
        data={"max_length": draw(st.integers(8, 8192)), "packing": draw(st.booleans())},
        training=training | recipe,
        evaluation={
            "per_device_eval_batch_size": draw(st.integers(1, 512)),
            "max_new_tokens": draw(st.integers(1, 2048)),
        },
    )


devices = st.sampled_from(["cpu", "cuda"])


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    plain = config.model_dump()
    plain[section] |= values
    return RunConfig.model_validate(plain)


@given(shape=shapes, config=run_settings(), device=devices)
def test_no_part_is_negative_and_the_parts_are_the_whole(shape: ModelShape, config: RunConfig, device: str) -> None:
    plan = predict(shape, config, device=device)
    assert all(size >= 0 for phase in plan.phases for size in phase.parts.values())
    assert all(sum(phase.parts.values()) == phase.total_bytes for phase in plan.phases)
    assert plan.peak_bytes == plan.peak.total_bytes == max(phase.total_bytes for phase in plan.judged)
    assert plan.least_bytes == plan.least.total_bytes <= plan.peak_bytes
    run = footprint_of(shape, config.training, device)
    assert plan.least_bytes > run.weights + run.optimizer + run.head_gradient
    if not config.training.optim_in_backward:
        assert plan.least_bytes > run.weights + run.optimizer + run.gradients
    assert json.loads(json.dumps(to_plain(plan), allow_nan=False))["peak_bytes"] == plan.peak_bytes


@given(shape=shapes, config=run_settings(), device=devices)
def test_the_proof_of_the_final_model_is_a_phase_with_both_models_that_no_run_is_refused_for(
    shape: ModelShape, config: RunConfig, device: str
) -> None:
    plan, run = predict(shape, config, device=device), footprint_of(shape, config.training, device)
    (proof,) = (phase for phase in plan.phases if phase not in plan.judged)
    assert proof.name == "proof" and proof.parts["weights"] == run.weights
    assert proof.parts["fresh_process"] >= run.final_model + PROOF_SPARE_BYTES
    assert device == "cpu" or (proof.parts["optimizer"], proof.parts["gradients"]) == (0, 0)
    assert "proof" not in (plan.peak_phase, plan.least.name)
    named = json.loads(json.dumps(to_plain(plan)))["phases"][-1]
    assert named == {"name": "proof", "parts": proof.parts, "total_bytes": proof.total_bytes}


def test_the_proof_of_a_small_model_does_not_make_its_run_too_big() -> None:
    shape, config = (
        shape_of({"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 100}),
        settings_of(),
    )
    for device in ("cpu", "cuda"):
        plan = predict(shape, config, device=device)
        assert plan.phases[-1].total_bytes > PROOF_SPARE_BYTES > plan.peak_bytes


@given(shape=shapes, config=run_settings())
def test_double_precision_needs_more_and_shorter_rows_less(shape: ModelShape, config: RunConfig) -> None:
    assume(config.training.master_dtype is None and config.training.lora_rank is None)
    single = predict(shape, changed(config, "training", dtype="float32"), device="cpu")
    double = predict(shape, changed(config, "training", dtype="float64"), device="cpu")
    # Soft-capped scores are kept once more, because their softmax is in float32.
    assert 1.0 < double.peak_bytes / single.peak_bytes <= (2.5 if shape.capped_scores else 2.0)
    assert predict(shape, config, device="cpu", row_tokens=8, target_share=0.5).peak_bytes <= double.peak_bytes


@given(shape=shapes, config=run_settings(), device=devices)
def test_an_optimizer_with_smaller_states_never_holds_more(shape: ModelShape, config: RunConfig, device: str) -> None:
    # Adafactor factors matrices; of the stacked weights of experts it keeps whole states, which 8 bits undercut.
    kinds = OPTIMIZERS if shape.experts is None else OPTIMIZERS[1:]
    plans = [predict(shape, changed(config, "training", optim=kind), device=device) for kind in kinds]
    states = [part_of(plan, "save", "optimizer") for plan in plans]
    assert states == sorted(states)
    if shape.parameters > 10**8:  # a small model is smaller than the temporaries of its update
        peaks = [plan.least_bytes for plan in plans]
        assert peaks == sorted(peaks)


@given(shape=shapes, config=run_settings(), device=devices)
def test_adafactor_never_holds_more_states_than_adamw(shape: ModelShape, config: RunConfig, device: str) -> None:
    plans = [predict(shape, changed(config, "training", optim=kind), device=device) for kind in ("adafactor", "adamw")]
    adafactor, adamw = (part_of(plan, "save", "optimizer") for plan in plans)
    assert adafactor <= adamw


OPTIMIZERS = ("adafactor", "adamw_8bit", "adamw")


def part_of(plan: MemoryPlan, phase: str, part: str) -> int:
    return next(one.parts[part] for one in plan.phases if one.name == phase)


def counted(plan: MemoryPlan) -> int:
    """The largest phase without what the heap of a CPU loses between blocks, which is more where blocks come and go; with what
    a recording holds besides."""
    return plan.pool_bytes + max(phase.total_bytes - phase.parts.get("allocator_slack", 0) for phase in plan.judged)


@given(shape=shapes, config=run_settings(), device=devices)
def test_updates_in_the_backward_pass_never_need_more(shape: ModelShape, config: RunConfig, device: str) -> None:
    assume(config.training.lora_rank is None and config.training.dtype != "float16")
    alone = changed(config, "training", gradient_accumulation_steps=1, optim_in_backward=False)
    whole = predict(shape, alone, device=device)
    in_backward = changed(alone, "training", optim_in_backward=True)
    run = footprint_of(shape, in_backward.training, device)
    assert counted(predict(shape, in_backward, device=device)) <= counted(whole) + run.update_of(run.trained_kinds)


@given(shape=shapes, config=run_settings(), device=devices)
def test_a_budget_for_activations_lies_between_all_and_none(shape: ModelShape, config: RunConfig, device: str) -> None:
    plans = [
        predict(shape, changed(config, "training", gradient_checkpointing=kept), device=device)
        for kept in (True, 0.2, 0.5, 0.8, False)
    ]
    # Beside all that the last layer keeps, one that is computed again needs what it was given.
    given_to_it = plans[0].rows * plans[0].row_tokens * shape.hidden * 4
    for fewer, more in pairwise(map(counted, plans)):
        assert fewer <= more + given_to_it


@given(shape=shapes, config=run_settings(), device=devices)
def test_adapters_never_need_more_than_every_parameter(shape: ModelShape, config: RunConfig, device: str) -> None:
    plain = changed(config, "training", lora_rank=None, master_dtype=None, optim_in_backward=False, optim="adamw")
    assume(shape.parameters > 10**8)
    adapted = changed(plain, "training", lora_rank=16)
    held = [
        sum(part_of(predict(shape, one, device=device), "update", name) for name in STATE) for one in (adapted, plain)
    ]
    assert held[0] < held[1]


STATE = ("weights", "optimizer", "gradients")


def test_gemma_2b_trains_every_parameter_in_little_more_than_its_weights_and_the_gradient_of_its_table() -> None:
    """1 x 1024 in bfloat16 on a GPU: weights 4.67 GiB, the table's gradient 0.98, a chunk of logits 0.25 for a while; one layer
    that is computed again takes less."""
    config = settings_of(
        data={"max_length": 1024},
        training={**SMALLEST, "per_device_train_batch_size": 1, "compile": False},
        evaluation={"per_device_eval_batch_size": 1},
    )
    plan = predict(shape_of(GEMMA_2B), config, device="cuda")
    assert 6.0 < plan.peak_bytes / GIB < 6.4
    assert plan.peak_phase == "loss"
    parts = {name: round(size / GIB, 2) for name, size in plan.peak.parts.items()}
    assert (parts["weights"], parts["gradients"]) == (4.67, 0.98)
    assert round(part_of(plan, "loss", "loss_head") / GIB, 2) == 0.25
    assert parts["optimizer"] <= 0.01


@pytest.mark.parametrize("config", [GEMMA_2B, GEMMA_2B | {"model_type": "gemma2"}], ids=["plain", "capped"])
def test_on_a_gpu_a_logit_takes_the_bytes_of_one_float32(config: dict[str, Any]) -> None:
    """Its gradient is written over it, in whatever type."""
    shape = shape_of(config)
    for dtype in ("bfloat16", "float32"):
        training = settings_of(training={"dtype": dtype, "master_dtype": dtype}).training
        run = footprint_of(shape, training, "cuda")
        states = 8192 * shape.hidden * run.widths.stream
        assert run.loss_head(8192, gradients_there=True) == [0, loss_rows(8192) * shape.vocab * 4, states, states]


def test_the_prediction_for_a_gpu_is_what_a_gpu_measured() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "engine_curves.json").read_text())
    case = recorded["runs"]["float32 AdamW"]
    config = settings_of(
        model={"weights": "random"},
        data={"max_length": 1024},
        training=case["settings"],
        evaluation={"per_device_eval_batch_size": 1},
    )
    plan = predict(shape_of(GEMMA_2B), config, device="cuda", capability=(9, 0))
    assert plan.peak_bytes == pytest.approx(case["peak_bytes"], rel=0.01)


def test_checkpointing_saves_most_of_the_activations_of_a_deep_model() -> None:
    config = settings_of(data={"max_length": 1024}, training={"per_device_train_batch_size": 4})
    plain = predict(shape_of(SMOLLM2_135M), config, device="cpu")
    saving = predict(shape_of(SMOLLM2_135M), changed(config, "training", gradient_checkpointing=True), device="cpu")
    assert part_of(saving, "loss", "activations") < 0.2 * part_of(plain, "loss", "activations")
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
    assert {a.name for a, b in zip(short, long, strict=True) if a != b} == {"forward", "loss", "backward", "update"}


def test_the_safety_share_covers_every_case_that_was_measured() -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / "memory_cpu.json").read_text())["cases"]
    assert len(cases) >= 20
    assert max(case["measured_bytes"] / case["predicted_bytes"] - 1 for case in cases) < SAFETY_SHARE
