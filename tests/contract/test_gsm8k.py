"""GSM8K as it is published, with the real tokenizer of Gemma 3: it passes validation, packs well, and is read again at once."""

import json

import pytest

from benchmarks.data import GEMMA_3_1B, GPT_2
from tests.conftest import REFERENCE
from tests.materials import real_tokenizer
from tests.program import tunix_rt

pytestmark = [pytest.mark.registry, pytest.mark.reference]
GSM8K = REFERENCE / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture
def model(tmp_path):
    """A folder with a model's shape and its real tokenizer."""

    def make(name, config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for path in real_tokenizer(name).iterdir():
            (folder / path.name).symlink_to(path)
        return folder

    return make


def check(*arguments, cwd):
    done = tunix_rt("data", "check", *arguments, "--json", cwd=cwd, XDG_CACHE_HOME=str(cwd / "cache"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_gsm8k_is_imported_passes_the_gate_and_fills_97_percent_of_its_rows(model, tmp_path):
    if not GSM8K.is_file():
        pytest.skip("GSM8K is not beside this clone (../shared/data/gsm8k)")
    gemma = model("gemma3", GEMMA_3_1B)
    done = tunix_rt("data", "import", GSM8K, "--as", "gsm8k", "--model", gemma, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "datasets" / "gsm8k" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["source"]["format"], manifest["tokenised"]["examples"]) == (7473, "gsm8k", 7473)
    said = check("gsm8k", "--model", gemma, "--set", "data.max_length=2048", cwd=tmp_path)
    assert [finding for finding in said["findings"] if finding["refuses"]] == []
    assert said["fill"] >= 0.97
    assert said["tokens"] == manifest["tokenised"]["tokens"] > 1_200_000
    assert said["merkle_root"] == manifest["tokenised"]["merkle_root"]
    again = check("gsm8k", "--model", gemma, "--set", "data.max_length=2048", cwd=tmp_path)
    assert (again["merkle_root"], again["from_cache"]) == (said["merkle_root"], True)


@pytest.mark.slow
def test_gpt2_has_no_template_and_too_few_positions_for_nothing_in_gsm8k(model, tmp_path):
    if not GSM8K.is_file():
        pytest.skip("GSM8K is not beside this clone (../shared/data/gsm8k)")
    said = check(GSM8K, "--model", model("gpt2", GPT_2), "--set", "data.max_length=1024", cwd=tmp_path)
    assert said["template"] == "plain"
    assert said["findings"] == []
