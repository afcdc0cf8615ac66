"""A GGUF file into a Hugging Face folder: `python -P -m tunix_rt.engines.gguf FILE FOLDER [--without-weights]`.

Tensors and tokenizer are read by transformers; this module decides what may be believed of the result. The folder is filled
beside its place and moved there when it is whole. A refusal is one line of JSON on stdout and the exit code of its class.
"""

import json
import math
import mmap
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError

from tunix_rt.errors import InputError, StorageError, TunixError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.gguf import BESIDE, MANIFEST, OTHER_CACHE, SCHEMA, read_manifest
from tunix_rt.storage import removed_on_error, staged_folder, storage, write_json

VERSIONS = (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
PLAIN = {"F32", "F16", "BF16"}
GIB = 2**30
WITH_CONFIG = "put the config.json of the original model beside the file, or use the model's safetensors"
# No weights but factors of the rotation, one for each frequency: Llama 3 and its long context.
ROTATION = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Layers of the models whose attention scale only config.json contains (Gemma 27B), by GGUF architecture.
LAYERS_WITHOUT_SCALE = {family.gguf: family.gguf_layers_without_scale for family in FAMILIES.values() if family.gguf}
# Where a file does not say whether a text begins with the token for it: kinds of tokenizers for which llama.cpp puts it.
BEGINS_WITH_BOS = {"tokenizer.ggml.model": {"llama"}, "tokenizer.ggml.pre": {"llama3", "llama-v3", "llama-bpe"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    """As torch has it: the fastest dimension last."""
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands before the tensors. Lists are kept as their length."""

    facts: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.facts.get("general.architecture"))

    @property
    def quantisation(self) -> str:
        """`Q4_1 (210 tensors), F32 (61), Q8_0 (1)`."""
        counted = Counter(tensor.kind for tensor in self.tensors).most_common()
        return ", ".join(f"{kind} ({count}{'' if at else ' tensors'})" for at, (kind, count) in enumerate(counted))

    @property
    def values(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def rows(self, name: str) -> int | None:
        return next((tensor.shape[0] for tensor in self.tensors if tensor.name == name and tensor.shape), None)


# --- making the folder -----------------------------------------------------------------------------------------------


def convert(file: Path, place: Path, *, with_weights: bool) -> None:
    """Fill `place`. One process does it; another that comes meanwhile waits, and finds it done."""
    with storage(place, fix=OTHER_CACHE):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.with_name(f"{place.name}.lock")
        with FileLock(lock), removed_on_error(lock):
            if read_manifest(place) is not None:
                return
            with staged_folder(place, replace=True, fix=OTHER_CACHE) as staged:
                about = _fill(staged, file, with_weights=with_weights)
                about["files"] = {path.name: path.stat().st_size for path in sorted(staged.iterdir())}
                write_json(staged / MANIFEST, about)


def _fill(building: Path, file: Path, *, with_weights: bool) -> dict[str, Any]:
    """Write configuration, weights and tokenizer; returns what is to be known of them."""
    header = read_header(file)
    if (parts := header.facts.get("split.count", 1)) > 1:
        raise InputError(
            f"{file.name} is one of {parts} parts of a model", fix="join them first (llama-gguf-split --merge)"
        )
    with tempfile.TemporaryDirectory() as nothing:  # transformers looks for more files beside the one it is given
        config = config_of(file, header, nothing)
        if with_weights:
            _write_weights(file, header, config, nothing, building)
        else:
            config.save_pretrained(building)
        tokenizer = _write_tokenizer(file, header, nothing, building)
    weights = "dequantised to float32; they are not those of the model the file was made from"
    if {tensor.kind for tensor in header.tensors} <= PLAIN:
        weights = "as float32, which holds every value of the file"
    return {
        "schema": SCHEMA,
        "file": file.name,
        "quantisation": header.quantisation,
        "weights": weights if with_weights else "none",
        "config": "config.json beside the file" if (file.parent / "config.json").is_file() else "the file",
        "tokenizer": tokenizer,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }


def config_of(file: Path, header: Header, nothing: str) -> Any:
    """The model's configuration: the config.json beside the file, else what transformers makes of the file's facts."""
    if (file.parent / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(file.parent, trust_remote_code=False, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config
    _refuse_lost_settings(file, header)
    config = transformers.AutoConfig.from_pretrained(nothing, gguf_file=str(file), local_files_only=True)
    # The tables themselves are right where the file's facts are silent, or count tokens that have no row.
    config.vocab_size = header.rows("token_embd.weight") or config.vocab_size
    if positions := header.rows("position_embd.weight"):  # learned: GPT-2
        config.n_positions = positions
    return config


def _refuse_lost_settings(file: Path, header: Header) -> None:
    """What a GGUF file says of its rotation and scores, and transformers does not read, would be lost without a word."""
    kind = header.architecture
    scaling = header.facts.get(f"{kind}.rope.scaling.type", "none")
    rotation = next((tensor.name for tensor in header.tensors if tensor.name in ROTATION), None)
    if rotation is not None or scaling != "none":
        lost = f"a scaled rotation ({rotation or scaling})"
    elif LAYERS_WITHOUT_SCALE.get(kind) == header.facts.get(f"{kind}.block_count", 0):
        lost = "the scale of the attention of a 27B model"
    else:
        return
    raise InputError(f"{file.name}: {lost} cannot be taken from a GGUF file", fix=WITH_CONFIG)


def load_model(file: Path, header: Header, config: Any, nothing: str) -> Any:
    """The model in float32, as transformers reads it. `nothing` is an empty folder."""
    options = {}
    if hasattr(transformers, "GgufConfig"):  # without it, dequantised is the only way
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        nothing, gguf_file=str(file), config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
        output_loading_info=True, **options,
    )  # fmt: skip
    wrong = [f"{kind.replace('_', ' ')}: {next(iter(info[kind]))}" for kind in info if info[kind]]
    in_file = sum(tensor.name not in ROTATION for tensor in header.tensors)
    if in_file != (
        in_model := sum(1 for _ in model.parameters())
    ):  # tensors it has no name for are left out in silence
        wrong.append(f"{in_file} tensors in the file, {in_model} in the model")
    if wrong:
        raise InputError(f"{file.name} is no whole {config.model_type} model: {wrong[0]}", fix=WITH_CONFIG)
    return model


def _write_weights(file: Path, header: Header, config: Any, nothing: str, building: Path) -> None:
    needed, free = 4 * header.values, shutil.disk_usage(building).free
    if needed > free:
        raise StorageError(
            f"{file.name} has {needed / GIB:.2f} GiB as float32, {free / GIB:.2f} GiB are free in {building.parent}",
            fix=OTHER_CACHE,
        )
    model = load_model(file, header, config, nothing)
    try:
        model.save_pretrained(building)
    except SafetensorError as error:  # of writing: it wraps what the system said
        raise StorageError(f"{building.parent}: {error}", fix=OTHER_CACHE) from error


def _write_tokenizer(file: Path, header: Header, nothing: str, building: Path) -> str:
    """Write the tokenizer; returns where it was taken from."""
    settings_path = building / "tokenizer_config.json"
    if (file.parent / "tokenizer.json").is_file():
        for name in BESIDE:
            if name != "config.json" and (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, building / name)
        if not settings_path.is_file():
            write_json(settings_path, {"add_bos_token": _begins_with_bos(header)})
        return "tokenizer.json beside the file"
    transformers.AutoTokenizer.from_pretrained(nothing, gguf_file=str(file), local_files_only=True).save_pretrained(
        building
    )
    settings = json.loads(settings_path.read_text(encoding="utf-8"))
    settings = {name: value for name, value in settings.items() if name not in ("local_files_only", "is_local")}
    write_json(settings_path, {**settings, "add_bos_token": _begins_with_bos(header)})
    if _begins_with_bos(header):
        _put_before_texts(header.facts.get("tokenizer.ggml.bos_token_id"), building / "tokenizer.json")
    return "the file"


def _put_before_texts(bos_id: Any, path: Path) -> None:
    """Let the tokenizer put the token that begins a text: what transformers makes of a GGUF file does not.

    A Gemma that is asked without it gives text of no sense, and a loss of 7.3 where it is 3.0 with it."""
    inner = tokenizers.Tokenizer.from_file(str(path))
    token = inner.id_to_token(bos_id) if isinstance(bos_id, int) else None
    if token is None or bos_id in inner.encode("x").ids:
        return
    put = tokenizers.processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, bos_id)]
    )
    before = inner.post_processor
    inner.post_processor = put if before is None else tokenizers.processors.Sequence([before, put])
    inner.save(str(path))


def _begins_with_bos(header: Header) -> bool:
    said = header.facts.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    return any(header.facts.get(fact) in kinds for fact, kinds in BEGINS_WITH_BOS.items())


# --- reading the header ----------------------------------------------------------------------------------------------


def read_header(file: Path) -> Header:
    """Facts and tensors of the file. One that is cut off or damaged is an InputError, before anything is believed of it."""
    size = file.stat().st_size
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content)
        try:
            header, end = reader.header()
        except (struct.error, UnicodeDecodeError) as error:
            raise InputError(
                f"{file.name} is incomplete or damaged: its header cannot be read at byte {reader.at:,} of {size:,}",
                fix="fetch the file again",
            ) from error
        except ValueError as error:
            raise InputError(f"{file.name}: {error}", fix="fetch the file again, or another one") from error
    if end > size:
        raise InputError(f"{file.name} is incomplete: {size:,} of {end:,} bytes", fix="fetch the file again")
    return header


class _Reader:
    """Parses a mapped GGUF header. Raises struct.error at the end of the file, ValueError for an unknown version or type.

    `gguf.GGUFReader` has no bounds: a list that claims more values than the file has makes it loop until memory is full.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 4  # after the magic

    def header(self) -> tuple[Header, int]:
        """The header, and the byte after the last one of any tensor."""
        version, tensor_count, fact_count = self.take("<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not known, {' and '.join(map(str, VERSIONS))} are")
        facts = {}
        for _ in range(fact_count):
            name = self.text()
            facts[name] = self.value(*self.take("<I"))
        listed = [self.tensor() for _ in range(tensor_count)]
        step = facts.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"an alignment of {step!r} bytes is none")
        start = math.ceil(self.at / step) * step
        header = Header(facts=facts, tensors=tuple(tensor for tensor, _ in listed))
        return header, max((start + end for _, end in listed), default=0)

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return found

    def skip(self, length: int) -> int:
        """Where it began."""
        start = self.at
        if start + length > len(self.content):
            raise struct.error("behind the end")
        self.at += length
        return start

    def text(self) -> str:
        (length,) = self.take("<Q")
        start = self.skip(length)
        return self.content[start : start + length].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.take(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a fact of type {kind}, which is not known")
        inner, count = self.take("<IQ")
        if inner in SCALARS:
            self.skip(count * struct.calcsize(SCALARS[inner]))
        elif inner == STRING:
            for _ in range(count):
                self.skip(*self.take("<Q"))
        else:
            raise ValueError(f"a list of type {inner}, which is not known")
        return count

    def tensor(self) -> tuple[Tensor, int]:
        """A tensor, and its last byte counted from where the tensors begin."""
        name = self.text()
        (dimensions,) = self.take("<I")
        shape = tuple(reversed(self.take(f"<{dimensions}Q")))
        number, offset = self.take("<IQ")
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        return Tensor(name=name, shape=shape, kind=kind.name), offset + math.prod(shape) // block * block_bytes


def main(arguments: Sequence[str]) -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        convert(Path(arguments[0]), Path(arguments[1]), with_weights="--without-weights" not in arguments[2:])
    except TunixError as error:
        sys.stdout.write(json.dumps({"problem": error.problem, "fix": error.fix}) + "\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
