"""A block of code in which nothing may wait for the GPU."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def nothing_waits(device="cuda"):
    """Raises RuntimeError at the first operation that waits for the device. On a CPU it checks nothing."""
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # torch warns that this check does not know every operation that waits
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
