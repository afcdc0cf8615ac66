"""docs/reference/speed.md: how fast the PyTorch engine trains beside other loops, read from benchmarks/results/speed_*.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.markdown import WRITTEN, table
from tunix_rt.errors import TunixError

RESULTS = Path("benchmarks/results")
COMMAND = "python -m benchmarks.speed"
GIB = 2**30


def page(root: Path) -> str:
    """Every part says which command measures it; a part whose file is not there says that it was not measured."""
    parts = [
        "# Speed, measured",
        WRITTEN,
        "Raw values, all rounds, versions and settings are in `benchmarks/results/speed_*.json`. In each round every contender "
        "is built anew with the same random weights, warms up, takes its timed steps on the same packed rows, and is freed; the "
        "order turns from round to round, and a figure is the median over the rounds.",
        "All keep their weights in bfloat16, clip at 1.0 and read the loss after every step. tunix-rt keeps the moments of AdamW "
        "in float32 and rounds updates stochastically; torch's AdamW, which the others use, keeps moments in bfloat16 and "
        "rounds to nearest. No example sees its neighbours, unless the name says so: that is another job, and a cheaper one.",
        "A token is one of the data: padding counts as none. An operation is one that the method needs: six per matrix parameter "
        "and token, the head only where a target is predicted, attention only inside an example; nothing that is computed "
        "twice counts twice. The first step includes compilation, with what the compiler's cache held.",
    ]
    for title, name, command, lines in PARTS:
        parts += [f"## {title}", *_part(root, name, command, lines)]
    parts += ["## Where the time of a step goes", *_profile(root), "## The same losses", *_same_losses(root)]
    return "\n\n".join(parts) + "\n"


def _part(root: Path, name: str, command: str, lines: Callable[[Any], list[str]]) -> list[str]:
    path = root / RESULTS / f"speed_{name}.json"
    if not path.is_file():
        return [f"Not measured yet; `{COMMAND} {command}` measures it."]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [*lines(found), f"`{COMMAND} {command}`; {_on(found)}."]
    except (KeyError, TypeError, ValueError) as error:
        raise TunixError(
            f"{RESULTS / path.name} lacks or misspells {error}", fix=f"measure it again: {COMMAND} {command}"
        ) from error


def _profile(root: Path) -> list[str]:
    """The table of `--profile`, as the program printed it."""
    path = root / RESULTS / "speed_profile.txt"
    if not path.is_file():
        return [f"Not measured yet; `{COMMAND} program --profile 4` measures it."]
    text = path.read_text(encoding="utf-8")
    begins, ends = text.index("Where the time of a step went"), text.index("## The longest of each part")
    return [
        "What `tunix-rt train --profile 4` printed of the program above, in a run of its own. Its product is the fastest of "
        "five short series; the one of the other tables is what the GPU holds for seconds, at the clocks that its power "
        "allows, and is lower.",
        text[begins:ends].strip(),
        f"`{COMMAND} program --profile 4`; the longest kernels of each part are in `{RESULTS / path.name}`.",
    ]


def _same_losses(root: Path) -> list[str]:
    path = root / RESULTS / "same_losses.json"
    command = "python -m benchmarks.same_losses"
    if not path.is_file():
        return [f"Not measured yet; `{command}` measures it."]
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        (words, *(f"{100 * found[name][key]:.2f}" for key in ("mean", "largest", "at_the_end")))
        for name, words in (
            ("noise", "plain operations, the same sums in another order"),
            ("kernels and compiled layers", "the head's kernel and compiled layers"),
        )
    ]
    return [
        f"{len(found['losses']['plain'])} steps of tiny-gemma3 on dev-reasoning-v2, bfloat16 compute, against PyTorch "
        "operations without a kernel of ours and without a compiler, which is what the engine computed before it had them. "
        "Differences of the loss in percent, step by step, and of the mean of the last 50 steps. They are called the same where "
        "the mean is at most three times that of the first line, which is noise. Weights are in float32, so the kernels that "
        "update bfloat16 ones have no part in it; tests hold those against float64.",
        table(("curve", "mean", "largest", "at the end"), rows),
        f"`{command}`; {found['about']['device']}, torch {found['about']['torch']}.",
    ]


def _on(found: Mapping[str, Any]) -> str:
    about = found["about"]
    named = {
        "torch": "torch", "transformers": "transformers", "triton": "Triton", "liger-kernel": "Liger", "driver": "driver",
    }  # fmt: skip
    said = [f"{word} {about[key]}" for key, word in named.items() if about.get(key)]
    return ", ".join([about["device"] if about["device"] != "cpu" else "a CPU", *said])


def _gib(count: float | None) -> str:
    return "" if count is None else f"{count / GIB:.1f}"


def _seconds(count: float | None) -> str:
    return "none" if count is None else f"{count:.1f}"


def _failed(kept: Mapping[str, Any]) -> str:
    """Why a contender has no figure, in the words of the file."""
    last = kept["rounds"][-1] if kept["rounds"] else {}
    if "out_of_memory" in last:
        return f"out of memory, {_gib(last.get('peak_allocated_bytes'))} GiB allocated"
    return f"skipped: {last['skipped']}" if "skipped" in last else last.get("error", "not measured: the time was up")


def _rows_of(case: Mapping[str, Any]) -> list[tuple[str, ...]]:
    ours = case["contenders"].get("ours", {}).get("median")
    rows = []
    for kept in case["contenders"].values():
        if (said := kept.get("median")) is None:
            rows.append((kept["words"], _failed(kept), *[""] * 5))
            continue
        faster = f"{ours['tokens_per_second'] / said['tokens_per_second']:.2f}" if ours else ""
        rows.append((
            kept["words"], f"{said['tokens_per_second']:,.0f}", f"{said['tflops']:,.0f}", f"{said['share_of_dense']:.1%}",
            _gib(said.get("peak_allocated_bytes")), f"{said['first_step_seconds']:.1f}", faster,
        ))  # fmt: skip
    return rows


COLUMNS = ("loop", "tokens/s", "TFLOP/s", "of the dense product", "peak GiB", "first step, s", "tunix-rt is faster by")


def _case(case: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    job = next(iter(case["contenders"].values()))["job"]
    full = sum(job["tokens"]) / sum(job["positions"])
    stopped = [f"Stopped early: {case['stopped']}."] if "stopped" in case else []
    return [
        f"{job['preset']}, {job['parameters']:,} parameters, {job['rows']} x {job['length']:,} positions a step, {full:.1%} of "
        f"them tokens; a dense bfloat16 product of 8,192 on each side ran at {case['dense_tflops_median']:,.0f} TFLOP/s in the "
        f"same run; {settings['rounds']} rounds of {settings['steps']} timed steps.",
        *stopped,
        table(COLUMNS, _rows_of(case)),
    ]


def _cases(found: Mapping[str, Any]) -> list[str]:
    settings = found["settings"]
    others = (
        "The other loops attend as transformers does by itself (`sdpa`, with a mask over the packed row), ours by flash "
        "attention over each example; no loop with flash attention for packed rows was at hand to stand beside it."
    )
    return [
        *([others] if settings["contenders"] != ["ours"] else []),
        *(p for case in found["cases"] for p in _case(case, case.get("settings", settings))),
    ]


def _least(found: Mapping[str, Any]) -> list[str]:
    cap = found["settings"]["cap_gib"]
    rounds = [one for case in found["cases"] for kept in case["contenders"].values() for one in kept["rounds"]]
    used = _gib(max((one.get("device_used_bytes") or 0 for one in rounds), default=None))
    return [
        f"The allocator may take {cap:g} GiB: Adafactor in backward, every layer computed again. With CUDA's own context, "
        f"which depends on the card, {used} GiB of the device were in use.",
        *(part for case in found["cases"] for part in _case(case, found["settings"])),
    ]


def _program(found: Mapping[str, Any]) -> list[str]:
    dense = [*found["dense_tflops_before"], *found["dense_tflops_after"]]
    rows = [
        ("tokens/s, median of the steps after the first five", f"{found['tokens_per_second']:,.0f}"),
        ("tokens/s of the same steps by the wall, everything between them included",
         f"{found['tokens_per_second_by_the_wall']:,.0f}"),
        ("TFLOP/s, and share of the dense product", f"{found['tflops']:,.0f}, {found['share_of_dense']:.1%}"),
        ("seconds of a step, median", f"{found['step_seconds']:.4f}"),
        ("peak GiB allocated", f"{found['peak_bytes'] / GIB:.2f}"),
        ("seconds of compilation, before the first step", _seconds(found["compile_seconds"])),
        ("seconds of the first step", f"{found['first_step_seconds']:.1f}"),
        ("seconds from the command to the end of the first step", f"{found['first_step_after_seconds']:.1f}"),
        ("loss of the first and the last step",
         f"{found['metrics'][0]['loss']:.4f}, {found['metrics'][-1]['loss']:.4f}"),
        ("dense product before and after, TFLOP/s", f"{min(dense):,.0f} to {max(dense):,.0f}"),
    ]  # fmt: skip
    return [
        f"`tunix-rt train` with `benchmarks/configs/{found['settings']['config']}`, read from its `metrics.jsonl`, "
        f"{len(found['metrics'])} steps; it was {found['ended']}.",
        table(("measure", "value"), rows),
    ]


def _epoch(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, run in found["runs"].items():
        job = run["job"]
        shape = f"{job['micro_batches']} of {job['rows']} x {job['length']:,}"
        if "seconds" not in run:
            rows.append((name, shape, f"{run['steps']}", _failed({"rounds": [run]}), "", "", ""))
            continue
        rows.append((
            name, shape, f"{run['steps']}", f"{run['seconds']:.2f}", f"{run['load_seconds']:.1f}",
            f"{run['warmup_seconds']:.1f} ({run['warmup_steps']})", f"{run['tokens_per_second']:,.0f}",
        ))  # fmt: skip
    runs = found["runs"]
    faster = (
        [
            f"Ours is {runs['predecessor']['seconds'] / runs['ours']['seconds']:.1f} times as fast. Its updates are fewer and "
            "of more examples each."
        ]
        if all("seconds" in runs.get(name, {}) for name in ("ours", "predecessor"))
        else []
    )
    columns = ("way", "micro-batches of a step", "updates", "seconds", "load, s", "warm-up, s (steps)", "tokens/s")
    return [
        "One epoch of dev-reasoning-v2 after load and compilation. The predecessor's way is a plain loop over single examples "
        "padded to 128 tokens, four to an update, with transformers' Adafactor; ours has AdamW.",
        table(columns, rows),
        *faster,
    ]


def _start(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            name,
            f"{start['first_step_after_seconds']:.1f}",
            _seconds(start["compile_seconds"]),
            f"{start['first_step_seconds']:.1f}",
        )
        if "first_step_after_seconds" in start
        else (name, start["error"], "", "")
        for name, start in found["starts"].items()
    ]
    shown = [line for line in found["starts"].get("cold", {}).get("shown", ()) if line]
    seen = ["What is seen meanwhile:", "```text\n" + "\n".join(shown) + "\n```"] if shown else []
    return [
        f"`tunix-rt train` with `benchmarks/configs/{found['settings']['config']}`. Cold: every cache is empty, that of tokens "
        "too. Warm: what the first run left is there.",
        table(("start", "seconds to the end of the first step", "of these compilation", "and the step itself"), rows),
        *seen,
    ]


def _cpu(found: Mapping[str, Any]) -> list[str]:
    job = found["job"]
    rows = [
        (words, *(f"{1000 * found[key][name]:.0f}" for key in ("median_seconds", "fastest_seconds")))
        for name, words in (("ours", "tunix-rt"), ("plain", "transformers, a plain loop"))
    ]
    rows.append(("ratio", f"{found['ratio']:.2f}", f"{found['ratio_of_fastest']:.2f}"))
    return [
        f"{job['preset']}, {job['rows']} x {job['length']} positions, float32, {found['threads']} threads, steps in turn. "
        "`tests/invariant/test_speed_ratio.py` holds a ratio of at most 1.2, of a smaller job, in every run of the tests.",
        table(("loop", "ms a step, median", "fastest"), rows),
    ]


PARTS: tuple[tuple[str, str, str, Callable[[Any], list[str]]], ...] = (
    ("The program itself", "program", "program", _program),
    ("Beside other loops", "compare", "compare", _cases),
    ("Other models", "models", "compare --presets", _cases),
    ("Inside 8 GiB", "least_memory", "least-memory", _least),
    ("One epoch, and the predecessor's way", "epoch", "epoch", _epoch),
    ("From the command to the first step", "start", "start", _start),
    ("On a CPU", "cpu", "cpu", _cpu),
)
