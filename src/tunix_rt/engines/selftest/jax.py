"""The kernel self-test with JAX (`doctor --prove`): the same checks in the same order as `selftest/torch.py`.

A child process: `python -m tunix_rt.engines.selftest.jax --device tpu --dtype bfloat16 --head-size 256`. jax reads its
variables when it is imported, so it is imported inside functions, after they are set.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np

from tunix_rt.data.packing import IGNORED
from tunix_rt.doctor.selftest import CheckResult
from tunix_rt.engines.optimizers import Hyperparameters
from tunix_rt.engines.selftest import cases, reference, runner
from tunix_rt.engines.selftest.runner import Bench, Setting, together

PLATFORM = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""What jax calls the device."""


def set_variables(setting: Setting) -> None:
    """One platform, so that a missing device is an error and not the CPU; memory of a GPU as needed, not 75 % at once."""
    os.environ["JAX_PLATFORMS"] = setting.device
    if setting.device == "cuda":
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if setting.dtype == "float64":
        os.environ["JAX_ENABLE_X64"] = "true"
    # Otherwise float32 products are made of TF32 or bfloat16 parts on accelerators.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"


@dataclass(frozen=True, slots=True)
class _Ops:
    """`runner.Ops` of JAX."""

    bench: Bench

    def put(self, name: str, values: Any, dtype: str | None = None) -> Any:
        import jax
        import jax.numpy as jnp

        is_float = np.issubdtype(values.dtype, np.floating)
        wanted = jnp.dtype(dtype or self.bench.setting.dtype) if is_float else values.dtype
        return self.placed(name, jax.device_put(values.astype(wanted), jax.devices()[0]))

    def placed(self, name: str, array: Any) -> Any:
        self.bench.homes[name] = ", ".join(sorted(_home(device) for device in array.devices()))
        return array

    def numbers(self, name: str, array: Any) -> Any:
        values = np.asarray(self.placed(name, array).block_until_ready())
        return values if values.dtype == np.float64 else values.astype(np.float32)

    def squares(self, size: int) -> tuple[Any, Any]:
        import jax

        keys = jax.random.split(jax.random.key(0), 2)
        left, right = (jax.random.normal(key, (size, size)).astype(self.bench.setting.dtype) for key in keys)
        return left.block_until_ready(), right.block_until_ready()

    def matmul(self, left: Any, right: Any) -> Any:
        import jax.numpy as jnp

        return jnp.matmul(left, right)

    def copy_of(self, size: int) -> Callable[[], Any]:
        """Adds 1, which reads and writes all; a plain copy might be optimized away."""
        import jax
        import jax.numpy as jnp

        source = jnp.ones(size // 4, dtype=jnp.float32)
        return partial(jax.jit(lambda array: array + 1), source)

    def seconds(self, once: Callable[[], Any], times: int = 1) -> float:
        """The device executes calls in order: the last one ends the time."""
        started = time.perf_counter()
        for _ in range(times):
            last = once()
        last.block_until_ready()
        return (time.perf_counter() - started) / times


def _home(device: Any) -> str:
    return f"{device.platform}:{device.id}"


# --- the checks -------------------------------------------------------------------------------------------------------


def device(bench: Bench) -> CheckResult:
    """JAX has the requested platform, and it adds up."""
    import jax
    import jax.numpy as jnp

    first = jax.devices()[0]
    bench.about.update(
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        platform=first.platform,
        name=first.device_kind,
        devices=len(jax.devices()),
    )
    if (capability := getattr(first, "compute_capability", None)) is not None:
        bench.about["capability"] = [int(part) for part in str(capability).split(".")]
    if limit := (first.memory_stats() or {}).get("bytes_limit"):
        bench.about["bytes_limit"] = int(limit)
    wanted = PLATFORM[bench.setting.device]
    if first.platform != wanted:
        return CheckResult(name="device", ok=False, detail=f"jax has {first.platform}, not {wanted}")
    bench.home = _home(first)
    return runner.added_up(float(jnp.ones(1024).sum()), f"{first.device_kind}, jax {jax.__version__}")


def product(bench: Bench) -> CheckResult:
    """At the highest precision."""
    return runner.checked_matmul(bench, _Ops(bench))


def attention(bench: Bench) -> CheckResult:
    """Forward and backward through the engine's attention with a mask, which serves on every platform."""
    import jax

    setting, ops, results = bench.setting, _Ops(bench), []
    samples = cases.attention_cases(setting)
    if any(case.name == "grouped" for case in samples):
        samples = samples[1:]  # shared heads or not is one function here, and each shape is compiled: seconds
    graded = jax.jit(partial(_attention_and_gradients, setting))
    for case in samples:
        inputs = [ops.put(f"{case.name} {name}", getattr(case, name)) for name in ("q", "k", "v", "upstream")]
        mask = reference.seen(case.q.shape[2], examples=case.examples, window=case.window)
        seen = ops.put(f"{case.name} mask", np.repeat(mask[None], len(case.q), axis=0))
        parts = zip(("out", "dq", "dk", "dv"), graded(*inputs, seen), strict=True)
        got = {name: ops.numbers(f"{case.name} {name}", array) for name, array in parts}
        results += case.judge(setting, got, spelled_out=setting.capped_scores)
    return together("attention", results, words=cases.attention_words(setting, samples, "exact"))


def _attention_and_gradients(setting: Setting, q: Any, k: Any, v: Any, upstream: Any, seen: Any) -> tuple[Any, ...]:
    """Cases are [rows, heads, tokens, size], the engine's arrays [rows, tokens, heads, size]."""
    import jax
    import jax.numpy as jnp

    from tunix_rt.engines.jax.model import masked_attention

    scale = setting.head_size**-0.5 if setting.scaling is None else setting.scaling
    model: Any = SimpleNamespace(query_scale=scale, score_cap=cases.score_cap(setting))

    def attend(*inputs: Any) -> Any:
        query, key, value = (jnp.swapaxes(one, 1, 2) for one in inputs)
        return jnp.swapaxes(masked_attention(query, key, value, seen, model), 1, 2)

    out, backward = jax.vjp(attend, q, k, v)
    return (out, *backward(upstream))


def loss(bench: Bench) -> CheckResult:
    """The engine's chunked loss, from hidden states and labels to the gradients of hidden states and lm_head."""
    import jax

    from tunix_rt.engines.jax.chunked_loss import head_loss

    setting, ops = bench.setting, _Ops(bench)
    case = cases.loss_case(setting)
    hidden = ops.put("loss states", case.states, setting.weights)
    lm_head = ops.put("loss head", case.head, setting.weights)
    targets = np.roll(case.labels, -1, axis=1).astype(np.int32)  # the token before predicts it
    targets[:, -1] = IGNORED
    given = (
        ops.put("loss targets", targets),
        ops.put("loss weights", (targets != IGNORED).astype(np.float32), "float32"),
    )
    summed = partial(head_loss, compute=setting.dtype, softcap=setting.softcap)
    value, gradients = jax.jit(jax.value_and_grad(summed, argnums=(0, 1)))(hidden, lm_head, *given)
    parts = {"loss": value, "d_states": gradients[0], "d_head": gradients[1]}
    got = {name: ops.numbers(f"computed {name}", array) for name, array in parts.items()}
    capped = f", soft-capped at {setting.softcap:g}" if setting.softcap else ""
    words = f"cross entropy of {case.targets} targets with backward{capped}, weights in {setting.weights}"
    return together("loss", case.judge(setting, got), words=words)


def optimizer(bench: Bench) -> CheckResult:
    """Two updates by the engine's optimizer. They round to nearest; stochastic rounding is checked by itself."""
    setting, ops = bench.setting, _Ops(bench)
    case = cases.optimizer_case(setting)
    got = _updated(ops, case.parameters, case.gradients, cases.HYPERPARAMETERS, stochastic=False)
    results, words = case.judge(setting, got), f"two updates of {setting.optim}, weights in {setting.weights}"
    if setting.weights == "bfloat16":
        rounding = cases.rounding_case(setting)
        (after,) = _updated(
            ops, {"rounded": rounding.parameter}, [{"rounded": rounding.gradient}], cases.ROUNDING, stochastic=True
        )
        results += rounding.judge(after["rounded"]["parameter"])
        words += ", rounded to nearest and at random"
    return together("optimizer", results, words=words)


def _updated(
    ops: _Ops, parameters: Any, gradients: Sequence[Any], fixed: Hyperparameters, *, stochastic: bool
) -> list[dict[str, dict[str, Any]]]:
    """After each update: every parameter and its optimizer states."""
    import jax

    from tunix_rt.engines.jax import optim

    dtype = ops.bench.setting.weights
    rule = optim.Optim(
        kind=ops.bench.setting.optim, beta1=fixed.beta1, beta2=fixed.beta2, epsilon=fixed.epsilon,
        weight_decay=fixed.decay, stochastic=stochastic,
    )  # fmt: skip
    weights = {name: ops.put(f"optimizer {name}", values, dtype) for name, values in parameters.items()}
    states = optim.init(weights, rule)
    update = jax.jit(partial(optim.update, optim=rule, lr=fixed.lr, key=jax.random.key(0)))
    got = []
    for step, unscaled in enumerate(gradients, 1):
        given = {name: ops.put(f"gradient {step} of {name}", one, dtype) for name, one in unscaled.items()}
        weights, states = update(weights, given, states, step=step, scale=cases.SCALES[step - 1])
        trees = {"parameter": weights, **states}
        got.append(
            {
                name: {
                    slot: ops.numbers(f"optimizer {slot} of {name}", of[name])
                    for slot, of in trees.items()
                    if of[name] is not None
                }
                for name in weights
            }
        )
    return got


def memory(bench: Bench) -> CheckResult:
    """What is allocated on the device is seen from outside of the program, or by the device's own allocator."""
    import jax

    first = jax.devices()[0]
    if bench.setting.device == "cpu":
        return runner.resident_memory(_ones)
    stats = first.memory_stats() or {}
    limit, in_use = int(stats.get("bytes_limit", 0)), int(stats.get("bytes_in_use", 0))
    # More than jax has ready from the proofs before, so that it must ask the driver.
    wanted = runner.ALLOCATION + int(stats.get("largest_free_block_bytes", 0))
    size = min(wanted, (limit - in_use) // 4) if limit else wanted
    on_cuda = bench.setting.device == "cuda"
    before = _under_our_pid() if on_cuda else None
    held = _ones(size)
    after = _under_our_pid() if on_cuda else None
    rise = int((first.memory_stats() or {}).get("bytes_in_use", 0)) - in_use
    del held
    counter = f"{'NVML does not list our process; ' if on_cuda else ''}what jax has in use on the device"
    return runner.device_memory(size, before=before, after=after, rise=rise, counter=counter)


def _ones(size: int) -> Any:
    import jax.numpy as jnp

    return jnp.ones((size,), dtype=jnp.uint8).block_until_ready()


def _under_our_pid() -> int | None:
    """Memory of all GPUs together that NVML lists for this process: jax does not tell the uuid of its device."""
    import pynvml

    from tunix_rt.doctor.nvidia import gpu_memory

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = {str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles}
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    case = gpu_memory(0, uuids)
    return case.used_bytes if case is not None and case.by == "nvml" else None


def speed(bench: Bench) -> CheckResult:
    return runner.measured_speed(bench, _Ops(bench), times=8)


CHECKS = (device, product, attention, loss, optimizer, runner.placement, memory, speed)


if __name__ == "__main__":
    requested = runner.read_setting()
    set_variables(requested)
    sys.exit(runner.run_checks(CHECKS, requested))
