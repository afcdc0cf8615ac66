"""The finished model of the PyTorch engine on disk, as plain transformers loads it."""

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from tunix_rt.backends import out_of_range
from tunix_rt.backends.torch_model import Engine, one_line
from tunix_rt.rundir import settle_files, storage, sync_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def round_weights(engine: Engine, dtype: str) -> None:
    """Round every weight to `dtype`, in which `save` writes it from here on.

    In memory it keeps its type: the engine computes what the saved model computes once it is loaded in that type."""
    for name, weight in engine.model.state_dict().items():
        if weight.is_floating_point():
            rounded = weight.to(getattr(torch, dtype))
            if not rounded.isfinite().all():
                raise out_of_range(name, dtype)
            weight.copy_(rounded)
    engine.saved_dtype = dtype


def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` whole.

    Adapters are added to the weights they stand beside. What it generates ends at `stop_ids`, whatever the base model
    says. `chat_template` takes the place of the tokenizer's own; None leaves that.
    """
    settings = copy.deepcopy(engine.model.generation_config)
    settings.eos_token_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    staged = folder.with_name(f".staged-{folder.name}")
    for leftover in (staged, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    with _disk_is_named(folder):
        engine.model.save_pretrained(staged, state_dict=saved_weights(engine))
        dtype = "float32" if engine.recipe.frozen is not None else engine.saved_dtype
        if dtype is not None:  # what is loaded later is rounded to the type that the configuration names
            config = json.loads((staged / "config.json").read_text(encoding="utf-8"))
            (staged / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")
        settings.save_pretrained(staged)
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, staged / name)
        if chat_template is not None:
            (staged / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="\n")
        settle_files(staged)  # `result.json` will say completed: the model must outlive a power cut by then
        staged.rename(folder)
        sync_folder(folder.parent)


def saved_weights(engine: Engine) -> dict[str, torch.Tensor] | None:
    """Weights as `save` writes them where they are not those in memory: with merged adapters, or in another type. On the
    host; names of one tensor, as of a tied embedding, stay names of one."""
    if engine.recipe.frozen is not None:
        from tunix_rt.backends.torch_lora import merged_weights

        return merged_weights(engine.model)
    if engine.saved_dtype is None:
        return None
    kind, cast = getattr(torch, engine.saved_dtype), dict[tuple[int, torch.Size], torch.Tensor]()
    named = {}
    for name, tensor in engine.model.state_dict().items():
        place = tensor.data_ptr(), tensor.shape
        if place not in cast:
            cast[place] = tensor.to("cpu", kind if tensor.is_floating_point() else None)
        named[name] = cast[place]
    return named


@contextlib.contextmanager
def _disk_is_named(folder: Path) -> Iterator[None]:
    """safetensors wraps what the disk says (full, read-only) in an error of its own that is no OSError."""
    with storage(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(None, one_line(error), str(folder)) from error
