"""What several tests are made from: records, datasets, devices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.readers import read_raw
from tunix_rt.data.records import Sample
from tunix_rt.data.sources import Dataset
from tunix_rt.doctor.selection import DeviceChoice


def read_samples(dataset: Dataset, format: str = "auto") -> Iterator[tuple[str, Sample]]:
    """Every record of the dataset with the place where it stands."""
    chosen = detect_format(dataset, format)
    for raw in read_raw(dataset):
        where = dataset.place(raw.file, raw.line)
        yield where, to_sample(dataset.record(raw), chosen, where)


def record(number: int = 0, **changed: Any) -> dict[str, Any]:
    """A trace of one sum."""
    step = {"i": 0, "type": "compute", "content": f"{number} + 1 = {number + 1}"}
    return {"prompt": f"What is {number} + 1?", "steps": [step], "final_answer": str(number + 1), **changed}


def write_lines(path: Path, *records: Any) -> Path:
    """Records as JSONL."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def device(kind: str, free_bytes: float, name: str = "a device", *, count: int = 1, **more: Any) -> DeviceChoice:
    """A device of `kind` ("cpu", "cuda", "tpu") with so much free memory and, unless `memory_bytes` is given, no more."""
    free = int(free_bytes)
    fields = {"memory_bytes": free, "reason": "for the test", **more}
    return DeviceChoice(device=kind, kind=name, count=count, free_bytes=free, **fields)
