"""The types of tensors in a GGUF file are those of llama.cpp's own quantizer, which wrote the recorded files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("gguf", reason="needs the extra `gguf` (scripts/setup --dev installs it)")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tunix_rt.engines.gguf_writer import architecture_of, plan_tensors  # noqa: E402

SHAPES = {"demo": ROOT / "models/tiny-gemma3", "SmolLM2-135M-Instruct": ROOT / "presets/smollm2-135m"}


def recorded():
    lines = map(json.loads, Path(ROOT, "benchmarks/results/gguf_files.jsonl").read_text().splitlines())
    models = {line["name"]: line["files"] for line in lines if "files" in line}
    return [
        pytest.param(SHAPES[name], kind, file["types"], id=f"{name} {kind}")
        for name, files in models.items()
        for kind, file in files.items()
        if name in SHAPES and file.get("llama_cpp", {}).get("types_that_differ") == []
    ]


@pytest.mark.parametrize(("folder", "kind", "types"), recorded())
def test_as_many_tensors_have_each_type_as_in_the_file_of_llama_cpp(folder, kind, types):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    planned = plan_tensors(model, architecture_of(model.config), kind)
    listed = Counter(one.kind.name for one in planned).most_common()
    assert sorted(types.replace(" tensors", "").split(", ")) == sorted(f"{name} ({count})" for name, count in listed)
