"""What llama.cpp computes from a GGUF file: `python llama_cpp_side.py REQUEST ANSWER` in an environment that has `cyllama`.

A program of its own: it imports nothing of tunix-rt. A request with `quantize` has llama.cpp write a file instead."""

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
from cyllama.llama import llama_cpp


class Model(llama_cpp.LlamaModel):
    @property
    def n_vocab(self):
        """`LlamaContext.get_logits` of cyllama 0.2.18 reads it, and its own class lacks it."""
        return self.get_vocab().n_vocab


def quantized(source: str, target: str, number: int) -> None:
    settings = llama_cpp.LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = number, 1
    llama_cpp.model_quantize(source, target, settings)


def logits_of(context, ids: list[int], last: bool) -> np.ndarray:
    """After the last token; or after each, one token at a time, [tokens, vocabulary]."""
    context.kv_cache_clear()
    rows = []
    for start, part in [(0, ids)] if last else [(at, [number]) for at, number in enumerate(ids)]:
        batch = llama_cpp.LlamaBatch(n_tokens=len(part), embd=0, n_seq_max=1)
        batch.set_batch(part, start, False)
        batch.set_last_logits_to_true()
        context.decode(batch)
        rows.append(np.array(context.get_logits(), dtype=np.float32))
    return rows[-1] if last else np.stack(rows)


def main(request: dict) -> dict:
    llama_cpp.disable_logging()
    if "quantize" in request:
        quantized(request["file"], request["quantize"], request["number"])
        return {}
    settings = llama_cpp.LlamaModelParams()
    settings.n_gpu_layers = 0
    model = Model(path_model=request["file"], params=settings, verbose=False)
    longest = max(map(len, [*request["prompts"], *request["documents"]]))
    settings = llama_cpp.LlamaContextParams()
    settings.n_ctx = settings.n_batch = longest + 8
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0  # float32 keys and values
    settings.flash_attn_type = 0
    context = llama_cpp.LlamaContext(model=model, params=settings, verbose=False)
    losses = []
    for ids in request["documents"]:
        logits = logits_of(context, ids[:-1], last=False).astype(np.float64)
        peaks = logits.max(axis=1)
        norm = peaks + np.log(np.exp(logits - peaks[:, None]).sum(axis=1))
        losses.append(float((norm - logits[np.arange(len(ids) - 1), ids[1:]]).sum()))
    vocabulary = model.get_vocab()
    return {
        "logits": [logits_of(context, ids, last=True).tolist() for ids in request["prompts"]],
        "losses": losses,
        "ids": [list(vocabulary.tokenize(text, False, False)) for text in request["texts"]],
        "adds_bos": bool(vocabulary.get_add_bos()),
        "description": model.desc,
        "versions": {"cyllama": importlib.metadata.version("cyllama"), "ggml": llama_cpp.ggml_version()},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
