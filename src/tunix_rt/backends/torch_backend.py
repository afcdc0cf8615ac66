"""The PyTorch engine: the loop, save, generate; `load` and the loss are in `torch_model.py`.

The loop yields one `Step` per optimizer update and knows no files.
"""

import contextlib
import copy
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tunix_rt.backends import Step
from tunix_rt.backends.schedule import learning_rate
from tunix_rt.backends.torch_model import Engine, is_out_of_memory, load, one_line, summed_loss
from tunix_rt.config import Training
from tunix_rt.data.pack import MicroBatch, Row, StepBatch, collate
from tunix_rt.errors import DoesNotFitError, HardwareError, InputError, TunixError
from tunix_rt.rundir import settle_files, storage, sync_folder

__all__ = ["generate", "heldout_loss", "load", "make_optimizer", "optimizer_steps", "save", "summed_loss"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


# --- the loop --------------------------------------------------------------------------------------------------------


def make_optimizer(engine: Engine, training: Training) -> torch.optim.AdamW:
    """AdamW over every parameter; matrices are decayed, vectors (norms, biases) are not."""
    parameters = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (training.adam_beta1, training.adam_beta2)
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon, fused=True)


def optimizer_steps(
    engine: Engine,
    optimizer: torch.optim.AdamW,
    batch_of: Callable[[int], StepBatch],
    training: Training,
    *,
    first: int,
    total: int,
) -> Iterator[Step]:
    """Train steps `first` to `total`, yielding after each. Everything random is a function of (seed, step)."""
    model = engine.model
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for step in range(first, total + 1):
        started = time.perf_counter()
        batch = batch_of(step)
        rate = learning_rate(step, total=total, training=training)
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.train()
        torch.manual_seed(_seed_of(training.seed, step))
        loss_sum = torch.zeros((), device=engine.device, dtype=torch.float64)
        with _memory_is_named(f"step {step}"):
            for micro in batch.micro_batches:
                loss = summed_loss(model, *_on_device(micro, engine.device))
                # The mean over all targets of the step, not of the micro-batch: accumulation must not change the loss.
                (loss / batch.target_tokens).backward()
                loss_sum += loss.detach().double()
            norm = _clip(model, training.max_grad_norm)
            mean_loss = loss_sum.item() / batch.target_tokens
            _refuse_nonfinite(step, mean_loss, norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step == first:
            _assert_on_device(engine, optimizer, loss)
        yield Step(
            step=step,
            loss=mean_loss,
            lr=rate,
            grad_norm=norm,
            target_tokens=batch.target_tokens,
            tokens=batch.tokens,
            seconds=time.perf_counter() - started,
            peak_bytes=engine.peak_bytes(),
            batch=batch.sha256,
        )


def _seed_of(seed: int, step: int) -> int:
    """A seed for one step. Mixed down to 32 bits, because torch's CPU generator ignores the higher ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big")


def _on_device(micro: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(part).to(device) for part in (micro.ids, micro.labels, micro.positions))


def _clip(model: Any, max_norm: float) -> float:
    """Global gradient norm before clipping; `max_norm` 0 only measures."""
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf))


def _refuse_nonfinite(step: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TunixError(
            f"step {step}: loss {loss}, gradient norm {norm}; stopped before the update",
            fix="lower training.learning_rate, or look at the rows of this step; the last checkpoint is intact",
        )


def _assert_on_device(engine: Engine, optimizer: torch.optim.AdamW, loss: torch.Tensor) -> None:
    """After the first step: parameters, buffers, optimizer state and loss live where the log says they do.

    A parameter that the optimizer keeps nothing for was not trained, and is named as well.
    """
    named = dict(engine.model.named_parameters())
    found = {**named, **dict(engine.model.named_buffers()), "the loss": loss}
    for name, parameter in named.items():
        kept = optimizer.state.get(parameter, {})
        if parameter.requires_grad and not kept:
            raise HardwareError(f"the optimizer keeps no state of {name} after the first step", fix=_DEFECT)
        found |= {f"{slot} of {name}": value for slot, value in kept.items()}
    asked = torch.empty(0, device=engine.device).device  # `cuda` with its number
    strays = sorted(f"{name} on {tensor.device}" for name, tensor in found.items() if tensor.device != asked)
    if strays:
        raise HardwareError(
            f"asked for {asked}, but after the first step {len(strays)} of {len(found)} tensors live elsewhere: "
            + ", ".join(strays[:3]),
            fix=_DEFECT,
        )


_DEFECT = "this is a defect of the engine; please report it with training_log.txt and doctor.json"


def heldout_loss(engine: Engine, rows: Sequence[Row], *, batch_size: int, pad_id: int) -> tuple[float, int]:
    """Mean loss over the target tokens of `rows`, and their number. Nothing is trained."""
    engine.model.eval()
    total, targets = 0.0, 0
    with torch.no_grad(), _memory_is_named("the held-out loss"):
        for start in range(0, len(rows), batch_size):
            micro = collate(rows[start : start + batch_size], pad_id=pad_id)
            total += summed_loss(engine.model, *_on_device(micro, engine.device)).item()
            targets += micro.targets
    return total / targets, targets


# --- save and restore ------------------------------------------------------------------------------------------------


def save_state(engine: Engine, optimizer: torch.optim.AdamW, folder: Path) -> None:
    """Weights and optimizer moments as safetensors in `folder`. RNG needs no file: it is a function of (seed, step)."""
    named = dict(engine.model.named_parameters())
    moments = {
        f"{kind}.{name}": optimizer.state[parameter][kind].contiguous()
        for name, parameter in named.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    weights = {name: parameter.detach().contiguous() for name, parameter in named.items()}
    with _disk_is_named(folder):
        save_file(weights, folder / "model.safetensors")
        save_file(moments, folder / "optimizer.safetensors")


def restore_state(engine: Engine, optimizer: torch.optim.AdamW, folder: Path, *, step: int) -> None:
    """Put weights and moments of a verified checkpoint back, bit for bit."""
    weights = load_file(folder / "model.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            parameter.copy_(weights[name])
            optimizer.state[parameter] = {
                # fused AdamW keeps its step count on the device of the parameter
                "step": torch.tensor(float(step), device=engine.device),
                "exp_avg": moments[f"exp_avg.{name}"].to(engine.device),
                "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(engine.device),
            }


def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` whole.

    What it generates ends at `stop_ids`, whatever the base model says. `chat_template` takes the place of the
    tokenizer's own; None leaves that.
    """
    settings = copy.deepcopy(engine.model.generation_config)
    settings.eos_token_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    staged = folder.with_name(f".staged-{folder.name}")
    for leftover in (staged, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    with _disk_is_named(folder):
        engine.model.save_pretrained(staged)
        settings.save_pretrained(staged)
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, staged / name)
        if chat_template is not None:
            (staged / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="\n")
        settle_files(staged)  # `result.json` will say completed: the model must outlive a power cut by then
        staged.rename(folder)
        sync_folder(folder.parent)


# --- generate --------------------------------------------------------------------------------------------------------


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Iterator[tuple[int, list[int]]]:
    """Greedy continuations as (index of the prompt, new ids), batch by batch, shortest first.

    An answer ends before the first of `stop_ids`: end-of-sequence, or the end of a turn.
    """
    engine.model.eval()
    settings = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(stop_ids), pad_token_id=pad_id, use_cache=True
    )
    stops = frozenset(stop_ids)
    limit = getattr(engine.model.config, "max_position_embeddings", None)
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(prompts[index]) for index in chosen)
        if limit is not None and width + max_new_tokens > limit:
            raise InputError(
                f"a prompt of {width} tokens and {max_new_tokens} new ones are over the model's {limit} positions",
                fix="lower evaluation.max_new_tokens",
            )
        ids = torch.full((len(chosen), width), pad_id)
        mask = torch.zeros((len(chosen), width), dtype=torch.long)
        for place, index in enumerate(chosen):  # padded on the left, so that every answer starts in the same column
            ids[place, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[place, width - len(prompts[index]) :] = 1
        with torch.no_grad(), _memory_is_named("generation"):
            output = engine.model.generate(
                input_ids=ids.to(engine.device), attention_mask=mask.to(engine.device), generation_config=settings
            )
        for place, index in enumerate(chosen):
            fresh = output[place, width:].tolist()
            yield index, fresh[: next((at for at, token in enumerate(fresh) if token in stops), len(fresh))]


# --- words -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


@contextlib.contextmanager
def _disk_is_named(folder: Path) -> Iterator[None]:
    """safetensors wraps what the disk says (full, read-only) in an error of its own that is no OSError."""
    with storage(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(None, one_line(error), str(folder)) from error


@contextlib.contextmanager
def _memory_is_named(where: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on the CPU
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"out of memory in {where}: {one_line(error)}",
            fix="halve training.per_device_train_batch_size and double training.gradient_accumulation_steps, "
            "or set training.gradient_checkpointing=true",
        ) from error
