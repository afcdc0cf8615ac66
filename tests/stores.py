"""A small dataset and its tokens, for the tests that look at what is kept on disk."""

import json
from pathlib import Path

from tests.program import ROOT
from tunix_rt.config.load import build_config
from tunix_rt.data.formats import detect_format
from tunix_rt.data.render import style_of
from tunix_rt.data.sources import find_dataset
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.tokenizer import load_tokenizer


def recipe_for(path: Path, **settings: object) -> Recipe:
    dataset, tokenizer = find_dataset(str(path)), load_tokenizer(ROOT / "models" / "tiny-gemma3", "gemma3_text")
    style = style_of(build_config({"data": settings}, "test").data, tokenizer)
    return Recipe(dataset=dataset, format=detect_format(dataset), tokenizer=tokenizer, style=style, needs_bos=True)


def quiet(*fields: object) -> None:
    """Progress that nobody watches."""


def write_sums(path: Path, count: int = 30) -> Path:
    """A JSONL file of `count` traces."""
    records = (
        {"prompt": f"What is {n} + 1?", "steps": [{"i": 0, "type": "c", "content": f"{n} + 1 = {n + 1}"}],
         "final_answer": str(n + 1)} for n in range(count)
    )  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}
