"""Configurations of other trainers: every key is mapped, reported as without effect, or refused by name."""

import json

import pytest

from tests.program import ROOT, in_process, refused
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.dialects.conversion import DIALECTS, convert, dialect_of
from tunix_rt.config.load import SETTINGS, build_config, load_config
from tunix_rt.errors import ConfigError

FOLDER = ROOT / "tests" / "dialects"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
NAMES = {"axolotl": "axolotl", "llamafactory": "llama-factory", "trl": "trl", "torchtune": "torchtune"}
AXOLOTL = "base_model: m\nsequence_len: 64\nmicro_batch_size: 2\ndatasets: [{path: d.jsonl, type: alpaca}]\n"
LLAMA_FACTORY = "model_name_or_path: m\nstage: sft\ndataset: d.json\ntemplate: gemma\n"
TORCHTUNE = "model: {_component_: torchtune.models.gemma2.gemma2_2b}\n"
TRL = "model_name_or_path: m\ndataset_name: d.jsonl\noutput_dir: out\n"


def settings_of(text):
    return dict(convert(text).settings)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_key_of_a_file_is_accounted_for_once_and_what_it_becomes_loads(file, tmp_path):
    found = convert(file.read_text(encoding="utf-8"), file.name, folder=FOLDER)
    assert found.dialect == NAMES[file.name.split("_")[0]]
    keys = [line.key for line in (*found.mapped, *found.without_effect, *found.refused)]
    assert len(keys) == len(set(keys)) >= 10
    assert all(line.note for line in (*found.without_effect, *found.refused))
    assert set(found.settings) <= SETTINGS
    (tmp_path / "ours.yaml").write_text(found.yaml(file.name), encoding="utf-8")
    loaded = load_config(tmp_path / "ours.yaml")
    assert loaded == build_config(found.nested(), "x")
    if not found.refused and file.suffix != ".json":  # SFTConfig has neither model nor dataset
        require_runnable(loaded)


def test_there_are_five_files_of_each_trainer_and_one_of_each_is_refused():
    found = [convert(file.read_text(encoding="utf-8"), folder=FOLDER) for file in FILES]
    assert {name: sum(one.dialect == name for one in found) for name in DIALECTS} == dict.fromkeys(DIALECTS, 5)
    assert {one.dialect for one in found if one.refused} == set(DIALECTS)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_row_of_a_table_reads_what_is_off_and_what_is_on_without_an_error(name):
    for key, rule in DIALECTS[name].TABLE.items():
        assert rule.describe and rule.kind in ("mapped", "without effect", "refused"), key
        for value in (None, False):
            assert rule.kind != "refused" or not rule.read(value, {}).refused, key
        assert rule.kind != "without effect" or not rule.read(True, {}).settings, key


@pytest.mark.parametrize(
    ("text", "wanted"),
    {
        "batch x accumulation": (AXOLOTL + "gradient_accumulation_steps: 4", {
            "training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 4}),
        "8-bit AdamW": (AXOLOTL + "optimizer: adamw_bnb_8bit", {"training.optim": "adamw_8bit"}),
        "steps win over the ratio": (TRL + "warmup_ratio: 0.1\nwarmup_steps: 5", {
            "training.warmup_steps": 5, "training.warmup_from_zero": True}),
        "a ratio is a share": (LLAMA_FACTORY + "warmup_ratio: 0.1", {"training.warmup_steps": 0.1}),
        "constant has no warm-up": (TRL + "lr_scheduler_type: constant\nwarmup_steps: 5", {
            "training.lr_scheduler_type": "constant", "training.warmup_steps": None}),
        "masks inverted": (LLAMA_FACTORY + "train_on_prompt: true", {"data.completion_only_loss": False}),
        "text numbers": (TRL + "learning_rate: 2e-4", {"training.learning_rate": 2e-4}),
        "no dtype": (TRL + "bf16: false", {"training.dtype": None}),
        "default dtype": (TRL, {"training.dtype": "bfloat16", "training.master_dtype": None}),
        "weights of Axolotl": (AXOLOTL + "bf16: true", {"training.master_dtype": "bfloat16"}),
        "LoRA of PEFT": (TRL + "use_peft: true", {
            "training.lora_rank": 16, "training.lora_alpha": 32, "training.lora_target_modules": ["q_proj", "v_proj"]}),
        "LoRA by default": (LLAMA_FACTORY, {"training.lora_rank": 8, "training.learning_rate": 5e-5}),
        "QLoRA of Axolotl": (AXOLOTL + "adapter: qlora\nload_in_4bit: true", {
            "training.load_in_4bit": True, "training.lora_rank": 8}),
        "QLoRA of LLaMA-Factory": (LLAMA_FACTORY + "quantization_bit: 4", {
            "training.load_in_4bit": True, "training.lora_rank": 8}),
        "QLoRA of TRL": (TRL + "use_peft: true\nload_in_4bit: true", {"training.load_in_4bit": True}),
        "QLoRA of torchtune": ("model: {_component_: torchtune.models.llama3.qlora_llama3_8b}", {
            "training.load_in_4bit": True, "training.lora_rank": 8, "training.master_dtype": None}),
        "split of TRL": (TRL.replace("d.jsonl", "o/d") + "dataset_train_split: train_sft", {"data.dataset": "o/d:train_sft"}),
        "splits of a mixture of TRL": (
            "model_name_or_path: m\npacking: true\ndatasets: [{path: o/d, split: test}, {path: o/e}]", {
            "data.dataset": ["o/d:test", "o/e"]}),
        "splits of Axolotl": (AXOLOTL.replace("path: d.jsonl", "path: o/d, split: train")
            + "test_datasets: [{path: o/d, split: test, type: alpaca}]", {
            "data.dataset": "o/d:train", "data.validation": "o/d:test"}),
        "split of a file": (AXOLOTL.replace("path: d.jsonl", "path: json, data_files: d.jsonl, split: train"), {
            "data.dataset": "d.jsonl"}),
        "LoRA keys without LoRA": (AXOLOTL + "lora_r: 8\nlora_alpha: 16", {"training.lora_rank": None}),
    }.values(),
)  # fmt: skip
def test_a_value_means_what_it_means_there(text, wanted):
    found = settings_of(text)
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "key", "way"),
    {
        "8 bits of Axolotl": (AXOLOTL + "adapter: lora\nload_in_8bit: true", "load_in_8bit", "16 bits, or 4"),
        "8 bits of LLaMA-Factory": (LLAMA_FACTORY + "quantization_bit: 8", "quantization_bit", "16 bits, or 4"),
        "8 bits of TRL": (TRL + "use_peft: true\nload_in_8bit: true", "load_in_8bit", "16 bits, or 4"),
        "another code": (TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4", "bnb_4bit_quant_type", "nf4"),
        "4 bits without adapters": (TRL + "load_in_4bit: true", "load_in_4bit", "train LoRA adapters"),
        "qlora in 16 bits": (AXOLOTL + "adapter: qlora\nload_in_4bit: false", "load_in_4bit", "adapter: lora"),
        "a part of a split of TRL": (
            TRL.replace("d.jsonl", "o/d") + "dataset_train_split: 'train[:9%]'", "dataset_name", "a whole split"),
        "a part of a split of Axolotl": (
            AXOLOTL.replace("path: d.jsonl", "path: o/d, split: 'train[:9%]'"), "datasets", "a whole split"),
        "another split of a file": (AXOLOTL.replace("path: d.jsonl", "path: d.jsonl, split: test"), "datasets", "a whole split"),
        "an end of text of Axolotl": (
            AXOLOTL + "special_tokens: {pad_token: a, eos_token: b}", "special_tokens", "all but pad_token"),
        "shifted attention": (AXOLOTL + "s2_attention: true", "s2_attention", "attends to every token"),
        "a threshold of patience": (AXOLOTL + "early_stopping_threshold: 0.1", "early_stopping_threshold", "every decrease"),
        "a limit of the loss": (AXOLOTL + "loss_watchdog_threshold: 5.0", "loss_watchdog_threshold", "held-out loss"),
        "a template of torchtune": (
            TORCHTUNE + "tokenizer: {prompt_template: torchtune.data.SummarizeTemplate}", "tokenizer.prompt_template", "chatml"),
        "a loss of torchtune": (
            TORCHTUNE + "loss: {_component_: torchtune.modules.loss.ForwardKLLoss}", "loss._component_", "cross-entropy"),
        "a name without its list": (LLAMA_FACTORY.replace("d.json", "identity"), "dataset", "dataset_info.json is not in"),
    }.values(),
)  # fmt: skip
def test_a_value_that_has_no_counterpart_is_refused_by_its_key(text, key, way):
    (refused_line,) = convert(text).refused
    assert refused_line.key == key and way in refused_line.note


def test_two_keys_that_differ_are_refused_and_so_is_an_unknown_key():
    (clash,) = convert(TRL + "max_length: 64\nmax_seq_length: 128").refused
    assert clash.key == "max_seq_length" and "max_length sets data.max_length differently" in clash.note
    (unknown,) = convert(AXOLOTL + "sequence_length: 4").refused
    assert "did you mean `sequence_len`?" in unknown.note


def test_a_name_of_llama_factory_is_looked_up_in_dataset_info(tmp_path):
    (tmp_path / "data").mkdir()
    entry = {"file_name": "d.json", "formatting": "sharegpt", "columns": {"messages": "chat"}}
    listed = {"mine": entry, "hub": {"hf_hub_url": "o/d", "split": "train_sft"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed), encoding="utf-8")
    named = LLAMA_FACTORY.replace("d.json", "mine")
    found = convert(named, folder=tmp_path).settings
    assert found["data.dataset"] == str(tmp_path / "data" / "d.json")
    assert (found["data.format"], found["data.columns"]) == ("sharegpt", {"conversations": "chat"})
    assert convert(named.replace("mine", "hub"), folder=tmp_path).settings["data.dataset"] == "o/d:train_sft"
    missing = convert(named.replace("mine", "mime"), folder=tmp_path)
    (other,) = missing.refused
    assert "did you mean `mine`?" in other.note and "data.dataset" not in missing.settings
    (tmp_path / "lf.yaml").write_text(named.replace("mine", "mime"), encoding="utf-8")
    loaded = load_config(tmp_path / "lf.yaml", flags={"data.dataset": "other.json"}, report=lambda found, path: found)
    assert loaded.data.dataset == "other.json"


def test_remote_code_has_no_effect_where_the_type_of_the_model_is_known(tmp_path):
    for name, own in (("plain", {"model_type": "starcoder9"}), ("coded", {"auto_map": {"AutoConfig": "x.X"}})):
        (tmp_path / name).mkdir()
        config = {"model_type": "made_up", **own}
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    known = {"google/gemma-3-270m": True, "plain": True, "coded": False, "nobody/nothing-9b": False}
    for model, wanted in known.items():
        (tmp_path / "a.yml").write_text(
            AXOLOTL.replace(": m", f": {model}") + "trust_remote_code: true", encoding="utf-8"
        )
        done = in_process("convert", "a.yml", cwd=tmp_path)
        assert done.returncode == (0 if wanted else 2), model
        assert ("trust_remote_code: the type of the model is known" if wanted else "never runs code") in done.stderr


def test_our_own_files_are_never_taken_for_those_of_others():
    for file in (ROOT / "training" / "configs").glob("*.yaml"):
        assert dialect_of(load_raw(file)) is None
    assert dialect_of({"model": {"base_model": "x"}, "sequence_len": 3, "base_model": "y"}) is None


def load_raw(path):
    from tunix_rt.config.strict_yaml import read_yaml

    return read_yaml(path)


@pytest.mark.parametrize(
    ("key", "hint"),
    {"base_model": "model.model_name_or_path", "sequence_len": "data.max_length", "cutoff_len": "data.max_length",
     "stage": "supervised", "sample_packing": "`data.packing`", "deepspeed": "training.backend: jax",
     "wandb_project": "training.report_to", 
     "neat_packing": "data.packing: true", "lora_modules_to_save": "names modules"}.items(),
)  # fmt: skip
def test_a_foreign_key_in_a_file_of_ours_gets_its_hint(key, hint):
    with pytest.raises(ConfigError) as caught:
        build_config({"training": {"max_steps": 1}, key: 1}, "x")
    assert hint in caught.value.fix


def test_the_verb_writes_a_file_that_plan_takes_and_refuses_by_name(tmp_path):
    text = AXOLOTL.replace("base_model: m", "base_model: tiny-gemma3")
    (tmp_path / "a.yml").write_text(text + "bf16: false\n", encoding="utf-8")
    done = in_process("convert", "a.yml", "--to", "ours.yaml", cwd=tmp_path)
    assert done.returncode == 0 and "base_model -> model.model_name_or_path" in done.stderr
    assert "ours.yaml exists" in refused(in_process("convert", "a.yml", "--to", "ours.yaml", cwd=tmp_path), 2)
    plans = [in_process("plan", name, "--on", "8gb", "--json", cwd=tmp_path) for name in ("a.yml", "ours.yaml")]
    assert [one.returncode for one in plans] == [0, 0] and "sequence_len -> data.max_length: 64" in plans[0].stderr
    assert json.loads(plans[0].stdout)["memory"] == json.loads(plans[1].stdout)["memory"]
    (tmp_path / "b.yml").write_text(text + "deepspeed: zero3.json\n", encoding="utf-8")
    for verb in (("convert", "b.yml", "--json"), ("train", "b.yml", "--output", "run"), ("plan", "b.yml")):
        assert "deepspeed: FSDP shards over all devices" in refused(in_process(*verb, cwd=tmp_path), 2)
    assert not (tmp_path / "run").exists()
    (tmp_path / "c.sh").write_text("trl dpo --model_name_or_path x", encoding="utf-8")
    assert "trl sft" in refused(in_process("convert", "c.sh", cwd=tmp_path), 2)
    (tmp_path / "d.yaml").write_text("model: {model_name_or_path: x}", encoding="utf-8")
    assert "one of ours already" in refused(in_process("convert", "d.yaml", cwd=tmp_path), 2)


def test_a_configuration_extends_another_and_what_is_recorded_is_the_resolved_one(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text(
        "model: {model_name_or_path: tiny-gemma3}\ntraining: {learning_rate: 1.0e-3, seed: 1}"
    )
    (tmp_path / "sub" / "mine.yaml").write_text("extends: ../base.yaml\ntraining: {lr: 0.5}\nmax_seq_length: 64\n")
    found = load_config(tmp_path / "sub" / "mine.yaml", overrides=["training.seed=7"])
    assert (found.training.learning_rate, found.training.seed, found.data.max_length) == (0.5, 7, 64)
    assert found.model.model_name_or_path == "tiny-gemma3"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a": "extends: b.yaml", "b": "extends: a.yaml"}, "a cycle"),
        ({"a": "extends: a.yaml"}, "a cycle"),
        ({"a": "extends: /etc/base.yaml"}, "an absolute path"),
        ({"a": "extends: [b.yaml]"}, "the path of one file"),
        ({"a": "extends: gone.yaml"}, "no such file"),
        ({"a": "extends: b.yaml", "b": "training: {lr: 1.0, learning_rate: 2.0}"}, "differently"),
        ({chr(97 + n): f"extends: {chr(98 + n)}.yaml" for n in range(15)}, "files deep"),
    ],
)
def test_a_chain_of_files_that_cannot_be_resolved_is_refused(tmp_path, files, problem):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        load_config(tmp_path / "a.yaml")
