"""Whether what a run left behind is true, also of one that was stopped, killed or failed."""

from collections.abc import Iterator
from pathlib import Path

from tunix_rt.evidence.checks import batches, chain, commitment, differs
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.facts import Run
from tunix_rt.runs.record import RunRecord


def list_problems(folder: Path, *, may_lack_weights: bool = False) -> list[str]:
    """Findings of the verifier. Of an unfinished run it judges only the files, so what they state is checked here."""
    done = examine(folder, may_lack_weights=may_lack_weights)
    if done.findings or done.level == "L1":
        return [f"{one.level} {one.check}: {one.problem}" for one in done.findings]
    return [f"unfinished: {problem}" for problem in _unfinished_problems(done.record)]


def _unfinished_problems(record: RunRecord) -> Iterator[str]:
    config, committed, result, doctor = record.config, record.commitment, record.result, record.doctor
    if result is None or result.status == "completed":
        yield "result.json: missing, or of a run that should be at L1"
    if config is None or committed is None or result is None or doctor is None:
        return  # ended before it committed to anything
    run = Run(
        record=record, config=config, commitment=committed, result=result, doctor=doctor,
        run_id=record.sums["precommit.json"], metric_lines=tuple(record.raw_lines("metrics.jsonl")),
    )  # fmt: skip
    for check in (commitment, chain, batches):
        yield from check(run)
    last = run.metrics[-1] if run.metrics else None
    ending = {
        "run_id": run.run_id, "device": run.device, "steps_completed": run.total, "metrics_head": run.heads[-1],
        "final_loss": last and last.loss, "final_loss_hex": last and last.loss_hex,
    }  # fmt: skip
    for name, expected in ending.items():
        if (recorded := getattr(result, name)) is not None:
            yield from differs("result.json", name, recorded, expected)
    for entry in record.checkpoints:
        if entry.step > run.total or entry.metrics_head != run.heads[entry.step]:
            yield f"checkpoints.json: step {entry.step}: metrics_head is not the hash of its line in metrics.jsonl"
