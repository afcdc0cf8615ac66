"""Forgeries of the steps: losses, learning rates, batches, tokens, times, and how many there were."""

import re
from pathlib import Path

from tests.forging.catalogue import forgery
from tests.forging.folder import (
    configure,
    each_step,
    edited,
    lines_of,
    metrics_of,
    put,
    put_lines,
    put_metrics,
    rebuild_batches,
    rebuild_log,
    set_loss,
    setting,
    settings_of,
    smooth,
    swap,
    swap_line,
)
from tests.forging.sealing import reseal
from tunix_rt.backends.schedule import learning_rate
from tunix_rt.config import Training

STEPS = "steps"
UNTIMED = "seconds are the run's own word: a replay on another machine takes other seconds"


def _finish(folder: Path) -> None:
    rebuild_log(folder)
    reseal(folder)


@forgery("one loss in the middle lowered by a tenth", group=STEPS, level="L3")
def forge_one_loss(folder: Path) -> None:
    lines = metrics_of(folder)
    set_loss(lines[len(lines) // 2], lines[len(lines) // 2]["loss"] * 0.9)
    put_metrics(folder, lines)
    _finish(folder)


@forgery("all losses lowered by a tenth", group=STEPS, level="L3")
def forge_all_losses(folder: Path) -> None:
    each_step(folder, lambda line: set_loss(line, line["loss"] * 0.9))
    _finish(folder)


@forgery("the loss curve smoothed", group=STEPS, level="L3")
def forge_smoothed_losses(folder: Path) -> None:
    lines = metrics_of(folder)
    for line, loss in zip(lines, smooth([line["loss"] for line in lines]), strict=True):
        set_loss(line, loss)
    put_metrics(folder, lines)
    _finish(folder)


@forgery("the last loss lowered in metrics, result, log and claims", group=STEPS, level="L3")
def forge_last_loss(folder: Path) -> None:
    lines = metrics_of(folder)
    set_loss(lines[-1], lines[-1]["loss"] / 2)
    put_metrics(folder, lines)
    _finish(folder)


@forgery("the final loss halved in result.json and all that is written of it", group=STEPS)
def forge_final_loss(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["final_loss"] /= 2
        result["final_loss_hex"] = result["final_loss"].hex()
    reseal(folder, ending=False)


@forgery("a loss in decimal that is not the one in hexadecimal", group=STEPS)
def forge_decimal_loss(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[-1]["loss"] /= 2
    put_metrics(folder, lines)
    reseal(folder)


@forgery("losses lowered in training_log.txt only", group=STEPS)
def forge_losses_of_the_log(folder: Path) -> None:
    each_step(folder, lambda line: set_loss(line, line["loss"] / 2))
    rebuild_log(folder)
    each_step(folder, lambda line: set_loss(line, line["loss"] * 2))
    reseal(folder)


@forgery("gradient norms made small", group=STEPS, level="L3")
def forge_gradient_norms(folder: Path) -> None:
    each_step(folder, lambda line: line.update(grad_norm=line["grad_norm"] / 10))
    _finish(folder)


@forgery("a negative gradient norm", group=STEPS)
def forge_negative_gradient_norm(folder: Path) -> None:
    each_step(folder, lambda line: line.update(grad_norm=-line["grad_norm"]))
    _finish(folder)


@forgery("the learning rate of one step edited", group=STEPS)
def forge_one_learning_rate(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[1]["lr"] *= 2
    put_metrics(folder, lines)
    _finish(folder)


@forgery("a constant learning rate in all steps", group=STEPS)
def forge_learning_rates(folder: Path) -> None:
    each_step(folder, lambda line: line.update(lr=0.0005))
    _finish(folder)


@forgery("another learning rate in config.yaml, hash rebuilt", group=STEPS)
def forge_learning_rate_of_the_config(folder: Path) -> None:
    configure(folder, "training", learning_rate=0.001)
    reseal(folder)


@forgery("another learning rate in config.yaml and in every step", group=STEPS, level="L3")
def forge_learning_rate_everywhere(folder: Path) -> None:
    rate = setting(folder, "training", "learning_rate")
    configure(folder, "training", learning_rate=2 * rate)
    each_step(folder, lambda line: line.update(lr=2 * line["lr"]))
    _finish(folder)


@forgery("a step left out, the others renumbered", group=STEPS)
def forge_skipped_step(folder: Path) -> None:
    lines = metrics_of(folder)
    del lines[len(lines) // 2]
    for number, line in enumerate(lines, start=1):
        line["step"] = number
    put_metrics(folder, lines)
    configure(folder, "training", max_steps=len(lines))
    _finish(folder)


@forgery("steps added that are copies of the last, renumbered", group=STEPS)
def forge_copied_steps(folder: Path) -> None:
    lines = metrics_of(folder)
    lines += [lines[-1] | {"step": len(lines) + number} for number in (1, 2)]
    put_metrics(folder, lines)
    configure(folder, "training", max_steps=len(lines))
    _finish(folder)


@forgery("steps that were not taken added, with batches and learning rates that fit", group=STEPS, level="L3")
def forge_invented_steps(folder: Path) -> None:
    lines = metrics_of(folder)
    steps = len(lines) + 2
    lines += [lines[-1] | {"step": number} for number in range(len(lines) + 1, steps + 1)]
    put_metrics(folder, lines)
    configure(folder, "training", max_steps=steps)
    rebuild_batches(folder)
    each_step(folder, lambda line: line.update(lr=rate_at(folder, line["step"], steps)))
    invent_checkpoint(folder, steps)
    swap(folder / "training_log.txt", f"step {steps - 2}/{steps - 2}", f"step {steps}/{steps}")
    swap_line(
        folder / "training_log.txt",
        rf"(?m)^(.*)step {steps - 2}  held-out(.*)$",
        rf"\g<0>\n\g<1>step {steps}  held-out\g<2>",
    )
    swap(folder / "training_log.txt", f"/{steps - 2} ", f"/{steps} ")
    swap(folder / "training_log.txt", f"Steps: {steps - 2} of", f"Steps: {steps} of")
    heldout = lines_of(folder / "eval" / "heldout.jsonl")
    put_lines(folder / "eval" / "heldout.jsonl", [*heldout, heldout[-1] | {"step": steps}])
    _finish(folder)


@forgery("two steps in each other's place", group=STEPS)
def forge_swapped_steps(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[0], lines[1] = lines[1] | {"step": 1}, lines[0] | {"step": 2}
    put_metrics(folder, lines)
    _finish(folder)


@forgery("the batch of one step edited", group=STEPS)
def forge_one_batch(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[1]["batch"] = lines[0]["batch"]
    put_metrics(folder, lines)
    _finish(folder)


@forgery("more tokens in every step", group=STEPS)
def forge_tokens(folder: Path) -> None:
    each_step(folder, lambda line: line.update(tokens=line["tokens"] * 2))
    _finish(folder)


@forgery("fewer targets in one step", group=STEPS)
def forge_targets(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[0]["target_tokens"] -= 1
    put_metrics(folder, lines)
    _finish(folder)


@forgery("seconds a million times shorter", group=STEPS)
def forge_impossible_speed(folder: Path) -> None:
    each_step(folder, lambda line: line.update(seconds=line["seconds"] / 1e6))
    _finish(folder)


@forgery("seconds a thousand times longer than the run took", group=STEPS)
def forge_impossible_slowness(folder: Path) -> None:
    each_step(folder, lambda line: line.update(seconds=line["seconds"] * 1000))
    _finish(folder)


@forgery("seconds of the steps a tenth shorter", group=STEPS, level="missed", why=UNTIMED)
def forge_nudged_speed(folder: Path) -> None:
    each_step(folder, lambda line: line.update(seconds=line["seconds"] * 0.9))
    _finish(folder)


@forgery("a step that took no time", group=STEPS)
def forge_negative_seconds(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[1]["seconds"] = -lines[1]["seconds"]
    put_metrics(folder, lines)
    reseal(folder)


@forgery("memory that no host has", group=STEPS)
def forge_impossible_memory(folder: Path) -> None:
    each_step(folder, lambda line: line.update(peak_bytes=line["peak_bytes"] * 10**6))
    _finish(folder)


@forgery("held-out losses lowered, the best of them too", group=STEPS, level="L3")
def forge_heldout_losses(folder: Path) -> None:
    path = folder / "eval" / "heldout.jsonl"
    lines = lines_of(path)
    for line in lines[1:]:
        line["loss"] *= 0.9
        line["loss_hex"] = line["loss"].hex()
    put_lines(path, lines)
    for line in lines[1:]:
        relog_heldout(folder, line["step"], line["loss"])
    reseal(folder)


@forgery("a better held-out loss in result.json only", group=STEPS)
def forge_best_heldout_loss(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["best_heldout_loss"] /= 2
    reseal(folder, ending=False)


@forgery("a held-out loss of a step that was not taken", group=STEPS)
def forge_heldout_step(folder: Path) -> None:
    path = folder / "eval" / "heldout.jsonl"
    lines = lines_of(path)
    put_lines(path, [*lines, lines[-1] | {"step": lines[-1]["step"] + 1000}])
    reseal(folder, ending=False)


@forgery("a held-out loss in decimal that is not the one in hexadecimal", group=STEPS)
def forge_heldout_decimal(folder: Path) -> None:
    path = folder / "eval" / "heldout.jsonl"
    lines = lines_of(path)
    lines[-1]["loss"] /= 2
    put_lines(path, lines)
    reseal(folder)


@forgery("a run that is said to have been continued", group=STEPS)
def forge_resumed(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["resumed_from"] = 1
    reseal(folder)


@forgery("fewer steps planned than config.yaml asks for", group=STEPS)
def forge_fewer_steps(folder: Path) -> None:
    put_metrics(folder, metrics_of(folder)[:-1])
    _finish(folder)


def relog_heldout(folder: Path, step: int, loss: float) -> None:
    path = folder / "training_log.txt"
    text = path.read_text(encoding="utf-8")
    put(path, re.sub(rf"step {step}  held-out loss \S+ over", f"step {step}  held-out loss {loss:.4f} over", text))


def invent_checkpoint(folder: Path, step: int) -> None:
    """A last checkpoint after those there are, of made-up hashes; the oldest that was kept goes, as in a real run."""
    sums = folder / "run-SHA256SUMS"
    lines = sums.read_text(encoding="utf-8").splitlines()
    kept = sorted({line.split("  ")[1].split("/")[1] for line in lines if "  checkpoints/" in line})
    with edited(folder / "checkpoints.json") as told:
        last = told["checkpoints"][-1]
        weights = last["files"]["model.safetensors"]
        other = last["files"] | {"model.safetensors": weights | {"sha256": weights["sha256"][::-1]}}
        told["checkpoints"].append(last | {"step": step, "files": other})
    copied = [line.replace(kept[-1], f"step-{step:06d}") for line in lines if f"/{kept[-1]}/" in line]
    copied = [line.replace(weights["sha256"], weights["sha256"][::-1]) for line in copied]
    left = [line for line in lines if f"/{kept[0]}/" not in line]
    put(sums, "".join(f"{line}\n" for line in sorted([*left, *copied], key=lambda line: line.split("  ")[1])))


def rate_at(folder: Path, step: int, steps: int) -> float:
    """The learning rate that the schedule of `config.yaml` gives."""
    return learning_rate(step, total=steps, training=Training(**settings_of(folder)["training"]))
