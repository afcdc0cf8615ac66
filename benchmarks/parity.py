"""transformers, our JAX engine and google-tunix on the same weights and batches in float32, each in a process of its own.

    python -m benchmarks.parity [--models tiny|real|all]     writes benchmarks/results/parity.json; exit 1 past a limit

Needs both environments: `.venv` (scripts/setup --dev) for transformers and our engine, `.venv-tunix` (scripts/tunix) for
google-tunix. They exchange files only. The sides, and what is packed, are described in `benchmarks/parity_sides.py`.

For each model: the loss before the first step; logits of a text of 35 tokens, and of the last 64 tokens of one longer than the
window; the losses of 20 steps of AdamW; whether each side writes back the tensors it read bit by bit; and, of the weights
that each side trained, the loss that every other side finds in them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunix_rt.data.packing import collate, make_rows
from tunix_rt.data.render import Example

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "parity.json"
PYTHONS = {
    "transformers": ROOT / ".venv" / "bin" / "python",
    "ours": ROOT / ".venv" / "bin" / "python",
    "tunix": ROOT / ".venv-tunix" / "bin" / "python",
    "adapter": ROOT / ".venv-tunix" / "bin" / "python",
}
EXCHANGING = ("transformers", "ours", "tunix")
"""Sides that read what the others trained. The adapter reads as ours does."""
LIMITS = {"loss": 1e-5, "curve": 1e-4, "exchanged": 1e-5}
"""Largest relative differences from transformers."""
STEPS = 20
ROUGH = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling takes longer than everything else here."""
_TINY = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
TINY = {
    "gemma": _TINY | {"model_type": "gemma", "num_hidden_layers": 2, "num_key_value_heads": 4},
    # 3 layers: the pattern of windows does not come out even. Caps so low that they bend.
    "gemma2": _TINY | {
        "model_type": "gemma2", "num_hidden_layers": 3, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    # 7 layers: the sixth is the first without a window.
    "gemma3": _TINY | {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "num_key_value_heads": 1,
    },
}  # fmt: skip
REAL = "gemma3-270m"


# --- what is asked ---------------------------------------------------------------------------------------------------


def prepare_tiny(root: Path) -> dict[str, Path]:
    """Models whose every parameter is drawn, norms too, each in a folder below `root`, and random tokens for them."""
    folders = {f"tiny {name}": root / name for name in TINY}
    for name, folder in zip(TINY, folders.values(), strict=True):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(TINY[name]))
        _random_tokens(folder)
    _run("transformers", "-c", _DRAW, *(str(folder / "model") for folder in folders.values()), cache=root / "compiled")
    return folders


def _random_tokens(folder: Path) -> None:
    """Examples are longer than the window of 6, and rows longer still."""
    drawn = np.random.default_rng(7)
    texts = [[drawn.integers(3, 1024, length) for length in (35, 20, 17, 9)] for _ in range(STEPS)]
    masks = [[drawn.random(len(ids)) < 0.7 for ids in step] for step in texts]
    write_inputs(folder, drawn.integers(3, 1024, 35), drawn.integers(3, 1024, 100), texts, masks, length=47)
    _ask(folder, rate=1e-3)


def prepare_real(root: Path) -> dict[str, Path]:
    """Real weights, converted from a GGUF file, and the text of a shipped dataset, longer than the window of 512."""
    import tokenizers

    folder = root / REAL
    folder.mkdir(parents=True)
    _run("transformers", "-c", _CONVERT, str(folder / "place.txt"), cache=root / "compiled")
    model = Path((folder / "place.txt").read_text())
    (folder / "model").symlink_to(model, target_is_directory=True)
    tokenizer, drawn = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")), np.random.default_rng(7)
    lines = (ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
    told = [
        " ".join([one["prompt"], *(step["content"] for step in one["steps"]), one["final_answer"]])
        for one in map(json.loads, lines)
    ]
    bos = tokenizer.token_to_id("<bos>")
    ids = [np.asarray([bos, *tokenizer.encode(text, add_special_tokens=False).ids]) for text in told]
    joined = np.concatenate([ids[0], *(one[1:] for one in ids[1:60])])
    long_enough = [one for one in ids if len(one) >= 40]
    texts = [[long_enough[2 * step][:40], long_enough[2 * step + 1][:24]] for step in range(STEPS)]
    masks = [[drawn.random(len(one)) < 0.7 for one in step] for step in texts]
    write_inputs(folder, joined[:35], joined[:800], texts, masks, length=64)
    _ask(folder, rate=1e-5)
    return {REAL: folder}


_DRAW = """
import sys, torch, transformers
for folder in sys.argv[1:]:
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
"""
_CONVERT = """
import sys
from tests.materials import gemma3_270m_gguf
from tunix_rt.models.resolve import resolve_model
with open(sys.argv[1], "w") as told:
    told.write(str(resolve_model(str(gemma3_270m_gguf())).folder))
"""


def write_inputs(
    folder: Path, short: Any, long: Any, texts: Sequence[Any], masks: Sequence[Any], *, length: int
) -> None:
    """Every step's examples twice: packed into rows of `length`, and each in a row of its own."""
    found: dict[str, Any] = {"short": short[None].astype(np.int32), "long": long[None].astype(np.int32)}
    for laid in ("packed", "alone"):
        steps = []
        for ids, trained in zip(texts, masks, strict=True):
            examples = [Example(ids=one.astype(np.int32), trained=mask) for one, mask in zip(ids, trained, strict=True)]
            steps.append(collate(list(make_rows(examples, max_length=length, packing=laid == "packed")), pad_id=0))
        for name in ("ids", "labels", "positions"):
            found[f"{laid} {name}"] = np.stack([getattr(one, name) for one in steps])
    np.savez(folder / "inputs.npz", **found)


def _ask(folder: Path, *, rate: float) -> None:
    asked = {
        "steps": STEPS, "rate": rate, "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0,
    }  # fmt: skip
    (folder / "asked.json").write_text(json.dumps(asked))


# --- the sides -------------------------------------------------------------------------------------------------------


def run_sides(folders: Sequence[Path]) -> None:
    """All that is asked in `folders`, one process for each side and phase."""
    cache = folders[0].parent / "compiled"
    for side in PYTHONS:
        _run(side, "-m", "benchmarks.parity_sides", side, "measure", *map(str, folders), cache=cache)
    for side in EXCHANGING:
        _run(side, "-m", "benchmarks.parity_sides", side, "exchange", *map(str, folders), cache=cache)


def _run(side: str, *arguments: str, cache: Path) -> None:
    began = time.monotonic()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ROUGH, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    # The same code is compiled in several processes.
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [str(PYTHONS[side]), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-3000:]}")
    print(
        f"{side} {arguments[3] if len(arguments) > 3 else 'draws'}: {time.monotonic() - began:.0f} s", file=sys.stderr
    )


# --- what was found --------------------------------------------------------------------------------------------------


def compared(folder: Path) -> dict[str, Any]:
    """Figures of one model. Differences are from transformers, relative to its loss, or to its largest logit."""
    found = {side: np.load(folder / f"{side}.npz") for side in PYTHONS}
    exchanged = {side: json.loads((folder / f"exchanged-{side}.json").read_text()) for side in EXCHANGING}
    base = found["transformers"]
    figures: dict[str, Any] = {"losses": {side: one["losses"].tolist() for side, one in found.items()}}
    for side, one in found.items():
        apart = np.abs(one["losses"] - base["losses"]) / base["losses"]
        figures[side] = {
            "loss": float(apart[0]),
            "curve": float(apart.max()),
            "logits": {name: _logits(one[name], base[name]) for name in ("short", "long")},
            "same tensors written back": same_tensors(folder / "model", folder / f"saved-{side}"),
        }
    figures["exchanged"] = {
        side: {name: abs(loss / exchanged["transformers"][name] - 1) for name, loss in losses.items()}
        for side, losses in exchanged.items()
    }
    return figures


def _logits(found: Any, wanted: Any) -> dict[str, float]:
    apart = np.abs(found.astype(np.float64) - wanted)
    return {
        "largest difference": float(apart.max()), "of the largest logit": float(apart.max() / np.abs(wanted).max()),
        "same first choice": float((found.argmax(-1) == wanted.argmax(-1)).mean()),
    }  # fmt: skip


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders have the same tensors in the same type, bit by bit."""
    from safetensors.numpy import load_file

    first, second = (load_file(place / "model.safetensors") for place in (one, other))
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name]) for name in first
    )


def past_a_limit(name: str, figures: Mapping[str, Any]) -> list[str]:
    wrong = []
    for side in PYTHONS:
        of_side = figures[side]
        worst = {kind: of_side[kind] for kind in ("loss", "curve")}
        if side in figures["exchanged"]:
            worst["exchanged"] = max(figures["exchanged"][side].values())
        wrong += [f"{name}, {side}: {kind} {far:.2g}" for kind, far in worst.items() if not far <= LIMITS[kind]]
        if not of_side["same tensors written back"]:
            wrong.append(f"{name}, {side}: other tensors were written back")
    return wrong


def about() -> dict[str, str]:
    """Versions on either side."""
    asked = {
        ".venv": ("torch", "transformers", "jax", "optax"),
        ".venv-tunix": ("google-tunix", "flax", "jax", "optax"),
    }
    found = {}
    for place, names in asked.items():
        code = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {names!r}), sep=', ')"
        told = subprocess.run([ROOT / place / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
        found[place] = told.stdout.strip()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=["tiny", "real", "all"], default="all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = json.loads(options.output.read_text())["models"] if options.output.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        folders = prepare_tiny(Path(scratch)) if options.models != "real" else {}
        folders |= prepare_real(Path(scratch)) if options.models != "tiny" else {}
        run_sides(list(folders.values()))
        figures |= {name: compared(folder) for name, folder in folders.items()}
    options.output.write_text(json.dumps({"about": about(), "limits": LIMITS, "models": figures}) + "\n")
    wrong = [words for name, one in figures.items() for words in past_a_limit(name, one)]
    print("\n".join(wrong) or "all within their limits")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
