"""What a series kills: tunix-rt on a small GPT-2 with dropout, whole or with a defect that must be found."""

import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kills.process import start
from tests.program import ROOT

MODEL = {
    "model_type": "gpt2", "vocab_size": 1024, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.2,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
STEPS, SAVE_STEPS, TRACES, ROW_TOKENS = 18, 3, 26, 128
LEARNING_RATE = 1e-3


def write_model(folder: Path) -> Path:
    """GPT-2 with dropout, small enough for steps of some 20 ms and wide enough for saves of as many."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "models" / "tiny-gemma3" / name, folder / name)
    return folder


class TunixRun:
    """`tunix-rt train` on a small GPT-2 with dropout. Its folder is read by the names that its users know."""

    def __init__(
        self, folder: Path, *, device: str = "cpu", deterministic: bool = False, defect: str = "", proven: bool = True
    ) -> None:
        self.steps, self.forks, self.defect, self.proven = STEPS, device == "cpu", defect, proven
        traces = (
            (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        )
        data = folder / "traces.jsonl"
        data.write_text("".join(traces[:TRACES]), encoding="utf-8")
        settings = {
            "training.save_steps": SAVE_STEPS, "training.per_device_train_batch_size": 1,
            "training.learning_rate": LEARNING_RATE, "data.max_length": ROW_TOKENS, "data.validation_fraction": 0,
            "evaluation.enabled": "false", **({"training.deterministic": "true"} if deterministic else {}),
        }  # fmt: skip
        self.told = ["train", "--model", str(write_model(folder / "model")), "--weights", "random", "--data", str(data)]
        self.told += ["--device", device, "--max-steps", str(STEPS)]
        self.told += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]

    def arguments(self, folder: Path) -> list[str]:
        return [*self.told, "--output", str(folder), *(["--resume"] if (folder / "precommit.json").exists() else [])]

    def command(self, arguments: list[str]) -> list[str]:
        return [sys.executable, "-m", "tunix_rt", *arguments]

    def main(self, arguments: list[str]) -> None:
        from tunix_rt.cli.main import main

        if self.defect:
            DEFECTS[self.defect][0]()
        if not self.proven:  # by a fresh process that loads the final model: more time than all the rest of a fork
            importlib.import_module("tunix_rt.export.export").check_round_trip = lambda *given, **named: None
        sys.argv = ["tunix-rt", *arguments]
        main()

    def look(self, folder: Path) -> tuple[int, frozenset[tuple[str, int]]]:
        newest, under_way = 0, []
        with contextlib.suppress(FileNotFoundError):  # not there yet, or gone between two glances
            for entry in os.scandir(folder / "checkpoints"):
                if entry.name.startswith(".staged-"):
                    under_way.append((entry.name, entry.stat().st_mtime_ns))
                elif entry.name.startswith("step-"):
                    newest = max(newest, int(entry.name.removeprefix("step-")))
        return newest, frozenset(under_way)

    def usable(self, folder: Path) -> int:
        from tunix_rt.runs.folder import checkpoint_problems

        good = [path for path in (folder / "checkpoints").glob("step-*") if not checkpoint_problems(path)]
        return max((int(path.name.removeprefix("step-")) for path in good), default=0)

    def resumed_from(self, said: str) -> int | None:
        found = re.search(r"^Resumed from step-(\d+)$", said, flags=re.MULTILINE)
        return int(found[1]) if found else None

    def finished(self, folder: Path) -> bool:
        result = folder / "result.json"
        return result.exists() and json.loads(result.read_text(encoding="utf-8"))["status"] == "completed"

    def outcome(self, folder: Path) -> dict[str, Any]:
        weights = folder / "final_model" / "model.safetensors"
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = "".join(f"{json.loads(line)['loss_hex']}\n" for line in lines)
        return {
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else "none",
            "losses_sha256": hashlib.sha256(losses.encode()).hexdigest(),
        }

    def wrong_with(self, folder: Path, said: Path) -> str:
        ended = start(self, ["evidence", "verify", str(folder)], said, forked=self.forks).wait()
        return "" if ended == 0 else f"evidence verify ended with {ended}: {said.read_text()[-1500:]}"

    def mend(self, folder: Path, said: str) -> str:
        return ""


def import_once() -> None:
    """All that a start imports, before the first fork. Nothing may compute yet: threads do not come along."""
    for name in ("transformers.models.gpt2.modeling_gpt2", "tunix_rt.cli.train", "tunix_rt.cli.evidence",
                 "tunix_rt.pipeline", "tunix_rt.engines.torch.loop"):  # fmt: skip
        importlib.import_module(name)
    require_one_thread()


def require_one_thread() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after importing; a fork would have one of them")


# --- planted defects --------------------------------------------------------------------------------------------------


def move_in_parts() -> None:
    """A checkpoint gets its name before it has its files."""
    for name in ("rename", "replace"):
        whole = getattr(os, name)

        def parts(source: Any, target: Any, *, whole: Callable[..., None] = whole, **more: Any) -> None:
            if not Path(source).name.startswith(".staged-step-"):
                return whole(source, target, **more)
            os.mkdir(target)
            for path in sorted(Path(source).iterdir()):
                time.sleep(0.03)
                whole(path, Path(target) / path.name)
            os.rmdir(source)

        setattr(os, name, parts)


def seed_at_first() -> None:
    """Dropout is seeded when a process begins and goes on from there, so that a resume draws other numbers."""
    import torch

    seed, left = torch.manual_seed, [3]

    def few(number: int) -> Any:
        left[0] -= 1
        return seed(number) if left[0] >= 0 else torch.default_generator

    torch.manual_seed = few


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "600"])


DEFECTS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "moved-in-parts": (move_in_parts, ("save",)),
    "seeded-at-first": (seed_at_first, ("step",)),
    "leaves-a-process": (leave_a_process, ("step",)),
}
"""Name -> what plants it, and the kinds of kills that show it."""
