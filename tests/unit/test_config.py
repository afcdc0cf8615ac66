"""A setting is honoured or refused by name, whatever its spelling; file, `--set` and flags become one configuration."""

import time

import pydantic
import pytest
import yaml

from tests.conftest import ROOT
from tests.tables import parametrize, tables
from tunix_rt.config import load as configuration
from tunix_rt.config import strict_yaml
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError

DEMO = ROOT / "training" / "configs" / "demo.yaml"


@pytest.fixture
def written(tmp_path):
    """A function that writes a configuration file and returns its path."""

    def write(text):
        path = tmp_path / "my.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return path

    return write


def refusal(load, *arguments, **named) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **named)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return str(caught.value)


# --- values ----------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults(written):
    assert (
        configuration.load_config(written("")) == configuration.load_config(written("# nothing\n---\n")) == RunConfig()
    )
    assert configuration.load_config(written("training:\nmodel:\n")) == RunConfig()


def test_a_loaded_configuration_cannot_be_changed():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        configuration.load_config(DEMO).training.seed = 1


ALIASES = tables(__file__)["aliases"]


def test_every_other_spelling_of_a_value_works():
    loaded = {line: configuration.build_config(yaml.safe_load(line), "x").training for line in ALIASES}
    found = {line: getattr(one, line.partition(":")[0]) for line, one in loaded.items()}
    assert found == ALIASES
    assert {type(found[line]) for line in found if line.startswith("gradient")} == {bool, float}


@parametrize("line")
def test_a_value_out_of_its_range_is_refused_by_the_name_of_its_setting(line):
    key = line.partition(":")[0].replace("batch_size", "per_device_train_batch_size")
    assert f"{key}: " in refusal(configuration.build_config, strict_yaml.parse_yaml(line, "x"), "x")


def test_all_mistakes_are_told_at_once(written):
    said = refusal(
        configuration.load_config,
        written("training:\n  seed: x\n  learning_rate: 0\n  max_steps: []\ndata:\n  packing: 7\n"),
    )
    assert "4 mistake(s)" in said
    for name in ("training.seed", "training.learning_rate", "training.max_steps", "data.packing"):
        assert name in said


# --- names -----------------------------------------------------------------------------------------------------------


@parametrize("key", "meant")
def test_an_unknown_name_is_refused_with_the_nearest_one(key, meant):
    said = refusal(configuration.build_config, {key: 1}, "x.yaml")
    assert f"x.yaml: unknown setting `{key}`" in said
    assert meant in said


@pytest.mark.parametrize("key", configuration.INSTEAD)
def test_a_name_known_elsewhere_is_refused_with_what_to_write_instead(key):
    for spelled in (key, f"training.{key}"):
        said = refusal(configuration.build_config, {spelled: True}, "x.yaml")
        assert f"`{spelled}`" in said
        assert configuration.INSTEAD[key] in said


def test_several_unknown_names_are_told_at_once():
    said = refusal(configuration.build_config, {"speed": 1, "training": {"turbo": True}}, "x.yaml")
    assert "speed" in said and "training.turbo" in said


def test_two_spellings_of_one_setting_may_agree_but_not_differ():
    agreed = configuration.build_config({"batch_size": 4, "training": {"per_device_train_batch_size": 4}}, "x")
    assert agreed.training.per_device_train_batch_size == 4
    said = refusal(configuration.build_config, {"batch_size": 4, "training": {"per_device_train_batch_size": 8}}, "x")
    assert "batch_size" in said and "training.per_device_train_batch_size" in said and "differently" in said


def test_three_spellings_that_do_not_all_agree_are_refused():
    raw = {"max_seq_length": 128, "data": {"max_length": 128}, "training": {"max_seq_length": 256}}
    assert "differently" in refusal(configuration.build_config, raw, "x")


def test_a_dotted_name_at_the_top_is_the_setting_it_names():
    assert configuration.build_config({"training.seed": 5}, "x").training.seed == 5


@pytest.mark.parametrize("section", ["model", "data", "training", "evaluation"])
@pytest.mark.parametrize("value", [5, "x", [1], True])
def test_something_else_in_the_place_of_a_section_is_refused_by_its_name(section, value):
    assert f"`{section}` is a section" in refusal(configuration.build_config, {section: value}, "x.yaml")


@pytest.mark.parametrize("key", [1, 1.5, None, True, (1, 2)])
def test_a_name_that_is_no_text_is_refused(key):
    assert repr(key) in refusal(configuration.modernise, {key: 1}, "x.yaml")


# --- YAML ------------------------------------------------------------------------------------------------------------


NOT_PLAIN = [
    *tables(__file__)["not_plain"],
    ("seed: 1\nmax_steps: " + "1" * 5_000 + "\n", 2),
    ("seed: 1\nx: " + "[" * 5_000 + "\n", 2),
    ("seed: 1\nx: " + "{a: " * 5_000 + "\n", 2),
    ("seed: 1\nx:\n" + "".join("  " * depth + "- a:\n" for depth in range(1, 60)), None),
]


@pytest.mark.parametrize(("text", "line"), NOT_PLAIN)
def test_yaml_that_is_not_plain_settings_is_refused_with_file_and_line(written, text, line):
    path = written(text)
    said = refusal(configuration.load_config, path)
    assert f"{path}:{line}:" in said if line else f"{path}:" in said


@pytest.mark.parametrize(
    "content", [b"\xff\xfes\x00e\x00", b"seed: \xe9\n", "seed: 1\n".encode("utf-16-le"), b"\x1f\x8b\x08\x00", b"\x80"]
)
def test_a_file_that_is_not_utf8_text_is_refused_with_its_line(written, content):
    path = written(content)
    assert f"{path}:1: " in refusal(configuration.load_config, path)


def test_a_byte_order_mark_and_windows_line_endings_do_not_matter(written):
    assert configuration.load_config(written(b"\xef\xbb\xbftraining:\r\n  seed: 5\r\n")).training.seed == 5


@pytest.mark.parametrize("text", ["- a\n- b\n", "hello", "5", "true", "2024-01-01"])
def test_a_file_that_holds_no_mapping_is_refused_by_name(written, text):
    path = written(text)
    assert f"{path}: " in refusal(configuration.load_config, path)


def test_a_number_too_long_to_be_written_out_is_refused_by_name(written):
    for number in ("0x" + "f" * 20_000, "[0x" + "f" * 20_000 + "]"):
        assert "seed" in refusal(configuration.load_config, written(f"seed: {number}\n"))


def test_a_file_far_too_long_is_refused_by_its_size(written):
    path = written("#" * (strict_yaml.MAX_CONFIG_BYTES + 1))
    assert f"{path}: over" in refusal(configuration.load_config, path)


BULK = {
    "a long list": lambda size: "seed: [" + "1," * (size // 2 - 10) + "]\n",
    "many lines": lambda size: "- a\n" * (size // 4),
    "many unknown names": lambda size: "".join(f"k{i}: 1\n" for i in range(size // 10)),
    "many near misses": lambda size: "".join(f"gradient_accumulation_steps{i}: 1\n" for i in range(size // 36)),
    "a number in base sixty": lambda size: "seed: 1" + ":11" * (size // 3 - 10) + "\n",
    "an open bracket": lambda size: "[" * size,
    "a long word": lambda size: "seed: " + "a" * (size - 10) + "\n",
    "many question marks": lambda size: "? " * (size // 2),
}


@pytest.mark.parametrize("kind", BULK)
def test_the_longest_file_that_is_read_is_refused_within_two_seconds(written, kind):
    path = written(BULK[kind](strict_yaml.MAX_CONFIG_BYTES)[: strict_yaml.MAX_CONFIG_BYTES])
    began = time.process_time()
    said = refusal(configuration.load_config, path)
    assert time.process_time() - began < 2
    assert len(said) < 20_000, "a message is a page at most"


def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path):
    assert str(tmp_path) in refusal(strict_yaml.read_yaml, tmp_path)
    assert "missing.yaml" in refusal(strict_yaml.read_yaml, tmp_path / "missing.yaml")


# --- file, --set, flags ----------------------------------------------------------------------------------------------


def test_set_wins_over_the_file_and_a_flag_over_both(written):
    path = written("training:\n  seed: 1\n  max_steps: 10\n  save_steps: 5\n")
    loaded = configuration.load_config(path, overrides=["training.seed=2", "max_steps=20"], flags={"training.seed": 3})
    assert (loaded.training.seed, loaded.training.max_steps, loaded.training.save_steps) == (3, 20, 5)


def test_a_flag_that_was_not_given_changes_nothing():
    assert configuration.load_config(DEMO, flags={"training.seed": None}) == configuration.load_config(DEMO)


def test_the_last_set_wins_in_any_spelling():
    loaded = configuration.load_config(
        None, overrides=["training.batch_size=2", "per_device_train_batch_size=4", "batch_size=8"]
    )
    assert loaded.training.per_device_train_batch_size == 8


def test_the_value_of_set_is_read_as_yaml():
    assert configuration.parse_override("training.seed=5") == ("training.seed", 5)
    assert configuration.parse_override(" data.packing =false") == ("data.packing", False)
    assert configuration.parse_override("data.system_instruction=a=b") == ("data.system_instruction", "a=b")
    assert configuration.parse_override("training.max_steps=") == ("training.max_steps", None)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.seed", "training.seed"),
        ("=5", "no name before its `=`"),
        ("training.sed=5", "training.sed"),
        ("trainig.seed=5", "trainig.seed"),
        ("training.seed=[", "training.seed"),
        ("training.seed=abc", "training.seed"),
        ("training.seed=!!python/name:os", "training.seed"),
        ("training.device.x=5", "training.device.x"),
        ("training=5", "training"),
        ("seed=" + "1" * 5_000, "seed"),
    ],
)
def test_a_bad_set_is_refused_by_its_name(override, named):
    assert named in refusal(configuration.load_config, None, overrides=[override])


def test_what_is_dumped_loads_as_the_same_configuration(written):
    for path in sorted((ROOT / "training" / "configs").glob("*.yaml")):
        loaded = configuration.load_config(path)
        assert configuration.load_config(written(configuration.dump_yaml(loaded))) == loaded


def test_the_dump_holds_every_setting_in_canonical_spelling():
    dumped = yaml.safe_load(
        configuration.dump_yaml(configuration.load_config(None, overrides=["batch_size=3", "device=gpu"]))
    )
    assert {section: set(values) for section, values in dumped.items()} == {
        section: set(field.annotation.model_fields) for section, field in RunConfig.model_fields.items()
    }
    assert dumped["training"]["per_device_train_batch_size"] == 3
    assert dumped["training"]["device"] == "cuda"


def test_a_shipped_configuration_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.yaml", "training/configs/demo.yaml"):
        assert configuration.find_config(name) == DEMO


def test_a_file_in_the_working_folder_wins_over_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text("seed: 1\n")
    assert configuration.load_config(configuration.find_config("demo.yaml")).training.seed == 1


@pytest.mark.parametrize("name", ["nothing", "x" * 300, "a\x00b", "", ".", "/"])
def test_a_configuration_that_is_not_there_is_refused_with_those_that_are(name):
    said = refusal(configuration.find_config, name)
    assert "demo" in said and "submission_local" in said


def test_a_misspelt_configuration_is_refused_with_the_nearest_one():
    assert "did you mean `submission_tpu`?" in refusal(configuration.find_config, "submision_tpu")


@pytest.mark.parametrize("name", ["/no/such/folder/demo.yaml", "./mine/demo.yaml", "../demo.yaml"])
def test_a_missing_file_is_not_replaced_by_a_shipped_one_of_the_same_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert name in refusal(configuration.find_config, name)


def test_parse_yaml_gives_plain_values():
    assert strict_yaml.parse_yaml("a: [1, 2.5, yes, null, x]", "x") == {"a": [1, 2.5, True, None, "x"]}


# --- what cannot be run ----------------------------------------------------------------------------------------------

RUNNABLE = {"model_name_or_path": "tiny-gemma3", "dataset": "dev-reasoning-v2"}


@parametrize("settings")
def test_configurations_that_fit_together_are_runnable(settings):
    require_runnable(configuration.build_config(RUNNABLE | settings, "x"))


@parametrize("changed", "named")
def test_what_this_version_cannot_do_is_refused_by_name(changed, named):
    assert named in refusal(require_runnable, configuration.build_config(RUNNABLE | changed, "x"))
