"""Loading a model for training or for inference: weights, attention, adapters, and a check of its loss on a few tokens."""

import contextlib
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.overrides import TorchFunctionMode

from tunix_rt.config.capabilities import refuse_unsupported
from tunix_rt.config.settings import Training
from tunix_rt.engines.base import StepShape
from tunix_rt.engines.failures import SEE_PLAN, is_out_of_memory, memory_errors_named
from tunix_rt.engines.memory_meter import RiseMeter
from tunix_rt.engines.torch.adapters import add_adapters, add_meta_adapters
from tunix_rt.engines.torch.attention import (
    VARLEN_LACKS,
    Attention,
    attention_of,
    kernel_failure,
    register,
)
from tunix_rt.engines.torch.compile import layers_of
from tunix_rt.engines.torch.model import (
    Engine,
    LossScale,
    text_config,
)
from tunix_rt.engines.torch.model_check import check_model
from tunix_rt.engines.torch.quantization import quantize
from tunix_rt.engines.torch.sharded_load import fill_model, meta_model
from tunix_rt.engines.torch.sharding import Sharding
from tunix_rt.errors import DoesNotFitError, InputError, TunixError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.multimodal import PREFIXES
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.secrets import one_line
from tunix_rt.plan.attention_kernels import MASKED, torch_attention
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES
from tunix_rt.plan.precision import recipe_for_inference, recipe_of
from tunix_rt.ranks import World

logger = logging.getLogger(__name__)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def load(
    source: ModelSource, *, device: str, training: Training, step: StepShape | None = None, implementation: str = "auto",
    attempt: bool = False,
) -> Engine:  # fmt: skip
    """The model on its device, checked to be what the loop assumes. Refuses weights that are missing or left over.

    `step` and `attempt` decide nothing here: PyTorch allocates as it runs, so a step is not compiled, and not refused, before
    the weights are loaded. `prepare_steps` compiles for the batches of the run."""
    refuse_unsupported(training, "torch", implementation=implementation)
    config = _config_of(source)
    set_deterministic(device, training.deterministic)
    limit = None
    if device == "cuda":
        _use_expandable_segments()
        limit = _limit_memory(training.memory_limit_gib)
    meter = RiseMeter()
    recipe = recipe_of(training)
    torch.manual_seed(training.seed)
    by_rows = dist.is_initialized() and _loads_by_rows(source)
    with _loading(source, device):
        attention = attention_for(config, device, training)
        dtype = getattr(torch, recipe.frozen or recipe.weights)
        if by_rows:
            model = meta_model(source, config, _options(attention, dtype))
        else:
            drawn_on = "cpu" if training.load_in_4bit else device  # a GPU need not have memory for whole weights
            model = _read_model(source, config, attention, dtype=dtype, device=drawn_on)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        adapters: dict[str, torch.Tensor] = {}
        if by_rows and training.lora_rank is not None:
            adapters = add_meta_adapters(model, training, name=source.name)
        if not by_rows:
            model = _adapted(model, source, training, torch.device(device))
        if recipe.compute == "float64":
            _keep_float64(model)
    engine = Engine(
        model=model,
        source=source,
        device=torch.device(device),
        parameters=parameters,
        meter=meter,
        recipe=recipe,
        attention=attention,
        deterministic=training.deterministic,
        loss_scale=LossScale() if recipe.loss_scaled else None,
        limit_bytes=limit,
    )
    if by_rows:
        sharding = _shard(engine, training)
        with _loading(source, device), memory_errors_named("the loading of the weights"):
            fill_model(model, source, sharding, key_mapping=_key_mapping(source))
            sharding.fill(adapters)
    with _loading(source, device):
        check_model(engine, training)
    if dist.is_initialized() and not by_rows:
        _shard(engine, training)
    return engine


def _loads_by_rows(source: ModelSource) -> bool:
    """Whether a rank reads its rows alone. Random weights are drawn whole, as one device draws them, and a model of an unknown
    family is tried as a whole."""
    return source.config.get("model_type") in FAMILIES and source.weights == "pretrained"


def _adapted(model: Any, source: ModelSource, training: Training, device: torch.device) -> Any:
    """The model on its device, quantized and with adapters as `training` has them."""
    if training.load_in_4bit:
        quantize(model, name=source.name, device=device)
    if training.lora_rank is not None:
        model = add_adapters(model, training, name=source.name)
    return model.to(device)


def _shard(engine: Engine, training: Training) -> Sharding:
    """Share the parameters with the other ranks of the process group."""
    engine.sharding = sharding = Sharding(
        engine.model, layers_of(engine.model), device=engine.device, replicas=training.data_replicas,
        world=World(rank=dist.get_rank(), size=dist.get_world_size()),
    )  # fmt: skip
    logger.info(
        "Sharded over %d ranks: %d replica(s) of %d shards",
        sharding.world.size, sharding.replicas, sharding.shards,
    )  # fmt: skip
    return sharding


def load_for_inference(source: ModelSource, *, device: str, dtype: str, seed: int = 0) -> Engine:
    """The model on its device with weights of type `dtype`, for generation: it need not be one that can be trained."""
    config = _config_of(source)
    set_deterministic(device, False)
    meter = RiseMeter()
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    capped = bool(getattr(config, "attn_logit_softcapping", None))
    name = "sdpa" if getattr(kind, "_supports_sdpa", True) and not capped else "eager"
    attention = Attention(name=name, training=name, generating=name, why="generation has a KV cache")
    torch.manual_seed(seed)
    with _loading(source, device):
        model = _read_model(source, config, attention, dtype=getattr(torch, dtype), device=device).to(
            torch.device(device)
        )
    return Engine(
        model=model,
        source=source,
        device=torch.device(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        meter=meter,
        recipe=recipe_for_inference(dtype),
        attention=attention,
    )


@contextlib.contextmanager
def _loading(source: ModelSource, device: str) -> Iterator[None]:
    """Reports errors of a model, and a lack of memory, as errors of tunix-rt. A defect of tunix-rt is not the model's."""
    try:
        yield
    except TunixError:
        raise
    except Exception as error:  # transformers builds a model from a stranger's config.json, which may raise anything
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_out_of_memory(error)):
            taken = f" beside the {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB taken" if device == "cuda" else ""
            raise DoesNotFitError(
                f"{source.name}: out of memory while it is loaded on {device}{taken}",
                fix=f"free memory there; {SEE_PLAN}",
            ) from error
        if not _raised_by_model(error):
            raise
        raise InputError(
            f"{source.name}: cannot be loaded: {type(error).__name__}: {one_line(error)}",
            fix="fetch the model again, or correct its config.json",
        ) from error


def _raised_by_model(error: Exception) -> bool:
    """Whether `error` was raised below code of transformers: that of the model, or of its weights. Any other is ours."""
    theirs = os.path.dirname(transformers.__file__)
    return any(frame.f_code.co_filename.startswith(theirs) for frame, _ in traceback.walk_tb(error.__traceback__))


def set_deterministic(device: str, enabled: bool) -> None:
    """For the whole process: deterministic kernels only, or any. cuBLAS reads its variable when it starts.

    Uninitialized memory is not filled: that takes time, and no result depends on it.
    """
    if enabled and device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.deterministic = enabled
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(enabled)
    if enabled:  # else the compiler chooses between kernels by their measured time
        from torch._inductor import config as compiler

        compiler.deterministic = True


def _use_expandable_segments() -> None:
    """Expandable segments reduce fragmentation, which on a nearly full GPU decides whether a step runs. Allocator settings of
    the user take precedence."""
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # its name since torch 2.9 or so
        (setter or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _limit_memory(limit_gib: float | None) -> int | None:
    """Limit the allocator of this process to `limit_gib` less the CUDA context; the limit in bytes, None without one."""
    if limit_gib is None:
        return None
    limit = max(0, round(limit_gib * 2**30) - CUDA_CONTEXT_BYTES)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    return limit


def attention_for(config: Any, device: str, training: Training) -> Attention:
    register()
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if (head_dim := largest_head(config)) is None:
        name = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
        return attention_of(name, f"its configuration has no head size: {MASKED}")
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    choice = torch_attention(
        device=device,
        dtype=training.dtype,
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        softcap=softcap,
        dropout=any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop")),
        head_dim=head_dim,
        deterministic=training.deterministic,
        sdpa=getattr(kind, "_supports_sdpa", True),
        varlen_lacks=VARLEN_LACKS,
    )
    attention = attention_of(*choice)
    if attention.name not in ("varlen", "flex"):
        return attention
    if reason := kernel_failure(attention, head_dim=head_dim, dtype=training.dtype):
        why = f"{attention.name} does not work here ({reason}); transformers builds a mask of tokens x tokens"
        return attention_of("eager" if softcap else "sdpa", why)
    return attention


def largest_head(config: Any) -> int | None:
    """The head size of the layers, the largest one where they differ (Gemma 4); None if the configuration has none."""
    layers = getattr(config, "per_layer_config", None)
    try:
        each = [config] if layers is None else [layers[at] for at in range(config.num_hidden_layers)]
        # A layer has no head size of its own if all have the same, and none is written where it follows from the width.
        sizes = [getattr(layer, "head_dim", None) or getattr(config, "head_dim", None) for layer in each]
        return max(int(size or config.hidden_size // config.num_attention_heads) for size in sizes)
    except (AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError, LookupError):
        return None


def _read_model(source: ModelSource, config: Any, attention: Attention, *, dtype: torch.dtype, device: str) -> Any:
    """The model with pretrained weights, or with random ones that are drawn on the device."""
    options = _options(attention, dtype)
    if source.weights == "random":
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, **options)
    if (key_mapping := _key_mapping(source)) is not None:
        options["key_mapping"] = key_mapping
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        source.folder, config=config, use_safetensors=True, local_files_only=True, trust_remote_code=False,
        output_loading_info=True, **options,
    )  # fmt: skip
    _refuse_partial_weights(source, info)
    return model


def _options(attention: Attention, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention.training}
    if dtype == torch.float64:  # for which torch has no grouped matmul of experts
        options["experts_implementation"] = "eager"
    return options


def _key_mapping(source: ModelSource) -> dict[str, str] | None:
    """Names in the file of a multimodal model -> names in its text model, as patterns."""
    if not source.multimodal:
        return None
    prefixes = {f"^{re.escape(prefix)}": "model." for prefix in PREFIXES}
    return prefixes | {"^language_model.lm_head": "lm_head"}


def _config_of(source: ModelSource) -> Any:
    """The model's configuration. Importing its class here excludes the code from the measured memory."""
    try:
        whole = transformers.AutoConfig.from_pretrained(source.folder, trust_remote_code=False, local_files_only=True)
        config = text_config(whole)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"no causal language model takes a {type(config).__name__}")
        _ = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:  # it validates a stranger's file, with errors of its own
        raise InputError(
            f"{source.name}: transformers refuses {source.folder / 'config.json'} "
            f"(model_type {source.config.get('model_type')!r}): {one_line(error)}",
            fix="use a causal language model that transformers knows, or correct config.json",
        ) from error
    return config


class _StaysFloat64(TorchFunctionMode):
    """Skips casts of a float64 tensor to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        down = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if down and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _keep_float64(model: Any) -> None:
    """RMS norms of transformers compute in float32 whatever the dtype of the model; a float64 run is a reference."""

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
