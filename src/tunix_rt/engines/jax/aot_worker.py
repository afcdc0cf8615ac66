"""The child of `aot.py`: compiles a training step for a TPU topology that is not present, and says what came of it.

`python -m tunix_rt.engines.jax.aot_worker`: the question is JSON on standard input, the answer the last line of standard
output. The environment is the parent's choice; nothing is set here.
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
"""Kinds that come with so many chips in one computer, which would else be taken for several of four."""
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Ran out of memory", "CompileTimeHbmOom")


def main() -> int:
    question = json.load(sys.stdin)
    try:
        answer = compiled_for(question)
    except TunixError as error:
        answer = {"problem": error.problem, "fix": error.fix}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0 if "problem" not in answer else 2


def compiled_for(question: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of the step that `question` describes, in plain values."""
    training = Training.model_validate(question["training"])
    architecture, tokens = architecture_of(question["config"]), question["tokens"]
    devices = absent_devices(question["topology"])
    mesh = make_mesh(devices, replicas=training.data_replicas)
    rows = training.per_device_train_batch_size * len(devices)
    plan = jax_step.step_plan(
        architecture, training, platform="tpu", rows=rows, tokens=tokens, implementation=question["implementation"]
    )
    params = jax_step.abstract_state(plan, mesh).params
    started = time.perf_counter()
    memory, message = _memory_or_message(plan, mesh, rows, tokens)
    return {
        "topology": question["topology"],
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "replicas": training.data_replicas,
        "rows": rows,
        "tokens": tokens,
        "accumulation": plan.accumulation,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "step": words_of(plan),
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
            f"the compiler knows no topology {topology}: {next(iter(str(error).splitlines()), '')[:200]}",
            fix="v5e:2x4 is Kaggle's v5e-8; whole computers of a kind can be named: v5e:4x4, v6e:2x4, v4:2x2x1, v5p:2x2x1",
        ) from error
    return list(described.devices)


def words_of(plan: jax_step.StepPlan) -> str:
    return (
        f"weights in {plan.weights}, products in {plan.compute}, {plan.optim.kind}, kept for the backward pass: "
        f"{ {'none': 'everything', 'products': 'products', 'layers': 'inputs of layers'}[plan.remat] }, "
        f"{plan.chunk} tokens of a row at the vocabulary at once, attention: {plan.attention}"
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
    found = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "aliased": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
        "peak": found.peak_memory_in_bytes,
    }, None


if __name__ == "__main__":
    sys.exit(main())
