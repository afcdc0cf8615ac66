"""What an engine does not support is refused by name, from one table that the pages print."""

from dataclasses import fields
from typing import get_args

import pytest

from tests.tables import tables
from tunix_rt.config.capabilities import CAPABILITIES, Capabilities, refuse_unsupported, unsupported
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import Training
from tunix_rt.engines.base import refuse_unsupported_model
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models.resolve import ModelSource, resolve_model
from tunix_rt.plan.knobs import can_run, with_copied

NAMED = {"model_name_or_path": "tiny-gemma3", "dataset": "dev-reasoning-v2"}
REQUESTS = tables(__file__)["requests"]
CASES = [(engine, setting) for engine, settings in REQUESTS.items() for setting in settings]


@pytest.mark.parametrize(("engine", "setting"), CASES)
def test_a_setting_is_refused_by_name_on_the_engine_that_lacks_it_alone(engine, setting):
    (other,) = CAPABILITIES.keys() - {engine}
    with pytest.raises(ConfigError) as caught:
        require_runnable(build_config({**NAMED, "backend": engine, **REQUESTS[engine][setting]}, "x"))
    assert caught.value.problem.startswith(f"{setting}: the {CAPABILITIES[engine].title} engine ")
    assert f"training.backend: {other}" in caught.value.fix
    require_runnable(build_config({**NAMED, "backend": other, **REQUESTS[engine][setting]}, "x"))


def test_every_difference_between_the_engines_is_tried_here():
    """Each value of a setting that one engine has and the other lacks, and each flag that is a setting."""
    torch, jax = CAPABILITIES["torch"], CAPABILITIES["jax"]
    settings = {"dtypes": "training.dtype", "optimizers": "training.optim", "implementations": "model.implementation"}
    lacking = {
        (engine, f"{settings[name]}: {value}")
        for engine, own, other in (("torch", torch, jax), ("jax", jax, torch))
        for name in settings
        for value in set(getattr(other, name)) - set(getattr(own, name))
    }
    flags = {"lora", "optim_in_backward", "eager", "profile", "multi_device"}
    known = {field.name for field in fields(Capabilities)}
    assert flags <= known and lacking <= set(CASES)
    assert len(CASES) == len(lacking) + len(flags - {"profile"})


def test_the_table_names_no_value_that_no_setting_has():
    for engine in CAPABILITIES.values():
        for name, values in (("dtype", engine.dtypes), ("optim", engine.optimizers), ("device", engine.devices)):
            assert set(values) <= set(get_args(Training.model_fields[name].annotation))
    assert set(CAPABILITIES) == set(get_args(Training.model_fields["backend"].annotation))


def test_what_both_engines_have_is_taken():
    for engine in CAPABILITIES:
        require_runnable(build_config({**NAMED, "backend": engine, "compile": True, "optim": "adafactor"}, "x"))


def test_a_profile_is_refused_where_the_engine_records_none():
    refuse_unsupported(Training(), profile_steps=3)
    refuse_unsupported(Training(backend="jax"))
    with pytest.raises(ConfigError, match="--profile 3: the JAX engine records no profile"):
        refuse_unsupported(Training(backend="jax"), profile_steps=3)


def test_an_engine_judges_settings_that_name_another():
    assert [found.setting for found in unsupported(Training(lora_rank=4), CAPABILITIES["jax"])] == [
        "training.lora_rank"
    ]
    with pytest.raises(ConfigError, match=r"training\.lora_rank"):
        refuse_unsupported(Training(lora_rank=4), "jax")


def with_config(**changes: object) -> ModelSource:
    source = resolve_model("tiny-gemma3")
    return ModelSource(
        **{field.name: getattr(source, field.name) for field in fields(source)} | {"config": source.config | changes}
    )


def test_a_model_with_dropout_is_refused_with_the_keys_that_set_it():
    refuse_unsupported_model(with_config(attention_dropout=0.0), "jax")
    refuse_unsupported_model(with_config(attention_dropout=0.1), "torch")
    with pytest.raises(InputError, match=r"config\.json has dropout of 0\.1 \(attention_dropout\)"):
        refuse_unsupported_model(with_config(attention_dropout=0.1), "jax")


def test_a_model_without_code_of_its_own_is_refused_on_jax_alone():
    refuse_unsupported_model(with_config(model_type="gptj"), "torch")
    with pytest.raises(InputError, match="model_type 'gptj' is not supported by the JAX engine"):
        refuse_unsupported_model(with_config(model_type="gptj"), "jax")


def test_nothing_that_the_engine_refuses_is_advised():
    jax, torch = (build_config({"backend": backend}, "x") for backend in ("jax", "torch"))
    setting = {"training.optim": "adamw_8bit"}
    assert not can_run(with_copied(jax, setting)) and can_run(with_copied(torch, setting))
    assert can_run(with_copied(jax, {"training.optim": "adafactor"}))


@pytest.mark.parametrize(
    "setting",
    [{"lora_alpha": 16}, {"lora_target_modules": ["q_proj"]}, {"lora_dropout": 0.1}],
    ids=lambda one: next(iter(one)),
)
def test_each_setting_of_adapters_is_refused_by_name_without_adapters(setting):
    (name,) = setting
    with pytest.raises(
        ConfigError, match=f"^training.{name}: the JAX engine trains every parameter and has no adapters"
    ):
        require_runnable(build_config({**NAMED, "backend": "jax", **setting}, "x"))
    with pytest.raises(ConfigError, match=f"^training.{name}: every parameter is trained") as caught:
        require_runnable(build_config({**NAMED, **setting}, "x"))
    assert "set training.lora_rank" in caught.value.fix
    require_runnable(build_config({**NAMED, "lora_rank": 4, **setting}, "x"))
