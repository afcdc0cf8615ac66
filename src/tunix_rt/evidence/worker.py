"""The process that reads and computes for `verify`: `python -m tunix_rt.evidence.worker REQUEST ANSWER`, under the limits of
`sandbox`. It writes JSON lines as it goes: `prepared`, `progress`, at last `outcome`, or `error` for what could not be tried."""

import contextlib
import dataclasses
import json
import logging
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.evidence.claims import Finding, Level
from tunix_rt.evidence.inputs import Inputs

PREPARING_BYTES = 3 * 2**30
"""Address space while templates, tokenizers and data of a stranger are read."""


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    with Path(answer_path).open("w", encoding="utf-8", newline="\n") as file:
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

    done = examine(
        Path(request["folder"]), inputs=_inputs(request), weights=Path(request["weights_root"]),
        may_lack_weights=request["may_lack_weights"],
    )  # fmt: skip
    run = done.run
    about: dict[str, Any] = {}
    if run is not None:
        machine = run.record.processes[-1].machine
        about = {
            "backend": run.backend, "threads": machine.threads, "source_sha256": run.commitment.source_sha256,
            "numerics": run.commitment.numerics, "seconds": run.result.seconds,
            "commit": run.record.manifest.commit if run.record.manifest else None,
            "final_model": any(name.startswith("final_model/") and name.endswith(".safetensors") for name in run.record.run_sums),
        }  # fmt: skip
    return {
        "findings": [dataclasses.asdict(one) for one in done.findings],
        "claims": [dataclasses.asdict(one) for one in done.claims],
        "notes": done.notes, "passed": done.passed, "about": about,
    }  # fmt: skip


# --- L2 to L4 ---------------------------------------------------------------------------------------------------------


def _compute(request: Mapping[str, Any], file: IO[str]) -> dict[str, Any]:
    from tunix_rt.evidence.facts import completed_run
    from tunix_rt.evidence.replay.session import prepare_run
    from tunix_rt.runs.record import RunRecord

    run = completed_run(RunRecord(Path(request["folder"])))
    if run is None:
        raise EvidenceError("the run is not completed", fix="")
    to_train = request["segments"] is not None
    findings: list[Finding] = []
    try:
        with _little_memory():
            ready = prepare_run(run, _inputs(request), to_train=to_train)
    except (EvidenceError, MemoryError, RecursionError) as error:
        problem = (
            error.problem
            if isinstance(error, EvidenceError)
            else f"preparing it takes more than {PREPARING_BYTES >> 30} GiB"
        )
        return _outcome([Finding(level="L3" if to_train else "L2", check="inputs", problem=problem)])
    _write(file, "prepared")
    from tunix_rt.evidence.replay.replay import Work, compute

    def progress(what: str, done: int, total: int) -> None:
        _write(file, "progress", what=what, done=done, total=total)

    work = Work(
        run=run, ready=ready, weights=Path(request["weights"]) if request["weights"] else None,
        weights_root=Path(request["weights_root"]), scratch=Path(request["scratch"]), segments=request["segments"],
        whole=request["whole"], root=request["root"], nonce=request["nonce"], progress=progress,
    )  # fmt: skip
    made = compute(work)
    return _outcome(
        [*findings, *made.findings],
        notes=made.notes,
        passed=made.passed,
        recomputed=made.recomputed,
        details=made.details,
    )


def _outcome(findings: list[Finding], **values: Any) -> dict[str, Any]:
    passed: list[Level] = []
    empty: dict[str, Any] = {"notes": [], "passed": passed, "recomputed": {}, "details": {}}
    return {"findings": [dataclasses.asdict(one) for one in findings]} | empty | values


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Less address space inside, where the system can limit it; elsewhere the parent's poll remains."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (PREPARING_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


if __name__ == "__main__":
    main(*sys.argv[1:])
