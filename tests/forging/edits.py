"""Changes to the files of a bundle. A file may be a hard link to the original: each change writes a new one in its place."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tunix_rt.config.load import dump_yaml
from tunix_rt.config.settings import RunConfig
from tunix_rt.scoring.score import judge
from tunix_rt.storage import json_line, json_text, to_plain

Json = dict[str, Any]
QUESTION = ("id", "prompt", "expected", "section", "category", "difficulty", "output", "ended")


def put(path: Path, content: str | bytes) -> None:
    """A new file under that name: whatever the old one is linked to stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def edited(path: Path) -> Iterator[Any]:
    """The JSON in `path`, to be changed in place; written as tunix-rt writes it."""
    value = read(path)
    yield value
    put(path, json_text(value))


def in_json(file: str, change: Callable[[Json], object]) -> Callable[[Path], None]:
    """A change to one JSON file of a folder."""

    def apply(folder: Path) -> None:
        with edited(folder / file) as value:
            change(value)

    return apply


def lines_of(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def put_lines(path: Path, lines: list[Json]) -> None:
    put(path, "".join(json_line(line) for line in lines))


def each_line(path: Path, change: Callable[[Json], object]) -> None:
    """Change every object of a JSONL file in place."""
    lines = lines_of(path)
    for line in lines:
        change(line)
    put_lines(path, lines)


def set_loss(line: Json, loss: float) -> None:
    line["loss"], line["loss_hex"] = loss, loss.hex()


def configure(folder: Path, section: str, **settings: Any) -> None:
    """Settings changed in config.yaml, in the form that tunix-rt writes."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    config[section] |= settings
    put(folder / "config.yaml", dump_yaml(RunConfig.model_validate(config)))


def answer(folder: Path, output: Callable[[Json], str], when: str = "after") -> None:
    """Other generations on one side of the evaluation, judged as the program judges them."""
    path = folder / "eval" / f"predictions-{when}.jsonl"
    lines = [{**one, "output": output(one)} for one in lines_of(path)]
    put_lines(path, [to_plain(judge(**{name: one[name] for name in QUESTION})) for one in lines])


def right_answer(one: Json) -> str:
    return f"<reasoning>It is {one['expected']}.</reasoning><answer>{one['expected']}</answer>"
