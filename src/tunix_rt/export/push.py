"""What a push uploads: the final model of a run or a folder of `tunix-rt export`, and a model card from the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError
from tunix_rt.export.model_card import model_card
from tunix_rt.export.origin import PROOF
from tunix_rt.models.hub_upload import CARD, refuse_repository, upload
from tunix_rt.progress import phase
from tunix_rt.runs.folder import RunDir, no_final_model
from tunix_rt.runs.index import find_run
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import read_json, sha256_file, storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A commit, before it is made."""

    repository: str
    private: bool
    files: Mapping[str, Path]
    card: str

    def describe(self) -> list[str]:
        where = f"{self.repository} ({'private' if self.private else 'public, or as it is there'})"
        sizes = [f"  {name}  {path.stat().st_size:,} bytes" for name, path in self.files.items()]
        return [f"{where}: {len(self.files)} files and the model card", *sizes, "", *self.card.splitlines()]

    def facts(self) -> dict[str, Any]:
        files = {name: path.stat().st_size for name, path in self.files.items()}
        return {"repository": self.repository, "private": self.private, "files": files, "card": self.card}


def plan_push(run: str, repository: str, *, folder: Path | None, private: bool) -> Push:
    """The files and the card. Nothing is sent."""
    refuse_repository(repository)
    root = find_run(Path(run))
    source = folder or root / RunDir(root).final_model.name
    with storage(source):
        if folder is None and not (source / "config.json").is_file():
            raise no_final_model(RunDir(root))
        if folder is not None and not (folder / PROOF).is_file():
            raise InputError(
                f"{folder} has no {PROOF}: it is no folder of `tunix-rt export`", fix="export the run first"
            )
        files = {path.name: path for path in sorted(source.iterdir()) if path.is_file() and path.name != CARD}
        if links := [name for name, path in files.items() if path.is_symlink()]:
            raise InputError(f"{source}: {links[0]} is a symbolic link", fix="push a folder of `tunix-rt export`")
        with phase("hash the files"):
            hashes = {name: sha256_file(path) for name, path in files.items()}
    record = RunRecord(root)
    card = model_card(record, repository, hashes, scored=_is_final_model(record, source, hashes))
    return Push(repository=repository, private=private, files=files, card=card)


def _is_final_model(record: RunRecord, folder: Path, hashes: Mapping[str, str]) -> bool:
    """Whether the scores of the run are those of the weights in `folder`, and not of another checkpoint. Refuses weights of no
    checkpoint of the run."""
    weights = {digest for name, digest in hashes.items() if name.endswith(".safetensors")}
    if PROOF in hashes:
        files, weights = _exported(folder)
        if changed := [name for name, digest in files.items() if hashes.get(name) != digest and name != CARD]:
            raise InputError(f"{folder}: {changed[0]} changed after the export", fix="export the run again")
    last = record.result.steps_completed if record.result else None
    final = {digest for name, digest in record.run_sums.items() if name.startswith("final_model/")}
    others = {one.step: {file.sha256 for file in one.files.values()} for one in record.checkpoints}
    if not weights or not any(weights <= known for known in (final, *others.values())):
        raise InputError(f"{folder}: its weights are not those of {record.root}", fix="export this run again")
    return weights <= final | others.get(last or 0, set())


def _exported(folder: Path) -> tuple[dict[str, str], set[str]]:
    """SHA-256 of each file of an export by name, and those of the weights it was made from."""
    proof = read_json(folder / PROOF, InputError, fix="export the run again")
    try:
        return dict(proof["files"]), set(proof.get("weights", ()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / PROOF} is not that of an export", fix="export the run again") from error


def push(planned: Push) -> str:
    """Upload. Returns the address of the commit."""
    with phase("upload"):
        return upload(
            planned.repository,
            planned.files,
            planned.card,
            private=planned.private,
            message="Upload the model of a tunix-rt run",
        )
