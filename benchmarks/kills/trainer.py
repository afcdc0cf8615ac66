"""The kills of `python -m benchmarks.kills` on the Trainer of transformers: python -m benchmarks.kills.trainer

It needs accelerate, which tunix-rt does not install:

    pip install --no-deps --target DIR accelerate
    PYTHONPATH=DIR python -m benchmarks.kills.trainer --folder SCRATCH

The same small GPT-2 with dropout, steps, save interval, seed and kinds of kills. Every setting that is not named in
`train` is the Trainer's own. It goes on as its guide says, with `resume_from_checkpoint=True` when there is a checkpoint.
A checkpoint counts as finished when it has the files of a finished one, in their size. Where a resume ends with an error,
the newest checkpoint is deleted by hand, as a person would, and it is tried again. Once with default settings, once with
`full_determinism`. Writes benchmarks/results/kills_trainer.json.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kills import RESULTS, write_results
from benchmarks.kills.process import Fork
from benchmarks.kills.series import Series, figures, prepare_process
from benchmarks.kills.subject import (
    LEARNING_RATE,
    ROW_TOKENS,
    SAVE_STEPS,
    STEPS,
    TRACES,
    require_one_thread,
    write_model,
)
from tests.program import ROOT

RESULT = RESULTS / "kills_trainer.json"
STATE = "trainer_state.json"
sys.modules["datasets"] = None  # type: ignore[assignment]  # our folder of that name is not the library it would pass for


# --- what is killed ---------------------------------------------------------------------------------------------------


def train(folder: Path, *, full_determinism: bool) -> None:
    """Begin the run in `folder`, or go on with it, as a script of a user of the Trainer does."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    metrics, last = folder / "metrics.jsonl", get_last_checkpoint(str(folder))

    class Observer(TrainerCallback):
        """One line for each step, so that it can be seen from outside how far it is."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if last is not None:
                print(f"Resumed from {Path(last).name}", flush=True)
            kept = metrics.read_text().splitlines(keepends=True)[: state.global_step] if metrics.exists() else []
            metrics.write_text("".join(kept))

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            with metrics.open("a") as file:
                file.write(f"{state.global_step}\n")

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVE_STEPS, save_total_limit=2, learning_rate=LEARNING_RATE,
        per_device_train_batch_size=1, seed=0, full_determinism=full_determinism, use_cpu=True, report_to="none",
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder.parents[1] / "model"), args=arguments,
        train_dataset=json.loads((folder.parents[1] / "rows.json").read_text()), callbacks=[Observer()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last is not None)
    trainer.save_model(str(folder / "final_model"))
    (folder / "done").touch()


def write_materials(folder: Path) -> None:
    """The base model with its weights, and rows of tokens from the same traces."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    traces = (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text(encoding="utf-8").splitlines()[:TRACES]
    tokens = Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).encode("\n".join(traces)).ids
    rows = [tokens[at : at + ROW_TOKENS] for at in range(0, len(tokens) - ROW_TOKENS, ROW_TOKENS)][:14]
    (folder / "rows.json").write_text(json.dumps([{"input_ids": row, "labels": row} for row in rows]))


class TrainerRun:
    """The Trainer, seen from outside by its folders `checkpoint-N`."""

    def __init__(self, *, full_determinism: bool) -> None:
        self.steps, self.forks, self.full_determinism = STEPS, True, full_determinism
        self.sizes: dict[str, int] = {STATE: 1}
        """Least size of each file of a finished checkpoint."""

    def arguments(self, folder: Path) -> list[str]:
        return ["--run", str(folder), *(["--full-determinism"] if self.full_determinism else [])]

    def command(self, arguments: list[str]) -> list[str]:
        return [sys.executable, "-m", "benchmarks.kills.trainer", *arguments]

    def main(self, arguments: list[str]) -> None:
        train(Path(arguments[1]), full_determinism=self.full_determinism)

    def learn_sizes(self, folder: Path) -> None:
        """Take the last checkpoint of an uninterrupted run as what a finished one is. Its log grows from save to save."""
        finished = folder / f"checkpoint-{STEPS}"
        self.sizes = {path.name: 1 if path.name == STATE else path.stat().st_size for path in finished.iterdir()}

    def look(self, folder: Path) -> tuple[int, frozenset[tuple[str, int]]]:
        newest, halves = 0, {}
        for checkpoint in folder.glob("checkpoint-*"):
            found, step = self._files(checkpoint), int(checkpoint.name.removeprefix("checkpoint-"))
            if all(found.get(name, (0, 0))[0] >= size for name, size in self.sizes.items()):
                newest = max(newest, step)
            else:
                halves[step] = (checkpoint.name, max((changed for _, changed in found.values()), default=0))
        # Half a checkpoint below the newest is one that is being deleted.
        return newest, frozenset(half for step, half in halves.items() if step > newest)

    def _files(self, checkpoint: Path) -> dict[str, tuple[int, int]]:
        """Size and time of each file; what is deleted meanwhile is not there."""
        found = {}
        for name in self.sizes:
            try:
                facts = (checkpoint / name).stat()
            except FileNotFoundError:
                continue
            found[name] = (facts.st_size, facts.st_mtime_ns)
        return found

    def usable(self, folder: Path) -> int:
        return self.look(folder)[0]

    def resumed_from(self, said: str) -> int | None:
        found = re.search(r"^Resumed from checkpoint-(\d+)$", said, flags=re.MULTILINE)
        return int(found[1]) if found else None

    def finished(self, folder: Path) -> bool:
        return (folder / "done").exists()

    def outcome(self, folder: Path) -> dict[str, Any]:
        weights = folder / "final_model" / "model.safetensors"
        return {"weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else "none"}

    def wrong_with(self, folder: Path, said: Path) -> str:
        return ""

    def mend(self, folder: Path, said: str) -> str:
        newest = max(
            folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None
        )
        if newest is None:
            return ""
        shutil.rmtree(newest)
        return f"{newest.name} deleted by hand"


# --- the series -------------------------------------------------------------------------------------------------------


def kill_trainer(folder: Path, *, kills: int, seed: int, full_determinism: bool) -> dict[str, Any]:
    folder.mkdir(parents=True)
    write_model(folder / "model")
    if (
        code := Fork(partial(write_materials, folder), folder / "said.txt").wait()
    ) != 0:  # it computes: not in this process
        raise RuntimeError(f"no base model ({code}):\n{(folder / 'said.txt').read_text()}")
    subject = TrainerRun(full_determinism=full_determinism)
    series = Series(subject=subject, folder=folder, seed=seed, wanted=kills)
    series.measure()
    subject.learn_sizes(folder / "whole" / "run")
    series.run()
    seen = figures(series)
    errors = Counter(named_error(problem["words"]) for problem in seen.pop("problems") if problem["kind"] == "failed")
    return {"save_steps": SAVE_STEPS, "errors": dict(errors.most_common()), **seen}


def named_error(said: str) -> str:
    """The last line of a traceback without the folder of this run."""
    return re.sub(r"[^\s']*/checkpoint-\d+", "checkpoint-N", said.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="must not exist; chains with a problem stay in it")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--full-determinism", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        train(options.run, full_determinism=options.full_determinism)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    prepare_process(folder)
    for name in ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"):
        importlib.import_module(name)
    require_one_thread()
    series = {
        name: kill_trainer(folder / name, kills=options.kills, seed=options.seed, full_determinism=name != "default")
        for name in ("default", "full_determinism")
    }
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "accelerate", "torch")}
    write_results(RESULT, {"versions": versions, **series})
    if not options.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
