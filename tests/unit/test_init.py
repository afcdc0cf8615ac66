"""`tunix-rt init` writes a configuration that fits its device: it passes `train --dry-run`."""

import pytest
import yaml
from click import testing

from tests.program import in_process, refused
from tunix_rt.cli.main import cli
from tunix_rt.config.load import load_config

TOKENIZER = ("--set", "model.tokenizer_name_or_path=tiny-gemma3", "--weights", "random")


@pytest.mark.parametrize(
    ("model", "on", "method", "lora"),
    [
        ("tiny-gemma3", None, "full", None),
        ("gemma-3-1b", "t4", "full", None),
        ("gemma-3-4b", "rtx4090", "full", None),
        ("llama-3.1-8b", "rtx4090", "lora", 16),
        ("llama-3.1-8b", "h200", "full", None),
    ],
)
def test_what_is_written_for_a_device_passes_a_dry_run_on_it(tmp_path, model, on, method, lora):
    device = ["--on", on] if on else []
    done = in_process("init", "a.yaml", "--model", model, "--data", "dev-reasoning-v2", *device, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.yaml").read_text()
    assert all("#" in line for line in text.splitlines() if line.startswith("  ")) and "GiB predicted" in text
    assert load_config(tmp_path / "a.yaml").training.lora_rank == lora
    assert ("its hub id (google/gemma" in done.stderr) == model.startswith("gemma")
    assert f"Trains {'every parameter' if method == 'full' else 'LoRA adapters'}" in text
    checked = in_process("train", "a.yaml", "--dry-run", *device, *TOKENIZER, cwd=tmp_path)
    assert checked.returncode == 0 and "This run would begin" in checked.stdout, checked.stderr


def test_four_bits_are_the_last_way_and_each_way_before_is_named(tmp_path):
    done = in_process("init", "a.yaml", "--model", "llama-3.1-8b", "--data", "d.jsonl", "--on", "t4", cwd=tmp_path)
    assert "not every parameter: no settings fit" in done.stderr and "not LoRA adapters: no settings fit" in done.stderr
    written = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert written["training"]["load_in_4bit"] is True and written["training"]["dtype"] == "float16"
    words = ("init", "b.yaml", "--model", "llama-3.1-8b", "--data", "d.jsonl", "--on", "t4", "--method", "lora")
    assert "does not fit on t4" in refused(in_process(*words, cwd=tmp_path), 5)
    assert not (tmp_path / "b.yaml").exists()


def test_a_tpu_gets_the_jax_engine_a_file_is_never_overwritten_and_nothing_is_guessed(tmp_path):
    words = ("init", "a.yaml", "--model", "gemma-2b", "--data", "d.jsonl", "--on", "tpu-v5e-8")
    assert in_process(*words, cwd=tmp_path).returncode == 0
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["training"]["backend"] == "jax"
    assert "a.yaml exists" in refused(in_process(*words, cwd=tmp_path), 2)
    assert "--data is missing" in refused(in_process("init", "b.yaml", "--model", "tiny-gemma3", cwd=tmp_path), 2)


def test_on_a_terminal_what_no_flag_gives_is_asked_and_half_a_pass_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(testing._NamedTextIOWrapper, "isatty", lambda stream: True, raising=False)
    words = ["init", str(tmp_path / "a.yaml"), "--model", "tiny-gemma3"]
    done = testing.CliRunner().invoke(cli, words, input="dev-reasoning-v2\nfull\n\n0.5\n")
    assert done.exit_code == 0, done.output
    assert load_config(tmp_path / "a.yaml").training.num_train_epochs == 0.5
