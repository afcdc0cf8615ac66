"""The process that reads and computes for `verify`: `python -m tunix_rt.evidence.worker REQUEST ANSWER`, under the limits of
`sandbox`. It writes JSON lines as it goes: `prepared`, `progress`, at last `outcome`, or `error` for what could not be tried."""

import contextlib
import dataclasses
import json
import logging
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.evidence.facts import Finding, Inputs

if TYPE_CHECKING:
    from tunix_rt.evidence.replay.replay import Results


def main(request_path: Path, answer_path: Path) -> None:
    request = json.loads(request_path.read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    with answer_path.open("w", encoding="utf-8", newline="\n") as file:
        try:
            _write(file, "outcome", **{"examine": _examine, "compute": _compute}[request["mode"]](request, file))
        except TunixError as error:
            _write(file, "error", error=type(error).__name__, problem=error.problem, fix=error.fix)


def _write(file: IO[str], kind: str, **values: Any) -> None:
    file.write(json.dumps({"kind": kind, **values}, sort_keys=True) + "\n")
    file.flush()


def _inputs(request: Mapping[str, Any]) -> Inputs:
    return Inputs(data=tuple(request["data"]), model=request["model"], tokenizer=request["tokenizer"])


def _examine(request: Mapping[str, Any], file: IO[str]) -> dict[str, Any]:
    from tunix_rt.evidence.examine import examine

    done = examine(Path(request["folder"]), inputs=_inputs(request), weights=Path(request["weights_root"]))
    about: dict[str, Any] = {}
    if done.run is not None and not done.findings:
        threads = done.run.record.processes[-1].machine.threads
        about = {"backend": done.run.backend, "threads": threads, "source_sha256": done.run.commitment.source_sha256}
    findings, claims = ([dataclasses.asdict(one) for one in found] for found in (done.findings, done.claims))
    return {"findings": findings, "claims": claims, "notes": done.notes, "passed": done.passed, "about": about}


# --- L2 to L4 ---------------------------------------------------------------------------------------------------------


def _compute(request: Mapping[str, Any], file: IO[str]) -> dict[str, Any]:
    from tunix_rt.evidence.facts import completed_run
    from tunix_rt.evidence.replay.replay import Results, Work, compute
    from tunix_rt.evidence.replay.session import prepare_run
    from tunix_rt.runs.record import RunRecord

    if request["cores"] and sys.platform == "linux":  # jax takes a thread for each core that it sees
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cores"]])
    run = completed_run(RunRecord(Path(request["folder"])))
    if run is None:
        raise EvidenceError("the run is not completed", fix="")
    to_train = request["segments"] is not None
    try:
        with _little_memory(request["preparing_bytes"]):
            prepared = prepare_run(run, _inputs(request), to_train=to_train)
        _write(file, "prepared")
        made = compute(Work(
            run=run, prepared=prepared, weights=Path(request["weights"]) if request["weights"] else None,
            weights_root=Path(request["weights_root"]), scratch=Path(request["scratch"]), segments=request["segments"],
            whole=request["whole"], root=request["root"], nonce=request["nonce"],
            progress=lambda what, done, total, _: _write(file, "progress", what=what, done=done, total=total),
        ))  # fmt: skip
    except EvidenceError as error:
        made = Results(findings=[Finding(level="L3" if to_train else "L2", check="inputs", problem=error.problem)])
    return _outcome(made)


def _outcome(made: "Results") -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)} | {
        "findings": [dataclasses.asdict(one) for one in made.findings]
    }


@contextlib.contextmanager
def _little_memory(most_bytes: int) -> Iterator[None]:
    """Less address space inside, where the system can limit it; elsewhere the parent's poll remains."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, before[1]))
    try:
        yield
    except (MemoryError, RecursionError) as error:
        raise EvidenceError("preparing it takes too much memory", fix="") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
