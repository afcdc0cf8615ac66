"""A model of the PyTorch engine: loaded, proven to be what the loop assumes, and its loss."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import IGNORED, MicroBatch
from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import PhasePeak, RiseMeter
from tunix_rt.engines.profile.trace import FORWARD, HEAD
from tunix_rt.engines.torch.attention import (
    Attention,
    choose_attention,
    fitting,
    kernels,
    refuse_unpackable,
    register,
    works,
)
from tunix_rt.engines.torch.chunked_loss import head_loss, lean_lookup
from tunix_rt.engines.torch.prefetch import Placed, Placing
from tunix_rt.engines.torch.profile import region
from tunix_rt.errors import DoesNotFitError, InputError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.secrets import one_line as one_line  # the backend takes it from here
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES
from tunix_rt.plan.precision import Recipe, recipe_of, recipe_to_ask

logger = logging.getLogger(__name__)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

GIVEN_OUT = "bytes that the CUDA allocator had given out"
HIGHEST_LOSS_SCALE = 2.0**24
STEPS_TO_GROW = 1000
"""Steps without an overflow after which float16's loss scale is doubled."""


@dataclass(slots=True, kw_only=True)
class LossScale:
    """What a float16 loss is multiplied by. Part of a checkpoint: the next step depends on it."""

    value: float = 2.0**15
    steps: int = 0
    """Steps since it last changed."""

    def overflowed(self) -> None:
        self.value, self.steps = self.value / 2, 0

    def held(self) -> None:
        self.steps += 1
        if self.steps >= STEPS_TO_GROW and self.value < HIGHEST_LOSS_SCALE:
            self.value, self.steps = self.value * 2, 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"loss_scale": torch.tensor([self.value, self.steps], dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        value, steps = tensors["loss_scale"].tolist()
        self.value, self.steps = value, int(steps)


@dataclass(slots=True, kw_only=True)
class Engine:
    """A loaded model on its device, how it computes, and the meter that was started before it was loaded."""

    model: Any
    source: ModelSource
    device: torch.device
    parameters: int
    """Of the model; with LoRA, adapters are not counted."""
    meter: RiseMeter
    recipe: Recipe
    attention: Attention
    deterministic: bool = False
    loss_scale: LossScale | None = None
    pending_copy: Any = None
    """A copy of the weights that is still being made for a checkpoint; awaited before the next update."""
    prepared: bool = False
    """Whether the layers have been made ready for training steps."""
    compiled_shape: tuple[int, int] | None = None
    """Rows and tokens that the layers of a training step are compiled for; None: they are not compiled."""
    recorded: Any = None
    """The `torch_record.Recorded` of the compiled layers; None: they are launched kernel by kernel."""
    saved_dtype: str | None = None
    """Type in which `save` writes the weights, which are rounded to it; None: as they are kept."""
    limit_bytes: int | None = None
    """What the CUDA allocator may hold at most; None: whatever there is."""
    taken_bytes: int = 0
    """On CUDA the highest peak of the phases that were asked for: each of them begins anew."""

    def peak_bytes(self) -> int:
        """Peak memory so far: of the CUDA allocator, or on a CPU the rise of resident memory since before the load."""
        if self.device.type == "cuda":
            # As max_memory_allocated reads it, without the hundred other figures: this is asked after every step.
            told = torch.cuda.memory_stats_as_nested_dict(self.device)
            return max(self.taken_bytes, int(told["allocated_bytes"]["all"]["peak"]))
        return self.meter.peak_bytes()

    def take_peak(self) -> PhasePeak:
        """Peak memory since this was last asked. From here on it is counted anew, but for `peak_bytes`."""
        if self.device.type != "cuda":
            return self.meter.take_peak()
        told = torch.cuda.memory_stats_as_nested_dict(self.device)
        used, held = (int(told[kind]["all"]["peak"]) for kind in ("allocated_bytes", "reserved_bytes"))
        self.taken_bytes = max(self.taken_bytes, used)
        torch.cuda.reset_peak_memory_stats(self.device)
        return PhasePeak(used_bytes=used, measure=GIVEN_OUT, alone=True, reserved_bytes=held)

    @property
    def compute(self) -> torch.dtype:
        return getattr(torch, self.recipe.compute)

    def computing(self, *, once: bool = False) -> torch.autocast:
        """Products in the type of the recipe, whatever the type of the weights.

        Casts of weights are kept until the end of the block; where every weight is used `once` in it, as in one forward
        pass, only as long as a product or its backward pass needs them."""
        return torch.autocast(self.device.type, dtype=self.compute, enabled=self.recipe.casts, cache_enabled=not once)

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        """The kernels of attention that may be taken; around the backward pass too, where layers are computed again."""
        return kernels(self.attention, deterministic=self.deterministic)

    @property
    def windows(self) -> tuple[int, ...]:
        window = getattr(self.model.config, "sliding_window", None)
        return (window,) if isinstance(window, int) else ()

    @property
    def compiled(self) -> bool:
        return self.compiled_shape is not None

    def placing(self, *, training: bool = False) -> Placing:
        """How micro-batches are laid out on the device; those of a training step in the shape it is compiled for."""
        least = (self.compiled_shape if training else None) or (0, 0)
        return Placing(device=self.device, attention=self.attention, windows=self.windows, least=least)

    @contextlib.contextmanager
    def attending(self, implementation: str) -> Iterator[None]:
        """The model with another attention for a while: generation keeps a cache, which packed rows do not."""
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = implementation
        try:
            yield
        finally:
            self.model.config._attn_implementation = before

    @property
    def tables(self) -> list[torch.nn.Parameter]:
        """Trained tables of the vocabulary, whose gradients are complete only when the backward pass is."""
        ends = (self.model.get_output_embeddings(), self.model.get_input_embeddings())
        return list({id(end.weight): end.weight for end in ends if end.weight.requires_grad}.values())


def load(source: ModelSource, *, device: str, training: Training) -> Engine:
    """The model on its device, proven to be what the loop assumes. Refuses weights that are missing or left over."""
    config = _config_of(source)
    be_deterministic(device, training.deterministic)
    limit = None
    if device == "cuda":
        _let_memory_grow()
        limit = _hold_to(training.memory_limit_gib)
    meter = RiseMeter()
    recipe = recipe_of(training)
    attention = attention_for(config, device, training)
    torch.manual_seed(training.seed)
    with _loading(source, device):
        model = _read_model(
            source, config, attention, dtype=getattr(torch, recipe.frozen or recipe.weights), device=device
        )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if training.lora_rank is not None:
            from tunix_rt.engines.torch.lora import add_adapters

            model = add_adapters(model, rank=training.lora_rank, source=source)
        model = model.to(torch.device(device))
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
    _refuse_unknown_head(engine)
    lean_lookup(model.get_input_embeddings())
    refuse_unpackable(model, source.name)
    engine.attention = fitting(model, attention)
    model.config._attn_implementation = engine.attention.training
    logger.info("Attention: %s; %s", engine.attention.name, engine.attention.why)
    with memory_is_named("the first look at the model"):
        _refuse_wrong_loss(engine)
    return engine


def load_to_ask(source: ModelSource, *, device: str, dtype: str, seed: int = 0) -> Engine:
    """The model on its device with weights of type `dtype`, to generate and nothing else: it need not be one to be trained."""
    config = _config_of(source)
    be_deterministic(device, False)
    meter = RiseMeter()
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    capped = bool(getattr(config, "attn_logit_softcapping", None))
    name = "sdpa" if getattr(kind, "_supports_sdpa", True) and not capped else "eager"
    attention = Attention(name=name, training=name, generating=name, why="answers keep a cache")
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
        recipe=recipe_to_ask(dtype),
        attention=attention,
    )


@contextlib.contextmanager
def _loading(source: ModelSource, device: str) -> Iterator[None]:
    """Errors of a load as the words of ours."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{source.name}: cannot be loaded: {one_line(error)}", fix="fetch the model again") from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            taken = f" beside the {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB taken" if device == "cuda" else ""
            raise DoesNotFitError(
                f"{source.name}: no memory to load it on {device}{taken}",
                fix="free memory there, or ask `tunix-rt plan` what to change",
            ) from error
        raise InputError(f"{source.name}: cannot be loaded: {one_line(error)}", fix="fetch the model again") from error


def free_bytes(engine: Engine) -> int:
    """Memory at hand on the engine's device. On a GPU that of the allocator which nobody uses counts too."""
    if engine.device.type != "cuda":
        return host_facts().ram_available_bytes  # of the container, where there is one
    free, _ = torch.cuda.mem_get_info(engine.device)
    held, used = torch.cuda.memory_reserved(engine.device), torch.cuda.memory_allocated(engine.device)
    if engine.limit_bytes is not None:
        free = min(free, max(0, engine.limit_bytes - held))
    return int(free + held - used)


def be_deterministic(device: str, asked: bool) -> None:
    """For the whole process: only kernels that give the same bits every time, or any. cuBLAS reads its variable at its start.

    Memory that nobody has written to is left as it is: filling it costs time, and no result depends on it.
    """
    if asked and device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.deterministic = asked
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(asked)
    if asked:  # the compiler chooses between kernels by how long they take, unless it is told not to
        from torch._inductor import config as compiler

        compiler.deterministic = True


def _let_memory_grow() -> None:
    """Let pieces of GPU memory grow where they lie, so that what is free is not cut into pieces that nothing fits into.

    On a card that is nearly full it decides whether a step runs. Left alone where the user has settings of their own."""
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        known = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # its name since torch 2.9 or so
        (known or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _hold_to(limit_gib: float | None) -> int | None:
    """Let the allocator of this process hold no more than `limit_gib`, less what CUDA itself takes of the device; what it may
    hold. Without a limit it is left as it is."""
    if limit_gib is None:
        return None
    limit = max(0, round(limit_gib * 2**30) - CUDA_CONTEXT_BYTES)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    return limit


def attention_for(config: Any, device: str, training: Training) -> Attention:
    register()
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    heads = getattr(config, "num_attention_heads", None) or 1  # a model without attention is refused once it is loaded
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    attention = choose_attention(
        device=device,
        dtype=training.dtype,
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        softcap=softcap,
        dropout=any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop")),
        head_dim=head_dim,
        deterministic=training.deterministic,
        sdpa=getattr(kind, "_supports_sdpa", True),
    )
    if attention.name not in ("varlen", "flex"):
        return attention
    if reason := works(attention, head_dim=head_dim, dtype=training.dtype):
        name = "eager" if softcap else "sdpa"
        why = f"{attention.name} does not work here ({reason}); transformers makes a mask of tokens x tokens"
        return Attention(name=name, training=name, generating=name, why=why)
    return attention


def _read_model(source: ModelSource, config: Any, attention: Attention, *, dtype: torch.dtype, device: str) -> Any:
    """The model with pretrained weights, or with random ones that are drawn on the device itself."""
    kinds = {"dtype": dtype, "attn_implementation": attention.training}
    if source.weights == "random":
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, **kinds)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        source.folder, config=config, use_safetensors=True, local_files_only=True, trust_remote_code=False,
        output_loading_info=True, **kinds,
    )  # fmt: skip
    _refuse_partial_weights(source, info)
    return model


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


def _refuse_unknown_head(engine: Engine) -> None:
    head = engine.model.get_output_embeddings()
    biased = getattr(head, "bias", None) is not None
    if not isinstance(head, torch.nn.Linear) or biased:
        raise InputError(
            f"{engine.source.name}: its head is a {type(head).__name__}{' with a bias' if biased else ''}",
            fix="only plain projections to the vocabulary can be trained",
        )


def _refuse_wrong_loss(engine: Engine) -> None:
    """Compare our loss and our packing with the model's own logits on a few tokens: a model that differs is refused."""
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    first, second, other = (torch.randint(vocabulary, (1, 8), generator=generator) for _ in range(3))
    positions = torch.cat([torch.arange(8), torch.arange(8)]).unsqueeze(0)
    ids, beside_other = (torch.cat([one, second], dim=1) for one in (first, other))
    labels = ids.clone()
    labels[:, [0, 8]] = IGNORED
    engine.model.eval()
    with torch.no_grad(), _full_precision(), engine.kernels():
        packed = _micro(ids, labels, positions)
        ours = summed_loss(engine, packed)
        theirs = torch.zeros((), device=engine.device, dtype=torch.float64)
        for half in (
            ids[:, :8].to(engine.device),
            ids[:, 8:].to(engine.device),
        ):  # each alone, through the model's head
            with engine.attending(engine.attention.generating), engine.computing(once=True):
                logits = engine.model(input_ids=half, use_cache=False).logits[:, :-1].double()
            theirs += torch.nn.functional.cross_entropy(logits.flatten(0, 1), half[:, 1:].flatten(), reduction="sum")
        states = hidden_states(engine, packed)[:, 8:]
        beside = hidden_states(engine, _micro(beside_other, labels, positions))[:, 8:]
    if not torch.isfinite(theirs):
        raise InputError(f"{engine.source.name}: gives {theirs.item()} on plain tokens", fix="the weights are damaged")
    if not torch.allclose(ours, theirs, rtol=1e-4 if engine.compute.itemsize >= 4 else 1e-2):
        raise InputError(
            f"{engine.source.name}: two packed examples give loss {ours.item():.6f}, alone they give {theirs.item():.6f}",
            fix="this architecture keeps no boundary between packed examples, or has a head we do not know",
        )
    if not torch.allclose(states, beside, rtol=0, atol=1e-5 * float(states.abs().max())):
        raise InputError(
            f"{engine.source.name}: a packed example notices when its neighbour changes",
            fix="this architecture cannot be trained on packed rows",
        )


def _micro(ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> MicroBatch:
    return MicroBatch(ids=ids.numpy(), labels=labels.numpy(), positions=positions.numpy())


def hidden_states(engine: Engine, micro: MicroBatch | Placed) -> torch.Tensor:
    """What the last layer makes of packed rows, [rows, tokens, hidden]; no token has seen another example."""
    placed = micro if isinstance(micro, Placed) else engine.placing()(micro)
    if engine.recorded is not None and torch.is_grad_enabled() and engine.recorded.fits(placed):
        with region(FORWARD):
            return engine.recorded(placed)
    with region(FORWARD), engine.computing(once=True):
        return engine.model.base_model(
            input_ids=placed.ids, position_ids=placed.positions, use_cache=False, **placed.borders
        ).last_hidden_state


def summed_loss(engine: Engine, micro: MicroBatch | Placed, *, scale: float = 1.0) -> torch.Tensor:
    """Cross entropy summed over the targets, times `scale`, in float64. Call `backward()` on this very value.

    Only the hidden states that predict a target meet the vocabulary.
    """
    placed = micro if isinstance(micro, Placed) else engine.placing()(micro)
    hidden = hidden_states(engine, placed)
    with region(HEAD):
        return head_loss(
            hidden.flatten(0, 1).index_select(0, placed.places),
            engine.model.get_output_embeddings().weight,
            placed.targets,
            scale=scale,
            softcap=getattr(engine.model.config, "final_logit_softcapping", None),
            compute=engine.compute,
        )


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
    """torch has a class of its own for it, and words of the libraries below, which say it in theirs."""
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


@contextlib.contextmanager
def memory_is_named(where: str) -> Iterator[None]:
    """Say where memory ran out; the planner adds what was in it and what to change."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"out of memory in {where}: {one_line(error)}", fix="ask `tunix-rt plan` what to change"
        ) from error
