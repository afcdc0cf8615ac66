"""A model as a GGUF file for llama.cpp and the programs built on it, with a reload check and an Ollama Modelfile."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer, needs_bos
from tunix_rt.engines.checkpoint import TOKENIZER_FILES
from tunix_rt.engines.gguf_reload import Reloaded, check_file
from tunix_rt.engines.gguf_writer import architecture_of, write_gguf
from tunix_rt.engines.torch.load import load_for_inference
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.export.export import (
    BESIDE_BYTES,
    ITEM_BYTES,
    PROOF,
    SCHEMA,
    Origin,
    built_in_template,
    device_for,
    export_model,
    find_origin,
    of_model,
    refuse_occupied,
)
from tunix_rt.export.modelfile import modelfile
from tunix_rt.export.roundtrip import QUESTIONS, TEXTS
from tunix_rt.models.secrets import refuse_address
from tunix_rt.progress import phase
from tunix_rt.storage import require_space, sha256_file, staged_folder, storage, write_json

MODELFILE = "Modelfile"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufExport:
    """The folder with the GGUF file, and its check."""

    folder: Path
    file: Path
    model: str
    kind: str
    bytes: int
    proof: Reloaded
    commands: tuple[str, ...]
    """What loads it elsewhere."""

    def describe(self) -> str:
        return f"{self.model} is in {self.file} ({self.kind}, {self.bytes / 2**20:.1f} MiB): {self.proof.describe()}"


def export_gguf(name: str, output: Path, *, kind: str, step: int | None = None, best: bool = False) -> GgufExport:
    """Write the model `name` as one GGUF file into the folder `output`, with a Modelfile and the files of its tokenizer.

    The folder gets its name after the reload check: a difference is an EvidenceError, and nothing is left behind."""
    refuse_address("the model", name)
    refuse_occupied(output)
    with find_origin(name, step=step, best=best, adapter=False) as found, _merged(found, name, step, best) as origin:
        floats = sum(path.stat().st_size for path in origin.source.weight_files()) * 4 // ITEM_BYTES[origin.dtype]
        device_for("cpu", "float32", 2 * floats)  # the model, and what transformers loads
        require_space(output, (floats if kind == "f32" else floats // 2) + BESIDE_BYTES, what="the GGUF file")
        with staged_folder(Path(os.path.abspath(output))) as staged:
            return _write_and_check(origin, staged, output, kind=kind, name=name)


@contextmanager
def _merged(origin: Origin, name: str, step: int | None, best: bool) -> Iterator[Origin]:
    """The origin; of a LoRA checkpoint, a model with the adapters merged."""
    if origin.adapted is None:
        yield origin
        return
    with tempfile.TemporaryDirectory(prefix="tunix-rt-export-") as scratch:
        done = export_model(name, Path(scratch) / "merged", device="cpu", step=step, best=best)
        merged = of_model(str(Path(scratch) / "merged"))
        yield replace(merged, source=replace(merged.source, name=done.model), data=origin.data, today=origin.today)


def _write_and_check(origin: Origin, folder: Path, output: Path, *, kind: str, name: str) -> GgufExport:
    source = origin.source
    tokenizer = load_tokenizer(origin.tokenizer, str(source.config["model_type"]))
    style = style_of(origin.data, tokenizer, today=origin.today)
    ends = sorted({*stop_ids(tokenizer, style), *origin.more_stops})
    with phase("load the weights"):
        engine = load_for_inference(source, device="cpu", dtype="float32")
    model = engine.model
    architecture_of(model.config)
    file = folder / f"{output.name}-{kind}.gguf"
    template = built_in_template(style) or tokenizer.chat_template
    with phase("write the GGUF file"), storage(file):
        planned = write_gguf(file, model, tokenizer, kind=kind, name=output.name, ends=ends, template=template)
    most = engine.positions
    with phase("reload check"):
        checked = check_file(
            file, model, planned, prompts=[prompt_ids(one, tokenizer, style)[:most] for one in QUESTIONS],
            texts={text: tokenizer.encode(text) for text in TEXTS},
        )  # fmt: skip
    with storage(folder):
        _write_beside(folder, origin, tokenizer, style)
        text = modelfile(
            file.name, tokenizer, style, ends=ends, positions=most,
            adds_bos=needs_bos(tokenizer, str(source.config["model_type"])),
        )  # fmt: skip
        (folder / MODELFILE).write_text(text, encoding="utf-8")
        files = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
        size = file.stat().st_size
    facts = {"model": source.name, "revision": source.revision, "gguf": kind, "files": files}
    write_json(folder / PROOF, {"schema": SCHEMA, **facts, "proof": asdict(checked)})
    return GgufExport(
        folder=output, file=output / file.name, model=source.name, kind=kind, bytes=size, proof=checked,
        commands=_commands(output, file.name),
    )  # fmt: skip


def _write_beside(folder: Path, origin: Origin, tokenizer: Tokenizer, style: Style) -> None:
    """Configuration and tokenizer: what a GGUF file cannot contain of them, vLLM and `tunix-rt` read beside it."""
    write_json(folder / "config.json", origin.source.config)
    for one in TOKENIZER_FILES:
        if (tokenizer.folder / one).is_file():
            shutil.copyfile(tokenizer.folder / one, folder / one)
    if (template := built_in_template(style)) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")


def _commands(output: Path, file: str) -> tuple[str, ...]:
    return (
        f"ollama create {output.name} -f {output / MODELFILE}",
        f"llama-server -m {output / file}",
        f"vllm serve {output / file} --tokenizer {output} --hf-config-path {output}",
    )
