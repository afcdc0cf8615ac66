"""`tunix-rt doctor`: will this run on this device, which cause stops it, and the line that mends it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.doctor.facts import Ask, Facts
    from tunix_rt.doctor.selection import DeviceChoice
    from tunix_rt.doctor.selftest import Proof


@click.command()
@click.argument("config", required=False)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "gpu", "tpu"]), help="What a run would ask for.")
@click.option("--backend", type=click.Choice(["torch", "jax"]), help="The engine of the run.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Its type of arithmetic.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where the run would be written; its disk is looked at."
)
@click.option("--prove", is_flag=True, help="Run kernels in a child process and compare them with a float64 reference.")
@click.option("--facts-only", is_flag=True, help="Print the facts as JSON and judge nothing.")
@click.option("--facts", "facts_file", type=click.Path(path_type=Path), help="Judge the facts in this file instead.")
@click.option("--json", "as_json", is_flag=True, help="Print verdict, cause, checks, proof and facts as JSON.")
def doctor(
    config: str | None,
    output: Path | None,
    prove: bool,
    facts_only: bool,
    facts_file: Path | None,
    as_json: bool,
    **named: Any,
) -> None:
    """Say whether a run would work on this computer; exit 4 and the cause when not.

    With CONFIG (a YAML file or the name of a shipped one) device, engine, type and model are taken from it; options win.
    Settings that no run takes together are refused with exit 2.
    Facts written on one computer (--facts-only) are judged on another with --facts.
    """
    from tunix_rt.errors import ConfigError, HardwareError, TunixError

    ask, settings = _what_is_asked(config, named)
    if facts_file is not None and (prove or facts_only):
        raise ConfigError(
            "--facts judges a file; nothing can be run or gathered there", fix="leave out --prove and --facts-only"
        )
    facts = _facts(facts_file, output, ask)
    if facts_only:
        from tunix_rt.cli.views import text
        from tunix_rt.storage import json_text

        text.show_lines(json_text(facts).splitlines())
        return
    choice: DeviceChoice | None = None
    proof: Proof | None = None
    refusal: TunixError | None = None
    try:
        from tunix_rt.cli.plan import refuse_what_no_run_takes
        from tunix_rt.doctor.selection import choose_device

        if settings is not None:
            refuse_what_no_run_takes(settings)
        choice = choose_device(ask, facts)
        if prove:
            click.echo(f"proving {choice.device} in a child process, some seconds", err=True)
            proof = _prove(ask, choice, settings)
    except (ConfigError, HardwareError) as error:
        refusal = error
    _show(facts, ask, choice, proof, refusal, as_json=as_json)


def _what_is_asked(config: str | None, named: dict[str, Any]) -> "tuple[Ask, RunConfig | None]":
    """The Ask, and the configuration where one is named."""
    from tunix_rt.doctor.facts import Ask

    given = {name: value for name, value in named.items() if value is not None}
    if config is None:
        return Ask(**given), None
    from tunix_rt.config.load import find_config, load_config

    settings = load_config(find_config(config), overrides=(), flags={})
    training = settings.training
    return Ask(**{"device": training.device, "backend": training.backend, "dtype": training.dtype} | given), settings


def _facts(facts_file: Path | None, output: Path | None, ask: "Ask") -> "Facts":
    from tunix_rt.doctor.facts import read_facts
    from tunix_rt.doctor.probe import gather_facts

    if facts_file is not None:
        return read_facts(facts_file)
    return gather_facts(output, backend=ask.backend or "torch", device=ask.device)


def _prove(ask: "Ask", choice: "DeviceChoice", settings: "RunConfig | None") -> "Proof":
    """The proof of the device, with the step and the heads of the configured run: of its model only small files are needed."""
    from tunix_rt.doctor.selection import set_environment
    from tunix_rt.doctor.selftest import prove
    from tunix_rt.models.resolve import resolve_model
    from tunix_rt.plan.shape import shape_of
    from tunix_rt.train.device import kernels_of, step_of

    backend = ask.backend or "torch"
    set_environment(choice.device, backend)
    asked: dict[str, Any] = {"backend": backend, "device": choice.device, "dtype": ask.dtype}
    if settings is None:
        return prove(**asked)
    asked |= step_of(settings.training)
    if ask.dtype != settings.training.dtype:  # weights for another type of arithmetic
        asked["master_dtype"] = None
    if not settings.model.model_name_or_path:
        return prove(**asked)
    model = resolve_model(settings.model.model_name_or_path, revision=settings.model.revision, weights="random")
    return prove(**asked, **kernels_of(model.config, shape_of(model.config)))


def _show(
    facts: "Facts",
    ask: "Ask",
    choice: "DeviceChoice | None",
    proof: "Proof | None",
    refusal: Any,
    *,
    as_json: bool,
) -> None:
    """The verdict first. A refusal ends with its exit code here, since its words are part of the answer."""
    from tunix_rt.accelerators import find_accelerator, peaks
    from tunix_rt.cli.views import text
    from tunix_rt.doctor.causes import CAUSES
    from tunix_rt.doctor.checks import judge
    from tunix_rt.doctor.report import not_ready, verdict_lines
    from tunix_rt.doctor.selftest import proof_lines, proof_problem
    from tunix_rt.models.secrets import redacted
    from tunix_rt.storage import to_plain

    checks = judge(facts, ask)
    disproved = proof_problem(proof) if proof else None
    ready = choice is not None and disproved is None
    code = 0 if ready else refusal.exit_code if refusal else 4
    cause = str(getattr(refusal, "cause", ""))
    if as_json:
        problem = (refusal.problem, refusal.fix) if refusal else disproved
        answer = {
            "schema": "tunix-rt/doctor/1",
            "verdict": "ready" if ready else "refused",
            "cause": cause or ("not-proven" if disproved else None),
            "kind": CAUSES[cause].kind if cause in CAUSES else "hardware" if disproved else None,
            "problem": redacted(problem[0]) if problem else None,
            "fix": redacted(problem[1]) if problem else None,
            "asked": ask,
            "choice": choice,
            "proof": proof,
            "checks": checks,
            "facts": facts,
        }
        text.show_json(to_plain(answer))
    elif refusal and not cause:
        raise refusal
    else:
        shown: list[str] = []
        if proof and choice:
            known = find_accelerator(choice.kind, choice.memory_bytes)
            shown = proof_lines(proof, peaks(known, ask.dtype) if known else (None, None))
        lines = verdict_lines(facts, checks, choice if ready else None, ask.device, proven=shown)
        if disproved:
            lines = [f"{not_ready(ask.device)}: {disproved[0]}", f"  fix:  {disproved[1]}", *lines]
        text.show_lines(lines)
    if code:
        raise click.exceptions.Exit(code)
