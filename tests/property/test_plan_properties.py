"""Whatever the model and the settings: memory and time are never negative, more work never needs less, nonsense is named."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.test_plan import CONFIGS, SMALL, changed, run_settings, shapes
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import InputError
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.speed import CPU_RATES, StepTime, rates_of, step_time
from tunix_rt.plan.timing import disk_needed_bytes, run_time

PLACES: list[tuple[str, str, tuple[int, int] | None]] = [
    ("torch", "cpu", None), ("torch", "cuda", (7, 5)), ("torch", "cuda", (9, 0)), ("jax", "cpu", None), ("jax", "cuda", (9, 0)),
    ("jax", "tpu", None),
]  # fmt: skip
places = st.sampled_from(PLACES)
rates = st.sampled_from([rates_of(989, 66.9, 4800), rates_of(25.5, 12.7, 360), rates_of(None, None, None)])
Place = tuple[str, str, tuple[int, int] | None]


def placed(config: RunConfig, place: Place) -> RunConfig:
    """For the engine of `place`, as far as it honours the settings."""
    training = config.training
    if place[0] == "torch":
        return config
    assume(training.lora_rank is None and training.dtype != "float16" and training.optim != "adamw_8bit")
    return changed(config, "training", backend="jax", optim_in_backward=False)


def planned(shape: ModelShape, config: RunConfig, place: Place) -> MemoryPlan:
    return predict_run(shape, config, device=place[1], capability=place[2])


def timed(shape: ModelShape, config: RunConfig, place: Place, published: Any, **more: Any) -> StepTime:
    used = CPU_RATES if place[1] == "cpu" else published
    return step_time(shape, config, used, device=place[1], capability=place[2], **more)


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), place=places, published=rates)
def test_memory_time_and_disk_are_finite_and_never_negative(
    shape: ModelShape, config: RunConfig, place: Place, published: Any
) -> None:
    config = placed(config, place)
    plan, step = planned(shape, config, place), timed(shape, config, place, published)
    assert all(size >= 0 for phase in plan.phases for size in phase.parts.values())
    assert 0 < plan.least_bytes <= plan.peak_bytes
    assert all(seconds >= 0 and math.isfinite(seconds) for seconds in step.parts.values())
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert 0 < step.seconds_low < step.seconds < step.seconds_high
    assert step.tokens_per_second == pytest.approx(step.tokens / step.seconds)
    assert disk_needed_bytes(shape, config) > 0
    run = run_time(step, config, rows=1000, rows_per_step=8)
    assert run is not None and run.steps > 0 and run.hours_low < run.hours < run.hours_high


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), place=places, published=rates, more=st.integers(1, 600))
def test_more_and_longer_rows_and_generations_never_need_less_memory_or_time(
    shape: ModelShape, config: RunConfig, place: Place, published: Any, more: int
) -> None:
    config = placed(config, place)
    plan = planned(shape, config, place)
    layers = "plain" if plan.layers == "plain" else "compiled"  # a larger step is no longer recorded
    step = timed(shape, config, place, published, layers=layers)
    rows, length, evaluation = config.training.per_device_train_batch_size, config.data.max_length, config.evaluation
    for larger in (
        changed(config, "training", per_device_train_batch_size=rows + more),
        changed(config, "data", max_length=length + more),
        changed(config, "evaluation", per_device_eval_batch_size=evaluation.per_device_eval_batch_size + more),
        changed(config, "evaluation", max_new_tokens=evaluation.max_new_tokens + more),
    ):
        after = planned(shape, larger, place)
        assert after.peak_bytes >= plan.peak_bytes and after.least_bytes >= plan.least_bytes
        assert timed(shape, larger, place, published, layers=layers).seconds >= step.seconds * (1 - 1e-12)


def test_the_chunks_of_the_loss_do_not_make_a_larger_step_faster() -> None:
    """At 2,049 targets the engine's chunks grow from 256 to 384."""
    shape = shape_of({"model_type": "gemma"})
    seconds = [
        timed(shape, RunConfig.model_validate({"training": {"per_device_train_batch_size": rows}, "data": {"max_length": 8}}),
              PLACES[2], rates_of(989, 66.9, 4800), layers="plain").seconds
        for rows in range(240, 300)
    ]  # fmt: skip
    assert seconds == sorted(seconds)


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), place=places, published=rates, parts=st.sampled_from([2, 3, 4, 8]))
def test_a_step_in_more_micro_batches_is_never_faster_and_keeps_its_tokens(
    shape: ModelShape, config: RunConfig, place: Place, published: Any, parts: int
) -> None:
    assume(not config.training.optim_in_backward)
    config = placed(config, place)
    rows, often = config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps
    whole = changed(config, "training", per_device_train_batch_size=parts * rows)
    split = changed(config, "training", gradient_accumulation_steps=parts * often)
    one, many = (timed(shape, each, place, published) for each in (whole, split))
    assert one.tokens == many.tokens
    assert one.seconds <= many.seconds * (1 + 1e-12)
    # In micro-batches as many as there were before, with gradients that are summed up in both, less is kept.
    if often > 1:
        assert planned(shape, split, place).peak_bytes <= planned(shape, whole, place).peak_bytes


@settings(deadline=None)
@given(shape=shapes, config=run_settings(), place=places, published=rates)
def test_what_is_computed_again_takes_time(shape: ModelShape, config: RunConfig, place: Place, published: Any) -> None:
    config = placed(config, place)
    seconds = [
        timed(shape, changed(config, "training", gradient_checkpointing=kept), place, published).seconds
        for kept in (False, 0.75, 0.5, 0.25, True)
    ]
    assert all(less <= more * (1 + 1e-12) for less, more in pairwise(seconds))


# --- nonsense --------------------------------------------------------------------------------------------------------

SIZES = {
    "gpt2": ("n_embd", "n_head", "n_layer", "n_inner", "vocab_size", "n_positions"),
    **dict.fromkeys(
        ("llama", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"), tuple(sorted(SMALL.keys() - {"pad_token_id"}))
    ),
}
nonsense = st.one_of(
    st.integers(max_value=0), st.booleans(), st.text(max_size=5), st.floats(), st.lists(st.integers(), max_size=2),
)  # fmt: skip


@given(data=st.data(), family=st.sampled_from(sorted(SIZES)), value=nonsense)
def test_a_size_that_is_none_is_refused_with_its_key(data: st.DataObject, family: str, value: object) -> None:
    key = data.draw(st.sampled_from(SIZES[family]))
    with pytest.raises(InputError) as refused:
        shape_of({"model_type": family, key: value})
    assert f"config.json: {key} is {value!r}, not a size" in refused.value.problem
    assert refused.value.fix


@given(value=st.one_of(st.floats(min_value=1), st.floats(max_value=-1e-9), st.booleans(), st.text(max_size=5)))
def test_a_share_that_is_none_is_refused_with_its_key(value: object) -> None:
    for family, key in (("gpt2", "attn_pdrop"), ("gpt2", "resid_pdrop"), ("llama", "attention_dropout")):
        with pytest.raises(InputError, match=key):
            shape_of({"model_type": family, key: value})


@given(heads=st.integers(1, 64), others=st.integers(1, 64))
def test_heads_that_do_not_go_together_are_refused_with_both_numbers(heads: int, others: int) -> None:
    asked = {"model_type": "llama", **SMALL, "num_attention_heads": heads, "num_key_value_heads": others}
    if heads % others == 0:
        assert shape_of(asked).parameters > 0
        return
    with pytest.raises(InputError, match=f"{heads} attention heads cannot share {others} key-value heads"):
        shape_of(asked)


@given(family=st.one_of(st.none(), st.text(max_size=12), st.integers(), st.lists(st.text(max_size=3), max_size=2)))
def test_a_family_that_is_not_known_is_named(family: Any) -> None:
    assume(str(family) not in {config["model_type"] for config in CONFIGS})
    with pytest.raises(InputError) as refused:
        shape_of({"model_type": family})
    assert repr(family) in refused.value.problem and "gemma3_text" in refused.value.fix
