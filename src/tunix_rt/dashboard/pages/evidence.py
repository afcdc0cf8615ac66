"""`/runs/ID/evidence`: how far the statements of a run were checked. Verified on request, in a process with limits (L1: no
model is loaded), and remembered until a file of the folder changes. Nothing is written into the folder."""

import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from tunix_rt.dashboard.background import Background, Outcome
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.errors import InputError
from tunix_rt.runs.checksums import SUMS, is_weights, list_folder, read_file
from tunix_rt.runs.index import Indexed
from tunix_rt.runs.record import MOST_SUMS

if TYPE_CHECKING:
    from tunix_rt.evidence.facts import Label, Verdict

MOST_BYTES = 8 * 2**30
"""Of a folder that is verified from the page. `verify` hashes 100 MB a second or is stopped, so this bounds the time."""
FLAGS = {"dataset": "--data FILE", "base model": "--model DIR"}
"""What L2 to L4 need beside the folder, by the claim that is self-reported where this computer does not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePage:
    run: Indexed
    command: str
    seconds: float | None
    """For how long the verification of this run has been going on; None where none is."""
    busy: bool
    """This or another run is being verified."""
    outcome: Outcome | None
    changed: bool
    """A file of the folder changed since."""
    verdict: "Verdict | None"
    not_shown: str
    """What does not follow from the level."""
    labels: "Mapping[Label, str]"
    commands: list[tuple[str, str]]
    """What a higher level does, and its command."""


def page(site: Site, query: Query, run_id: str) -> Page:
    from tunix_rt.evidence.facts import LABELS, NOT_SHOWN

    found, work = site.run(run_id), background(site)
    seconds, outcome = work.running(run_id), work.outcome(run_id)
    changed = outcome is not None and outcome.stamp != stamp_of(found)
    verdict: Verdict | None = outcome.value if outcome and not changed else None
    values = EvidencePage(
        run=found, command=_command(found), seconds=seconds, busy=work.running() is not None, outcome=outcome,
        changed=changed, verdict=verdict, not_shown=NOT_SHOWN[verdict.level] if verdict else "", labels=LABELS,
        commands=list(_higher_levels(found, verdict)),
    )  # fmt: skip
    return Page(
        template="evidence.html", title=f"Evidence of {found.name}", values=values, live=work.running() is not None
    )


def verified_level(site: Site, found: Indexed) -> str | None:
    """The level of a run that was verified here and has not changed since; None for any other."""
    outcome = background(site).outcome(found.id)
    known = outcome is not None and outcome.value is not None and outcome.stamp == stamp_of(found)
    return str(outcome.value.level) if outcome is not None and known else None


def verify_run(site: Site, run_id: str, body: bytes = b"") -> dict[str, Any]:
    """Start the verification. One at a time: that of another run has to end first."""
    if start(site, site.run(run_id)) is None and background(site).running(run_id) is None:
        raise InputError("another run is being verified", fix="wait until it is done")
    return {"state": "running"}


def start(site: Site, found: Indexed) -> Thread | None:
    """The thread that verifies a run; None where another one is being verified."""

    def verified() -> "Verdict":
        from tunix_rt.evidence.verify import verify

        if (size := sum(list_folder(found.root).files.values())) > MOST_BYTES:
            problem = f"{size / 2**30:.1f} GiB, from this page at most {MOST_BYTES / 2**30:.0f} GiB are verified"
            raise InputError(problem, fix=f"in a terminal: {_command(found)}")
        return verify(found.root)

    return background(site).start(found.id, stamp_of(found), verified)


def stamp_of(found: Indexed) -> str:
    """Changes with SHA256SUMS, and with name, size, time or inode of any file."""
    listing, digest = list_folder(found.root), hashlib.sha256(read_file(found.root, SUMS, MOST_SUMS)[0] or b"")
    for name in listing.files:
        try:
            stat = os.lstat(found.root / name)
        except OSError:  # deleted meanwhile
            continue
        digest.update(os.fsencode(f"{name}\0{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}\n"))
    digest.update(os.fsencode("\n".join(listing.problems)))
    return digest.hexdigest()


def background(site: Site) -> Background:
    made: Background = site.cache.setdefault("evidence", Background())
    return made


def _command(found: Indexed) -> str:
    return f"tunix-rt evidence verify {shlex.quote(str(found.root))}"


def _higher_levels(found: Indexed, verdict: "Verdict | None") -> Iterator[tuple[str, str]]:
    from tunix_rt.evidence.readme import LEVEL_FLAGS

    has_model = any(is_weights(name) for name in list_folder(found.root).files if name.startswith("final_model/"))
    reported = {claim.name for claim in verdict.claims if claim.label == "self-reported"} if verdict else set()
    given = [flag for name, flag in FLAGS.items() if name in reported]
    for flag, does in LEVEL_FLAGS.items():
        weights = ["--weights DIR"] if does.startswith("L2") and not has_model else []
        if flag:
            yield does, " ".join([_command(found) + flag, *weights, *given])
