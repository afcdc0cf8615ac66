"""The `tunix-rt` program: its verbs, and the one place where an error becomes words and an exit code."""

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
    "doctor": ("doctor", "Which device will be used on this computer, and why."),
    "env": ("env", "Make an environment with the torch that fits this computer, or verify one."),
    "plan": ("plan", "Predict the peak memory of a run, and whether it fits."),
    "data": ("data", "Bring a dataset in, check it, and see token by token what is trained."),
    "train": ("train", "Run the whole pipeline: doctor, plan, data, train, evaluate, evidence."),
    "export": ("export", "Write a model for transformers, proven to be the one it was made from."),
    "evaluate": ("evaluate", "Ask a model the questions of an eval set, and score its answers."),
    "compare": (
        "evaluate",
        "Two runs, question by question: what was gained, what was lost, and whether it is chance.",
    ),
    "generate": ("generate", "Ask a model one question, and see its reasoning and its answer."),
    "chat": ("generate", "Talk with a model."),
    "runs": ("runs", "List the runs in a folder, or show one."),
    "evidence": ("evidence", "Collect what a run left behind into a bundle, and check either."),
}


class Verbs(click.Group):
    """A group that knows its verbs by name only, and turns a TunixError into two lines and an exit code."""

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
            formatter.write_dl([(name, words) for name, (_, words) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            vars(error)["message"] = without_values(error.message)  # declared final, and said from here by click
            raise
        except TunixError as error:
            report(error)
            ctx.exit(error.exit_code)


def report(error: TunixError) -> None:
    """The only place that prints an error. A token in it, of whatever setting or path it was part, is struck out."""
    from tunix_rt.models.secrets import redacted

    click.echo(redacted(f"error: {error.problem}\n  fix: {error.fix}"), err=True)


def without_values(message: str) -> str:
    """What click says of a mistake, without the value that was given: it may be a password in the wrong place."""
    from tunix_rt.models.secrets import redacted

    message = re.sub(r"^(Got unexpected extra arguments?) \(.*\)$", r"\1", message, flags=re.DOTALL)
    return redacted(re.sub(r"^'.*?' is not ", "it is not ", message, flags=re.DOTALL))


def say_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of a defect of ours, without secrets."""
    from tunix_rt.models.secrets import redacted

    click.echo(redacted("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)


@click.group(cls=Verbs, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="tunix-rt")
def cli() -> None:
    """Fine-tune a language model to show its reasoning, on the accelerator you really have."""


def main() -> None:
    sys.excepthook = say_defect
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that this terminal cannot show ends nothing
    cli.main(args=sys.argv[1:], prog_name="tunix-rt")
