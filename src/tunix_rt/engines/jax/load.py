"""Loading a model of the JAX engine: settings of the process, the mesh, the compiled step, the parameters on their devices."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from tunix_rt.assets import cache_root
from tunix_rt.config.settings import Training
from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import StepShape
from tunix_rt.engines.failures import SEE_PLAN, memory_errors_named
from tunix_rt.engines.jax import tunix as jax_tunix
from tunix_rt.engines.jax.architecture import Architecture, architecture_of
from tunix_rt.engines.jax.attention import attention_named, choose_attention
from tunix_rt.engines.jax.mesh import make_mesh, parameter_shardings, put, rows_for
from tunix_rt.engines.jax.model import summed_loss
from tunix_rt.engines.jax.step import StepPlan, compile_step, step_plan
from tunix_rt.engines.jax.weights import abstract_parameters, init_weights, load_weights
from tunix_rt.engines.memory_meter import PhasePeak, RiseMeter
from tunix_rt.errors import DoesNotFitError, HardwareError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.secrets import one_line
from tunix_rt.plan.jax_floor import row_length
from tunix_rt.plan.precision import Recipe, recipe_for_inference, recipe_of

logger = logging.getLogger(__name__)

GIB = 2**30
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""`training.device` -> the platform of jax."""
CACHED_SECONDS = 0.2
"""Programs that take so long to compile are cached on disk."""
MORE_DEVICES = f"{SEE_PLAN}; or use more devices: weights, optimizer states and gradients are sharded over them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention kernel, and why. `generating` is the implementation of transformers that it is compared with."""

    name: str
    why: str
    generating: str


@dataclass(slots=True, kw_only=True)
class Engine:
    """A loaded model on its devices. `meter` was started before the load."""

    params: Any
    """The tree of `model.py`, each array sharded over the mesh."""
    source: ModelSource
    architecture: Architecture
    mesh: Any
    device: str
    """cpu, cuda or tpu."""
    parameters: int
    meter: RiseMeter
    recipe: Recipe
    attention: Attention
    plan: StepPlan | None = None
    """What the training step is compiled from; None: for inference."""
    step: Any = None
    """The compiled step."""
    rows: int = 0
    """Of a micro-batch of that step, padded to a multiple of the devices."""
    tokens: int = 0
    """Of each of its rows."""
    saved_dtype: str | None = None
    """Type in which `save` writes the weights, which are rounded to it; None: as they are in memory."""
    deterministic: bool = False
    implementation: str = "auto"
    """`auto` for the models of this package, `tunix` for those of google-tunix."""
    runs_transformers: ClassVar[bool] = False
    packs: ClassVar[bool] = True

    @property
    def device_type(self) -> str:
        return self.device

    @property
    def compiled_shape(self) -> tuple[int, int] | None:
        """Rows and tokens of the micro-batches that the step is compiled for."""
        return None if self.step is None else (self.rows, self.tokens)

    @property
    def platform(self) -> str:
        return PLATFORMS[self.device]

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def own_devices(self) -> list[Any]:
        """Those of this process, whose memory it can read."""
        return [one for one in self.devices if one.process_index == jax.process_index()]

    @property
    def compute(self) -> str:
        """The compute dtype."""
        return self.recipe.compute

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence."""
        return self.architecture.shape.max_positions

    @property
    def vocabulary(self) -> int:
        return self.architecture.shape.vocab

    def step_parts(self) -> Mapping[str, int]:
        """Bytes on each device while the compiled step runs, by the analysis of the compiler: the peak on a TPU, which allocates
        less than the sum, elsewhere by part. Empty where it has none."""
        parts = {} if self.step is None else compiled_parts(self.step)
        if parts and self.device == "tpu":
            return {"peak": int(self.step.memory_analysis().peak_memory_in_bytes)}
        return parts

    def peak_bytes(self) -> int:
        """Peak memory since the load: of the fullest device, or on a CPU the rise of resident memory."""
        if self.device == "cpu":
            return self.meter.peak_bytes()
        return max(int((one.memory_stats() or {}).get("peak_bytes_in_use", 0)) for one in self.own_devices)

    def take_peak(self) -> PhasePeak:
        """Peak memory since the last call on a CPU; elsewhere since the load, because jax cannot reset its counters."""
        if self.device == "cpu":
            return self.meter.take_peak()
        return PhasePeak(used_bytes=self.peak_bytes(), measure="bytes in use on the fullest device", alone=False)

    def attending(self, tokens: int) -> Any:
        """The attention for rows of so many tokens, sharded over the mesh."""
        name, _, _ = choose_attention(self.platform, self.architecture, self.recipe.compute, tokens)
        return attention_named(name, self.mesh)

    def loss_function(self, tokens: int) -> tuple[Any, Any]:
        """`summed_loss` of the implementation, and its attention for rows of so many tokens."""
        if self.implementation == "tunix":
            return jax_tunix.summed_loss, None
        return summed_loss, self.attending(tokens)


# --- loading ---------------------------------------------------------------------------------------------------------


def load(
    source: ModelSource, *, device: str, training: Training, step: StepShape | None = None, implementation: str = "auto",
    attempt: bool = False,
) -> Engine:  # fmt: skip
    """The model on the devices of the mesh. Given the shape of a `step`, it is compiled before a weight is read, and a step that
    does not fit on a device is refused, unless this is an `attempt`."""
    recipe = recipe_of(training)
    prepare_process(recipe, device=device, deterministic=training.deterministic)
    architecture = architecture_of(source.config)
    mesh = make_mesh(devices_of(device), replicas=training.data_replicas)
    rows = rows_for(mesh, step.rows) if step else 0
    tokens = row_length(step.tokens if step else architecture.shape.max_positions, device)
    attention = _attention(architecture, recipe, device, tokens, implementation)
    logger.info(
        "Devices: %d x %s; attention: %s; %s",
        mesh.size, mesh.devices.flat[0].device_kind, attention.name, attention.why,
    )  # fmt: skip
    plan = compiled = None
    if step is not None:
        wanted = training.model_copy(update={"gradient_accumulation_steps": step.accumulation})
        plan = step_plan(
            architecture, wanted, platform=PLATFORMS[device], rows=rows, tokens=tokens, implementation=implementation
        )
        compiled = _compiled(plan, mesh, rows, tokens)
        try:
            _refuse_too_large(compiled_parts(compiled), mesh, device, training.memory_limit_gib)
        except DoesNotFitError as error:
            if not attempt:
                raise
            logger.warning("Attempting the run although it %s", error.problem)
    return _loaded(
        source, architecture, mesh, device, recipe, attention, seed=training.seed, plan=plan, step=compiled, rows=rows,
        tokens=tokens, deterministic=training.deterministic, implementation=implementation,
    )  # fmt: skip


def _attention(
    architecture: Architecture, recipe: Recipe, device: str, tokens: int, implementation: str = "auto"
) -> Attention:
    """For rows of so many tokens. Models of google-tunix have their own; a model that it does not support is refused."""
    name, _, why = choose_attention(PLATFORMS[device], architecture, recipe.compute, tokens)
    if implementation == "tunix":
        jax_tunix.config_of(architecture)
        name, why = jax_tunix.ATTENTION, jax_tunix.WHY
        logger.info("Model: training uses google-tunix, generation the models of tunix-rt with the same weights")
    return Attention(name=name, why=why, generating="sdpa" if architecture.score_cap is None else "eager")


def load_for_inference(source: ModelSource, *, device: str, dtype: str, seed: int = 0) -> Engine:
    """The model with weights of type `dtype`, for generation."""
    recipe = recipe_for_inference(dtype)
    prepare_process(recipe, device=device, deterministic=False)
    architecture = architecture_of(source.config)
    mesh = make_mesh(devices_of(device))
    attention = _attention(architecture, recipe, device, row_length(architecture.shape.max_positions, device))
    return _loaded(source, architecture, mesh, device, recipe, attention, seed=seed)


def _loaded(
    source: ModelSource, architecture: Architecture, mesh: Any, device: str, recipe: Recipe, attention: Attention, *,
    seed: int, **compiled: Any,
) -> Engine:  # fmt: skip
    """The model with its parameters; `compiled` is what an engine has for its training step."""
    meter = RiseMeter()
    with memory_errors_named(f"the load of {source.name}"):
        params = _parameters(source, architecture, mesh, dtype=recipe.weights, seed=seed)
    return Engine(
        params=params,
        source=source,
        architecture=architecture,
        mesh=mesh,
        device=device,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        meter=meter,
        recipe=recipe,
        attention=attention,
        **compiled,
    )


def _parameters(source: ModelSource, architecture: Architecture, mesh: Any, *, dtype: str, seed: int) -> Any:
    """Read and moved to their devices array by array, or drawn there."""
    shapes = abstract_parameters(architecture, dtype)
    shardings = parameter_shardings(mesh, shapes)
    if source.weights == "random":
        return init_weights(architecture, source.config, shapes, shardings, seed=seed)
    return placed(load_weights(source, architecture, dtype=dtype), shardings)


def placed(tree: Any, shardings: Any) -> Any:
    """Host arrays on their devices; each is freed once it is there. Empties `tree`."""
    arrays: dict[str, Any] = {}
    for key in list(tree):
        value = tree.pop(key)
        inner = isinstance(value, dict)
        arrays[key] = placed(value, shardings[key]) if inner else put(np.asarray(value), shardings[key])
        if not inner:
            arrays[key].block_until_ready()
    return arrays


# --- the process -----------------------------------------------------------------------------------------------------


def prepare_process(recipe: Recipe, *, device: str, deterministic: bool) -> None:
    """Settings of jax for the whole process, before it initializes devices."""
    if deterministic and device == "cuda":
        flag = "--xla_gpu_deterministic_ops=true"
        if flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    jax.config.update("jax_enable_x64", recipe.compute == "float64")
    if recipe.compute in ("float32", "float64"):  # else a GPU uses TF32, a TPU bfloat16
        jax.config.update("jax_default_matmul_precision", "highest")
    folder = cache_root() / "jax"
    if jax.config.jax_compilation_cache_dir is None:
        with contextlib.suppress(OSError):  # without a cache, every process compiles
            folder.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_SECONDS)


def devices_of(device: str) -> list[Any]:
    """The devices of the requested platform, or a HardwareError: jax must not fall back to another."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise HardwareError(
            f"jax does not start on {device}: {one_line(error)}",
            fix=f"run `tunix-rt doctor --device {device} --backend jax --prove`",
            cause="jax-broken",
        ) from error
    if devices[0].platform != PLATFORMS[device]:
        raise HardwareError(
            f"the run is on {device}, jax uses {devices[0].platform}",
            fix=f"run `tunix-rt doctor --device {device} --backend jax`",
            cause="jax-sees-no-device",
        )
    return sorted(devices, key=lambda one: (one.process_index, one.id))  # the shards of a process are neighbours


# --- the compiled step -----------------------------------------------------------------------------------------------


def _compiled(plan: StepPlan, mesh: Any, rows: int, tokens: int) -> Any:
    """The executable of a whole step."""
    logger.info(
        "Compiling a step: %d x %d rows of %d tokens over %d device(s), activation checkpointing: %s",
        plan.accumulation, rows, tokens, mesh.size, plan.remat,
    )  # fmt: skip
    if plan.remat == "products":
        logger.info(
            "Activation checkpointing: a fraction is configured; every layer saves the results of its matmuls with weights"
        )
    began = time.monotonic()
    with memory_errors_named("the compiler"):
        compiled = compile_step(plan, mesh, rows, tokens)
    parts = compiled_parts(compiled)
    logger.info(
        "Compiled in %.1f s; the compiler asks for %.3f GiB a device: %s",
        time.monotonic() - began, sum(parts.values()) / GIB,
        ", ".join(f"{name} {size / GIB:.3f}" for name, size in parts.items()),
    )  # fmt: skip
    return compiled


def compiled_parts(compiled: Any) -> dict[str, int]:
    """Bytes on each device while the step runs, by the analysis of the compiler; empty where it has none."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    return {
        "state and batch": int(analysis.argument_size_in_bytes),
        "results": int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        "temporaries": int(analysis.temp_size_in_bytes),
        "code": int(analysis.generated_code_size_in_bytes),
    }


def _refuse_too_large(parts: Mapping[str, int], mesh: Any, device: str, limit_gib: float | None = None) -> None:
    """Virtual devices of a CPU share one memory; others have their own, with a limit of jax and that of the run, `limit_gib`. The
    TPU compiler refuses what does not fit by itself, and allocates less than the sum."""
    needed = sum(parts.values()) * (jax.local_device_count() if device == "cpu" else 1)
    limits = [_limit(mesh, device) if device != "tpu" else None, None if limit_gib is None else round(limit_gib * GIB)]
    limit = min((one for one in limits if one is not None), default=None)
    if limit is not None and needed > limit:
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        raise DoesNotFitError(
            f"does not fit: the compiled step needs {needed / GIB:.2f} GiB on {device}, {limit / GIB:.2f} GiB are available\n"
            f"  in GiB a device: {listed}",
            fix=MORE_DEVICES,
        )


def _limit(mesh: Any, device: str) -> int | None:
    if device == "cpu":
        return host_facts().ram_available_bytes
    stats = [one.memory_stats() or {} for one in jax.local_devices()]
    return min((int(one["bytes_limit"]) for one in stats if "bytes_limit" in one), default=None)


# --- memory ----------------------------------------------------------------------------------------------------------


def free_bytes(engine: Engine) -> int:
    """Free memory on the fullest of the engine's devices."""
    if engine.device == "cpu":
        return host_facts().ram_available_bytes
    stats = [one.memory_stats() or {} for one in engine.own_devices]
    return min(max(0, int(one.get("bytes_limit", 0)) - int(one.get("bytes_in_use", 0))) for one in stats)
