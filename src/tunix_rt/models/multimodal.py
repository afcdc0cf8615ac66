"""The text model inside a multimodal checkpoint, which is all that is loaded and trained.

A multimodal config.json has a `text_config`. In the file, tensors of the text model have a prefix; all others (vision and audio
towers, projectors) are copied unchanged into the final model, which is multimodal again.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunix_rt.models.safetensors import INDEX, Tensor, header_of, read_header

PREFIXES = ("language_model.model.", "model.language_model.")
"""Of the text model in files: until transformers 4.51 and after."""
HEADS = ("language_model.lm_head.weight", "lm_head.weight")
COPY_BYTES = 16 * 2**20


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model; `config` itself where the model has no other part."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and isinstance(inner.get("model_type"), str) else config


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The tensors of the text model: name in a multimodal file -> name in the text model. Empty for the file of a text model."""
    found = {
        name: f"model.{name.removeprefix(prefix)}" for name in names for prefix in PREFIXES if name.startswith(prefix)
    }
    return found and found | {name: "lm_head.weight" for name in names if name in HEADS}


def has_towers(folder: Path) -> bool:
    """Whether the weights of a folder are those of a multimodal model."""
    return any(text_names(read_header(path)[0]) for path in folder.glob("*.safetensors"))


def restore_towers(staged: Path, base: Path) -> None:
    """Make the folder `staged`, with a trained text model, multimodal again: with the files, the names, the towers and the
    configuration of the folder `base`."""
    trained: dict[str, tuple[Path, Tensor]] = {}
    for path in sorted(staged.glob("*.safetensors")):
        path = path.rename(path.with_suffix(".text"))
        stored = read_header(path)[0]
        ours = text_names(stored)  # transformers may write the names that it has read
        trained |= {ours.get(name, name): (path, tensor) for name, tensor in stored.items()}
    trained.setdefault("lm_head.weight", trained["model.embed_tokens.weight"])  # tied, and stored twice in some files
    for path in sorted(base.glob("*.safetensors")):
        own = read_header(path)[0]
        ours = text_names(own)
        sources = {name: trained[ours[name]] if name in ours else (path, tensor) for name, tensor in own.items()}
        _write(staged / path.name, sources)
    for path in {path for path, _ in trained.values()}:
        path.unlink()
    _write_configuration(staged, base)


def _write(path: Path, sources: Mapping[str, tuple[Path, Tensor]]) -> None:
    described = [(name, one.dtype, one.shape, one.end - one.begin) for name, (_, one) in sources.items()]
    header, _ = header_of(described, {"format": "pt"})
    with path.open("wb") as out:
        out.write(header)
        for place, tensor in sources.values():
            with place.open("rb") as file:
                file.seek(tensor.begin)
                left = tensor.end - tensor.begin
                while left:
                    left -= out.write(file.read(min(left, COPY_BYTES)))


def _write_configuration(staged: Path, base: Path) -> None:
    dtype = json.loads((staged / "config.json").read_text(encoding="utf-8")).get("dtype")
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name
    config = config | {"dtype": dtype, "text_config": {**config["text_config"], "dtype": dtype}}
    (staged / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (staged / INDEX).unlink(missing_ok=True)
    if (base / INDEX).is_file():
        shutil.copyfile(base / INDEX, staged / INDEX)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (base / name).is_file():
            shutil.copyfile(base / name, staged / name)
