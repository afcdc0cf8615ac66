"""How a failure of either engine is recognized and reported: memory that runs out, numbers that are not finite, defects."""

import contextlib
import importlib
import math
import subprocess
from collections.abc import Iterator

from tunix_rt.errors import DoesNotFitError, TunixError
from tunix_rt.models.secrets import one_line

REPORT_DEFECT = "this is a defect of the engine; please report it with training_log.txt and doctor.json"
SEE_PLAN = "`tunix-rt plan` lists what to change"

_OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "resource_exhausted", "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)  # fmt: skip
"""In lower case: the messages of PyTorch, XLA and CUDA libraries, which share no exception class."""


def is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def compiler_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What a missing or failing compiler of kernels raises, and `more`. torch's own errors are RuntimeErrors."""
    known = (ImportError, OSError, subprocess.SubprocessError, *more)
    try:
        return (*known, importlib.import_module("triton.errors").TritonError)
    except ImportError:  # without Triton
        return known


@contextlib.contextmanager
def memory_errors_named(where: str) -> Iterator[None]:
    """Raise DoesNotFitError with `where` when memory runs out; the planner adds what was in it and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(f"out of memory in {where}: {one_line(error)}", fix=SEE_PLAN) from error


def refuse_nonfinite(step: int, loss: float, norm: float, *, updated: str = "") -> None:
    """Stop before an update that is not finite; `updated` describes what an update in backward has changed already."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        where = "within" if updated else "before"
        raise TunixError(
            f"step {step}: loss {loss}, gradient norm {norm}; stopped {where} the update{updated}",
            fix="lower training.learning_rate, or inspect the rows of this step; the last checkpoint is intact",
        )


def out_of_range(name: str, dtype: str) -> TunixError:
    """The error of `round_weights` where a weight is too large for `dtype`."""
    return TunixError(
        f"training.save_dtype: {name} has weights that are too large for {dtype}",
        fix="export the last checkpoint with `tunix-rt export`, or train with training.save_dtype: bfloat16",
    )
