"""Predicted beside measured memory of the newer families, of adapters, and of traced models, for docs/concepts/memory-model.md.

The prediction of an exact family is that of the code as it is now. A traced one needs torch and transformers, and was noted
beside the measurement by `benchmarks.memory_on_gpu --replan`.
"""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import memory_on_gpu
from docs.markdown import table
from docs.solver_pages import H200, HOPPER, RESULTS, gib, read
from tunix_rt.plan.fit import least_room

FILE, WHOLE, LEAST, QLORA = "memory_families.json", "speed_gemma4.json", "speed_gemma4_least.json", "qlora_16gib.json"
Case = Mapping[str, Any]


def block(root: Path) -> str:
    """Two tables and what did not run."""
    whole = read(root, FILE)
    cases, about = whole["cases"], whole["about"]
    rows, summary, failures = [], [], []
    for kind in ("exact", "adapters", "traced"):
        mine = [case for case in cases if kind_of(case) == kind]
        errors = []
        for case in mine:
            predicted, asked = predicted_now(case)
            if "failed" in case:
                failures.append(
                    f"- `{case['preset']}` {_size(case)} ({_settings(case)}): {_cause(case)}. The code as it is now predicts "
                    f"{gib(predicted)} GiB and requests {gib(asked)} GiB; it was not measured again."
                )
                continue
            errors.append(predicted / case["peak_bytes"] - 1)
            measured = (
                gib(predicted),
                gib(case["peak_bytes"]),
                f"{100 * errors[-1]:+.2f} %",
                f"{100 * case['error']:+.2f} %",
            )
            rows.append((case["preset"], _size(case), _settings(case), kind, *measured))
        sizes = (statistics.median(map(abs, errors)), max(0.0, *errors), min(0.0, *errors))
        shares = (f"{100 * sizes[0]:.2f} %", *(f"{100 * size:+.2f} %" for size in sizes[1:]))
        summary.append((kind, str(len(mine)), *shares, f"{len(errors)} of {len(mine)}"))
    heads = ("plan", "cases", "median error", "largest above", "largest below", "ran in the requested memory")
    columns = ("model", "rows x tokens", "settings", "plan", "predicted GiB", "measured GiB", "error", "error then")
    said = f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}; `{RESULTS / FILE}`"
    failed = "Did not run, under the cap of the plan of that moment:\n\n" + "\n".join(failures)
    return "\n\n".join((table(heads, summary), said + ".", *_whole(root), failed, table(columns, rows)))


def _whole(root: Path) -> Iterator[str]:
    """Models in their full size, from the measurements of speed and of QLoRA."""
    measured = [name for name in (WHOLE, LEAST) if (root / RESULTS / name).is_file()]
    for file, case in ((name, case) for name in measured for case in read(root, name)["cases"]):
        last = {name: [one for one in of["rounds"] if "seconds" in one][-1:] for name, of in case["contenders"].items()}
        if not last["ours"]:
            continue
        job, training, (ours,) = case["contenders"]["ours"]["job"], case["training"], last["ours"]
        states = training.get("optim", "adamw") + " in the backward pass" * training.get("optim_in_backward", False)
        compiled = "".join(
            f"; the loop of transformers, compiled: {one['tokens_per_second']:,.0f} tokens/s, "
            f"{gib(one['peak_allocated_bytes'])} GiB"
            for one in last.get("compiled", [])
        )
        yield (
            f"`{case['preset']}` in its full size ({job['parameters']:,} parameters, {job['rows']} x {job['length']:,} tokens, "
            f"weights in bfloat16, {states}, eager): {ours['tokens_per_second']:,.0f} tokens/s, predicted "
            f"{gib(case['predicted_bytes'])} GiB, measured {gib(ours['peak_allocated_bytes'])} GiB{compiled}; `{RESULTS / file}`."
        )
    if (root / RESULTS / QLORA).is_file() and (whole := read(root, QLORA)).get("exit_code") == 0:
        about, memory, reload = whole["about"], whole["memory"], whole["result"]["final_model"]
        yield (
            f"QLoRA of `{about['preset']}` under a cap of {about['cap_gib']:g} GiB (1 x {about['length']:,} tokens): predicted "
            f"{gib(memory['predicted_bytes'])} GiB, measured {gib(memory['measured_bytes'])} GiB; merged in float32 and reloaded "
            f"by transformers: {reload['tensors']} tensors bitwise equal, logits within {reload['largest_logit_difference']:.2g} "
            f"(tolerance {reload['tolerance']:.2g}); `{RESULTS / QLORA}`."
        )


def kind_of(case: Case) -> str:
    if case.get("traced"):
        return "traced"
    return "adapters" if "lora_rank" in case["settings"]["training"] else "exact"


def predicted_now(case: Case) -> tuple[int, int]:
    """The peak, and the least memory that is requested, in bytes."""
    if case.get("traced"):
        now = case.get("replanned", {"predicted_total": case["predicted_total"], "asked_bytes": case.get("cap_bytes")})
        return now["predicted_total"], now["asked_bytes"]
    plan = memory_on_gpu.plan_of(dict(case), HOPPER, H200)
    return plan.peak_bytes, least_room(plan) - plan.context_bytes


def _cause(case: Case) -> str:
    if case["out_of_memory"]:
        return f"out of memory with {gib(case['peak_bytes'])} GiB given out under a cap of {gib(case['cap_bytes'])} GiB"
    return "a self-test of the loaded model failed; it is corrected"


def _size(case: Case) -> str:
    settings = case["settings"]
    return f"{settings['training']['per_device_train_batch_size']} x {settings['data']['max_length']}"


def _settings(case: Case) -> str:
    left_out = ("per_device_train_batch_size", "lora_alpha", "lora_dropout", "gradient_accumulation_steps")
    training = {name: value for name, value in case["settings"]["training"].items() if name not in left_out and value}
    words = [str(training.pop("dtype")), *([f"{layers} layers"] if (layers := _layers(case)) else [])]
    words += ["`" + f"{name}={value}".replace("|", "\\|") + "`" for name, value in training.items()]
    return ", ".join(words + ([] if case["settings"]["data"]["packing"] else ["unpacked"]))


def _layers(case: Case) -> int:
    config = case.get("config", {})
    return int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
