"""A run on rollouts before its first step: what is refused by name, its questions, its alarms, its plan."""

import json
from types import SimpleNamespace

import pytest

from tests.samples import device, record, write_lines
from tests.stores import quiet
from tunix_rt.config.capabilities import refuse_rollouts
from tunix_rt.config.conflicts import NOT_WITH_ROLLOUTS, require_runnable
from tunix_rt.config.load import build_config
from tunix_rt.data.packing import rows_of_step
from tunix_rt.data.prepare import ModelFacts, prepare
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.memory import predict
from tunix_rt.plan.run import RowFacts, plan_run
from tunix_rt.plan.trace import shape_of_any
from tunix_rt.runs.schemas_rollouts import AlongLine
from tunix_rt.train.alarms import alarm_stop, alarms_of, mean_reward
from tunix_rt.train.rollouts import require_sound_reward

NAMED = {"model_name_or_path": "tiny-gemma3", "dataset": "dev-reasoning-v2"}
ROLLOUTS = {"prompts": 4, "samples": 4, "max_new_tokens": 16}


def config_of(**changed):
    return build_config({**NAMED, "method": "grpo", "rollouts": ROLLOUTS, "max_length": 64, **changed}, "x")


# --- refused by name --------------------------------------------------------------------------------------------------


def test_grpo_runs_on_the_engine_and_device_that_it_was_tried_on():
    require_runnable(config_of())
    refuse_rollouts(config_of().training, "cpu")
    with pytest.raises(ConfigError, match=r"training\.method: grpo is not supported on cuda yet"):
        refuse_rollouts(config_of().training, "cuda")
    refuse_rollouts(build_config(NAMED, "x").training, "cuda")


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setattr("tunix_rt.config.capabilities.world", lambda: SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match="over several ranks"):
        refuse_rollouts(config_of().training, "cpu")


OTHERS = {
    "training.gradient_accumulation_steps": 2, "training.optim_in_backward": True, "training.load_in_4bit": True,
    "training.lora_rank": 4, "training.patience": 2, "training.memory": "auto", "training.compile": True,
    "training.data_replicas": 2, "data.group_by_length": True, "data.completion_only_loss": False,
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_WITH_ROLLOUTS)
def test_what_was_not_tried_with_rollouts_is_refused_by_name(name):
    assert OTHERS.keys() == NOT_WITH_ROLLOUTS.keys()
    more = {"eval_steps": 5} if name == "training.patience" else {}
    with pytest.raises(ConfigError) as caught:
        require_runnable(config_of(**{name.partition(".")[2]: OTHERS[name]}, **more))
    assert name.partition(".")[2] in caught.value.problem


def test_the_jax_engine_refuses_it_by_the_loss_it_lacks():
    with pytest.raises(ConfigError, match=r"training\.method: grpo: the JAX engine has no loss with a weight"):
        require_runnable(config_of(backend="jax"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"rollouts": None}, "needs training.rollouts"),
        ({"method": "sft"}, "nothing is sampled"),
        ({"rollouts": {**ROLLOUTS, "max_new_tokens": 64}}, "no room for a prompt"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changed, problem):
    with pytest.raises(ConfigError, match=problem):
        require_runnable(config_of(**changed))


@pytest.mark.parametrize("rollouts", [{"samples": 1}, {"prompts": 0}, {"advantage": "best"}, {"temperature": 0.7}])
def test_rollouts_have_four_keys_and_bounds(rollouts):
    with pytest.raises(ConfigError, match=next(iter(rollouts))):
        config_of(rollouts={**ROLLOUTS, **rollouts})


# --- its questions ----------------------------------------------------------------------------------------------------


def ready(path, tokenizer, **changed):
    config = config_of(dataset=str(path), **{"validation_fraction": 0.2, **changed})
    facts = ModelFacts(vocabulary=tokenizer.vocab_size, positions=512)
    return config, prepare(config, tokenizer, facts, quiet)


def test_a_row_is_a_question_with_its_answer_and_held_out_ones_are_for_alarms(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(number) for number in range(20)))
    for packing in (True, False):
        config, data = ready(path, tokenizer, packing=packing)
        assert len(data.rows) == len(data.prompts) == 16 and len(data.alarm_items) == 4
        asked = {item.prompt for item in data.prompts}
        assert len(asked) == 16 and not asked & {item.prompt for item in data.alarm_items}
        for row, item in zip(data.rows, data.prompts, strict=True):
            text = tokenizer.decode([int(one) for one in row.ids])
            assert item.prompt in text and f"<answer>{item.answer}</answer>" in text
        chosen = [rows_of_step(step, row_count=16, rows_per_step=4, seed=0) for step in range(1, 5)]
        assert sorted(row for rows in chosen for row in rows) == list(range(16)), "each question once in an epoch"
        assert config.training.rows_per_step(99) == 4
        require_sound_reward(data)


def test_records_without_an_answer_are_refused_with_their_number(tmp_path, tokenizer):
    lines = [{"prompt": f"What is {n} + 1?", "completion": f"<answer>{n + 1}</answer>"} for n in range(8)]
    lines[5]["completion"] = "I do not know."
    with pytest.raises(InputError, match=r"1 of \d+ records are not one question .* record 6"):
        ready(write_lines(tmp_path / "x.jsonl", *lines), tokenizer, validation_fraction=0, enabled=False)


def test_a_prompt_without_room_for_its_rollout_is_refused(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(number) for number in range(10)))
    with pytest.raises(InputError, match=r"the prompt of row-\d+ has \d+ tokens; with 60 new ones"):
        ready(path, tokenizer, rollouts={**ROLLOUTS, "max_new_tokens": 60})


# --- alarms -----------------------------------------------------------------------------------------------------------


def along(step=1, **changed) -> AlongLine:
    facts = {"items": 100, "correct": 60, "well_formed": 90, "unfinished": 2, "equations": 200, "equations_right": 190,
             "mean_output_chars": 80.0, "alarms": ()}  # fmt: skip
    return AlongLine(step=step, **{**facts, **changed})


BEFORE = [along(0), along(10, reward=0.5, correct=62)]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reward": 0.7, "correct": 60}, "sampled reward rose by 0.20"),
        ({"well_formed": 97, "equations_right": 170}, "well-formed outputs rose by 7%"),
        ({"mean_output_chars": 130.0}, "outputs have 130 characters"),
        ({"unfinished": 15}, "15 of 100 outputs are unfinished"),
    ],
)
def test_each_sign_of_a_gamed_reward_is_an_alarm(changed, words):
    (alarm,) = alarms_of(BEFORE, along(20, **{"reward": 0.5, **changed}), no_signal=False)
    assert words in alarm


def test_progress_is_no_alarm():
    assert alarms_of(BEFORE, along(20, reward=0.8, correct=75, well_formed=99, unfinished=0), no_signal=False) == []
    assert alarms_of([], along(0), no_signal=False) == []


def test_steps_without_anything_to_train_are_an_alarm():
    (alarm,) = alarms_of(BEFORE, along(20, reward=0.5), no_signal=True)
    assert "no rollout was trained" in alarm


def test_a_run_ends_at_the_first_alarm_unless_it_goes_on():
    lines = [*BEFORE, along(20, alarms=("a",)), along(30, alarms=("b",))]
    assert alarm_stop(lines, stops=True) == 20
    assert alarm_stop(lines, stops=False) is None
    assert alarm_stop(BEFORE, stops=True) is None
    assert mean_reward([None, None]) is None and mean_reward([0.5, 1.0, None]) == 0.75


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_counts_sampling_and_states_no_time():
    config = config_of(validation_fraction=0, enabled=False, per_device_train_batch_size=2)
    shape = shape_of_any(resolve_model("tiny-gemma3", weights="random"), config.training)
    phases = {phase.name: phase.total_bytes for phase in predict(shape, config, device="cpu").phases}
    assert phases["rollout"] > 0 and "generation" not in phases
    longer = config_of(
        validation_fraction=0, enabled=False, per_device_train_batch_size=2, max_length=512,
        rollouts={**ROLLOUTS, "max_new_tokens": 448},
    )  # fmt: skip
    more = {phase.name: phase.total_bytes for phase in predict(shape, longer, device="cpu").phases}
    assert more["rollout"] > phases["rollout"]
    facts = RowFacts(rows=100, longest=64, tokens=6400, target_tokens=6400, packed=False)
    planned = plan_run(config, shape, device("cpu", 8e9), facts, cpu_flops=1e10)
    assert planned.rows_per_step == 4 and planned.steps == 75
    assert planned.seconds is None and planned.tokens_per_step is None


def test_config_yaml_has_the_rollouts_of_a_run_and_reads_back():
    from tunix_rt.config.load import dump_yaml
    from tunix_rt.config.strict_yaml import parse_yaml

    config = config_of()
    again = build_config(parse_yaml(dump_yaml(config), "x"), "x")
    assert again == config and json.loads(config.model_dump_json())["training"]["rollouts"]["prompts"] == 4
