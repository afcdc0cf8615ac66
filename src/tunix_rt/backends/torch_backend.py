"""The PyTorch engine: load, the loop, save, generate. The loop yields one `Step` per optimizer update and knows no files."""

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from tunix_rt.backends import Step
from tunix_rt.backends.process_memory import RiseMeter
from tunix_rt.backends.schedule import learning_rate
from tunix_rt.config import Training
from tunix_rt.data.pack import IGNORED, MicroBatch, Row, StepBatch, collate
from tunix_rt.errors import DoesNotFitError, HardwareError, InputError, TunixError
from tunix_rt.models import ModelSource

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LOSS_ROWS = 1024
"""Target tokens projected to the vocabulary at a time when no gradient is needed."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(slots=True, kw_only=True)
class Engine:
    """A loaded model on its device, and the meter that was started before it was loaded."""

    model: Any
    source: ModelSource
    device: torch.device
    parameters: int
    meter: RiseMeter

    def peak_bytes(self) -> int:
        """Peak memory so far: of the CUDA allocator, or on a CPU the rise of resident memory since before the load."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return self.meter.peak_bytes()


# --- load ------------------------------------------------------------------------------------------------------------


def load(source: ModelSource, *, device: str, dtype: str, seed: int) -> Engine:
    """The model on its device, proven to be what the loop assumes. Refuses weights that are missing or left over."""
    config = _config_of(source)
    meter = RiseMeter()
    torch.manual_seed(seed)
    wanted = getattr(torch, dtype)
    # SDPA has no soft-capped scores (Gemma 2); with it they would be left out without a word.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    try:
        if source.weights == "random":
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=wanted, attn_implementation=attention)
        else:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                source.folder, config=config, dtype=wanted, attn_implementation=attention, use_safetensors=True,
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
            _refuse_partial_weights(source, info)
        model = model.to(torch.device(device))
        if wanted == torch.float64:
            _keep_float64(model)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{source.name}: cannot be loaded: {_one_line(error)}", fix="fetch the model again") from error
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise DoesNotFitError(
                f"{source.name}: no memory to load it on {device}", fix="use a smaller model"
            ) from error
        raise InputError(f"{source.name}: cannot be loaded: {_one_line(error)}", fix="fetch the model again") from error
    engine = Engine(
        model=model,
        source=source,
        device=torch.device(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        meter=meter,
    )
    _refuse_wrong_loss(engine)
    return engine


def _config_of(source: ModelSource) -> Any:
    """The model's configuration. Importing its model class here keeps code out of the measured memory."""
    try:
        config = transformers.AutoConfig.from_pretrained(source.folder, trust_remote_code=False, local_files_only=True)
        _ = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{source.name}: model_type {source.config.get('model_type')!r} cannot be trained here: {_one_line(error)}",
            fix="use a causal language model that transformers knows",
        ) from error
    return config


class _StaysFloat64(TorchFunctionMode):
    """Casts of a float64 tensor to float32 are left out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        down = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if down and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _keep_float64(model: Any) -> None:
    """transformers' RMS norms compute in float32 whatever the model's type; a float64 run is a reference and may not."""

    def wrap(inner: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _StaysFloat64():
                return inner(*args, **kwargs)

        return forward

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = wrap(module.forward)


def _refuse_partial_weights(source: ModelSource, info: Mapping[str, Any]) -> None:
    """transformers fills missing weights at random and only warns."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(str(name) for name in info.get(kind) or ()):
            raise InputError(
                f"{source.name}: {len(names)} {kind.replace('_', ' ')}, first {names[0]}",
                fix="the weights do not belong to this config.json; fetch the model again",
            )


def _refuse_wrong_loss(engine: Engine) -> None:
    """Compare our loss and our packing with the model's own logits on a few tokens: a model that differs is refused."""
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    first, second, other = (torch.randint(vocabulary, (1, 8), generator=generator) for _ in range(3))
    positions = torch.cat([torch.arange(8), torch.arange(8)]).unsqueeze(0)
    engine.model.eval()
    with torch.no_grad(), _full_precision():
        ids = torch.cat([first, second], dim=1).to(engine.device)
        beside_other = torch.cat([other, second], dim=1).to(engine.device)
        labels = ids.clone()
        labels[:, [0, 8]] = IGNORED
        ours = summed_loss(engine.model, ids, labels, positions.to(engine.device))
        theirs = torch.zeros((), device=engine.device, dtype=ours.dtype)
        for half in (ids[:, :8], ids[:, 8:]):  # each alone, through the model's own head
            logits = engine.model(input_ids=half, use_cache=False).logits[:, :-1].to(ours.dtype)
            theirs += torch.nn.functional.cross_entropy(logits.flatten(0, 1), half[:, 1:].flatten(), reduction="sum")
        only_second = labels.clone()
        only_second[:, :8] = IGNORED
        alone = summed_loss(engine.model, ids, only_second, positions.to(engine.device))
        beside = summed_loss(engine.model, beside_other, only_second, positions.to(engine.device))
    if not torch.isfinite(theirs):
        raise InputError(f"{engine.source.name}: gives {theirs.item()} on plain tokens", fix="the weights are damaged")
    if not torch.allclose(ours, theirs, rtol=1e-4):
        raise InputError(
            f"{engine.source.name}: two packed examples give loss {ours.item():.6f}, alone they give {theirs.item():.6f}",
            fix="this architecture keeps no boundary between packed examples, or has a head we do not know",
        )
    if not torch.allclose(alone, beside, rtol=1e-5):
        raise InputError(
            f"{engine.source.name}: a packed example notices when its neighbour changes",
            fix="this architecture cannot be trained on packed rows",
        )


# --- the loop --------------------------------------------------------------------------------------------------------


def summed_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the targets. Only the hidden states that predict a target meet the vocabulary."""
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    is_target = labels[:, 1:] != IGNORED  # [rows, tokens - 1]: token t is predicted by the state at t - 1
    states = hidden[:, :-1][is_target]
    targets = labels[:, 1:][is_target]
    if not torch.is_grad_enabled():
        chunks = zip(states.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        return torch.stack([_head_loss(model, s, t) for s, t in chunks]).sum()
    return _head_loss(model, states, targets)


def _head_loss(model: Any, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model.get_output_embeddings()(states)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide, targets, reduction="sum")


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
    """After the first step: parameters, optimizer state and loss live where the log says they do."""
    state = [value for slots in optimizer.state.values() for value in slots.values() if value.dim()]
    homes = {tensor.device.type for tensor in (*engine.model.parameters(), *state, loss)}
    if homes != {engine.device.type}:
        raise HardwareError(
            f"asked for {engine.device.type}, but tensors of the first step live on {', '.join(sorted(homes))}",
            fix="this is a defect of the engine; please report it with training_log.txt",
        )


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
    save_file(
        {name: parameter.detach().contiguous() for name, parameter in named.items()}, folder / "model.safetensors"
    )
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


def save(engine: Engine, folder: Path, *, tokenizer_folder: Path) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` whole."""
    staged = folder.with_name(f".staged-{folder.name}")
    for leftover in (staged, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    engine.model.save_pretrained(staged)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, staged / name)
    staged.rename(folder)


# --- generate --------------------------------------------------------------------------------------------------------


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    eos_id: int,
    pad_id: int,
) -> Iterator[tuple[int, list[int]]]:
    """Greedy continuations as (index of the prompt, new ids without end-of-sequence), batch by batch, shortest first."""
    engine.model.eval()
    settings = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos_id, pad_token_id=pad_id, use_cache=True
    )
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
            yield index, fresh[: fresh.index(eos_id)] if eos_id in fresh else fresh


# --- words -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Without TF32: its rounding is larger than the differences we look for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _memory_is_named(where: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on the CPU
        if not _is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"out of memory in {where}: {_one_line(error)}",
            fix="halve training.per_device_train_batch_size and double training.gradient_accumulation_steps, "
            "or set training.gradient_checkpointing=true",
        ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
