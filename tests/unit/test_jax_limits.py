"""What the JAX engine does not do is refused by name, and stands in the table of its page."""

from pathlib import Path

import pytest

from tunix_rt.config.load import build_config
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.plan.jax_limits import LIMITS, refuse_dropout, refuse_for_jax, refuse_profile
from tunix_rt.plan.knobs import can_run, with_copied

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "jax-engine.md").read_text(encoding="utf-8")
ASKED = {
    "training.lora_rank": {"lora_rank": 8},
    "training.dtype: float16": {"dtype": "float16"},
    "training.optim: adamw_8bit": {"optim": "adamw_8bit"},
    "training.optim_in_backward": {"optim_in_backward": True},
    "training.compile: false": {"compile": False},
}


def test_every_limit_is_tried_here_and_listed_on_the_page():
    assert {limit.setting for limit in LIMITS} == set(ASKED)
    for limit in LIMITS:
        assert f"| `{limit.setting}` | 2 |" in PAGE


@pytest.mark.parametrize("setting", ASKED)
def test_a_setting_is_refused_with_its_name_and_only_on_this_engine(setting):
    with pytest.raises(ConfigError) as caught:
        refuse_for_jax(build_config({"backend": "jax", **ASKED[setting]}, "x"))
    assert caught.value.problem.startswith(f"{setting}: ") and "training.backend: torch" in caught.value.fix
    refuse_for_jax(build_config(ASKED[setting], "x"))


def test_what_is_not_in_the_table_is_taken():
    refuse_for_jax(build_config({"backend": "jax", "compile": True, "optim": "adafactor", "dtype": "bfloat16"}, "x"))


def test_recorded_steps_are_refused_on_this_engine_alone():
    refuse_profile("torch", 3)
    refuse_profile("jax", 0)
    with pytest.raises(ConfigError, match="--profile 3"):
        refuse_profile("jax", 3)


def test_a_model_with_dropout_is_refused_with_the_keys_that_ask_for_it():
    refuse_dropout("m", 0.0, {"attn_pdrop": 0.0})
    with pytest.raises(InputError, match=r"m: config\.json asks for dropout of 0\.1 \(attn_pdrop\)"):
        refuse_dropout("m", 0.1, {"attn_pdrop": 0.1, "resid_pdrop": 0.0})
    with pytest.raises(InputError, match="by default"):
        refuse_dropout("m", 0.1, {})


def test_nothing_that_the_engine_refuses_is_advised():
    jax, torch = (build_config({"backend": backend}, "x") for backend in ("jax", "torch"))
    asked = {"training.optim": "adamw_8bit"}
    assert not can_run(with_copied(jax, asked)) and can_run(with_copied(torch, asked))
    assert can_run(with_copied(jax, {"training.optim": "adafactor"}))
