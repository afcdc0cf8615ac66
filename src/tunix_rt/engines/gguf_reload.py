"""The check of a written GGUF file: read back by `gguf`, and loaded by transformers from the facts in the file alone."""

import contextlib
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from tunix_rt.engines.gguf import Header, config_of, load_model, read_header
from tunix_rt.engines.gguf_writer import Written, architecture_of, as_llama_cpp, rotations
from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.models.families import Family

BOUNDS: dict[Type, tuple[int, float, int]] = {
    Type.F32: (1, 0.0, 0),
    Type.F16: (1, 2**-11, 1),
    Type.BF16: (1, 2**-8, 1),
    Type.Q8_0: (32, 1 / 200, 127),
    Type.Q6_K: (256, 2 / 63, 32 * 128),
    Type.Q5_K: (256, 2 / 31, 31 * 63),
    Type.Q5_0: (32, 1 / 15, 16),
    Type.Q5_1: (32, 2 / 31, 31),
    Type.Q4_K: (256, 2 / 15, 15 * 63),
    Type.Q4_0: (32, 1 / 7, 8),
}
"""Block of a type; its largest error as a fraction of the largest weight in the block, a step of its codes or half of one; and
the multiples of its float16 unit, whose own rounding is `UNIT` where it is small."""
UNIT = 2.0**-25
NOT_READ = ("query_pre_attn_scalar", "layer_types", "head_dim", "attn_logit_softcapping", "final_logit_softcapping")
SAME = 1e-4
"""Tolerance of logits that the same float32 weights give, as a fraction of the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What was equal, and by how much quantization moves the logits."""

    tensors: int
    types: str
    largest_error: float
    """Of a weight, as a fraction of the bound of its type."""
    prompts: int
    largest_logit: float
    moved_logits: float
    """Largest difference between the logits of the weights in the file and those of the model."""
    top_tokens_equal: int
    logit_difference: float | None
    """Between transformers, which loaded the file with the same weights, and the model with them. None: it has no reader."""
    texts: int

    def describe(self) -> str:
        read = f"{self.tensors} tensors ({self.types}), errors at most {self.largest_error:.0%} of their bound"
        loaded = "transformers cannot load this architecture from GGUF: its logits are not compared"
        if self.logit_difference is not None:
            loaded = f"transformers loads the same weights, logits within {self.logit_difference:.2g}, {self.texts} texts equal"
        share = self.moved_logits / self.largest_logit
        moved = f"quantization moves logits by up to {self.moved_logits:.2g} ({share:.1%} of the largest)"
        return f"{read}; {loaded}; {moved}, top token equal after {self.top_tokens_equal} of {self.prompts} prompts"


def check_file(
    file: Path, model: Any, planned: Sequence[Written], *, prompts: Sequence[Sequence[int]], texts: dict[str, list[int]]
) -> Reloaded:
    """Compare the file with `model`, which has the weights of the file afterwards. A difference is an EvidenceError."""
    family, before = architecture_of(model.config), last_logits(model, prompts)
    header = read_header(file)
    error = _read_back(file, model, planned, family)
    after = last_logits(model, prompts)
    largest = float(np.abs(before).max())
    apart = _load_and_compare(file, model, planned, family, prompts, texts, after) if family.gguf else None
    return Reloaded(
        tensors=len(header.tensors),
        types=header.quantisation,
        largest_error=error,
        prompts=len(prompts),
        largest_logit=largest,
        moved_logits=float(np.abs(after - before).max()),
        top_tokens_equal=int((after.argmax(axis=1) == before.argmax(axis=1)).sum()),
        logit_difference=apart,
        texts=len(texts),
    )


def last_logits(model: Any, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Logits of the token after each prompt."""
    with torch.no_grad():
        return np.stack([model(torch.tensor([list(prompt)])).logits[0, -1].float().numpy() for prompt in prompts])


def _differs(file: Path, what: str) -> EvidenceError:
    return EvidenceError(
        f"{file.name} is not the model in memory: {what}",
        fix="write it again to another disk; if it happens again, please report it",
    )


def _read_back(file: Path, model: Any, planned: Sequence[Written], family: Family) -> float:
    """Put the weights of the file into `model`; the largest error as a fraction of its bound."""
    stored = {one.name: one for one in gguf.GGUFReader(file).tensors if one.name != "rope_freqs.weight"}
    if stored.keys() != {one.name for one in planned}:
        raise _differs(file, f"other tensors: {', '.join(sorted(stored.keys() ^ {one.name for one in planned})[:3])}")
    parameters, worst = dict(model.named_parameters()), 0.0
    for one in planned:
        found, parameter = stored[one.name], parameters[one.parameter]
        shape = tuple(int(size) for size in reversed(found.shape))
        if (found.tensor_type, shape) != (one.kind, one.shape):
            raise _differs(file, f"{one.name} is {found.tensor_type.name} {shape}, not {one.kind.name} {one.shape}")
        values = np.array(gguf.quants.dequantize(found.data, found.tensor_type), dtype=np.float32).reshape(one.shape)
        meant = as_llama_cpp(parameter.detach().numpy(), one, model.config, family)
        error = _share_of_bound(values, meant, one.kind)
        if not error <= 1:
            raise _differs(file, f"a weight of {one.name} has {error:.3g} times the error that {one.kind.name} allows")
        worst = max(worst, error)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(as_llama_cpp(values, one, model.config, family, back=True)))
    return worst


def _share_of_bound(values: npt.NDArray[np.float32], meant: npt.NDArray[np.float32], kind: Type) -> float:
    block, share, multiples = BOUNDS[kind]
    error = np.abs(values - meant).reshape(-1, block).max(axis=1)
    if share == 0:
        return 0.0 if not error.any() else float("inf")
    allowed = np.abs(meant).reshape(-1, block).max(axis=1) * np.float32(share) + np.float32(multiples * UNIT)
    return float((error / allowed).max())


def _config_in(file: Path, header: Header, nothing: str, original: Any) -> Any:
    """The configuration in the file, and of the original only what transformers does not read there."""
    try:
        config = config_of(file, header, nothing)
    except InputError:  # a scaled rotation
        return original
    if any(rope.get("partial_rotary_factor", 1) != 1 for rope in rotations(original).values()):
        return original
    for key in NOT_READ:
        if hasattr(original, key):
            setattr(config, key, getattr(original, key))
    return config


def _load_and_compare(
    file: Path, model: Any, planned: Sequence[Written], family: Family, prompts: Sequence[Sequence[int]],
    texts: dict[str, list[int]], expected: npt.NDArray[np.float32],
) -> float:  # fmt: skip
    """The largest difference of logits between transformers' reading of the file and `model`, which has its weights."""
    header = read_header(file)
    with tempfile.TemporaryDirectory() as nothing:
        alone = Path(nothing) / file.name  # without a config.json beside it
        alone.symlink_to(file.resolve())
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers hides
            loaded = load_model(alone, header, _config_in(alone, header, nothing, model.config), nothing)
        if texts:
            tokenizer = transformers.AutoTokenizer.from_pretrained(nothing, gguf_file=str(alone), local_files_only=True)
    theirs, ours = dict(loaded.named_parameters()), dict(model.named_parameters())
    for one in planned:
        rounded = 1e-6 if len(one.shape) == 1 else 0.0  # of a norm: 1 is added, and subtracted again
        if not torch.allclose(theirs[one.parameter], ours[one.parameter], rtol=0, atol=rounded):
            raise _differs(file, f"transformers reads other values of {one.parameter}")
    for text, ids in texts.items():
        if (read := tokenizer(text, add_special_tokens=False)["input_ids"]) != ids:
            raise _differs(file, f"transformers reads a tokenizer that gives {text!r} {len(read)} other token ids")
    apart = float(np.abs(last_logits(loaded, prompts) - expected).max())
    if not apart <= SAME * np.abs(expected).max():
        raise _differs(file, f"logits of what transformers loads differ by up to {apart:.3g}")
    return apart
