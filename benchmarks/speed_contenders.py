"""The loops that `benchmarks.speed` compares. Each builds its model anew, trains on the batches of a job, and tells a clock.

All keep their weights in the type of the job, clip at 1.0, read the loss after every step, and start from the same weights.
A name that ends in `-open` passes no positions, as most loops do: then the examples of a packed row see their neighbours,
which is another job, and a cheaper one.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.optimization import Adafactor

from benchmarks.speed_jobs import SEED, Job, flops_of, memory, real_lengths, wait
from tunix_rt.data.packing import MicroBatch
from tunix_rt.engines.torch import loop as torch_backend

RATE = 1e-5
CLIP = 1.0


@dataclass(slots=True)
class Clock:
    """Notes when steps end. The device is waited for at the beginning and the end of the timed ones, and nowhere else."""

    job: Job
    steps: int
    began: float = field(default_factory=time.perf_counter)
    load_seconds: float = 0.0
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.job.warmup + self.steps

    def loaded(self) -> None:
        wait()
        self.load_seconds = time.perf_counter() - self.began
        self.began = time.perf_counter()

    def step(self, loss: float) -> None:
        self.losses.append(loss)
        if len(self.ends) + 1 in (self.job.warmup, self.total):
            wait()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.total:
            self.memory = memory()

    def found(self) -> dict[str, Any]:
        if len(self.ends) != self.total:
            raise RuntimeError(f"{len(self.ends)} steps were taken, {self.total} were asked for")
        timed = [self.job.batch(step) for step in range(self.job.warmup + 1, self.total + 1)]
        seconds = self.ends[-1] - self.ends[self.job.warmup - 1]
        starts = [self.began, *self.ends]
        return {
            "load_seconds": self.load_seconds,
            "first_step_seconds": self.ends[0] - self.began,
            "warmup_seconds": self.ends[self.job.warmup - 1] - self.began,
            "seconds": seconds,
            "step_seconds": [end - start for start, end in zip(starts, self.ends, strict=False)],
            "tokens_per_second": sum(batch.tokens for batch in timed) / seconds,
            "positions_per_second": sum(m.ids.size for batch in timed for m in batch.micro_batches) / seconds,
            "tflops": sum(flops_of(self.job, batch) for batch in timed) / seconds / 1e12,
            "losses": self.losses,
            **self.memory,
        }


Contender = Callable[[Job, Clock], None]


# --- ours -------------------------------------------------------------------------------------------------------------


def ours_steps(job: Job, clock: Clock, total: int) -> Iterator[float]:
    """The engine as `tunix-rt train` uses it, without what the program does around its steps."""
    engine = torch_backend.load(job.source, device=job.device, training=job.training)
    optimizer = torch_backend.make_optimizer(engine, job.training)
    clock.loaded()
    for step in torch_backend.optimizer_steps(engine, optimizer, job.batch, job.training, first=1, total=total):
        yield step.loss


def ours(job: Job, clock: Clock) -> None:
    for loss in ours_steps(job, clock, clock.total):
        clock.step(loss)


def fsdp(job: Job, clock: Clock) -> None:
    """The same as the only rank of a process group: what FSDP2 costs where nothing is to be sent."""
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1,
    )  # fmt: skip
    try:
        ours(job, clock)
    finally:
        dist.destroy_process_group()


# --- loops of transformers --------------------------------------------------------------------------------------------


def their_model(job: Job) -> Any:
    config = transformers.AutoConfig.from_pretrained(job.source.folder)
    attention = job.attention or ("eager" if job.shape.capped_scores else "sdpa")
    torch.manual_seed(SEED)
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=job.dtype, attn_implementation=attention)
    return model.train()


def inputs_of(micro: MicroBatch, device: str, *, bordered: bool) -> dict[str, Any]:
    """What a model of transformers is called with. It finds the examples of a row where positions restart."""
    named = {"input_ids": micro.ids, "labels": micro.labels} | ({"position_ids": micro.positions} if bordered else {})
    return {name: torch.from_numpy(part).to(device) for name, part in named.items()}


def plain_steps(
    job: Job, clock: Clock, *, bordered: bool = True, change: Callable[[Any], None] = lambda model: None
) -> Iterator[float]:
    """A plain loop: the model's own loss, fused AdamW. `change` is done to the model before the first step."""
    model = their_model(job)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    clock.loaded()
    step = 0
    while True:
        step += 1
        (micro,) = job.batch(step).micro_batches
        loss = model(**inputs_of(micro, job.device, bordered=bordered), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def _pull(steps: Iterator[float], clock: Clock) -> None:
    for _ in range(clock.total):
        clock.step(next(steps))
    steps.close()  # type: ignore[attr-defined]  # a generator: its model goes with it


def eager(job: Job, clock: Clock, *, bordered: bool = True) -> None:
    _pull(plain_steps(job, clock, bordered=bordered), clock)


def compiled(job: Job, clock: Clock, *, bordered: bool = True) -> None:
    _pull(plain_steps(job, clock, bordered=bordered, change=lambda model: model.compile()), clock)


def liger(job: Job, clock: Clock, *, bordered: bool = True) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if (kind := job.source.config["model_type"]) not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RuntimeError(f"Liger has no kernels for {kind}")
    with _as_it_was(job):
        _pull(
            plain_steps(
                job, clock, bordered=bordered, change=lambda model: _apply_liger_kernel_to_instance(model=model)
            ),
            clock,
        )


@contextlib.contextmanager
def _as_it_was(job: Job) -> Iterator[None]:
    """Liger changes transformers' module for the whole process; the contenders after it must not run on its kernels."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[
        type(transformers.AutoConfig.from_pretrained(job.source.folder))
    ].__module__
    module = sys.modules[kind]
    names = dict(vars(module))
    forwards = {
        value: value.forward for value in names.values() if isinstance(value, type) and "forward" in vars(value)
    }
    try:
        yield
    finally:
        for name, value in names.items():
            setattr(module, name, value)
        for kind_of_module, forward in forwards.items():
            kind_of_module.forward = forward


# --- Trainer ----------------------------------------------------------------------------------------------------------


class _Told(transformers.TrainerCallback):
    """Trainer logs the loss after every step, which is when a step has ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if logs and "loss" in logs:
            self._clock.step(float(logs["loss"]))


class _InOrder(transformers.Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


def trainer(job: Job, clock: Clock, *, bordered: bool = True) -> None:
    """transformers.Trainer on the same rows in the same order; it saves nothing and reports to nobody."""
    rows = [
        {name: part[place] for name, part in inputs_of(micro, "cpu", bordered=bordered).items()}
        for step in range(1, clock.total + 1)
        for micro in job.batch(step).micro_batches
        for place in range(len(micro.ids))
    ]
    transformers.trainer.is_datasets_available = lambda: False  # our folder of that name is not the library
    model = their_model(job)
    model.config.use_cache = False  # with a cache transformers makes no mask of the examples
    with tempfile.TemporaryDirectory(prefix="speed-trainer-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=clock.total, per_device_train_batch_size=len(job.batches[0].micro_batches[0].ids),
            gradient_accumulation_steps=1, optim="adamw_torch_fused", learning_rate=RATE, weight_decay=0.0,
            lr_scheduler_type="constant", max_grad_norm=CLIP, bf16=False, fp16=False, logging_steps=1, save_strategy="no",
            eval_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, seed=SEED,
            use_cpu=job.device == "cpu",
        )  # fmt: skip
        made = _InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[_Told(clock)])
        made.remove_callback(transformers.PrinterCallback)
        clock.loaded()
        made.train()


# --- the predecessor --------------------------------------------------------------------------------------------------


def predecessor(job: Job, clock: Clock) -> None:
    """Its way: one example at a time padded to 128 tokens, four before an update, transformers' Adafactor."""
    model = their_model(job)
    optimizer = Adafactor(model.parameters(), lr=RATE, scale_parameter=False, relative_step=False, warmup_init=False)
    clock.loaded()
    for step in range(1, clock.total + 1):
        batch = job.batch(step)
        total = torch.zeros((), device=job.device)
        for micro in batch.micro_batches:
            inputs = inputs_of(micro, job.device, bordered=False)
            (length,) = real_lengths(micro)
            mask = torch.arange(micro.ids.shape[1], device=job.device).unsqueeze(0) < length
            loss = model(**inputs, attention_mask=mask, use_cache=False).loss / len(batch.micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step(total.item())


def _open(contender: Callable[..., None]) -> Contender:
    def run(job: Job, clock: Clock) -> None:
        contender(job, clock, bordered=False)

    return run


CONTENDERS: dict[str, Contender] = {
    "ours": ours, "fsdp": fsdp, "eager": eager, "compiled": compiled, "trainer": trainer, "liger": liger,
    "eager-open": _open(eager), "compiled-open": _open(compiled), "trainer-open": _open(trainer),
    "liger-open": _open(liger), "predecessor": predecessor,
}  # fmt: skip

WORDS = {
    "ours": "tunix-rt",
    "fsdp": "tunix-rt, sharded by FSDP2 over one rank",
    "eager": "transformers, a plain loop",
    "compiled": "the plain loop with `model.compile()`",
    "trainer": "transformers' Trainer",
    "liger": "the plain loop with Liger (Triton)",
    "eager-open": "the plain loop, examples see their neighbours",
    "compiled-open": "compiled, examples see their neighbours",
    "trainer-open": "Trainer, examples see their neighbours",
    "liger-open": "Liger (Triton), examples see their neighbours",
    "predecessor": "the predecessor's way: padded to 128, 1 x 4, Adafactor",
}
