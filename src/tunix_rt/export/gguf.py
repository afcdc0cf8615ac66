"""A model as a GGUF file for llama.cpp and the programs built on it, with a reload check and an Ollama Modelfile."""

import os
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer, needs_bos
from tunix_rt.engines.checkpoint import TOKENIZER_FILES
from tunix_rt.engines.gguf_reload import Reloaded, check_file
from tunix_rt.engines.gguf_writer import architecture_of, write_gguf
from tunix_rt.engines.torch.load import load_for_inference
from tunix_rt.errors import ConfigError
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.export import export as hf
from tunix_rt.export.export import built_in_template
from tunix_rt.export.modelfile import modelfile
from tunix_rt.export.origin import ITEM_BYTES, PROOF, Origin, find_origin, source_weights
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

    @property
    def commands(self) -> tuple[str, ...]:
        """What loads it elsewhere."""
        name, folder, file = (shlex.quote(str(one)) for one in (self.folder.name, self.folder, self.file))
        return (
            f"ollama create {name} -f {shlex.quote(str(self.folder / MODELFILE))}",
            f"llama-server -m {file}",
            f"vllm serve {file} --tokenizer {folder} --hf-config-path {folder}",
        )

    def describe(self) -> str:
        return f"{self.model} is in {self.file} ({self.kind}, {self.bytes / 2**20:.1f} MiB): {self.proof.describe()}"


def export_gguf(name: str, output: Path, *, kind: str, step: int | None = None, best: bool = False) -> GgufExport:
    """Write the model `name` as one GGUF file into the folder `output`, with a Modelfile and the files of its tokenizer.

    The folder gets its name after the reload check: a difference is an EvidenceError, and nothing is left behind."""
    refuse_address("the model", name)
    hf.refuse_occupied(output)
    output = Path(os.path.abspath(output))
    with find_origin(name, step=step, best=best, adapter=False) as origin:
        if origin.adapted is not None:
            fix = "export the checkpoint with --to hf first, then that folder with --gguf"
            raise ConfigError("--gguf writes whole models, and the checkpoints of a LoRA run contain adapters", fix=fix)
        floats = sum(path.stat().st_size for path in origin.source.weight_files()) * 4 // ITEM_BYTES[origin.dtype]
        hf.device_for("cpu", "float32", 2 * floats)  # the model, and what transformers loads
        require_space(output, (floats if kind == "f32" else floats // 2) + hf.BESIDE_BYTES, what="the GGUF file")
        with staged_folder(output) as staged:
            return _write_and_check(origin, staged, output, kind=kind)


def _write_and_check(origin: Origin, folder: Path, output: Path, *, kind: str) -> GgufExport:
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
    facts["weights"] = source_weights(origin)
    write_json(folder / PROOF, {"schema": hf.SCHEMA, **facts, "proof": asdict(checked)})
    return GgufExport(folder=output, file=output / file.name, model=source.name, kind=kind, bytes=size, proof=checked)


def _write_beside(folder: Path, origin: Origin, tokenizer: Tokenizer, style: Style) -> None:
    """Configuration and tokenizer: what a GGUF file cannot contain of them, vLLM and `tunix-rt` read beside it."""
    write_json(folder / "config.json", origin.source.config)
    for one in TOKENIZER_FILES:
        if (tokenizer.folder / one).is_file():
            shutil.copyfile(tokenizer.folder / one, folder / one)
    if (template := built_in_template(style)) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")
