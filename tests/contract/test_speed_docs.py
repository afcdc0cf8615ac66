"""The page about speed has the figures of the benchmark's files, and says where there are none."""

import json
from pathlib import Path

import pytest

from benchmarks import speed, speed_program
from docs import speed_pages
from tunix_rt.errors import TunixError

GIB = 2**30
ABOUT = {
    "device": "a test GPU", "torch": "9.9", "transformers": "8.8", "triton": None, "liger-kernel": "7.7", "driver": "6",
}  # fmt: skip
SETTINGS = {"cap_gib": 8.0, "config": "some.yaml", "rounds": 3, "steps": 5, "contenders": ["ours", "trainer"]}
JOB = {
    "preset": "gemma-2b", "parameters": 2_506_172_416, "rows": 8, "length": 2048, "micro_batches": 1,
    "tokens": [16_000, 16_056], "positions": [16_384, 16_384],
}  # fmt: skip


def round_of(tokens_per_second: float, gib: float, first: float) -> dict[str, object]:
    return {
        "seconds": 2.0, "tokens_per_second": tokens_per_second, "positions_per_second": 1.1 * tokens_per_second,
        "tflops": tokens_per_second / 100, "load_seconds": 1.5, "first_step_seconds": first,
        "peak_allocated_bytes": gib * GIB, "peak_reserved_bytes": gib * GIB,
    }  # fmt: skip


def case_of(**contenders: list[dict[str, object]]) -> dict[str, object]:
    kept = {name: {"words": speed.WORDS[name], "job": JOB, "rounds": rounds} for name, rounds in contenders.items()}
    case = {"preset": "gemma-2b", "dense_tflops": [[800.0, 790.0], [810.0]], "contenders": kept}
    speed.summarise(case)
    return case


def write(root: Path, name: str, found: dict[str, object]) -> None:
    path = root / speed_pages.RESULTS / f"speed_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": ABOUT, "settings": SETTINGS, **found}))


def test_what_was_not_measured_is_said_with_the_command_that_measures_it(tmp_path):
    page = speed_pages.page(tmp_path)
    for title, _, command, _ in speed_pages.PARTS:
        assert f"## {title}\n\nNot measured yet; `{speed_pages.COMMAND} {command}` measures it." in page
    assert "program --profile 4` measures it" in page and "same_losses` measures it" in page
    assert "|" not in page


def test_the_table_of_a_profile_is_the_one_that_was_printed(tmp_path):
    path = tmp_path / speed_pages.RESULTS / "speed_profile.txt"
    path.parent.mkdir(parents=True)
    path.write_text(
        "# x\n\nWhere the time of a step went: 9 ms.\n\n| part | ms |\n|---|---|\n| all | 9 |\n\n## The longest of each part\n"
    )
    assert "9 ms.\n\n| part | ms |\n|---|---|\n| all | 9 |\n\n`" in speed_pages.page(tmp_path)


def test_a_figure_is_the_median_of_the_rounds_and_a_contender_without_one_says_why(tmp_path):
    case = case_of(
        ours=[round_of(40_000, 45, 30.0), round_of(39_000, 45, 1.0), round_of(41_000, 46, 1.0)],
        trainer=[round_of(20_000, 100, 0.5)],
        eager=[{"out_of_memory": "CUDA out of memory", "peak_allocated_bytes": 130 * GIB}],
        liger=[{"skipped": "liger_kernel cannot be imported here"}],
        compiled=[],
    )
    write(tmp_path, "compare", {"cases": [case]})
    page = speed_pages.page(tmp_path)
    assert "| tunix-rt | 40,000 | 400 | 50.0% | 46.0 | 30.0 | 1.00 |" in page
    assert "| transformers' Trainer | 20,000 | 200 | 25.0% | 100.0 | 0.5 | 2.00 |" in page
    assert "| transformers, a plain loop | out of memory, 130.0 GiB allocated |" in page
    assert "skipped: liger_kernel cannot be imported here" in page and "not measured: the time was up" in page
    assert "ran at 800 TFLOP/s" in page and "8 x 2,048 positions a step, 97.8% of them tokens" in page
    assert "a test GPU, torch 9.9, transformers 8.8, Liger 7.7, driver 6." in page
    del case["contenders"]["ours"]["median"]["tflops"]
    write(tmp_path, "compare", {"cases": [case]})
    with pytest.raises(TunixError, match=r"speed_compare\.json lacks or misspells 'tflops'"):
        speed_pages.page(tmp_path)


def test_the_figure_of_the_program_leaves_the_first_steps_out(tmp_path):
    steps = [
        {"loss": 9.0 - n, "tokens": 1000, "seconds": 0.5 if n >= 5 else 7.0, "peak_bytes": 3 * GIB} for n in range(8)
    ]
    found = speed_program.program_figures(steps, [20.0, 27.0, 34.0, 41.0, 48.0, 49.0, 50.0, 51.0])
    assert found["tokens_per_second"] == 2000 and found["tokens_per_second_by_the_wall"] == 1000
    told = {"ended": "x", "compile_seconds": 12.5, "tflops": 400.4, "share_of_dense": 0.505}
    write(tmp_path, "program", {**found, **told, "dense_tflops_before": [790.0], "dense_tflops_after": [801.0]})
    page = speed_pages.page(tmp_path)
    assert "first five | 2,000 |" in page and "command to the end of the first step | 20.0 |" in page
    assert "benchmarks/configs/some.yaml" in page and "790 to 801" in page
    assert "| 400, 50.5% |" in page and "compilation, before the first step | 12.5 |" in page


def test_the_other_parts_are_read_from_their_files(tmp_path):
    run = {"job": JOB, "steps": 4, "warmup_steps": 4, "warmup_seconds": 31.0, **round_of(30_000, 40, 9.0)}
    old = {**run, "job": {**JOB, "micro_batches": 4, "rows": 1, "length": 128}, "steps": 138, "seconds": 50.0}
    write(tmp_path, "epoch", {"runs": {"ours": run, "predecessor": old}})
    start = {"first_step_after_seconds": 61.5, "first_step_seconds": 20.25, "compile_seconds": None}
    start["shown"] = ["Using device: cuda", "step 1/3"]
    write(tmp_path, "start", {"starts": {"cold": start, "warm": {"error": "no step was taken"}}})
    write(tmp_path, "least_memory", {"cases": [case_of(ours=[round_of(28_000, 7, 12.0)])]})
    times = {"ours": 0.25, "plain": 0.2}
    write(tmp_path, "cpu", {
        "job": JOB, "threads": 2, "median_seconds": times, "fastest_seconds": times, "ratio": 1.25, "ratio_of_fastest": 1.24,
    })  # fmt: skip
    page = speed_pages.page(tmp_path)
    assert "Ours is 25.0 times as fast" in page and "| predecessor | 4 of 1 x 128 | 138 | 50.00 |" in page
    assert "| cold | 61.5 | none | 20.2 |" in page and "| warm | no step was taken |" in page
    assert "```text\nUsing device: cuda\nstep 1/3\n```" in page
    assert "may take 8 GiB" in page and "| 28,000 |" in page
    assert "| tunix-rt | 250 | 250 |" in page and "| ratio | 1.25 | 1.24 |" in page
