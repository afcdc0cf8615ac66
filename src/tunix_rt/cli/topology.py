"""`tunix-rt plan CONFIG --topology v5e:2x4`: what the TPU's own compiler says of the training step, without a TPU."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunix_rt.backends.jax_ahead import Verdict
    from tunix_rt.config import RunConfig

NO_TPU = "said by the TPU's compiler; no TPU was used, and speed is not part of it"


def run_topology(settings: "RunConfig", topology: str, as_json: bool, *, limit_seconds: float | None = None) -> None:
    """Show the verdict on stdout, with progress on stderr. A DoesNotFitError when the compiler refuses."""
    from tunix_rt.backends.jax_ahead import LIMIT_SECONDS, Case, ask_compiler
    from tunix_rt.cli import text
    from tunix_rt.errors import ConfigError
    from tunix_rt.models import resolve_model
    from tunix_rt.plan.jax_memory import row_length
    from tunix_rt.rundir import to_plain

    if not settings.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    # Only config.json is read: the step is compiled from shapes.
    source = resolve_model(settings.model.model_name_or_path, revision=settings.model.revision, weights="random")
    case = Case(
        config=source.config,
        training=settings.training,
        tokens=row_length(settings.data.max_length, "tpu"),  # as a run fills its rows up
        topology=topology,
        implementation=settings.model.implementation,
    )
    found = ask_compiler(
        case,
        say=lambda line: print(text.printable(line), file=sys.stderr, flush=True),
        limit_seconds=limit_seconds or LIMIT_SECONDS,
    )
    if as_json:
        text.show_json(to_plain({"model": source.name, "fits": found.fits, "verdict": found}))
    else:
        show_verdict(found)
    refuse_if_refused(found)


def show_verdict(found: "Verdict") -> None:
    """One line with the verdict, one with what was compiled, then the bytes of one device by kind."""
    from tunix_rt.cli import text

    where = f"each of {found.devices} x {found.device_kind} ({found.topology})"
    of_usable = f" of {text.gib(found.usable)}" if found.usable else ""
    lines = [
        f"{found.parameters:,} parameters in {found.replicas} {'copy' if found.replicas == 1 else 'copies'}, "
        f"{found.accumulation} x {found.rows} rows of {found.tokens} tokens a step",
        found.step,
        f"jax {found.versions['jax']}, libtpu {found.versions['libtpu']}, compiled in {text.duration(found.seconds)}; {NO_TPU}",
    ]
    if found.memory is None:
        text.show_lines([f"does not fit: refused for {where}", *lines])
        return
    text.show_lines([f"fits: {text.gib(found.memory.total)}{of_usable} on {where}", *lines])
    kinds = ("arguments", "outputs", "aliased", "temporaries", "code", "total", "peak")
    rows = [(kind, f"{getattr(found.memory, kind) / 2**30:.3f}") for kind in kinds]
    text.show_table(("GiB on a device", ""), rows, numbers=[""])


def refuse_if_refused(found: "Verdict") -> None:
    from tunix_rt.cli import text
    from tunix_rt.errors import DoesNotFitError

    if found.refusal is None:
        return
    words = next(iter(found.refusal.message.splitlines()), "")
    fixes = [
        "training.data_replicas: 1, which cuts the state over all devices" if found.replicas > 1 else "",
        "training.gradient_checkpointing: true",
        "training.master_dtype: bfloat16",
        "fewer rows or shorter ones",
        "a topology with more chips",
    ]
    raise DoesNotFitError(
        f"the compiler refuses this step for {found.topology}: {text.gib(found.refusal.needed)} or more wanted on a device of "
        f"{text.gib(found.refusal.usable)}: {words}",
        fix=f"try, one after the other: {'; '.join(fix for fix in fixes if fix)}",
    )
