"""The configurations the founding documents name, their old spellings, and the promise that no setting is ignored."""

import ast
import re

import pytest
import yaml

from tests.conftest import ROOT
from tests.tables import parametrize, tables
from tunix_rt.cli.train import script_config, script_options
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import INSTEAD, OLD_NAMES, SETTINGS, build_config, load_config, modernise
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError

CONFIGS = ROOT / "training" / "configs"
SOURCE = ROOT / "src" / "tunix_rt"
DEMANDED = [
    "smoke_tiny", "submission_gemma_flax", "submission_tpu", "submission_local_gpu", "submission_local_gpu_gpt2",
    "submission_local_cpu_gpt2", "submission_local",
]  # fmt: skip

# Pasted as it stands in the founding document.
FLAT = """\
device: gpu
batch_size: 1
max_seq_length: 128   # try 256 only if 128 passes
gradient_accumulation_steps: 4
dtype: bfloat16
optimizer: adafactor
"""
MEMORY_SAFE = {
    "device": "cuda", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "dtype": "bfloat16",
    "optim": "adafactor",
}  # fmt: skip
"""What it sets under `training`, in canonical names."""


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEMANDED)
def test_every_configuration_of_the_founding_documents_is_there_and_names_model_and_dataset(name):
    loaded = load_config(CONFIGS / f"{name}.yaml")
    assert loaded.model.model_name_or_path
    assert loaded.data.dataset == "dev-reasoning-v2"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_runs_or_is_refused_by_the_name_of_a_setting(path):
    loaded = load_config(path)
    try:
        require_runnable(loaded)
    except ConfigError as error:
        assert re.search(r"\b(model|data|training|evaluation)\.\w+", error.problem)
        assert error.fix


def test_the_memory_safe_gpu_configuration_has_the_values_that_were_asked_for():
    path = CONFIGS / "submission_local_gpu.yaml"
    loaded = load_config(path)
    assert MEMORY_SAFE.items() <= loaded.training.model_dump().items() and loaded.data.max_length == 128
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^\s+device: gpu$", text, re.MULTILINE), "as it was written, not as it is resolved"
    assert "256 only if 128 passes" in text


@parametrize("name", "model", "device", "backend")
def test_every_configuration_names_the_model_and_device_its_title_promises(name, model, device, backend):
    loaded = load_config(CONFIGS / f"{name}.yaml")
    training = loaded.training
    assert (loaded.model.model_name_or_path, training.device, training.backend) == (model, device, backend)
    assert loaded.model.weights == "pretrained"


def test_every_shipped_configuration_is_written_in_canonical_names():
    for path in CONFIGS.glob("*.yaml"):
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = {f"{section}.{name}" for section, values in raw.items() for name in values}
        assert names <= SETTINGS, f"{path.name}: {sorted(names - SETTINGS)}"


# --- old spellings ---------------------------------------------------------------------------------------------------


def test_the_flat_snippet_of_the_founding_document_loads_as_pasted(tmp_path):
    path = tmp_path / "pasted.yaml"
    path.write_text(FLAT, encoding="utf-8")
    loaded = load_config(path)
    assert MEMORY_SAFE.items() <= loaded.training.model_dump().items() and loaded.data.max_length == 128
    untouched = load_config(None)
    assert loaded.model == untouched.model
    assert loaded.evaluation == untouched.evaluation
    for name in set(type(loaded.training).model_fields) - set(MEMORY_SAFE):
        assert getattr(loaded.training, name) == getattr(untouched.training, name)


def test_there_are_about_fifty_settings_and_each_says_what_it_is():
    # Four are for data as users have it (data.columns, validation, max_examples, skip_bad), two say when to save and to stop,
    # three are those of LoRA beside its rank, which users of PEFT, TRL and Axolotl set, one is QLoRA's, and one is the
    # learning rate of the first step, without which no converted configuration has the curve of its trainer
    # (benchmarks/trl_parity.py). Two are those of reinforcement learning: the method, and the rollouts of a step.
    assert len(SETTINGS) <= 71, "a person reads them all before the first run: take one out for one put in"
    for section, field in RunConfig.model_fields.items():
        for name, setting in field.annotation.model_fields.items():
            assert setting.description and setting.description.endswith("."), f"{section}.{name} has no sentence"


def test_no_two_sections_share_the_name_of_a_setting():
    """A bare name at the top of a file would otherwise mean two things."""
    leaves = [name.partition(".")[2] for name in SETTINGS]
    assert len(leaves) == len(set(leaves))


EXAMPLES = tables(__file__)["examples"]


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_every_old_name_sets_the_setting_it_stands_for(old, new, tmp_path):
    assert new in SETTINGS
    assert old not in SETTINGS, "a name cannot be old and canonical"
    section, leaf = new.split(".")
    value = EXAMPLES[new]
    assert getattr(getattr(RunConfig(), section), leaf) != value, "the example must differ from the default"
    if "." in old:
        of, name = old.split(".")
        assert of in RunConfig.model_fields, f"{old} could never be written in a file"
        raw = {of: {name: value}}
    else:
        raw = {old: value}
    assert getattr(getattr(build_config(raw, "x"), section), leaf) == value
    by_set = load_config(None, overrides=[f"{old}={value}"])
    assert getattr(getattr(by_set, section), leaf) == value


def test_every_setting_may_be_written_without_its_section():
    for section, leaf in (name.split(".") for name in SETTINGS):
        assert modernise({leaf: 1}, "x") == {section: {leaf: 1}}


def test_what_is_not_a_setting_here_is_not_one_anywhere():
    leaves = {name.partition(".")[2] for name in SETTINGS} | {name.rpartition(".")[2] for name in OLD_NAMES}
    assert not leaves & set(INSTEAD)


# --- smoke overrides -------------------------------------------------------------------------------------------------


def legacy(config, **options):
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return script_config(
        script_options(["--config", str(CONFIGS / f"{config}.yaml"), "--output", "unused", *flags]), "torch"
    )


@pytest.mark.parametrize("options", [{"smoke_steps": 0}, {"max_steps": 0}, {"smoke_steps": 0, "max_steps": 5}])
def test_a_number_of_steps_that_was_asked_for_is_never_dropped_in_silence(options):
    with pytest.raises(ConfigError):
        legacy("submission_local_cpu_gpt2", **options)


def test_two_numbers_of_steps_that_differ_are_refused():
    with pytest.raises(ConfigError, match="--max_steps and --smoke_steps differ"):
        legacy("submission_local_cpu_gpt2", max_steps=5, smoke_steps=6)


# --- honoured or refused ---------------------------------------------------------------------------------------------


def attributes(tree: ast.AST) -> set[str]:
    """`section.setting` for every attribute of that shape: `config.training.seed`, `training.seed`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = [getattr(node.value, "attr", getattr(node.value, "id", "")) for node in nodes]
    return {f"{owner}.{node.attr}" for owner, node in zip(owners, nodes, strict=True)}


def settings_read() -> set[str]:
    """By the program outside of `config`, and by the schedule, which both engines call; a property of a section that is read
    there reads its settings."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    readers = [path for path in trees if path.parent.name != "config" or path.name == "optimizers.py"]
    read = set().union(*(attributes(trees[path]) for path in readers))
    sections = [node for node in trees[SOURCE / "config" / "settings.py"].body if isinstance(node, ast.ClassDef)]
    for section, function in [(one.name.lower(), part) for one in sections for part in one.body]:
        if isinstance(function, ast.FunctionDef) and f"{section}.{function.name}" in read:
            read |= {name.replace("self.", f"{section}.") for name in attributes(function)}
    return read


def test_every_setting_is_read_by_the_program():
    """A setting that only the configuration knows would be accepted and ignored."""
    read = settings_read()
    assert "training.learning_rate" in read, "the search itself works"
    assert "training.turbo" not in read
    unread = SETTINGS - read
    refused = {name for name in unread if _is_refused_by_name(name)}
    assert unread == refused, f"accepted and ignored: {sorted(unread - refused)}"


def _is_refused_by_name(name: str) -> bool:
    """Whether a value other than the default is refused by `require_runnable`, with the name in its words."""
    leaf = name.partition(".")[2]
    runnable = {"model_name_or_path": "tiny-gemma3", "dataset": "dev-reasoning-v2", leaf: EXAMPLES.get(name)}
    try:
        require_runnable(build_config(runnable, "x"))
    except ConfigError as error:
        return name in error.problem
    return False
