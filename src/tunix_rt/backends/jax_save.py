"""The finished model of the JAX engine on disk, as plain transformers loads it; written without it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tunix_rt.backends import out_of_range
from tunix_rt.backends.jax_engine import Engine, memory_is_named
from tunix_rt.backends.jax_state import MODEL, saved_leaves, write_leaves
from tunix_rt.errors import InputError
from tunix_rt.rundir import settle_files, storage, sync_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
CLASSES = {
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
}  # fmt: skip
"""The class of transformers that a `config.json` names; other programs go by it."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What transformers takes over from `config.json` where a model has no settings for generation."""


@memory_is_named("the rounding of the weights")
def round_weights(engine: Engine, dtype: str) -> None:
    """Round every weight to `dtype`, in which `save` writes it from here on.

    In memory it keeps its type: the engine computes what the saved model computes once it is loaded in that type."""

    def rounded(path: Any, weight: Any) -> Any:
        narrow = weight.astype(dtype)  # by itself: a compiler that sees both casts leaves them out
        if not bool(jnp.isfinite(narrow).all()):
            raise out_of_range(jax.tree_util.keystr(path), dtype)
        return narrow.astype(weight.dtype)

    engine.params = jax.tree_util.tree_map_with_path(rounded, engine.params)
    engine.saved_dtype = dtype


@memory_is_named("the saving of the final model")
def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` whole.

    What it generates ends at `stop_ids`, whatever the base model says. `chat_template` takes the place of the tokenizer's
    own; None leaves that.
    """
    staged = folder.with_name(f".staged-{folder.name}")
    with storage(folder):
        for leftover in (staged, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        staged.mkdir(parents=True)
        write_leaves(staged / MODEL, list(saved_leaves(engine)), {"format": "pt"})
        _write(staged / "config.json", _config(engine))
        _write(staged / "generation_config.json", _generation(engine, stop_ids))
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, staged / name)
        if chat_template is not None:
            (staged / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="\n")
        settle_files(staged)  # `result.json` will say completed: the model must outlive a power cut by then
        staged.rename(folder)
        sync_folder(folder.parent)


def _config(engine: Engine) -> dict[str, Any]:
    """That of the base model, with the type of the weights that lie beside it."""
    said = {key: value for key, value in engine.source.config.items() if key != "torch_dtype"}  # its older name
    said.setdefault("architectures", [CLASSES[engine.architecture.shape.model_type]])
    return said | {"dtype": engine.saved_dtype or engine.recipe.weights}


def _generation(engine: Engine, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The base model's own settings, where it has some; the end is ours."""
    path = engine.source.folder / "generation_config.json"
    config = engine.source.config
    said = {name: config[name] for name in SPECIAL if config.get(name) is not None}
    if path.is_file():
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}", fix="fetch the model again") from error
        said = read if isinstance(read, dict) else said
    return said | {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
