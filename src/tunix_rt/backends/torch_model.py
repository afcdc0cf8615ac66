"""A model of the PyTorch engine: loaded, proven to be what the loop assumes, and its loss."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode

from tunix_rt.backends.process_memory import RiseMeter
from tunix_rt.data.pack import IGNORED
from tunix_rt.errors import DoesNotFitError, InputError
from tunix_rt.models import ModelSource

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LOSS_ROWS = 1024
"""Target tokens projected to the vocabulary at a time when no gradient is needed."""


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
        raise InputError(f"{source.name}: cannot be loaded: {one_line(error)}", fix="fetch the model again") from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"{source.name}: no memory to load it on {device}", fix="use a smaller model"
            ) from error
        raise InputError(f"{source.name}: cannot be loaded: {one_line(error)}", fix="fetch the model again") from error
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
            f"{source.name}: model_type {source.config.get('model_type')!r} cannot be trained here: {one_line(error)}",
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


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Without TF32: its rounding is larger than the differences we look for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
