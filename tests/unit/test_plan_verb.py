"""`tunix-rt plan` says which total it judged, judges the disk, and refuses what a run would refuse."""

import json
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tunix_rt.cli.main import cli
from tunix_rt.cli.plan import _disk_line, _show_memory
from tunix_rt.config import load_config
from tunix_rt.plan.fit import judge
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of

SMALL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
GIB = 2**30


def shown(capsys, free_bytes: int) -> tuple[dict[str, list[float]], str]:
    """The totals of the table by their names, and all of the text, on a device with so much free memory."""
    overrides = ("data.max_length=64", "training.save_steps=1", "evaluation.enabled=false")
    config, shape = load_config(None, overrides=overrides), shape_of(SMALL)
    plan = predict(shape, config, device="cpu")
    fit = judge(plan, SimpleNamespace(device="cpu", free_bytes=free_bytes, capability=None), shape, config)
    _show_memory(plan, fit, "cpu")
    said = capsys.readouterr().out
    totals = [re.split(r" {2,}", line.strip()) for line in said.splitlines() if line.startswith(" total")]
    by_name = {words[0]: [float(word.replace(",", "")) for word in words[1:]] for words in totals}
    judged = next(values for name, values in by_name.items() if name.endswith("(judged)"))
    assert max(judged) == pytest.approx(fit.predicted_bytes / 2**20, abs=0.06), "the verdict and the table say the same"
    return by_name, said


def test_with_room_for_all_the_whole_total_is_judged(capsys):
    totals, said = shown(capsys, 64 * GIB)
    assert said.startswith("fits: ") and list(totals) == ["total (judged)", "total without *"]
    assert "snapshot *" in said and "* given up when memory is short\n" in said
    proof = next(line for line in said.splitlines() if line.startswith("proof of the final model: "))
    assert proof.endswith("not judged: without room for it the proof is left out, which is said")


def test_where_memory_is_short_the_total_without_what_is_given_up_is_judged(capsys):
    totals, said = shown(capsys, 1)
    assert said.startswith("does not fit: ") and " predicted without mapped_file and snapshot (+" in said
    assert list(totals) == ["total", "total without * (judged)"]
    assert max(totals["total"]) > max(totals["total without * (judged)"])


def test_the_disk_has_a_verdict_of_its_own():
    assert _disk_line(GIB, GIB) == "disk: up to 1.00 GiB needed, 1.00 GiB free; fits"
    assert _disk_line(2 * GIB, GIB).endswith("does not fit: a run would be refused with exit code 8")


def test_the_json_of_the_plan_says_whether_the_disk_suffices():
    done = CliRunner().invoke(cli, ["plan", "smoke_tiny", "--device", "cpu", "--json"])
    told = json.loads(done.stdout)
    assert told["disk_fits"] is (told["disk_bytes"] <= told["disk_free_bytes"])


UNFIT = "training: {optim_in_backward: true, gradient_accumulation_steps: 2}\n"


@pytest.mark.parametrize("verb", [["plan", "--model", "tiny-gemma3", "--device", "cpu"], ["doctor", "--device", "cpu"]])
def test_settings_that_no_run_takes_together_are_refused_without_a_dataset_too(tmp_path, verb):
    (tmp_path / "unfit.yaml").write_text(UNFIT)
    done = CliRunner().invoke(cli, [verb[0], str(tmp_path / "unfit.yaml"), *verb[1:]])
    assert done.exit_code == 2 and "training.optim_in_backward" in done.stderr


def test_the_doctor_speaks_json_of_settings_that_no_run_takes_together(tmp_path):
    (tmp_path / "unfit.yaml").write_text(UNFIT)
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path / "unfit.yaml"), "--device", "cpu", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["verdict"]) == (2, "refused") and "training.optim_in_backward" in told["problem"]
