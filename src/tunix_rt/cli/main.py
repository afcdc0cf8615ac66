"""The `tunix-rt` program: its verbs, and the one place where an error is printed and becomes an exit code."""

import importlib
import io
import re
import sys
import traceback
from types import TracebackType
from typing import Any

import click

from tunix_rt import __version__
from tunix_rt.errors import TunixError

# Verb -> (module, what it does). The module is imported when the verb is used, so `--help` stays fast.
VERBS = {
    "doctor": ("doctor", "Which device a run uses on this computer, and why."),
    "env": ("doctor", "Create an environment with a torch that fits this computer, or verify one."),
    "plan": ("plan", "Predict the peak memory of a run, and whether it fits."),
    "data": ("data", "Import a dataset, check it, and show token by token what is trained."),
    "train": ("train", "Run the whole pipeline: doctor, plan, data, train, evaluate, evidence."),
    "export": ("inference", "Write a model for transformers, and check that it computes the same."),
    "evaluate": ("inference", "Answer the questions of an eval set with a model, and score the answers."),
    "compare": ("inference", "Compare two runs question by question: gains, losses, and whether they are chance."),
    "generate": ("inference", "Answer one question with a model: its reasoning and its answer."),
    "chat": ("inference", "Chat with a model."),
    "runs": ("runs", "List the runs in a folder, or show one."),
    "evidence": ("evidence", "Collect a run into a bundle, sign it, verify it, pack it."),
}


class Verbs(click.Group):
    """A group that imports a verb when it is used, and turns a TunixError into two lines and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"tunix_rt.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs, in the order of the pipeline"):
            formatter.write_dl([(name, title) for name, (_, title) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            vars(error)["message"] = without_values(error.message)  # declared final, and printed by click
            raise
        except TunixError as error:
            report(error)
            ctx.exit(error.exit_code)


def report(error: TunixError) -> None:
    """The only place that prints an error. Secrets in it are redacted."""
    from tunix_rt.models.secrets import redacted

    problem = redacted(f"error: {error.problem}").split("\n")
    if sys.stderr.isatty():  # the fix may be a command, which is copied
        from tunix_rt.cli.views.text import folded

        problem = list(map(folded, problem))
    click.echo("\n".join([*problem, redacted(f"  fix: {error.fix}")]), err=True)


def without_values(message: str) -> str:
    """A message of click without the given value, which may be a password in the wrong place."""
    from tunix_rt.models.secrets import redacted

    message = re.sub(r"^(Got unexpected extra arguments?) \(.*\)$", r"\1", message, flags=re.DOTALL)
    return redacted(re.sub(r"^'.*?' is not ", "it is not ", message, flags=re.DOTALL))


def print_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of a defect of tunix-rt, without secrets."""
    from tunix_rt.models.secrets import redacted

    click.echo(redacted("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)


@click.group(cls=Verbs, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="tunix-rt")
def cli() -> None:
    """Fine-tune a language model to show its reasoning, on the accelerator you really have."""


def main() -> None:
    sys.excepthook = print_defect
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character outside of the terminal's encoding is no error
    cli.main(args=sys.argv[1:], prog_name="tunix-rt")
