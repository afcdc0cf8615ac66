"""What `memory: auto` settles on, for both engines, and what a continued run makes of it."""

import json
import logging
from types import SimpleNamespace

import pytest

from tests.samples import device
from tunix_rt.config.load import build_config, with_settings
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.errors import TunixError
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.report import judge
from tunix_rt.plan.shape import shape_of
from tunix_rt.train.commitment import as_it_began, config_hash, fitting_of_run
from tunix_rt.train.preflight import settle_settings

GIB = 2**30
SHAPE = shape_of({
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
})  # fmt: skip
FRESH = SimpleNamespace(continued=False)


def asked(**training):
    written = {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 2, "memory": "auto", **training}
    data = {"max_length": 512, "dataset": "dev-reasoning-v2"}
    return build_config({"training": written, "data": data, "model": {"name": "a-model"}}, "a test")


def gpu(free_gib: float) -> DeviceChoice:
    return device("cuda", free_gib * GIB, "NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0))


def predicted(config):
    return predict_run(SHAPE, config, device="cuda", devices=1, capability=(9, 0))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.35])
def test_what_is_chosen_fits_and_keeps_the_rows_of_a_step_and_what_is_trained(backend, share):
    config = asked(backend=backend, memory_limit_gib=3.0)
    room = share * predicted(config).least_bytes / GIB + 0.5
    assert not judge(predicted(config), gpu(room)).fits
    settled, fitting = settle_settings(FRESH, config, SHAPE, gpu(room))
    training = settled.training
    assert judge(predicted(settled), gpu(room)).fits
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 48
    assert (training.lora_rank, settled.data, training.memory) == (None, config.data, "auto")
    assert with_settings(settled, fitting["written"]) == config
    assert fitting["predicted_bytes"] == predicted(settled).least_bytes
    assert fitting["available_bytes"] == gpu(room).free_bytes
    json.dumps(fitting)


def test_as_written_is_left_alone_unless_auto_is_asked_for():
    config = asked(memory="as_written")
    assert settle_settings(FRESH, config, SHAPE, gpu(0.1)) == (config, None)


def test_where_nothing_fits_it_stays_as_written_and_says_so(caplog):
    caplog.set_level(logging.INFO)
    config = asked()
    settled, fitting = settle_settings(FRESH, config, SHAPE, gpu(0.6))
    assert settled == config and fitting["chosen"] == {}
    assert "are predicted to fit" in caplog.messages[-1]


def test_what_changes_the_result_is_said(caplog):
    caplog.set_level(logging.INFO)
    _, fitting = settle_settings(FRESH, asked(), SHAPE, gpu(1.25))
    assert fitting["changes_the_result"]
    assert f"It changes the result: {'; '.join(fitting['changes_the_result'])}" in caplog.messages[-1]


# --- a run that is continued ------------------------------------------------------------------------------------------

FITTING = {
    "chosen": {"training.dtype": "bfloat16", "training.gradient_checkpointing": 0.5},
    "written": {"training.dtype": "float32", "training.gradient_checkpointing": False},
    "why": "a test",
}


@pytest.mark.parametrize("now", [{}, {"dtype": "bfloat16", "gradient_checkpointing": 0.5}])
def test_a_run_goes_on_as_it_began_from_what_was_written_and_from_what_was_chosen(now):
    began = with_settings(asked(), FITTING["chosen"])
    assert config_hash(as_it_began({"fitting": FITTING}, asked(memory_limit_gib=7.0, **now))) == config_hash(began)


def test_a_setting_that_was_neither_written_nor_chosen_is_another_run():
    now = as_it_began({"fitting": FITTING}, asked(gradient_checkpointing=True))
    assert now.training.gradient_checkpointing is True and now.training.dtype == "bfloat16"
    config = asked(memory="as_written")
    assert as_it_began({"fitting": FITTING}, config) is config
    assert as_it_began({}, asked()) == asked()


@pytest.mark.parametrize(
    "damaged",
    [[], "x", {"chosen": {}}, {"chosen": {"training.dtype": "bfloat16"}, "written": {}},
     {"chosen": {"training.colour": 1}, "written": {"training.colour": 1}}, {"chosen": 1, "written": 1}],
)  # fmt: skip
def test_a_choice_that_is_damaged_is_an_error_not_a_guess(damaged):
    with pytest.raises(TunixError, match=r"the choice of training\.memory: auto, cannot be read"):
        fitting_of_run({"fitting": damaged})
