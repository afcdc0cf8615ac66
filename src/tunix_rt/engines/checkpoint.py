"""What checkpoints and saved models of both engines share: file names, host memory, refusals, and the model folder."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from tunix_rt.doctor.probe import host_facts
from tunix_rt.errors import InputError, StorageError
from tunix_rt.models.secrets import one_line
from tunix_rt.storage import discard, staged_folder

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
BLOCK_BYTES = 64 * 2**20
"""Size of the blocks in which tensors are copied to the host. A power of two, to which PyTorch rounds pinned memory up."""
HOST_RESERVE_BYTES = 2**30
"""Host memory that a snapshot leaves free."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def host_has_room(needed_bytes: int) -> bool:
    """Whether the host, or its container, has memory for a snapshot of `needed_bytes`."""
    return needed_bytes + HOST_RESERVE_BYTES <= host_facts().ram_available_bytes


def unreadable(path: Path, error: Exception) -> StorageError:
    """The error of a checkpoint file that cannot be read."""
    return StorageError(
        f"{path} cannot be read: {one_line(error) or type(error).__name__}",
        fix="its hash was right a moment ago: check the volume and free memory, or resume from a copy on a local disk",
    )


def refuse_other_tensors(path: Path | str, stored: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """InputError for the first tensor of `path` that is missing, unexpected, or of another shape or dtype. Tensors are given
    by name as `[shape] dtype`."""
    fix = "the checkpoint is of another model or optimizer; start a new run with another --output"
    if differing := sorted(stored.keys() ^ expected.keys()):
        fault = "lacks" if differing[0] in expected else "has the unexpected tensor"
        raise InputError(f"{path} {fault} {differing[0]}; {len(differing)} tensor names differ", fix=fix)
    for name, own in expected.items():
        if stored[name] != own:
            raise InputError(f"{path} has {name} as {stored[name]}; this model has it as {own}", fix=fix)


@contextlib.contextmanager
def staged_model(folder: Path, *, tokenizer_folder: Path, chat_template: str | None) -> Iterator[Path]:
    """A folder that becomes `folder` at the end of the block, with the files of the tokenizer. An existing folder is removed
    first: the disk may not have space for two. One that cannot be is moved aside. `chat_template` replaces that of the
    tokenizer."""
    discard(folder)
    with staged_folder(folder, replace=True) as staged:
        yield staged
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, staged / name)
        if chat_template is not None:
            (staged / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="\n")
