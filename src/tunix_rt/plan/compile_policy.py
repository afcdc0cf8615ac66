"""How layers run: eager, compiled or as CUDA graphs. Compiling pays if a run saves more time than it takes."""

from dataclasses import dataclass

from tunix_rt.accelerators import accelerators_named
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.precision import Recipe, recipe_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.progress import duration

COMPILE_SECONDS = 25.0
"""Seconds to compile the layers of a model for the first time; Gemma 2B on an H200 took 14
(benchmarks/results/speed_program.json)."""
SAVED_SHARE = 0.15
"""Fraction of the time of an eager step: a low guess, since element-wise work is a good part of any model."""
REACHED_SHARE = 0.45
"""Fraction of a GPU's published rate that an eager step reaches."""
UNKNOWN_TFLOPS = 100.0
"""Assumed for a GPU that is not in the table of accelerators."""
LAUNCH_SECONDS = 0.002
"""Launch time of the kernels of a compiled layer, forward and backward: 1.6 ms with an H200
(benchmarks/results/speed_models_unrecorded.json, GPT-2 and SmolLM2-135M)."""
COMPILED_CAPABILITY = (7, 0)
"""The first CUDA compute capability that Triton, and so torch.compile, supports."""
COMPILED_MULTIPLE = 64
"""Rows of a compiled step are padded to a multiple of this many tokens."""


def compiled_length(tokens: int) -> int:
    """The padded length of rows of up to `tokens` tokens in a compiled step."""
    return -(-tokens // COMPILED_MULTIPLE) * COMPILED_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """Whether layers are compiled, and why (not)."""

    wanted: bool
    required: bool
    """`training.compile: true`: a compiler that fails is an error."""
    why: str


def choose_compiling(
    setting: bool | str,
    *,
    device: str,
    device_name: str | None,
    parameters: int,
    tokens: int,
    steps: int,
    packed: bool,
    adapters: bool,
    capability: tuple[int, int] | None = None,
) -> Compiling:
    """Whether to compile by the `setting` `training.compile`, for a run of `steps` steps of `tokens` tokens each.

    Depends on the whole run, not on what is left of it. The choice may differ on another GPU: a resumed run keeps the one in its
    checkpoint.
    """
    if isinstance(setting, bool):
        return Compiling(wanted=setting, required=setting, why=f"training.compile: {str(setting).lower()}")
    if device != "cuda":
        return Compiling(wanted=False, required=False, why=f"on a {device.upper()} only with training.compile: true")
    if capability is not None and capability < COMPILED_CAPABILITY:
        why = "torch.compile needs a GPU of compute capability 7.0 or above"
        return Compiling(wanted=False, required=False, why=why)
    if not packed:
        return Compiling(wanted=False, required=False, why="rows are not packed, so each length would be compiled")
    if adapters:  # their names differ by layer, so no two layers share a graph
        return Compiling(wanted=False, required=False, why="with adapters, every layer would be compiled separately")
    seconds = step_seconds(device_name, parameters=parameters, tokens=tokens) * steps
    saved = SAVED_SHARE * seconds
    why = f"saves about {duration(saved)} of {duration(seconds)}, and compiling takes up to {duration(COMPILE_SECONDS)}"
    return Compiling(wanted=saved > COMPILE_SECONDS, required=False, why=why)


def step_seconds(device_name: str | None, *, parameters: int, tokens: int) -> float:
    """A rough estimate for an eager step: six operations per parameter and token."""
    known = [found.bf16_tflops for found in accelerators_named(device_name or "") if found.bf16_tflops]
    rate = REACHED_SHARE * (known[0] if known else UNKNOWN_TFLOPS) * 1e12
    return 6 * parameters * tokens / rate


def waits_for_the_host(device_name: str | None, *, parameters: int, layers: int, tokens: int) -> bool:
    """Whether a GPU computes the layers of such a step faster than the host launches their kernels."""
    return step_seconds(device_name, parameters=parameters, tokens=tokens) < layers * LAUNCH_SECONDS


def to_be_recorded(
    recipe: Recipe, *, device: str, device_name: str | None, flex: bool, accumulation: int, parameters: int, layers: int,
    tokens: int,
) -> bool:  # fmt: skip
    """Whether compiled layers run as CUDA graphs (`engines/torch/compile.py`), because the GPU would wait for launches. Not with
    `flex` attention, whose masks are made for every batch, or layers that differ, nor with gradients that must be accumulated
    or freed early."""
    if device != "cuda" or flex or recipe.in_backward or accumulation != 1 or recipe.kept_share != 1.0:
        return False
    return waits_for_the_host(device_name, parameters=parameters, layers=layers, tokens=tokens)


def layers_planned(
    config: RunConfig,
    shape: ModelShape,
    *,
    device: str,
    device_name: str | None = None,
    capability: tuple[int, int] | None = None,
    row_tokens: int | None = None,
    packed: bool | None = None,
    steps: int | None = None,
) -> str:
    """How the PyTorch engine runs the layers: `plain` (eager), `compiled` or `recorded` (CUDA graphs). `packed` rows have several
    examples. A run of unknown `steps` is assumed to be long enough for compiling to pay."""
    training = config.training
    if training.load_in_4bit or ((shape.trace is not None or shape.kinds) and training.compile is not True):
        return "plain"
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    tokens = rows * (row_tokens or config.data.max_length)
    wanted = choose_compiling(
        training.compile, device=device, device_name=device_name, parameters=shape.parameters, tokens=tokens,
        steps=A_LONG_RUN if steps is None else steps, packed=config.data.packing if packed is None else packed,
        adapters=training.lora_rank is not None, capability=capability,
    ).wanted  # fmt: skip
    if not wanted:
        return "plain"
    recorded = to_be_recorded(
        recipe_of(training), device=device, device_name=device_name, flex=shape.capped_scores or bool(shape.kinds),
        accumulation=training.gradient_accumulation_steps, parameters=shape.parameters, layers=shape.layers, tokens=tokens,
    )  # fmt: skip
    return "recorded" if recorded else "compiled"


A_LONG_RUN = 10**12
"""Steps for which compiling pays with any model."""
