"""The child of `aot.py`: compiles a training step for a TPU topology that is not present.

`python -m tunix_rt.engines.jax.aot_worker`: the request is JSON on standard input, the result the last line of standard
output. The parent sets the environment.
"""

import json
import math
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies

from tunix_rt.config.settings import Training
from tunix_rt.engines.jax import step as jax_step
from tunix_rt.engines.jax.aot import topology_parts
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.mesh import make_mesh
from tunix_rt.errors import ConfigError, TunixError

ONE_HOST = {"v5e": 8, "v6e": 8}
"""Chips in one host of these kinds; libtpu assumes hosts of four."""
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Ran out of memory", "CompileTimeHbmOom")


def main() -> int:
    request = json.load(sys.stdin)
    try:
        result = compiled_for(request)
    except TunixError as error:
        result = {"problem": error.problem, "fix": error.fix}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if "problem" not in result else 2


def compiled_for(request: dict[str, Any]) -> dict[str, Any]:
    """The result of compiling the step that `request` describes, as JSON values."""
    training = Training.model_validate(request["training"])
    architecture, tokens = architecture_of(request["config"]), request["tokens"]
    devices = absent_devices(request["topology"])
    mesh = make_mesh(devices, replicas=training.data_replicas)
    rows = training.per_device_train_batch_size * len(devices)
    plan = jax_step.step_plan(
        architecture, training, platform="tpu", rows=rows, tokens=tokens, implementation=request["implementation"]
    )
    params = jax_step.abstract_state(plan, mesh).params
    started = time.perf_counter()
    memory, message = _memory_or_message(plan, mesh, rows, tokens)
    return {
        "topology": request["topology"],
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "replicas": training.data_replicas,
        "rows": rows,
        "tokens": tokens,
        "accumulation": plan.accumulation,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "step": describe(plan),
        "memory": memory,
        "message": message,
        "seconds": time.perf_counter() - started,
    }


def absent_devices(topology: str) -> list[Any]:
    """The devices of `topology`, as the compiler describes them."""
    kind, chips = topology_parts(topology)
    options: dict[str, Any] = {}
    if math.prod(chips) <= ONE_HOST.get(kind, 1):
        options["chips_per_host_bounds"] = (*chips, 1)[:3]
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"unknown topology {topology}: {next(iter(str(error).splitlines()), '')[:200]}",
            fix="v5e:2x4 is Kaggle's v5e-8; whole computers of a kind can be named: v5e:4x4, v6e:2x4, v4:2x2x1, v5p:2x2x1",
        ) from error
    return list(described.devices)


def describe(plan: jax_step.StepPlan) -> str:
    return (
        f"weights in {plan.weights}, compute dtype {plan.compute}, {plan.optim.kind}, saved for the backward pass: "
        f"{ {'none': 'everything', 'products': 'matmuls', 'layers': 'inputs of layers'}[plan.remat] }, "
        f"loss in chunks of {plan.chunk} tokens of a row, attention: {plan.attention}"
    )


def _memory_or_message(
    plan: jax_step.StepPlan, mesh: Any, rows: int, tokens: int
) -> tuple[dict[str, int] | None, str | None]:
    try:
        compiled = jax_step.compile_step(plan, mesh, rows, tokens)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if not any(words in message for words in OUT_OF_MEMORY):
            raise
        return None, message
    analysis = compiled.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
        "peak": analysis.peak_memory_in_bytes,
    }, None


if __name__ == "__main__":
    sys.exit(main())
