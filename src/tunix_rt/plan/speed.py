"""Seconds of an optimizer step on a GPU or TPU, predicted as a sum of named parts from the model's shape and the settings alone.

Every part is arithmetic over a rate or bytes over a bandwidth, and both are taken at the share of the published figure that
was reached on an H200. The constants below are all there are; `tests/unit/test_speed_prediction.py` holds them against every
measured step. What was not measured is another GPU: there the published figures scale the parts, and the range is wider.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tunix_rt.accelerators import find_accelerator
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.activations import DTYPE_BYTES, Batch, attention_kernel, widths_of
from tunix_rt.plan.compile_policy import UNKNOWN_TFLOPS, compiled_length, layers_planned
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.jax_memory import has_kernel, row_length
from tunix_rt.plan.memory import longest_row
from tunix_rt.plan.precision import Recipe, loss_rows, recipe_of
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.target import Device

# --- fitted to the steps in benchmarks/results/speed_*.json and jax_speed*.json, where nothing else is said

PRODUCT_SHARE = 0.78
"""Of the published rate of products, beside the time that their operands take: the layers of Gemma 2B came to 693 of 989
TFLOP/s with both (benchmarks/results/speed_profile.txt)."""
BANDWIDTH_SHARE = 0.8
"""Of the published bandwidth: 3,847 of 4,800 GB/s (benchmarks/results/jax_program_h200.txt)."""
ATTENTION_SHARE = 0.2
"""Of the published rate, by the products of attention, whose softmax stands between them."""
ATTENTION_PASSES = 30
"""Times that a head's values are read or written, forth and back: short examples fill a kernel's tiles badly."""
NORM_PASSES = 20
"""Times that a norm's values are, with the residual beside it, in a compiled layer."""
GATED_PASSES, PLAIN_PASSES = 9, 6
"""Times that the inner values of an MLP are between its products: gate, up and their product, or a single activation."""
PLAIN_LAYER = 3.0
"""What a layer that is not compiled moves, in multiples of what a compiled one does: each operation by itself. A guess: where
such layers were measured, the host was slower."""
LOGIT_BYTES = 9
"""Moved for each logit beside the products of the head (`_turn_part` in speed_profile.txt)."""
COMPILED_LAUNCH_SECONDS, PLAIN_LAUNCH = 0.0031, 1.4
"""A host launches the kernels of a compiled layer, forth and back, in so long beside an H200
(speed_models_unrecorded.json); of one that is not compiled, in so many times as long (smollm2_gsm8k/metrics.jsonl)."""
STEP_SECONDS = 0.003
"""The device waits so long in every step, for its batch and its loss."""
UPDATE_LAUNCH_SECONDS, TENSORS_OF_A_LAYER = 0.00005, 9
"""A host launches the update of one tensor in so long, where each is updated by itself in the backward pass
(solver_order.json)."""
EIGHT_BIT_PASSES = 10
"""Times that the temporaries of an update with moments of 8 bits are read and written, where no kernel does it at once
(solver_auto.json, before there was one)."""
JAX_SLOWER = 1.14
"""The JAX engine's steps beside the same parts of the PyTorch engine's (jax_program_h200.txt)."""
JAX_GRADIENT_BYTES = 16
"""Moved for each parameter in every micro-batch of the JAX engine besides: gradients are arrays of their own that are then
added up (jax_local_gpu_h200/metrics.jsonl)."""
KNOWN_RANGE, UNKNOWN_RANGE = (0.8, 1.7), (0.5, 2.5)
"""Seconds come to lie between these multiples of the prediction: on a device whose rates are published, and on any other. The
first holds every step that was measured on an H200; a step that waits for its host comes near its end (solver_order.json).
Other devices were not measured."""

TYPICAL_EXAMPLE_TOKENS = 256
"""Length of the examples in a packed row, where it is not known: attention stays within an example."""
ASSUMED_FP32_SHARE, ASSUMED_BANDWIDTH = 0.25, 600e9
"""Of a GPU that no table knows: float32 products at a quarter of the rate of 16-bit ones, bytes in a second."""
CPU_FLOPS, CPU_BANDWIDTH = 1e11, 2e10
"""Of a CPU: two busy cores, within a factor of two of most steps in benchmarks/results/memory_cpu.json. Good enough to order
settings by; `plan/timing.py` measures the CPU it is asked on."""
SCORE_BYTES = 40
"""Moved for each score where attention makes them: ten times in float32. A guess."""


@runtime_checkable
class Named(Protocol):
    """A device with a name that the table of accelerators may know (the doctor's DeviceChoice)."""

    @property
    def kind(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...


@runtime_checkable
class Published(Protocol):
    """A device that carries its published figures (a target of the catalogue)."""

    @property
    def tflops(self) -> float | None: ...
    @property
    def fp32_tflops(self) -> float | None: ...
    @property
    def bandwidth_gb_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device computes and moves in a second, as published."""

    flops_per_second: float
    """Of products of 16-bit numbers."""
    fp32_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    """In which a host launches the kernels of one compiled layer, forth and back; 0 where nothing is launched one by one."""
    known: bool
    """Whether these are the device's own figures, or assumed."""


def rates_of(tflops: float | None, fp32_tflops: float | None, bandwidth_gb_s: float | None) -> Rates:
    """The published figures as rates. What is not published is assumed: middling, and said to be so by `known`."""
    narrow = tflops if tflops is not None else (fp32_tflops or ASSUMED_FP32_SHARE * UNKNOWN_TFLOPS) / ASSUMED_FP32_SHARE
    wide = fp32_tflops if fp32_tflops is not None else ASSUMED_FP32_SHARE * narrow
    return Rates(
        flops_per_second=narrow * 1e12,
        fp32_flops_per_second=wide * 1e12,
        bytes_per_second=bandwidth_gb_s * 1e9 if bandwidth_gb_s is not None else ASSUMED_BANDWIDTH,
        launch_seconds=COMPILED_LAUNCH_SECONDS,
        known=tflops is not None and bandwidth_gb_s is not None,
    )


CPU_RATES = Rates(
    flops_per_second=CPU_FLOPS,
    fp32_flops_per_second=CPU_FLOPS,
    bytes_per_second=CPU_BANDWIDTH,
    launch_seconds=0.0,
    known=False,
)


def rates_for(device: Device) -> Rates:
    """The rates of a device: those it carries, those of its name in the table of accelerators, or assumed ones."""
    if device.device == "cpu":
        return CPU_RATES
    if isinstance(device, Published):
        return rates_of(device.tflops, device.fp32_tflops, device.bandwidth_gb_s)
    if isinstance(device, Named):
        found = find_accelerator(device.kind, device.memory_bytes)
        if found is not None:
            return rates_of(found.bf16_tflops, found.fp32_tflops, found.bandwidth_gb_s)
    return rates_of(None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, by cause."""

    parts: dict[str, float]
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens: int
    """Of all its micro-batches on all devices, rows taken to be full."""
    tokens_per_second: float
    layers: str
    """How its layers are launched: `plain`, `compiled` or `recorded` (replayed as CUDA graphs, without a host)."""


def step_time(
    shape: ModelShape,
    config: RunConfig,
    rates: Rates,
    *,
    device: str,
    rows: int | None = None,
    row_tokens: int | None = None,
    target_share: float = 1.0,
    layers: str | None = None,
    devices: int = 1,
    capability: tuple[int, int] | None = None,
    device_name: str | None = None,
    example_tokens: int | None = None,
) -> StepTime:
    """How long an optimizer step takes. `rows` are those of a micro-batch on all `devices`; what becomes of its `layers` is
    what the plan of the run says, or, where that is not given, what it would say of a device of this name.

    What devices tell one another is not counted. Rows are taken to be full, and a packed one to hold examples of
    `example_tokens`.
    """
    training = config.training
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    all_rows = rows or training.per_device_train_batch_size * devices
    jax = training.backend == "jax"
    if jax:
        layers = "compiled"  # every step, as a whole
    elif layers is None:
        layers = layers_planned(config, shape, device=device, device_name=device_name, row_tokens=length)
    padded = row_length(length, device) if jax else length if layers == "plain" else compiled_length(length)
    batch = Batch(
        rows=-(-all_rows // devices),
        length=padded,
        packed=config.data.packing,
        device=device,
        modern=capability is None or capability >= (8, 0),
        deterministic=training.deterministic,
    )
    run = _Run(shape=shape, config=config, recipe=recipe_of(training), rates=rates, batch=batch, jax=jax)
    example = min(length, example_tokens or (TYPICAL_EXAMPLE_TOKENS if config.data.packing else length))
    kernel = _kernel(run, device, capability)
    parts = _parts(run, layers, max(1, int(batch.tokens * target_share)), example, kernel)
    seconds = sum(parts.values())
    tokens = all_rows * length * training.gradient_accumulation_steps
    low, high = KNOWN_RANGE if rates.known else UNKNOWN_RANGE
    return StepTime(
        parts=parts,
        seconds=seconds,
        seconds_low=low * seconds,
        seconds_high=high * seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        layers=layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A step on one device."""

    shape: ModelShape
    config: RunConfig
    recipe: Recipe
    rates: Rates
    batch: Batch
    jax: bool

    @property
    def compute(self) -> int:
        return DTYPE_BYTES[self.recipe.compute]

    @property
    def weights(self) -> int:
        return DTYPE_BYTES[self.recipe.frozen or self.recipe.weights]

    @property
    def published(self) -> float:
        """Rate of products of this type; those of float64 are taken to be half as fast as those of float32."""
        if self.compute == 2:
            return self.rates.flops_per_second
        return self.rates.fp32_flops_per_second * 4 / self.compute

    def computing(self, flops: float, share: float = PRODUCT_SHARE) -> float:
        return flops / (share * self.published)

    def moving(self, size: float) -> float:
        return size / (BANDWIDTH_SHARE * self.rates.bytes_per_second)


def _kernel(run: _Run, device: str, capability: tuple[int, int] | None) -> str:
    """Which attention there will be: `fused`, `masked`, or `math` and `eager`, which make the scores."""
    if run.jax:
        known = has_kernel(run.shape, run.recipe, device=device, tokens=run.batch.length, capability=capability)
        return "fused" if known else "math"
    return attention_kernel(run.shape, widths_of(run.recipe, run.config.training.lora_rank), run.batch)


def _parts(run: _Run, layers: str, targets: int, example: int, kernel: str) -> dict[str, float]:
    micro_batches = run.config.training.gradient_accumulation_steps
    slower = JAX_SLOWER if run.jax else 1.0
    products, attention = _products(run), _attention(run, example, kernel)
    elementwise = _elementwise(run) * (PLAIN_LAYER if layers == "plain" else 1.0)
    each = {
        "products": products,
        "head": _head(run, targets),
        "attention": attention,
        "elementwise": elementwise,
        "recomputation": _recomputation(run, products, attention, elementwise),
    }
    parts = {name: slower * micro_batches * seconds for name, seconds in each.items()}
    parts["update"] = slower * (_update(run) + micro_batches * _adding_up(run))
    parts["launches"] = STEP_SECONDS + max(0.0, _launching(run, layers) - sum(parts.values()))
    return parts


def _products(run: _Run) -> float:
    """Of the layers: six operations per parameter and token, four where it is frozen. What goes in and out is moved for each
    of the three products, weights and gradients once in every micro-batch."""
    shape, tokens = run.shape, run.batch.tokens
    frozen = run.recipe.frozen is not None
    passes = 2 if frozen else 3
    widths = 4 * shape.hidden + 2 * shape.query_size + 2 * shape.kv_size
    widths += (3 if shape.gated_mlp else 2) * (shape.hidden + shape.ffn)
    accumulating = run.config.training.gradient_accumulation_steps > 1
    each = passes * run.compute + (run.weights + run.compute if run.recipe.casts else 0)
    each += 0 if frozen else run.weights * (3 if accumulating else 1)
    parameters = shape.layers * shape.layer_matrix_parameters
    moved = passes * run.compute * widths * shape.layers * tokens + each * parameters
    return run.computing(2 * passes * parameters * tokens) + run.moving(moved)


def _head(run: _Run, targets: int) -> float:
    """Products with the vocabulary, the logits between them, and the table with its gradient once for every chunk of rows."""
    shape = run.shape
    passes = 2 if run.recipe.frozen is not None else 3
    chunks = targets / loss_rows(targets)
    moved: float = LOGIT_BYTES * shape.vocab * targets
    moved += chunks * shape.embedding_parameters * 2 * (run.compute + run.weights)
    return run.computing(2 * passes * shape.embedding_parameters * targets) + run.moving(moved)


def _attention(run: _Run, example: int, kernel: str) -> float:
    """Scores and values, forth and back, with the scores computed once more on the way back. Without a mask within examples
    alone, and half of the square; else over the whole row."""
    shape, length = run.shape, run.batch.length
    reach = example if kernel == "fused" else 2 * length
    flops = 7 * shape.query_size * reach
    moved = ATTENTION_PASSES * (shape.query_size + shape.kv_size) * run.compute
    if kernel == "masked":
        moved += 2 * shape.heads * length * run.compute
    elif kernel != "fused":
        moved += SCORE_BYTES * shape.heads * length
    everywhere = shape.layers * run.batch.tokens
    return run.computing(flops * everywhere, ATTENTION_SHARE) + run.moving(moved * everywhere)


def _elementwise(run: _Run) -> float:
    """Norms, residuals and the activation of a layer, as a compiled one moves them."""
    shape = run.shape
    normed = shape.norms_per_layer * shape.hidden + shape.head_norms * (shape.query_size + shape.kv_size)
    values = NORM_PASSES * normed + (GATED_PASSES if shape.gated_mlp else PLAIN_PASSES) * shape.ffn
    width = (run.compute + run.weights) / 2  # what layers pass on has the type of the weights
    return run.moving(values * width * shape.layers * run.batch.tokens)


def _recomputation(run: _Run, products: float, attention: float, elementwise: float) -> float:
    """The forward pass of the layers that are computed again. The JAX engine, told to keep a share, keeps all products and
    is not slower for what it computes again (jax_speed.json beside jax_speed_none.json)."""
    again = 1 - run.recipe.kept_layers(run.shape.layers) / run.shape.layers
    if run.jax and 0 < run.recipe.kept_share < 1:
        return 0.0
    return again * (products / 3 + attention / 3 + elementwise / 3)


def _update(run: _Run) -> float:
    """Weights and states are read and written, gradients read twice (for their norm); and temporaries where no kernel does
    all at once."""
    footprint = footprint_of(run.shape, run.config.training, run.batch.device, modern=run.batch.modern)
    kernel = run.jax or footprint.updated_by_kernel
    moved = 4 * footprint.width * footprint.trained_elements + 2 * footprint.optimizer
    passes = EIGHT_BIT_PASSES if run.recipe.optimizer == "adamw_8bit" and not run.jax else 1
    return run.moving(moved + (0 if kernel else 2 * passes * footprint.updates))


def _adding_up(run: _Run) -> float:
    """The gradients of a micro-batch of the JAX engine."""
    return run.moving(JAX_GRADIENT_BYTES * run.shape.parameters) if run.jax else 0.0


def _launching(run: _Run, layers: str) -> float:
    """How long the host takes; where that is longer than the device, the device waits."""
    launch = run.rates.launch_seconds
    if run.jax or not launch:
        return 0.0
    count, micro_batches = run.shape.layers, run.config.training.gradient_accumulation_steps
    by_one = UPDATE_LAUNCH_SECONDS * TENSORS_OF_A_LAYER * count if run.recipe.in_backward else 0.0
    if layers == "recorded":
        return by_one
    again = 1 - run.recipe.kept_layers(count) / count
    each = launch * (PLAIN_LAUNCH if layers == "plain" else 1.0)
    return by_one + micro_batches * count * each * (1 + again)  # through torch's hooks
