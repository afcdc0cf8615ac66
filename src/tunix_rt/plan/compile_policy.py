"""Whether compiling the layers of a model pays: what a run would save by it against the time it takes."""

from dataclasses import dataclass

from tunix_rt.accelerators import accelerators_named
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.precision import Recipe, recipe_of
from tunix_rt.plan.shape import ModelShape

COMPILE_SECONDS = 25.0
"""Seconds to compile the layers of a model for the first time; Gemma 2B on an H200 took 14
(benchmarks/results/speed_program.json)."""
SAVED_SHARE = 0.15
"""Of the time of a step that is not compiled: a guess, and a low one, for element-wise work is a good part of any model."""
REACHED_SHARE = 0.45
"""Of a GPU's published rate, by a step that is not compiled."""
UNKNOWN_TFLOPS = 100.0
"""Assumed of a GPU that the table of accelerators does not know."""
LAUNCH_SECONDS = 0.002
"""A host takes so long to launch the kernels of a compiled layer, forth and back: 1.6 ms beside an H200
(benchmarks/results/speed_models_unrecorded.json, GPT-2 and SmolLM2-135M)."""


COMPILED_CAPABILITY = (7, 0)
"""CUDA compute capability from which on Triton, and so torch's compiler, makes code."""
COMPILED_MULTIPLE = 64
"""Rows of a compiled step are padded to a multiple of so many tokens."""


def compiled_length(tokens: int) -> int:
    """How long rows of up to `tokens` tokens are in a compiled step."""
    return -(-tokens // COMPILED_MULTIPLE) * COMPILED_MULTIPLE


def may_compile(asked: bool | str, *, device: str, packed: bool) -> bool:
    """Whether layers may come to be compiled, as far as that is known before a run."""
    return asked if isinstance(asked, bool) else device == "cuda" and packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """Whether layers are compiled, and why (not)."""

    wanted: bool
    required: bool
    """Asked for by name: then a compiler that fails is an error."""
    why: str


def choose_compiling(
    asked: bool | str,
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
    """What `training.compile` comes to for a run of `steps` steps of `tokens` tokens each.

    A function of the whole run, not of what is left of it. On another GPU it may come to something else: a run that is
    continued asks for what its checkpoint says.
    """
    if isinstance(asked, bool):
        return Compiling(wanted=asked, required=asked, why="asked for" if asked else "turned off")
    if device != "cuda":
        return Compiling(wanted=False, required=False, why=f"on a {device.upper()} only where it is asked for")
    if capability is not None and capability < COMPILED_CAPABILITY:
        return Compiling(
            wanted=False, required=False, why="torch's compiler needs a GPU of compute capability 7.0 or above"
        )
    if not packed:
        return Compiling(wanted=False, required=False, why="rows are not packed, and have as many lengths as there are")
    if adapters:  # those of a layer have names of their own, so that no two layers share a graph
        return Compiling(wanted=False, required=False, why="with adapters every layer would be compiled by itself")
    seconds = step_seconds(device_name, parameters=parameters, tokens=tokens) * steps
    saved = SAVED_SHARE * seconds
    words = f"saves some {_spoken(saved)} of {_spoken(seconds)}, and compiling takes up to {_spoken(COMPILE_SECONDS)}"
    return Compiling(wanted=saved > COMPILE_SECONDS, required=False, why=words)


def step_seconds(device_name: str | None, *, parameters: int, tokens: int) -> float:
    """A rough guess of a step that is not compiled: six operations per parameter and token."""
    known = [found.bf16_tflops for found in accelerators_named(device_name or "") if found.bf16_tflops]
    rate = REACHED_SHARE * (known[0] if known else UNKNOWN_TFLOPS) * 1e12
    return 6 * parameters * tokens / rate


def waits_for_the_host(device_name: str | None, *, parameters: int, layers: int, tokens: int) -> bool:
    """Whether a GPU computes the layers of such a step faster than they are launched kernel by kernel."""
    return step_seconds(device_name, parameters=parameters, tokens=tokens) < layers * LAUNCH_SECONDS


def to_be_recorded(
    recipe: Recipe, *, device: str, device_name: str | None, flex: bool, accumulation: int, parameters: int, layers: int,
    tokens: int,
) -> bool:  # fmt: skip
    """Whether compiled layers run as CUDA graphs (`engines/torch/compile.py`): launched kernel by kernel, they would
    keep the GPU waiting. `flex` attention has masks that are made anew for every batch; a gradient that lives until the next pass
    can be neither added to nor dropped early."""
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
    """What becomes of the layers of a run of the PyTorch engine: `plain`, `compiled` or `recorded`. `packed` rows really have
    several examples. Where its `steps` are not known yet, it is taken to be long enough for compiling to pay."""
    training = config.training
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
        recipe_of(training), device=device, device_name=device_name, flex=shape.capped_scores,
        accumulation=training.gradient_accumulation_steps, parameters=shape.parameters, layers=shape.layers, tokens=tokens,
    )  # fmt: skip
    return "recorded" if recorded else "compiled"


A_LONG_RUN = 10**12
"""Steps of a run for which compiling pays, whatever the model."""


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:,.0f} min"
