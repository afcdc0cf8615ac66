"""How many questions a device can answer at once: the memory at hand over what the answers need."""

from tunix_rt.plan.activations import Batch
from tunix_rt.plan.footprint import footprint_to_ask
from tunix_rt.plan.memory import answering_parts
from tunix_rt.plan.shape import ModelShape

MOST_ROWS = {"cpu": 64, "cuda": 512}
"""More at once make a CPU no faster, and a GPU hardly."""
USED_SHARE = {"cpu": 0.5, "cuda": 0.85}
"""Of the memory at hand. A CPU's is shared with other programs, a GPU's comes in pieces."""


def rows_that_fit(
    shape: ModelShape,
    *,
    dtype: str,
    device: str,
    length: int,
    max_new_tokens: int,
    free_bytes: int,
    modern: bool = True,
) -> int:
    """The most prompts of `length` tokens whose answers fit into `free_bytes` beside the weights, and at least 1."""
    run = footprint_to_ask(shape, dtype, device)

    def needed(rows: int) -> int:
        batch = Batch(rows=rows, length=length, packed=False, device=device, modern=modern)
        return sum(answering_parts(run, batch, max_new_tokens).values())

    low, high = 1, MOST_ROWS[device]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= USED_SHARE[device] * free_bytes else (low, middle - 1)
    return low
