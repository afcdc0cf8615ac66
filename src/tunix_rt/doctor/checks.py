"""Judgement of the facts: one check per cause, in the order in which one cause hides the next. Pure."""

from dataclasses import replace

from tunix_rt.doctor.facts import Facts
from tunix_rt.doctor.gpu_checks import GPU_CHECKS
from tunix_rt.doctor.host_checks import CONDITION_CHECKS
from tunix_rt.doctor.jax_checks import JAX_CHECKS, TPU_CHECKS
from tunix_rt.doctor.verdict import Ask, Check, skipped
from tunix_rt.doctor.wheel_checks import WHEEL_CHECKS

__all__ = ["EVERY_CHECK", "Ask", "Check", "first_failure", "judge"]

GROUPS = (GPU_CHECKS, TPU_CHECKS, WHEEL_CHECKS, JAX_CHECKS)
EVERY_CHECK = (*GPU_CHECKS, *TPU_CHECKS, *WHEEL_CHECKS, *JAX_CHECKS, *CONDITION_CHECKS)


def judge(facts: Facts, ask: Ask) -> list[Check]:
    """The answer of every check, in order. What was not asked for is `skip`, and so is what an earlier failure hides.

    In a group the first failure hides the rest: whoever has no GPU need not hear that no driver lists it. A device that
    cannot be reached at all hides what engines say of it; whether they are installed is still judged.
    """
    checks: list[Check] = []
    for group in GROUPS:
        hidden_by = ""
        for check in group:
            answer = check(facts, ask)
            if hidden_by:
                answer = skipped(answer.cause, f"hidden by {hidden_by}")
            elif answer.verdict == "fail":
                hidden_by = answer.cause
            checks.append(answer)
        if hidden_by and group in (GPU_CHECKS, TPU_CHECKS) and not facts.nvidia.gpus:
            ask = replace(ask, device="cpu")
    return checks + [check(facts, ask) for check in CONDITION_CHECKS]


def first_failure(checks: list[Check]) -> Check | None:
    """THE cause: the first that fails hides the ones behind it."""
    return next((check for check in checks if check.verdict == "fail"), None)
