"""One process of `benchmarks.replay_noise`: the same steps, honestly and with each cheat, on one device with one engine.

python -m benchmarks.replay_noise_worker JOB.json       the numbers of each variant go to files of the folder it names
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tunix_rt.config.load import build_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.packing import Row, StepBatch, batch_of_step, rows_of_step
from tunix_rt.data.prepare import Prepared, prepare
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.doctor.selection import set_environment
from tunix_rt.engines.base import Step, StepShape, load_backend
from tunix_rt.evaluate.generate import Questions, decoding_of, generate_predictions
from tunix_rt.models.resolve import resolve_model
from tunix_rt.train.context import find_tokenizer

ROWS, LENGTH, RATE, DECAY = 2, 128, 5e-4, 0.01
ITEMS, NEW_TOKENS = 60, 24

CHEATS: dict[str, dict[str, Any]] = {
    "one token of one row": {},
    "one target of one row": {},
    "learning rate 1 % higher": {"learning_rate": RATE * 1.01},
    "a schedule of one step more": {"total": 1},
    "another order of the rows": {"data_seed": 8},
    "one step left out": {},
    "no weight decay": {"weight_decay": 0.0},
    "gradients not clipped": {"max_grad_norm": 0.0},
}
"""What the run that is recorded did otherwise than it says, as settings where it is one."""
OTHER_DROPOUT, OTHER_TYPE = "other random numbers", "computed in bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Settings of one process. `honest` is the name its honest steps go by."""

    backend: str
    device: str
    dtype: str
    honest: str
    cheats: bool
    folder: str
    steps: int
    deterministic: bool = False
    dropout: bool = False


def config_of(job: Job, model: Path | str, **changed: Any) -> RunConfig:
    training = {
        "backend": job.backend, "device": job.device, "dtype": job.dtype, "learning_rate": RATE, "weight_decay": DECAY,
        "warmup_steps": 4, "per_device_train_batch_size": ROWS, "seed": 7, "data_seed": 7, "compile": False,
        "deterministic": job.deterministic, "max_steps": job.steps, **changed,
    }  # fmt: skip
    data = {"dataset": "dev-reasoning-v2", "max_length": LENGTH}
    raw = {"model": {"model_name_or_path": str(model)}, "data": data, "training": training}
    return build_config(raw | {"evaluation": {"evalset": "eval_v2"}}, "benchmark")


def with_dropout(folder: Path) -> Path:
    """The shipped model with a tenth of its attention dropped, so that random numbers count."""
    made = folder / "with-dropout"
    if not made.exists():
        shutil.copytree(resolve_model("tiny-gemma3").folder, made)
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return made


def changed_rows(rows: list[Row], variant: str, steps: int) -> list[Row]:
    """The rows with one token or one target of one of them changed; it is trained on after a quarter of the steps."""
    if variant not in ("one token of one row", "one target of one row"):
        return rows
    place = rows_of_step(steps // 4, row_count=len(rows), rows_per_step=ROWS, seed=7)[0]
    row = rows[place]
    at = int(np.flatnonzero(row.trained)[len(np.flatnonzero(row.trained)) // 2])
    ids, trained = row.ids.copy(), row.trained.copy()
    if variant == "one token of one row":
        ids[at] += 1
    else:
        trained[at] = False
    return [replace(row, ids=ids, trained=trained) if number == place else one for number, one in enumerate(rows)]


def taken(
    backend: Any, engine: Any, optimizer: Any, batch_of: Callable[[int], StepBatch], config: RunConfig, variant: str, total: int
) -> Iterator[Step]:  # fmt: skip
    """The steps; with one in the middle left out, those before and those after it."""
    steps = config.training.max_steps or 0
    parts = [(1, steps)]
    if variant == "one step left out":
        parts = [(1, steps // 2), (steps // 2 + 2, steps)]
    for first, last in parts:
        for step in backend.optimizer_steps(engine, optimizer, batch_of, config.training, first=first, total=total):
            yield step
            if step.step == last:
                break


def run(job: Job, variant: str, data: Prepared, tokenizer: Tokenizer, model: Path | str) -> None:
    """Train as `variant` does and write down losses, norms, weights and answers."""
    changed = dict(CHEATS.get(variant, {}))
    total = job.steps + int(changed.pop("total", 0))
    if variant == OTHER_DROPOUT:
        changed["seed"] = 8
    config = config_of(replace(job, dtype="bfloat16" if variant == OTHER_TYPE else job.dtype), model, **changed)
    backend = load_backend(job.backend)
    known = {"step": StepShape(rows=ROWS, accumulation=1, tokens=data.longest_row)} if job.backend == "jax" else {}
    engine = backend.load(resolve_model(str(model)), device=job.device, training=config.training, **known)
    optimizer = backend.make_optimizer(engine, config.training)
    folder = Path(job.folder) / variant.replace(" ", "-").replace("%", "percent")
    for name in ("first", "last"):
        (folder / name).mkdir(parents=True)
    backend.write_direct(engine, optimizer, folder / "first")
    before = {"texts": texts(backend, engine, data, tokenizer)} if variant == job.honest else {}
    rows = changed_rows(list(data.rows), variant, job.steps)
    batch_of = partial(
        batch_of_step, rows, micro_batch_size=ROWS, accumulation=1, seed=config.training.data_seed or 0,
        pad_id=tokenizer.pad_id,
    )  # fmt: skip
    steps = [
        {"step": step.step, "loss": step.loss, "grad_norm": step.grad_norm}
        for step in taken(backend, engine, optimizer, batch_of, config, variant, total)
    ]
    backend.write_direct(engine, optimizer, folder / "last")
    told = {"steps": steps, "machine": backend.machine_facts(engine), **before}
    if variant == job.honest:
        told["texts_trained"] = texts(backend, engine, data, tokenizer)
    (folder / "told.json").write_text(json.dumps(told))


def texts(backend: Any, engine: Any, data: Prepared, tokenizer: Tokenizer) -> list[str]:
    """Greedy answers to some questions."""
    decoding = decoding_of(data.style, max_new_tokens=NEW_TOKENS)
    questions = Questions(items=data.items[:ITEMS], tokenizer=tokenizer, style=data.style, decoding=decoding)
    silent: dict[str, Any] = {"progress": lambda *_: None, "stop": lambda: None}
    given = generate_predictions(backend, engine, questions, what="", batch_size_at=lambda length: ITEMS, **silent)
    return [answer.output for answer in given]


def main(path: str) -> None:
    job = Job(**json.loads(Path(path).read_text()))
    set_environment(job.device, job.backend)
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    model: Path | str = with_dropout(Path(job.folder).parent) if job.dropout else "tiny-gemma3"
    config = config_of(job, model)
    tokenizer, facts = find_tokenizer(config)
    data = prepare(config, tokenizer, facts, lambda *_: None)
    variants = [job.honest]
    if job.cheats:
        variants += [OTHER_DROPOUT] if job.dropout else list(CHEATS)
        variants += [OTHER_TYPE] * (job.dtype == "float32")
    for variant in variants:
        run(job, variant, data, tokenizer, model)


if __name__ == "__main__":
    main(sys.argv[1])
