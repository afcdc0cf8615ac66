"""A real GPT-2 whose weights are set so that each token is followed by a given one: what it will say is known beforehand."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.conftest import SHIPPED

WIDTH = 128


def write_chain_model(
    folder: Path, says: Mapping[str, str], *, positions: int = 256, template: str | None = None, **config: Any
) -> Path:
    """A model folder. After a token that ends one of the texts `says`, the text under it is written, then the end.

    A text that ends in `...` has no end: its last token is followed by its first."""
    import torch
    import transformers

    from tunix_rt.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(SHIPPED)
    settings = transformers.GPT2Config(
        vocab_size=1024, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=positions, tie_word_embeddings=False,
        bos_token_id=2, eos_token_id=1, pad_token_id=0, **config,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight.copy_(torch.randn(1024, WIDTH))
        model.lm_head.weight.zero_()
        known = model.transformer.ln_f(model.transformer.wte.weight)
        follower: dict[int, int] = {}
        for before, text in says.items():
            ids = [tokenizer.encode(before)[-1], *tokenizer.encode(text.removesuffix("..."))]
            for token, following in pairwise([*ids, ids[1] if text.endswith("...") else tokenizer.eos_id]):
                assert follower.setdefault(token, following) == following, f"two followers of {token} in {text!r}"
        for token, following in follower.items():
            model.lm_head.weight[following] += known[token]
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    if template is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder
