"""The process that computes: `python -m tunix_rt.recompute.child REQUEST ANSWER`. It writes one JSON object a line, as it goes
on, and ends with `done`, `finding` (what is here is not what the run committed to) or `error` (it could not be tried)."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.evidence.segments import Segment
from tunix_rt.recompute import SCHEMA
from tunix_rt.recompute.session import Differs


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    _take_few_cores(request.get("cores"))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    with Path(answer_path).open("w", encoding="utf-8", newline="\n") as file:

        def tell(kind: str, **values: Any) -> None:
            if os.getppid() != request["parent"]:  # whoever asked is gone
                raise SystemExit(1)
            file.write(json.dumps({"kind": kind, **values}, sort_keys=True) + "\n")
            file.flush()

        try:
            if request.get("schema") != SCHEMA:
                raise EvidenceError(
                    "the package of the recorded commit does not know this request", fix="verify with that version"
                )
            {"steps": _steps, "answers": _answers, "gaps": _gaps}[request["what"]](request, tell)
            tell("done")
        except Differs as difference:
            tell("finding", check=difference.check, problem=difference.problem)
        except TunixError as error:
            tell("error", error=type(error).__name__, problem=error.problem, fix=error.fix)


def _take_few_cores(wanted: object) -> None:
    """Stay on as many cores as the run had, where there are more: jax takes a thread for each that it sees."""
    if isinstance(wanted, int) and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if 0 < wanted < len(cores):
            os.sched_setaffinity(0, cores[:wanted])


def _steps(request: dict[str, Any], tell: Any) -> None:
    from tunix_rt.recompute.session import open_session
    from tunix_rt.recompute.steps import Wanted, take_steps

    session = open_session(Path(request["folder"]), model=request["model"], progress=lambda *_: None)
    tell("machine", machine=session.backend.machine_facts(session.engine), total=session.total)
    wanted = Wanted(**{name: set(request[name]) for name in ("checkpoints", "states", "heldout", "answers")})
    for one in request["passes"]:
        segment = Segment(start=one["start"], stop=min(one["stop"], session.total))
        take_steps(session, segment, wanted, scratch=Path(request["scratch"]), tell=tell)


def _answers(request: dict[str, Any], tell: Any) -> None:
    from tunix_rt.recompute.answers import answer_again

    answer_again(request, tell)


def _gaps(request: dict[str, Any], tell: Any) -> None:
    from tunix_rt.recompute.answers import follow_answers

    follow_answers(request, tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
