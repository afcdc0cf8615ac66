"""What the page of the optimizers advises about sums in bfloat16 follows from what was measured."""

import json
from pathlib import Path

from benchmarks import accumulation_error

ROOT = Path(__file__).parents[2]


def test_sums_in_bfloat16_get_worse_with_every_micro_batch_and_sums_in_float32_stay_exact():
    """Which is what the page advises by."""
    errors = json.loads((ROOT / accumulation_error.RESULT).read_text(encoding="utf-8"))["errors"]
    narrow, wide = ([of[str(count)] for count in accumulation_error.MICRO_BATCHES] for of in errors.values())
    assert narrow[0] == wide[0] == 0
    assert narrow == sorted(narrow) and narrow[-1] > 0.01
    assert max(wide) < 1e-6
