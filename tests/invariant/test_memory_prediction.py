"""The planner is held against the kernel: predicted and measured peak memory of real training, in fresh processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_prediction.py"
ALLOWED_ERROR = 0.25


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's peak of resident memory is read from /proc"
)
@pytest.mark.parametrize("name", ["tiny 8x128", "llama 4x256 checkpointing", "qwen3 3x384"])
def test_the_predicted_peak_is_within_a_quarter_of_the_measured_one(name: str, tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, str(BENCHMARK), "--only", name, "--output", str(written)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (case,) = json.loads(written.read_text())["cases"]
    assert case["measured_bytes"] > 4 * case["parameters"] * 4, "a step holds weights, gradients and two moments"
    assert abs(case["error"]) <= ALLOWED_ERROR, case
