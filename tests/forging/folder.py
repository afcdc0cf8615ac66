"""The forger's tools: edit a file of a bundle, then make everything that follows from it anew, as far as that goes.

The files of a good bundle may be hard links to the original: every edit here writes a new file in place of the old one.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tunix_rt.data.merkle import merkle_root
from tunix_rt.data.pack import rows_of_step
from tunix_rt.evaluate.report import compare, samples_markdown
from tunix_rt.evaluate.score import Prediction, judge, score_predictions
from tunix_rt.evaluate.summary import comparison_facts
from tunix_rt.evidence.source import combined_hash
from tunix_rt.rundir import json_line, json_text, to_plain

Json = dict[str, Any]


def put(path: Path, content: str | bytes) -> None:
    """A new file under that name: whatever the old one is linked to stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def edited(path: Path) -> Iterator[Any]:
    """The JSON in `path`, to be changed in place; written as tunix-rt writes it."""
    value = read(path)
    yield value
    put(path, json_text(value))


def swap(path: Path, old: str, new: str) -> None:
    """Put `new` in place of every `old`, of which there must be one."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path.name} has no {old!r}"
    put(path, text.replace(old, new))


def swap_line(path: Path, pattern: str, new: str) -> None:
    """Put `new` in place of all that the pattern finds, which must be something."""
    text, count = re.subn(pattern, new, path.read_text(encoding="utf-8"))
    assert count, f"{path.name} has nothing like {pattern!r}"
    put(path, text)


def swap_everywhere(folder: Path, old: str, new: str) -> None:
    """In every text file of the bundle, hashes aside."""
    found = False
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".txt", ".md", ".yaml"):
            text = path.read_text(encoding="utf-8")
            if old in text:
                put(path, text.replace(old, new))
                found = True
    assert found, f"no file has {old!r}"


# --- steps ------------------------------------------------------------------------------------------------------------


def metrics_of(folder: Path) -> list[Json]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def put_metrics(folder: Path, lines: list[Json]) -> None:
    put(folder / "metrics.jsonl", "".join(json_line(line) for line in lines))


def each_step(folder: Path, change: Callable[[Json], None]) -> None:
    lines = metrics_of(folder)
    for line in lines:
        change(line)
    put_metrics(folder, lines)


def set_loss(line: Json, loss: float) -> None:
    line["loss"], line["loss_hex"] = loss, loss.hex()


def lines_of(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def put_lines(path: Path, lines: list[Json]) -> None:
    put(path, "".join(json_line(line) for line in lines))


# --- the configuration, the data --------------------------------------------------------------------------------------


def configure(folder: Path, section: str, **settings: Any) -> None:
    """Settings changed in `config.yaml`, as the program writes it."""
    config = settings_of(folder)
    config[section] |= settings
    put(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def settings_of(folder: Path) -> Json:
    found: Json = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return found


def setting(folder: Path, section: str, name: str) -> Any:
    return settings_of(folder)[section][name]


def rebuild_batches(folder: Path) -> None:
    """Batch, tokens and targets of every step as seed and rows now give them."""
    rows = lines_of(folder / "rows.jsonl")
    committed = read(folder / "precommit.json")
    per_step = setting(folder, "training", "per_device_train_batch_size")
    per_step *= setting(folder, "training", "gradient_accumulation_steps")
    if "batch" in committed:
        per_step = committed["batch"]["rows"] * setting(folder, "training", "gradient_accumulation_steps")

    def change(line: Json) -> None:
        seed = committed["seeds"]["data_seed"]
        taken = rows_of_step(line["step"], row_count=len(rows), rows_per_step=per_step, seed=seed)
        line["batch"] = hashlib.sha256(b"".join(bytes.fromhex(rows[one]["sha256"]) for one in taken)).hexdigest()
        line["tokens"] = sum(rows[one]["tokens"] for one in taken)
        line["target_tokens"] = sum(rows[one]["targets"] for one in taken)

    each_step(folder, change)


def rebuild_root(folder: Path) -> None:
    """The Merkle root of the rows as they are now, committed to."""
    rows = lines_of(folder / "rows.jsonl")
    with edited(folder / "precommit.json") as committed:
        committed["dataset"]["merkle_root"] = merkle_root([bytes.fromhex(row["sha256"]) for row in rows])


def rebuild_source(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["source_sha256"] = combined_hash(committed["source_files"])


# --- answers ----------------------------------------------------------------------------------------------------------


def answers_of(folder: Path, when: str) -> list[Json]:
    return lines_of(folder / "eval" / f"predictions-{when}.jsonl")


def put_answers(folder: Path, when: str, answers: list[Json]) -> None:
    """The answers, judged as the program judges them: verdicts that fit the outputs."""
    asked = ("id", "prompt", "expected", "section", "category", "difficulty", "output", "ended")
    judged = [judge(**{name: one[name] for name in asked}) for one in answers]
    put_lines(folder / "eval" / f"predictions-{when}.jsonl", [to_plain(one) for one in judged])


def right_answer(one: Json) -> str:
    return f"<reasoning>It is {one['expected']}.</reasoning><answer>{one['expected']}</answer>"


def rebuild_scores(folder: Path) -> None:
    """Scores, summary, samples and result as the answers now give them."""
    sides = {when: [Prediction(**one) for one in answers_of(folder, when)] for when in ("before", "after")}
    scores = {when: to_plain(score_predictions(side, when)) for when, side in sides.items()}
    for when, told in scores.items():
        put(folder / "eval" / f"{when}.json", json_text(told))
    comparison = compare(sides["before"], sides["after"])
    with edited(folder / "eval_summary.json") as summary:
        facts = {"comparison": to_plain(comparison_facts(comparison)), "questions": len(sides["after"])}
        summary |= scores | facts
    put(folder / "samples.md", samples_markdown(sides["before"], sides["after"], comparison))
    with edited(folder / "result.json") as result:
        for when, told in scores.items():
            result["scores"][when] = {name: told[name] for name in result["scores"][when]}


# --- the log ----------------------------------------------------------------------------------------------------------

STEP_LINE = re.compile(r"step (\d+)/(\d+)  loss \S+  lr \S+  grad norm \S+  \S+ tokens/s  peak \S+ GiB")


def rebuild_log(folder: Path) -> None:
    """The steps in `training_log.txt` as the metrics now have them."""
    steps = {line["step"]: line for line in metrics_of(folder)}

    def as_told(match: re.Match[str]) -> str:
        line = steps.get(int(match[1]))
        if line is None:
            return match[0]
        speed = f"{line['tokens'] / line['seconds']:,.0f}"
        return (
            f"step {line['step']}/{len(steps)}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  grad norm "
            f"{line['grad_norm']:.2f}  {speed} tokens/s  peak {line['peak_bytes'] / 2**30:.2f} GiB"
        )

    path = folder / "training_log.txt"
    put(path, STEP_LINE.sub(as_told, path.read_text(encoding="utf-8")))


def rebuild_scores_told(folder: Path) -> None:
    """What `training_log.txt` says of the evaluations, as the scores now are."""
    for when in ("before", "after"):
        scores = read(folder / "eval" / f"{when}.json")
        right, items, leniently = (scores[name] for name in ("correct", "items", "correct_lenient"))
        said = f"{right} of {items} right by the tags ({leniently} leniently), {100 * scores['format_rate']:.0f} % well-formed"
        swap_line(folder / "training_log.txt", f"Evaluation {when}: .*", f"Evaluation {when}: {said}")
        swap_line(folder / "training_log.txt", rf"(evaluate {when}: \d+) of \d+", rf"\g<1> of {items}")


def smooth(values: list[float]) -> list[float]:
    width = min(3, len(values))
    return [float(np.mean(values[max(0, at - width + 1) : at + 1])) for at in range(len(values))]
