"""GGUF files that tunix-rt writes: reloaded by transformers and by llama.cpp, and their perplexity on GSM8K.

    python -m benchmarks.gguf_files --data GSM8K.jsonl [--llama-cpp PYTHON] [--only NAME ...] [--kinds KIND ...]
        [--documents 8] [--quick]

Each model is written as q8_0, q4_k_m and f16, and checked as `tunix-rt export --gguf` does. PYTHON is the interpreter of an
environment with `cyllama`, which contains llama.cpp: `pip install cyllama==0.2.18 numpy`. It loads every file, and writes q8_0
and q4_k_m itself from our f32 file, whose types and errors are compared with ours. Small models with drawn weights stand for
the families. Results append to benchmarks/results/gguf_files.jsonl, one line for a model, or with --kinds for some files of
it; a model that is there is not measured again. --quick leaves out llama.cpp's own quantizer, and the
tokenizer of transformers.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.materials import gemma3_270m_gguf, real_tokenizer, smollm2_gguf
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.engines.gguf import config_of, load_model, read_header
from tunix_rt.engines.gguf_reload import check_file, last_logits
from tunix_rt.engines.gguf_writer import FILES, write_gguf
from tunix_rt.export.roundtrip import QUESTIONS, TEXTS
from tunix_rt.models.resolve import resolve_model

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/gguf_files.jsonl"
SLOW = 2
"""Documents that llama.cpp reads: its binding gives the logits of one token at a time."""
KINDS = ["f16", "q8_0", "q4_k_m"]
MORE_TEXTS = ("THEY'RE 1234567 times 12x34, aren't they?", "one  two   three\n\n\n four\t\tfive <b>x</b> ½ ٣")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "smollm3": {"no_rope_layers": [1, 1]}, "gpt2": {}, "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None}, "olmo2": {}, "granite": {}, "gemma": {}, "gemma3": {},
    "llama3": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }},
    "qwen2": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "layer_types": None, "tie_word_embeddings": True},
}  # fmt: skip
DEMO, KEPT = ROOT / "models/tiny-gemma3", ("sliding_window", "tie_word_embeddings")
BASE = {"llama3": "llama", "qwen2": "llama", "qwen3": "llama", "gemma2": "gemma"}
"""Whose small model another family takes."""


def documents_of(data: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The last questions of the file with their answers, as plain text."""
    lines = data.read_text(encoding="utf-8").splitlines()[-count:]
    texts = [f"Question: {one['question']}\nAnswer: {one['answer']}" for one in map(json.loads, lines)]
    return [[*tokenizer.prefix, *tokenizer.encode(text)] for text in texts]


def losses_of(model: Any, documents: list[list[int]]) -> list[float]:
    """Summed cross-entropy of each document."""
    found = []
    for ids in documents:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        found.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")))
    return found


def perplexity(losses: list[float], documents: list[list[int]]) -> float:
    return float(np.exp(sum(losses) / sum(len(ids) - 1 for ids in documents)))


def llama_cpp(python: Path, request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    given, answer = scratch / "request.json", scratch / "answer.json"
    given.write_text(json.dumps(request))
    subprocess.run([python, ROOT / "benchmarks/llama_cpp_side.py", given, answer], check=True, capture_output=True)
    return json.loads(answer.read_text())


def relative_errors(ours: Path, theirs: Path, exact: Path) -> dict[str, Any]:
    """Types that differ, and by type the error of both quantizers relative to the weights."""
    files = [{one.name: one for one in gguf.GGUFReader(file).tensors} for file in (exact, ours, theirs)]
    differing = [name for name in files[0] if files[1][name].tensor_type != files[2][name].tensor_type]
    sums: dict[str, np.ndarray] = {}
    for name in files[0].keys() - set(differing):
        kind = files[1][name].tensor_type
        if kind.name == "F32":
            continue
        values = np.array(files[0][name].data, dtype=np.float64)
        both = [gguf.quants.dequantize(one[name].data, kind).reshape(values.shape) - values for one in files[1:]]
        squares = [(values**2).sum(), *((error**2).sum() for error in both)]
        sums[kind.name] = sums.get(kind.name, np.zeros(3)) + squares
    errors = {
        kind: {"ours": (own / all_) ** 0.5, "llama_cpp": (other / all_) ** 0.5}
        for kind, (all_, own, other) in sums.items()
    }
    return {"types_that_differ": differing, "relative_errors": errors}


def measured(name: str, model: Any, tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Any]:
    python: Path | None = options.llama_cpp
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    prompts = [[*tokenizer.prefix, *tokenizer.encode(question)] for question in QUESTIONS]
    texts = {text: tokenizer.encode(text) for text in (*TEXTS, *MORE_TEXTS)}
    documents = documents_of(options.data, tokenizer, options.documents)
    positions = model.config.max_position_embeddings
    documents = [ids[:positions] for ids in documents]
    original = perplexity(losses_of(model, documents), documents)
    line: dict[str, Any] = {
        "name": name,
        "parameters": sum(one.numel() for one in model.parameters()),
        "original": original,
    }
    line |= {"documents": len(documents), "tokens": sum(map(len, documents)), "files": {}}
    line |= {"versions": {one: version(one) for one in ("torch", "transformers", "gguf")}}
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)

        def write(kind: str):
            file = scratch / f"{kind}.gguf"
            made = {"kind": kind, "name": name, "ends": [tokenizer.eos_id], "template": tokenizer.chat_template}
            return file, write_gguf(file, model, tokenizer, **made)

        exact = write("f32")[0] if python and not options.quick else None
        for kind in options.kinds:
            model.load_state_dict(weights)
            file, planned = write(kind)
            checked = check_file(file, model, planned, prompts=prompts, texts={} if options.quick else texts)
            stored = line["files"][kind] = {
                "bytes": file.stat().st_size, "types": checked.types,
                "perplexity": perplexity(losses_of(model, documents), documents),
                "moved_logits": checked.moved_logits, "largest_logit": checked.largest_logit,
                "transformers_difference": checked.logit_difference, "largest_error": checked.largest_error,
            }  # fmt: skip
            if python is not None:
                request = {"file": str(file), "prompts": prompts, "documents": documents[:SLOW], "texts": list(texts)}
                answer = llama_cpp(python, request, scratch)
                line["versions"] |= answer["versions"]
                apart = np.abs(np.array(answer["logits"]) - last_logits(model, prompts)).max()
                stored["llama_cpp"] = {
                    "perplexity": perplexity(answer["losses"], documents[:SLOW]),
                    "perplexity_here": perplexity(losses_of(model, documents[:SLOW]), documents[:SLOW]),
                    "logit_difference": float(apart),
                    "texts_equal": sum(ids == own for ids, own in zip(answer["ids"], texts.values(), strict=True)),
                    "texts": len(texts), "description": answer["description"],
                }  # fmt: skip
                if kind != "f16" and exact is not None:
                    theirs = scratch / "theirs.gguf"
                    number = int(FILES[kind][0])
                    llama_cpp(python, {"file": str(exact), "quantize": str(theirs), "number": number}, scratch)
                    stored["llama_cpp"] |= relative_errors(file, theirs, exact)
            file.unlink()
    return line


def family(name: str, python: Path, scratch: Path) -> dict[str, Any]:
    """A small model with drawn weights and norms, as f32: the logits of llama.cpp and of transformers."""
    config = json.loads((ROOT / "tests/conftest.json").read_text())["small models"][BASE.get(name, name)]
    config |= {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0} | FAMILIES[name]
    folder = Path(shutil.copytree(DEMO, scratch / name))
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value or key in KEPT})
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).eval()
    for key, parameter in model.named_parameters():
        if "norm" in key or "ln_" in key:
            parameter.data += torch.randint(-16, 17, parameter.shape) / 64
    tokenizer = load_tokenizer(folder, model.config.model_type)
    file = scratch / f"{name}.gguf"
    write_gguf(file, model, tokenizer, kind="f32", name="small", ends=[tokenizer.eos_id], template=None)
    prompts = [[*tokenizer.prefix, *tokenizer.encode(question)] for question in QUESTIONS]
    answer = llama_cpp(python, {"file": str(file), "prompts": prompts, "documents": [], "texts": []}, scratch)
    expected = last_logits(model, prompts)
    apart = float(np.abs(np.array(answer["logits"]) - expected).max() / np.abs(expected).max())
    return {"name": f"family {name}", "architecture": answer["description"].split()[0], "relative_difference": apart}


def model_of(name: str) -> tuple[Any, Tokenizer]:
    """The original in float32. Those that come as GGUF files are dequantized."""
    if name == "Gemma-3-270M":
        file = gemma3_270m_gguf()
        with tempfile.TemporaryDirectory() as nothing:
            header = read_header(file)
            model = load_model(file, header, config_of(file, header, nothing), nothing)
        return model.eval(), load_tokenizer(real_tokenizer("gemma3"), "gemma3_text")
    folder = DEMO if name == "demo" else resolve_model(str(smollm2_gguf())).folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, load_tokenizer(folder, model.config.model_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--kinds", nargs="*", choices=list(FILES), default=KINDS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    done = {json.loads(line)["name"] for line in RESULTS.read_text().splitlines()} if RESULTS.is_file() else set()
    names = ["demo", *(f"family {one}" for one in FAMILIES), "SmolLM2-135M-Instruct", "Gemma-3-270M"]
    for name in [
        one
        for one in names
        if (one not in done or options.kinds != KINDS) and (not options.only or one in options.only)
    ]:
        if name.startswith("family "):
            if options.llama_cpp is None:
                continue
            with tempfile.TemporaryDirectory() as place:
                line = family(name.removeprefix("family "), options.llama_cpp, Path(place))
        else:
            line = measured(name, *model_of(name), options)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:300], flush=True)


if __name__ == "__main__":
    main()
