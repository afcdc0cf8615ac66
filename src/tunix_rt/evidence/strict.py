"""No placeholder in what a bundle says: a fact that could not be had is left out, or the bundle is not made."""

from collections.abc import Iterator
from pathlib import Path

from tunix_rt.evidence.agreeing import SAYS
from tunix_rt.evidence.claims import SCHEMA, read_object
from tunix_rt.evidence.doubtful import placeholders, shown
from tunix_rt.evidence.gathered import few
from tunix_rt.evidence.manifest import MANIFEST
from tunix_rt.evidence.provenance import PROVENANCE

STRICT = (
    SAYS, MANIFEST, PROVENANCE, "result.json", "precommit.json", "plan.json", "memory.json", "checkpoints.json",
    "processes.json", "eval_summary.json", "eval/before.json", "eval/after.json",
)  # fmt: skip
"""Not `doctor.json`, in which a null is a fact that could not be found out, and an empty fix that of a check that passed."""


def placeholder_problems(folder: Path, schema: str) -> Iterator[str]:
    """Everything that stands where a fact should, by file and name. Of an older bundle, in its own file alone."""
    for name in STRICT if schema == SCHEMA else STRICT[:1]:
        if (folder / name).exists():
            found = placeholders(read_object(folder / name))
            yield from few(
                (
                    f"{name}: {shown(one)} is null, empty or a placeholder; what is not known is left out"
                    for one in found
                ),
                name,
            )
