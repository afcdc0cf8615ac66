"""Predicted peak memory of one rank beside that of a step whose every tensor is counted, without a GPU and without memory.

    python -m benchmarks.memory_of_ranks --drawn SEED --count N [--output FILE]
    python -m benchmarks.memory_of_ranks --whole [--output FILE]      whole models on 1,024 ranks
    python -m benchmarks.memory_of_ranks --preset gemma-2b --world 64 [--replicas N] [--layers N] [--output FILE]

A case is the training step of a preset in its published sizes, with fewer layers, on rank 0 of a fake process group: torch's
FakeTensorMode makes tensors without memory, `fully_shard` shards the model as the engine does, and torch's FSDPMemTracker counts
what is alive. Loss head, embedding lookup and activation checkpointing are those of the engine; attention and the loss kernel
have the tensors of their CUDA kernels. Optimizer states are not made, so they are left out of both figures, with the allowance
for cuBLAS. Each case has a process of its own.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.family_cases import shortened
from tunix_rt.config.settings import RunConfig
from tunix_rt.models.resolve import resolve_architecture
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import shape_of

GIB = 2**30
STEP = ("gather", "forward", "loss", "backward", "reduce")
"""Phases of the plan in which a tensor is counted; updates of shards have no temporaries with a kernel."""
UNCOUNTED = ("optimizer", "overhead")
FAMILIES = (
    "gemma-2b", "gemma-3-1b", "gemma-3-270m", "gemma-2-2b", "llama-3.2-1b", "llama-3.1-8b", "qwen-3-0.6b", "qwen-3-4b",
    "smollm2-135m", "mistral-7b", "olmo-2-1b", "granite-3.3-2b", "gpt2", "phi-4-mini", "smollm3-3b",
)  # fmt: skip

WHOLE = (("gemma-2b", 1), ("gemma-2b", 128), ("llama-3.1-8b", 1))
"""Presets and replicas."""


def case_of(
    preset: str, *, world: int, replicas: int = 1, rows: int = 1, tokens: int = 1024, layers: int = 4, **training: Any
) -> dict[str, Any]:
    """Weights in bfloat16 unless `training` has others; 0 `layers` are those of the preset."""
    chosen = {"dtype": "bfloat16", "master_dtype": "bfloat16", **training}
    words = ", ".join(f"{name}={value}" for name, value in training.items())
    return {
        "name": f"{preset}, {layers or 'all'} layers, {world} ranks in {replicas}, {rows}x{tokens} {words}".strip(),
        "preset": preset,
        "world": world,
        "layers": layers,
        "settings": {
            "model": {"weights": "random"},
            "data": {"max_length": tokens, "validation_fraction": 0},
            "training": {"per_device_train_batch_size": rows, "data_replicas": replicas, "compile": False, **chosen},
            "evaluation": {"enabled": False},
        },
    }


def drawn(seed: int) -> Iterator[dict[str, Any]]:
    """Cases by a random generator without end, the families in turn."""
    own = random.Random(seed)
    while True:
        for preset in own.sample(FAMILIES, len(FAMILIES)):
            world = own.choice([2, 4, 8, 16, 64, 256])
            tokens = own.choice([256, 512, 1024])
            # GPT-2 in bfloat16 only: autocast computes its powers in float32 on CUDA, and not on a CPU.
            casts = own.random() < 0.33 and preset != "gpt2"
            training: dict[str, Any] = {"master_dtype": "float32"} if casts else {}
            training |= {"gradient_checkpointing": own.choice([False, True, 0.5])}
            training |= {"optim_in_backward": True} if own.random() < 0.2 else {}
            yield case_of(
                preset,
                world=world,
                replicas=own.choice([one for one in (1, 1, 2, 4) if one < world]),
                rows=own.choice([1, 2, 4]),
                tokens=tokens,
                layers=own.choice([3, 4, 6]),
                **training,
            )


def model_config(case: dict[str, Any]) -> dict[str, Any]:
    known = dict(resolve_architecture(case["preset"]).config)
    if not case["layers"]:
        return known
    if "n_layer" in known:
        return known | {"n_layer": case["layers"]}
    return shortened(known, case["layers"], always=True)


def plan_of(case: dict[str, Any]) -> MemoryPlan:
    config = RunConfig.model_validate(case["settings"])
    return predict_run(
        shape_of(model_config(case)), config, device="cuda", capability=(9, 0), devices=case["world"], layers="plain"
    )


def predicted_bytes(plan: MemoryPlan) -> int:
    """The largest phase of the step, without what is not counted."""
    return max(
        phase.total_bytes - sum(phase.parts.get(name, 0) for name in UNCOUNTED)
        for phase in plan.phases
        if phase.name in STEP
    )


# --- a step of fake tensors -------------------------------------------------------------------------------------------


def tracked_bytes(case: dict[str, Any]) -> int:
    """Peak bytes of the step on rank 0."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["world"])
    replicas = case["settings"]["training"]["data_replicas"]
    sizes = (case["world"],) if replicas == 1 else (replicas, case["world"] // replicas)
    try:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "shard")[-len(sizes) :])
        with FakeTensorMode(allow_non_fake_inputs=True), _cuda_kernels():
            step, inputs = _sharded_step(case, mesh)
            tracker = FSDPMemTracker(step)
            tracker.track_inputs(inputs)
            with tracker:
                step(*inputs).backward()
            (peak,) = [parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values() if parts["Total"]]
    finally:
        dist.destroy_process_group()
    return int(peak)


def _sharded_step(case: dict[str, Any], mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A module whose forward pass is the loss of a step, sharded, and its inputs. FSDPMemTracker needs a root with a forward."""
    import torch
    import transformers
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from tunix_rt.engines.torch.chunked_loss import head_loss, lean_lookup
    from tunix_rt.engines.torch.compile import layers_of
    from tunix_rt.engines.torch.model import embeddings_of
    from tunix_rt.plan.precision import recipe_of

    settings = RunConfig.model_validate(case["settings"])
    training, recipe = settings.training, recipe_of(settings.training)
    weights, compute = getattr(torch, recipe.weights), getattr(torch, recipe.compute)
    config = transformers.AutoConfig.for_model(**model_config(case))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation=ATTENTION).train()
    for table in embeddings_of(model):
        assert lean_lookup(table)
    layers = layers_of(model)
    if recipe.kept_share < 1:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers[len(layers) - recipe.kept_layers(len(layers)) :]:
            layer.gradient_checkpointing = False

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, positions: Any, targets: Any) -> Any:
            with torch.autocast("cpu", dtype=compute, enabled=recipe.casts, cache_enabled=False):
                found = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            lm_head = model.get_output_embeddings().weight
            return head_loss(found.flatten(0, 1)[: len(targets)], lm_head, targets, scale=1.0, compute=compute)

    step = Step()
    reduce = torch.float32 if weights == torch.bfloat16 else None
    for module in (*layers, step):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
    for module in step.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if training.optim_in_backward:
        for parameter in step.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    rows, tokens = training.per_device_train_batch_size, settings.data.max_length
    ids = torch.zeros((rows, tokens), dtype=torch.long)
    return step, (ids, torch.zeros_like(ids), torch.zeros(rows * tokens, dtype=torch.long))


ATTENTION = "tracked_attention"


@contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Attention and the loss with the tensors of their CUDA kernels, which fake tensors of a CPU do not have."""
    import torch
    import transformers
    from transformers import AttentionInterface

    from tunix_rt.engines.torch import chunked_loss

    transformers.utils.logging.set_verbosity_error()
    AttentionInterface.register(ATTENTION, _attention())

    def product_type(compute: Any, device: Any) -> Any:
        return compute

    def workspace(lm_head: Any, kind: Any, rows: int, softcap: Any) -> Any:
        padded = -(-len(lm_head) // 8) * 8
        return torch.empty(rows, padded, dtype=torch.float32)[:, : len(lm_head)]

    def chunk(
        hidden: Any, lm_head: Any, targets: Any, softcap: Any, scale: Any, logits: Any, weights: Any = None
    ) -> Any:
        """The gradient of the logits takes their place."""
        logits = logits[: len(hidden)]
        dlogits = logits.as_strided((len(hidden), len(lm_head)), (logits.stride(0), 1))
        if hidden.dtype.itemsize == 2:
            flat = logits.as_strided((len(hidden), logits.stride(0)), (logits.stride(0), 1)).view(hidden.dtype)
            dlogits = flat[:, : len(lm_head)]
        return torch.zeros(len(hidden), dtype=torch.float64), dlogits

    before = {name: getattr(chunked_loss, name) for name in ("_product_type", "_workspace", "_chunk")}
    for name, function in zip(before, (product_type, workspace, chunk), strict=True):
        setattr(chunked_loss, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(chunked_loss, name, function)


def _attention() -> Any:
    import torch

    from tunix_rt.engines.torch.attention import _computed_in

    class Fused(torch.autograd.Function):
        """Saves what flash attention saves."""

        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            out = torch.empty_like(query)
            log_sums = torch.empty(query.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, out, log_sums)
            return out

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        kind = _computed_in(value)
        return Fused.apply(*(part.to(kind) for part in (query, key, value))).transpose(1, 2), None

    return attend


# --- the command line -------------------------------------------------------------------------------------------------


def count_each(cases: Iterable[dict[str, Any]]) -> Iterator[int]:
    """`tracked_bytes` of each case, in a process of its own that is forked after the imports."""
    import transformers  # noqa: F401

    forked = multiprocessing.get_context("fork")
    for case in cases:
        mine, theirs = forked.Pipe(duplex=False)
        process = forked.Process(target=lambda case=case, end=theirs: end.send(tracked_bytes(case)))
        process.start()
        theirs.close()
        try:
            yield int(mine.recv())
        except EOFError:
            sys.exit(f"{case['name']}: its step failed")
        process.join()


def compared(case: dict[str, Any], tracked: int) -> dict[str, Any]:
    plan = plan_of(case)
    predicted = predicted_bytes(plan)
    phase = max((one for one in plan.phases if one.name in STEP), key=lambda one: one.total_bytes).name
    error = round(predicted / tracked - 1, 5)
    return {**case, "predicted_bytes": predicted, "tracked_bytes": tracked, "error": error, "phase": phase}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, metavar="SEED")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--preset")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    cases = [case for case, _ in zip(drawn(asked.drawn or 0), range(asked.count), strict=False)]
    if asked.whole:
        cases = [
            case_of(preset, world=1024, replicas=replicas, layers=0, gradient_checkpointing=True)
            for preset, replicas in WHOLE
        ]
    if asked.preset:
        sizes = {"rows": asked.rows, "tokens": asked.tokens, "layers": asked.layers}
        sharded = {"world": asked.world, "replicas": asked.replicas}
        cases = [case_of(asked.preset, gradient_checkpointing=True, **sharded, **sizes)]
    found: list[dict[str, Any]] = []
    began = time.monotonic()
    for case, tracked in zip(cases, count_each(cases), strict=True):
        one = compared(case, tracked)
        found.append(one)
        gib = f"{one['predicted_bytes'] / GIB:8.3f} {one['tracked_bytes'] / GIB:8.3f}"
        print(f"{gib} {100 * one['error']:+6.2f} % {one['phase']:9} {one['name']}", flush=True)
        if asked.output:
            versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
            asked.output.write_text(
                json.dumps({"versions": versions, "cases": found}, indent=1) + "\n", encoding="utf-8"
            )
    worst = max(abs(one["error"]) for one in found)
    print(f"{len(found)} cases in {time.monotonic() - began:.0f} s; the largest error is {100 * worst:.2f} %")


if __name__ == "__main__":
    main()
