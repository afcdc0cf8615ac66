"""The `tunix-rt` program: its verbs, what they share, and the one place where an error is printed and becomes an exit code."""

import contextlib
import difflib
import importlib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import click

from tunix_rt import __version__
from tunix_rt.errors import ConfigError, TunixError, did_you_mean
from tunix_rt.ranks import process_exit_code

# Verb -> (module, what it does). The module is imported when the verb is used, so `--help` stays fast.
VERBS = {
    "doctor": ("doctor", "Which device a run uses on this computer, and why."),
    "env": ("doctor", "Create an environment with a torch that fits this computer, or verify one."),
    "models": ("models", "List the model families, and how each is supported."),
    "init": ("init", "Write a commented configuration that fits this computer: five questions, or flags."),
    "convert": ("convert", "Convert a configuration of Axolotl, LLaMA-Factory, TRL or torchtune."),
    "plan": ("plan", "Predict the peak memory of a run, and whether it fits."),
    "data": ("data", "Import a dataset, check it, and show token by token what is trained."),
    "train": ("train", "Run the whole pipeline: doctor, plan, data, train, evaluate, evidence."),
    "export": ("inference", "Write a model for transformers, and check that it computes the same."),
    "push": ("push", "Upload the model of a run to the hub, with a model card; a dry run without --yes."),
    "evaluate": ("inference", "Answer the questions of an eval set with a model, and score the answers."),
    "compare": ("inference", "Compare two runs question by question: gains, losses, and whether they are chance."),
    "generate": ("inference", "Answer one question with a model: its reasoning and its answer."),
    "chat": ("inference", "Chat with a model."),
    "serve": ("serve", "Serve a model to OpenAI clients on this computer."),
    "runs": ("runs", "List the runs in a folder, show one, delete or archive them."),
    "dashboard": ("dashboard", "Look at runs, plans and data in a browser on this computer."),
    "evidence": ("evidence", "Collect a run into a bundle, sign it, verify it, pack it."),
    "completion": ("completion", "Print the completion script of a shell."),
}


EXAMPLES = {
    "--as": "KEY", "--device": "cpu", "--evalset": "eval_v2", "--key": "~/.ssh/id_ed25519", "--output": "runs/NAME",
    "--set": "SECTION.KEY=VALUE", "--to": "../BUNDLE",
}  # fmt: skip
"""Option -> a value of it, for the fix."""
RENDERING_ONLY = ("evaluate", "generate", "chat", "serve")
"""Verbs whose --set takes settings of prompts alone."""


class Group(click.Group):
    """A group that lists its commands with their whole first sentence, which click cuts off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in commands.items() if one])


class Dtype(click.Choice):  # type: ignore[type-arg]
    """A dtype, also by the aliases that a configuration takes."""

    def __init__(self) -> None:
        super().__init__(["float32", "bfloat16", "float16"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from tunix_rt.config.settings import DTYPE_ALIASES

        return super().convert(DTYPE_ALIASES.get(str(value).lower(), value), param, ctx)


NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Shows the help, as a call without arguments is expected to. Not in click 8.1."""


class Verbs(Group):
    """A group that imports a verb when it is used, and turns every error into two lines and an exit code."""

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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with reported(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with reported(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Print an error of click or of tunix-rt, and exit with its code."""
    try:
        yield
    except NO_ARGUMENTS:
        raise
    except (click.UsageError, TunixError) as error:
        refusal = usage_error(error) if isinstance(error, click.UsageError) else error
        report(refusal)
        ctx.exit(process_exit_code(refusal.exit_code))


def report(error: TunixError) -> None:
    """The only place that prints an error. Secrets in it are redacted."""
    from tunix_rt.models.secrets import redacted

    problem = redacted(f"error: {error.problem}").split("\n")
    if sys.stderr.isatty():  # the fix may be a command, which is copied
        from tunix_rt.cli.views.text import folded

        problem = list(map(folded, problem))
    click.echo("\n".join([*problem, redacted(f"  fix: {error.fix}")]), err=True)


def print_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of a defect of tunix-rt, without secrets."""
    from tunix_rt.models.secrets import redacted

    click.echo(redacted("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)


# --- mistakes on the command line ---------------------------------------------------------------------------------------


def usage_error(error: click.UsageError) -> ConfigError:
    """An error of click. Long values are not repeated: one may be a password in the wrong place."""
    from tunix_rt.config.load import quoted

    ctx = error.ctx or click.Context(click.Command("tunix-rt"), info_name="tunix-rt")
    if unknown := re.fullmatch(r"No such command '(.*)'\.", error.message, flags=re.DOTALL):
        return ConfigError(f"{ctx.command_path} has no command {quoted(unknown[1])}", fix=_command(unknown[1], ctx))
    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        return ConfigError(f"{ctx.command_path} has no option {quoted(name)}", fix=_option(name, ctx))
    if isinstance(error, click.BadOptionUsage):
        name, is_flag = error.option_name, "not take a value" in error.message
        value = "without a value" if is_flag else EXAMPLES.get(name, "VALUE")
        return ConfigError(f"{name} {'takes no' if is_flag else 'needs a'} value", fix=f"write {name} {value}")
    usage = f"write {ctx.command_path} {' '.join(ctx.command.collect_usage_pieces(ctx))}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name, is_option = max(error.param.opts, key=len), isinstance(error.param, click.Option)
        missing = name if is_option else error.param.human_readable_name
        fix = f"add it, as {name} {_example(error.param, name)}" if is_option else usage
        return ConfigError(f"{ctx.command_path}: {missing} is missing", fix=fix)
    if isinstance(error, click.BadParameter) and error.param is not None:
        value = re.sub(r"^'(.*?)'(?= is )", lambda one: quoted(one[1]), error.message, flags=re.DOTALL)
        choices = getattr(error.param.type, "choices", ())
        fix = f"use one of: {', '.join(choices)}" if choices else f"`{ctx.command_path} -h` describes it"
        return ConfigError(f"{error.param.get_error_hint(ctx).strip(chr(39))}: {value.rstrip('.')}", fix=fix)
    if extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message, flags=re.DOTALL):
        problem = f"{ctx.command_path}: unexpected extra argument {quoted(extra[1])}"
        return ConfigError(problem, fix=f"{usage}; put quotes around a text with spaces")
    return ConfigError(f"{ctx.command_path}: {error.message.rstrip('.')}", fix=usage)


def _command(name: str, ctx: click.Context) -> str:
    known = ctx.command.list_commands(ctx) if isinstance(ctx.command, click.Group) else []
    return did_you_mean(name, known, before=f"{ctx.command_path} ", otherwise=f"use one of: {', '.join(known)}")


def _option(name: str, ctx: click.Context) -> str:
    from tunix_rt.config.load import setting_named

    options = [option for one in ctx.command.params for option in one.opts if option.startswith("--")]
    setting = setting_named(name.lstrip("-").replace("-", "_")) if "--set" in options else None
    if setting and (ctx.command.name not in RENDERING_ONLY or setting.startswith("data.")):
        return f"it is a setting: --set {setting}=VALUE"
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]}?" if close else f"`{ctx.command_path} -h` lists its options"


def _example(param: click.Parameter, name: str) -> str:
    choices = getattr(param.type, "choices", ())
    return str(choices[0]) if choices else EXAMPLES.get(name, "VALUE")


@click.group(cls=Verbs, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tunix-rt")
def cli() -> None:
    """Fine-tune a language model to show its reasoning, on the accelerator you really have."""


def main() -> None:
    sys.excepthook = print_defect
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character outside of the terminal's encoding is no error
    cli.main(args=sys.argv[1:], prog_name="tunix-rt")
