"""Seconds of an optimizer step on a GPU or TPU, predicted as a sum of named parts from the model's shape and the settings.

A part is operations over a rate or bytes over a bandwidth, each at the fraction of the published figure that an H200 reached.
`tests/unit/test_speed_prediction.py` compares the constants below with every measured step. Other GPUs were not measured: their
published figures scale the parts, and the range is wider.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tunix_rt.accelerators import find_accelerator
from tunix_rt.config.capabilities import capabilities_of
from tunix_rt.config.optimizers import OPTIMIZERS
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.activations import DTYPE_BYTES, Batch, attention_kernel, widths_of
from tunix_rt.plan.attention_kernels import jax_attention
from tunix_rt.plan.compile_policy import UNKNOWN_TFLOPS, compiled_length, layers_planned
from tunix_rt.plan.fit import Device
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.fsdp import Rank
from tunix_rt.plan.jax_floor import row_length
from tunix_rt.plan.memory import MemoryPlan, longest_row
from tunix_rt.plan.network import Links, idle_seconds
from tunix_rt.plan.precision import FEWEST_LOSS_ROWS, MOST_LOSS_CHUNKS, Recipe, recipe_of
from tunix_rt.plan.sizes import ModelShape

# --- fitted to the steps in benchmarks/results/speed_*.json and jax_speed*.json, unless another file is named

MATMUL_SHARE = 0.78
"""Fraction of the published matmul rate, without the time to move operands: with both, the layers of Gemma 2B reached 693 of
989 TFLOP/s (benchmarks/results/speed_profile.txt)."""
BANDWIDTH_SHARE = 0.8
"""Fraction of the published bandwidth: 3,847 of 4,800 GB/s (benchmarks/results/jax_program_h200.txt)."""
ATTENTION_SHARE = 0.2
"""Fraction of the published rate that the matmuls of attention reach, with a softmax between them."""
ATTENTION_PASSES = 30
"""Times that the values of a head are read or written, forward and backward: short examples fill a kernel's tiles badly."""
NORM_PASSES = 20
"""The same for the values of a norm with its residual, in a compiled layer."""
GATED_PASSES, PLAIN_PASSES = 9, 6
"""The same for the inner values of an MLP between its matmuls: gate, up and their product, or a single activation."""
PLAIN_LAYER = 3.0
"""Memory traffic of an eager layer in multiples of a compiled one: each operation alone. A guess: where such layers were
measured, the host was slower."""
LOGIT_BYTES = 9
"""Memory traffic of each logit beside the lm_head matmuls (`_turn_part` in speed_profile.txt)."""
COMPILED_LAUNCH_SECONDS, PLAIN_LAUNCH = 0.0031, 1.4
"""Launch time of the kernels of a compiled layer, forward and backward, with an H200 (speed_models_unrecorded.json); an eager
layer takes this many times as long (smollm2_gsm8k/metrics.jsonl)."""
STEP_SECONDS = 0.003
"""Time in every step in which the device waits for its batch and its loss."""
UPDATE_LAUNCH_SECONDS, TENSORS_OF_A_LAYER = 0.00005, 9
"""Launch time of the update of one tensor in the backward pass (solver_order.json)."""
SHARDED_LAUNCH_SECONDS = 0.0027
"""Time on the host for FSDP's hooks around a layer, forward and backward: Gemma 2B on an H200, compiled, took 48 ms more for 18
layers on a rank of 8 than without FSDP."""
EIGHT_BIT_PASSES = 10
"""Times that the temporaries of an 8-bit update are read and written without a Triton kernel (solver_auto.json, before there
was one)."""
JAX_SLOWER = 1.14
"""Time of the JAX engine's steps in multiples of the same parts of the PyTorch engine (jax_program_h200.txt)."""
JAX_GRADIENT_BYTES = 16
"""Additional memory traffic of each parameter in every micro-batch of the JAX engine: gradients are separate arrays that are
then added up (jax_local_gpu_h200/metrics.jsonl)."""
KNOWN_RANGE, UNKNOWN_RANGE = (0.8, 1.7), (0.5, 2.5)
"""Seconds lie between these multiples of the prediction: on a device with published rates, and on any other. The first contains
every step that was measured on an H200; a step that waits for its host is near the end (solver_order.json). Other devices were
not measured."""

TYPICAL_EXAMPLE_TOKENS = 256
"""Assumed length of the examples in a packed row: attention stays within an example."""
ASSUMED_FP32_SHARE, ASSUMED_BANDWIDTH = 0.25, 600e9
"""Of an unknown GPU: float32 matmuls at a quarter of the 16-bit rate, bytes per second."""
CPU_FLOPS, CPU_BANDWIDTH = 1e11, 2e10
"""Of a CPU: two busy cores, within a factor of two of most steps in benchmarks/results/memory_cpu.json. Good enough to order
settings; `plan/timing.py` measures the CPU at hand."""
SCORE_BYTES = 40
"""Memory traffic of each attention score without a fused kernel: ten times in float32. A guess."""


@runtime_checkable
class Named(Protocol):
    """A device with a name that may be in the table of accelerators (the doctor's DeviceChoice)."""

    @property
    def kind(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...


@runtime_checkable
class Published(Protocol):
    """A device with its published figures (a target of the catalogue)."""

    @property
    def tflops(self) -> float | None: ...
    @property
    def fp32_tflops(self) -> float | None: ...
    @property
    def bandwidth_gb_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Published rates of a device."""

    flops_per_second: float
    """Of 16-bit matmuls."""
    fp32_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    """Launch time of one compiled layer, forward and backward; 0 without kernel launches."""
    known: bool
    """Whether these are published figures, or assumed."""


def rates_of(tflops: float | None, fp32_tflops: float | None, bandwidth_gb_s: float | None) -> Rates:
    """The published figures as rates. Middling ones are assumed for what is not published, and `known` is False."""
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
    """The rates of a device: its own, those of its name in the table of accelerators, or assumed ones."""
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
    """Predicted seconds of one optimizer step, by part."""

    parts: dict[str, float]
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens: int
    """Of all micro-batches on all devices, with full rows."""
    tokens_per_second: float
    layers: str
    """How layers run: `plain` (eager), `compiled` or `recorded` (CUDA graphs)."""

    @property
    def waits_for_host(self) -> bool:
        """Most of the step passes while the host launches kernels: a faster device is not faster."""
        return 2 * self.parts.get("launches", 0.0) > self.seconds


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
    links: Links | None = None,
) -> StepTime:
    """How long an optimizer step takes. `rows` counts a micro-batch on all `devices`; `layers` run as the plan has it, by
    default as it would for a device of this name.

    Communication is counted between the ranks of the PyTorch engine, over `links`. Rows are assumed to be full, and packed ones
    to have examples of `example_tokens`.
    """
    training = config.training
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    all_rows = rows or training.per_device_train_batch_size * devices
    jax = capabilities_of(training).compiles_whole_step
    layers = "compiled" if jax else layers
    layers = layers or layers_planned(config, shape, device=device, device_name=device_name, row_tokens=length)
    padded = row_length(length, device) if jax else length if layers == "plain" else compiled_length(length)
    batch = Batch(
        rows=-(-all_rows // devices),
        length=padded,
        packed=config.data.packing,
        device=device,
        capability=capability,
        deterministic=training.deterministic,
    )
    rank = None if jax or devices == 1 else _rank(shape, config, batch, devices)
    run = _Run(shape=shape, config=config, recipe=recipe_of(training), rates=rates, batch=batch, jax=jax, rank=rank)
    example = min(length, example_tokens or (TYPICAL_EXAMPLE_TOKENS if config.data.packing else length))
    kernel = _kernel(run, device, capability)
    parts = _parts(run, layers, max(1, int(batch.tokens * target_share)), example, kernel)
    low, high = KNOWN_RANGE if rates.known else UNKNOWN_RANGE
    alone, idle = sum(parts.values()), (0.0, 0.0, 0.0)
    times = training.gradient_accumulation_steps
    if rank is not None and links is not None:
        idle = idle_seconds(rank, links, (alone - parts["update"]) / times, low, times)
        parts["network"] = idle[1]
    seconds = alone + idle[1]
    tokens = all_rows * length * times
    return StepTime(
        parts=parts,
        seconds=seconds,
        seconds_low=low * alone + idle[0],
        seconds_high=high * alone + idle[2],
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        layers=layers,
    )


def time_of_plan(plan: MemoryPlan, shape: ModelShape, config: RunConfig, rates: Rates, device: Device) -> StepTime:
    """How long the step takes whose memory is planned, on `device` with these `rates`."""
    return step_time(
        shape, config, rates, device=plan.device, devices=plan.devices, rows=plan.rows, row_tokens=plan.row_tokens,
        target_share=plan.target_share, capability=device.capability, layers=plan.layers,
        links=getattr(device, "links", None),
    )  # fmt: skip


def _rank(shape: ModelShape, config: RunConfig, batch: Batch, devices: int) -> Rank:
    run = footprint_of(shape, config.training, batch.device, modern=batch.modern)
    return Rank.of(run, devices, config.training.data_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A step on one device."""

    shape: ModelShape
    config: RunConfig
    recipe: Recipe
    rates: Rates
    batch: Batch
    jax: bool
    rank: Rank | None = None
    """What this device has of the parameters; None: all of them."""

    @property
    def compute(self) -> int:
        return DTYPE_BYTES[self.recipe.compute]

    @property
    def weights(self) -> int:
        return DTYPE_BYTES[self.recipe.frozen or self.recipe.weights]

    @property
    def published(self) -> float:
        """Rate of matmuls in the compute dtype; float64 is assumed to be half as fast as float32."""
        if self.compute == 2:
            return self.rates.flops_per_second
        return self.rates.fp32_flops_per_second * 4 / self.compute

    def computing(self, flops: float, share: float = MATMUL_SHARE) -> float:
        return flops / (share * self.published)

    def moving(self, size: float) -> float:
        return size / (BANDWIDTH_SHARE * self.rates.bytes_per_second)


def _kernel(run: _Run, device: str, capability: tuple[int, int] | None) -> str:
    """Which attention there will be: `fused`, `masked`, or `math` and `eager`, which make the scores."""
    if run.jax:
        name, _ = jax_attention(
            run.shape, platform=device, compute=run.recipe.compute, tokens=run.batch.length, capability=capability
        )
        return "math" if name == "exact" else "fused"
    return attention_kernel(run.shape, widths_of(run.recipe), run.batch)


def _parts(run: _Run, layers: str, targets: int, example: int, kernel: str) -> dict[str, float]:
    micro_batches = run.config.training.gradient_accumulation_steps
    slower = JAX_SLOWER if run.jax else 1.0
    matmuls, attention = _matmuls(run), _attention(run, example, kernel)
    elementwise = _elementwise(run) * (PLAIN_LAYER if layers == "plain" else 1.0)
    each = {
        "products": matmuls,
        "head": _head(run, targets),
        "attention": attention,
        "elementwise": elementwise,
        "recomputation": _recomputation(run, matmuls, attention, elementwise),
    }
    parts = {name: slower * micro_batches * seconds for name, seconds in each.items()}
    parts["update"] = slower * (_update(run) + micro_batches * _adding_up(run))
    parts["launches"] = STEP_SECONDS + max(0.0, _launching(run, layers) - sum(parts.values()))
    return parts


def _matmuls(run: _Run) -> float:
    """Matmuls of the layers: six operations per parameter and token, four if it is frozen. Inputs and outputs are moved for each
    of the three matmuls, weights and gradients once in every micro-batch."""
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
    """lm_head matmuls, logits, and the lm_head weight with its gradient once for every chunk of the loss. Chunks are counted as a
    fraction, before `loss_rows` rounds them, so that more targets never take less time."""
    shape = run.shape
    passes = 2 if run.recipe.frozen is not None else 3
    chunks = max(1.0, min(targets / FEWEST_LOSS_ROWS, MOST_LOSS_CHUNKS))
    moved: float = LOGIT_BYTES * shape.vocab * targets
    moved += chunks * shape.embedding_parameters * 2 * (run.compute + run.weights)
    return run.computing(2 * passes * shape.embedding_parameters * targets) + run.moving(moved)


def _attention(run: _Run, example: int, kernel: str) -> float:
    """Scores and values, forward and backward, with the scores recomputed in the backward pass. A fused kernel computes half of
    the square within examples; others compute the whole row."""
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
    """Norms, residuals and the activation of a compiled layer."""
    shape = run.shape
    normed = shape.norms_per_layer * shape.hidden + shape.head_norms * (shape.query_size + shape.kv_size)
    values = NORM_PASSES * normed + (GATED_PASSES if shape.gated_mlp else PLAIN_PASSES) * shape.ffn
    width = (run.compute + run.weights) / 2  # the residual stream has the dtype of the weights
    return run.moving(values * width * shape.layers * run.batch.tokens)


def _recomputation(run: _Run, matmuls: float, attention: float, elementwise: float) -> float:
    """The repeated forward pass of checkpointed layers. With a fraction, the JAX engine saves all matmul results and is not
    slower for what it recomputes (jax_speed.json beside jax_speed_none.json)."""
    again = 1 - run.recipe.kept_layers(run.shape.layers) / run.shape.layers
    if run.jax and 0 < run.recipe.kept_share < 1:
        return 0.0
    return again * (matmuls / 3 + attention / 3 + elementwise / 3)


def _update(run: _Run) -> float:
    """Weights and states are read and written, gradients read twice (for their norm); and temporaries without a fused
    kernel."""
    footprint = run.rank or footprint_of(run.shape, run.config.training, run.batch.device, modern=run.batch.modern)
    kernel = run.jax or footprint.updated_by_kernel
    moved = 4 * footprint.width * footprint.trained_elements + 2 * footprint.optimizer
    passes = EIGHT_BIT_PASSES if OPTIMIZERS[run.recipe.optimizer].quantized and not run.jax else 1
    return run.moving(moved + (0 if kernel else 2 * passes * footprint.updates))


def _adding_up(run: _Run) -> float:
    """Accumulation of the gradients of a micro-batch of the JAX engine."""
    return run.moving(JAX_GRADIENT_BYTES * run.shape.parameters) if run.jax else 0.0


def _launching(run: _Run, layers: str) -> float:
    """Launch time on the host; if it is longer than the device computes, the device waits."""
    launch = run.rates.launch_seconds
    if run.jax or not launch:
        return 0.0
    count, micro_batches = run.shape.layers, run.config.training.gradient_accumulation_steps
    by_one = UPDATE_LAUNCH_SECONDS * TENSORS_OF_A_LAYER * count if run.recipe.in_backward else 0.0
    if layers == "recorded":
        return by_one
    again = 1 - run.recipe.kept_layers(count) / count
    each = launch * (PLAIN_LAUNCH if layers == "plain" else 1.0)
    sharded = SHARDED_LAUNCH_SECONDS if run.rank else 0.0
    return by_one + micro_batches * count * (each * (1 + again) + sharded)  # through torch's hooks
