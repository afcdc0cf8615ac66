"""`tunix-rt doctor`: which device a run would use here, and why."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tunix_rt.doctor.checks import Check, DeviceChoice
    from tunix_rt.doctor.probe import Facts
    from tunix_rt.errors import TunixError


@click.command()
@click.option(
    "--device",
    default="auto",
    type=click.Choice(["auto", "cpu", "cuda", "gpu", "tpu"]),
    help="What a run would ask for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print facts, checks and choice as JSON.")
def doctor(device: str, as_json: bool) -> None:
    """Say which device a run would use on this computer, and why. Exit 4 when what is asked for cannot be used."""
    from tunix_rt.cli import text
    from tunix_rt.doctor.checks import choose_device, run_checks
    from tunix_rt.doctor.probe import gather_facts
    from tunix_rt.errors import TunixError
    from tunix_rt.rundir import to_plain

    facts = gather_facts()
    checks = run_checks(facts)
    choice: DeviceChoice | None = None
    refusal: TunixError | None = None
    try:
        choice = choose_device(device, facts)
    except TunixError as error:
        refusal = error
    if as_json:
        refused = {"problem": refusal.problem, "fix": refusal.fix} if refusal else None
        text.show_json(to_plain({"facts": facts, "checks": checks, "choice": choice, "refused": refused}))
    else:
        text.show_lines(_lines(facts, checks, choice, refusal))
    if refusal:
        raise refusal


def _lines(
    facts: "Facts", checks: "list[Check]", choice: "DeviceChoice | None", refusal: "TunixError | None"
) -> list[str]:
    """Verdict, what to do, facts. A refusal is said again, on stderr, when the program ends."""
    from tunix_rt.doctor.words import device_lines, torch_version_text

    lines = (
        [f"ready: {choice.device} ({choice.reason})"]
        if choice
        else [f"not ready: {refusal.problem if refusal else ''}"]
    )
    for check in checks:
        if check.verdict in ("fail", "warn"):
            lines += [f"  {check.verdict}: {check.why} ({check.saw})", f"    do: {check.fix}"]
    lines += ["", *(device_lines(choice, facts) if choice else [f"Platform: {facts.os}, Python {facts.python}"])]
    lines += [f"CPU: {facts.cpu}, {facts.cpu_cores} cores"]
    lines += [f"GPU {gpu.index}: {gpu.name}, {gpu.total_bytes / 2**30:.1f} GiB" for gpu in facts.gpus]
    lines += [", ".join(torch_version_text(facts).splitlines())]
    return [*lines, f"Disk: {facts.disk_free_bytes / 2**30:.1f} GiB free at {facts.disk_path}"]
