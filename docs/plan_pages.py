"""The example in docs/guides/plan.md: what the program says now, so that no figure of it is older than the code."""

from pathlib import Path

from click.testing import CliRunner

from tunix_rt.cli.main import cli

PAGE = Path("docs/guides/plan.md")
ASKED = ("plan", "submission_local_gpu", "--on", "8gb")


def example_block() -> str:
    """The answer for a card that is too small, without its table of phases."""
    said = CliRunner().invoke(cli, list(ASKED), env={"COLUMNS": "80"}).stdout
    lines, skipping = [], False
    for line in said.splitlines():
        if line.startswith(" phase"):
            skipping = True
        elif skipping and line and not line.startswith(" "):
            skipping = False
        if not skipping and line.strip():
            lines.append(line.rstrip())
    return "\n".join(["```text", *lines, "```"])
