"""A dataset read whole, as samples."""

from collections.abc import Iterator

from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.readers import parse, read_raw
from tunix_rt.data.records import Sample
from tunix_rt.data.sources import Dataset


def read_samples(dataset: Dataset, format: str = "auto") -> Iterator[tuple[str, Sample]]:
    """Every record of the dataset with the place where it stands."""
    chosen = detect_format(dataset, format)
    for raw in read_raw(dataset):
        where = dataset.place(raw.file, raw.line)
        yield where, to_sample(parse(raw, where), chosen, where)
