"""What `doctor --prove` executes with JAX: the same proofs in the same order as `selftest/torch.py`.

A child process: `python -m tunix_rt.engines.selftest.jax --device tpu --dtype bfloat16 --head-size 256`. jax reads its
variables when it is imported, so it is imported inside functions, after they are set.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np

from tunix_rt.data.packing import IGNORED
from tunix_rt.doctor.selftest import Proved
from tunix_rt.engines.selftest import cases as proof_samples
from tunix_rt.engines.selftest import optimizer_cases as optimizer_samples
from tunix_rt.engines.selftest import reference as references
from tunix_rt.engines.selftest import runner as proving
from tunix_rt.engines.selftest.runner import Bench, Setting, together

PRODUCT_SIZE = 4096
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


def _put(bench: Bench, name: str, values: Any, dtype: str | None = None) -> Any:
    """`values` on the device. Floats take the run's type, in which they are exact."""
    import jax
    import jax.numpy as jnp

    is_float = np.issubdtype(values.dtype, np.floating)
    wanted = jnp.dtype(dtype or bench.setting.dtype) if is_float else values.dtype
    return _seen(bench, name, jax.device_put(values.astype(wanted), jax.devices()[0]))


def _seen(bench: Bench, name: str, array: Any) -> Any:
    bench.homes[name] = ", ".join(sorted(_home(device) for device in array.devices()))
    return array


def _home(device: Any) -> str:
    return f"{device.platform}:{device.id}"


def _numbers(bench: Bench, name: str, array: Any) -> Any:
    """The values of a result, waited for, after its place was noted."""
    found = np.asarray(_seen(bench, name, array).block_until_ready())
    return found if found.dtype == np.float64 else found.astype(np.float32)


# --- the proofs -------------------------------------------------------------------------------------------------------


def device(bench: Bench) -> Proved:
    """The platform asked for is the one jax has, and it adds up."""
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
        return Proved(name="device", ok=False, detail=f"jax has {first.platform}, not {wanted}")
    bench.home = _home(first)
    total = float(jnp.ones(1024).sum())
    words = f"{first.device_kind}, jax {jax.__version__}"
    return Proved(
        name="device", ok=total == 1024.0, detail=words if total == 1024.0 else f"1,024 ones add up to {total}"
    )


def product(bench: Bench) -> Proved:
    """A whole 4096 x 4096 product at the highest precision. A CPU gets 2048, or less where it emulates the type."""
    size = PRODUCT_SIZE
    if bench.setting.device == "cpu":
        size = proving.affordable_size(lambda trial: _seconds(*_squares(bench, trial)))
    sample = proof_samples.product_sample(bench.setting, size=size)
    left, right = _put(bench, "product left", sample.left), _put(bench, "product right", sample.right)
    return sample.judge(bench.setting, _numbers(bench, "product", _product(left, right)))


def _product(left: Any, right: Any) -> Any:
    import jax.numpy as jnp

    return jnp.matmul(left, right)


def attention(bench: Bench) -> Proved:
    """Forward, and backward by differentiating attention that is written out."""
    import jax

    setting, found = bench.setting, []
    samples = proof_samples.attention_samples(setting)
    if any(sample.name == "grouped" for sample in samples):
        samples = samples[1:]  # shared heads or not is one function here, and each shape is compiled: seconds
    scaling = setting.head_size**-0.5 if setting.scaling is None else setting.scaling
    graded = jax.jit(partial(_attention_and_gradients, scaling=scaling, softcap=proof_samples.score_cap(setting)))
    for sample in samples:
        parts = {
            name: _put(bench, f"{sample.name} {name}", getattr(sample, name)) for name in ("q", "k", "v", "upstream")
        }
        mask = references.seen(sample.q.shape[2], examples=sample.examples, window=sample.window)
        seen = _put(bench, f"{sample.name} mask", mask)
        results = graded(parts["q"], parts["k"], parts["v"], parts["upstream"], seen)
        names = ("out", "dq", "dk", "dv")
        got = {
            name: _numbers(bench, f"{sample.name} {name}", array) for name, array in zip(names, results, strict=True)
        }
        found += sample.judge(setting, got, spelled_out=setting.capped_scores)
    return together("attention", found, words=proof_samples.attention_words(setting, samples, "written out"))


def _attention_and_gradients(q: Any, k: Any, v: Any, upstream: Any, seen: Any, **how: Any) -> tuple[Any, ...]:
    import jax

    out, backward = jax.vjp(lambda q, k, v: _attention(q, k, v, seen, **how), q, k, v)
    return (out, *backward(upstream))


def _attention(q: Any, k: Any, v: Any, seen: Any, *, scaling: float, softcap: float | None) -> Any:
    """Softmax in float32 (float64 in a float64 run); shared heads stay shared."""
    import jax
    import jax.numpy as jnp

    rows, heads, tokens, size = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(rows, k.shape[1], heads // k.shape[1], tokens, size)
    scores = jnp.einsum("bkgts,bkus->bkgtu", grouped, k, preferred_element_type=wide) * scaling
    if softcap:
        scores = jnp.tanh(scores / softcap) * softcap
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgtu,bkus->bkgts", weights, v, preferred_element_type=wide)
    return out.reshape(q.shape).astype(q.dtype)


def loss(bench: Bench) -> Proved:
    """Summed cross entropy over the targets, from hidden states and labels to gradients of states and head."""
    import jax

    sample = proof_samples.loss_sample(bench.setting)
    states, head = _put(bench, "loss states", sample.states), _put(bench, "loss head", sample.head)
    labels = _put(bench, "loss labels", sample.labels.astype(np.int32))
    softcap = bench.setting.softcap
    graded = jax.jit(
        jax.value_and_grad(lambda states, head: _summed_loss(states, head, labels, softcap), argnums=(0, 1))
    )
    summed, (d_states, d_head) = graded(states, head)
    got = {
        "loss": _numbers(bench, "loss", summed),
        "d_states": _numbers(bench, "loss d_states", d_states),
        "d_head": _numbers(bench, "loss d_head", d_head),
    }
    capped = f", soft-capped at {softcap:g}" if softcap else ""
    words = f"cross entropy of {sample.targets} targets with backward{capped}"
    return together("loss", sample.judge(bench.setting, got), words=words)


def _summed_loss(states: Any, head: Any, labels: Any, softcap: float | None) -> Any:
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(states.dtype, jnp.float32)
    logits = jnp.einsum("bth,vh->btv", states[:, :-1], head, preferred_element_type=wide)
    if softcap:
        logits = jnp.tanh(logits / softcap) * softcap
    targets = labels[:, 1:]
    is_target = targets != IGNORED
    at = jnp.where(is_target, targets, 0)[..., None]
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, at, axis=-1)[..., 0]
    return jnp.where(is_target, losses, 0.0).sum()


def optimizer(bench: Bench) -> Proved:
    """Two updates by optax's AdamW. In float32 for the half types: weights are kept in it, since updates vanish in them."""
    import jax

    try:
        import optax
    except ModuleNotFoundError:
        return Proved(name="optimizer", ok=False, detail="optax is not installed: pip install 'tunix-rt[jax]'")
    dtype = "float64" if bench.setting.dtype == "float64" else "float32"
    setting = replace(bench.setting, master_dtype=None, optim="adamw")
    sample = optimizer_samples.optimizer_sample(setting)
    adamw = optax.adamw(
        optimizer_samples.RATE, b1=optimizer_samples.BETA1, b2=optimizer_samples.BETA2,
        eps=optimizer_samples.EPSILON, weight_decay=optimizer_samples.DECAY, mask={"matrix": True, "vector": False},
    )  # fmt: skip
    kept = {name: _put(bench, f"optimizer {name}", values, dtype) for name, values in sample.parameters.items()}
    state = adamw.init(kept)

    def update(kept: Any, state: Any, gradients: Any, scale: float) -> tuple[Any, Any]:
        updates, state = adamw.update(jax.tree.map(lambda one: scale * one, gradients), state, kept)
        return optax.apply_updates(kept, updates), state

    got = []
    for number, gradients in enumerate(sample.gradients):
        put = {
            name: _put(bench, f"optimizer gradient {number} of {name}", one, dtype) for name, one in gradients.items()
        }
        kept, state = jax.jit(update)(kept, state, put, optimizer_samples.SCALES[number])
        moments = next(part for part in jax.tree.leaves(state, is_leaf=_has_moments) if _has_moments(part))
        _seen(bench, "optimizer count", moments.count)
        got.append(
            {
                name: {
                    "parameter": _numbers(bench, f"optimizer {name}", kept[name]),
                    "exp_avg": _numbers(bench, f"optimizer first moment of {name}", moments.mu[name]),
                    "exp_avg_sq": _numbers(bench, f"optimizer second moment of {name}", moments.nu[name]),
                }
                for name in sample.parameters
            }
        )
    found = sample.judge(setting, got)
    return together("optimizer", found, words=f"two updates of optax {optax.__version__} AdamW in {dtype}")


def _has_moments(part: Any) -> bool:
    return hasattr(part, "mu") and hasattr(part, "nu")


def memory(bench: Bench) -> Proved:
    """What is allocated on the device is seen from outside of the program, or by the device's own allocator."""
    import jax

    first = jax.devices()[0]
    if bench.setting.device == "cpu":
        return proving.resident_memory(_ones)
    stats = first.memory_stats() or {}
    limit, in_use = int(stats.get("bytes_limit", 0)), int(stats.get("bytes_in_use", 0))
    # More than jax has ready from the proofs before, so that it must ask the driver.
    wanted = proving.ALLOCATION + int(stats.get("largest_free_block_bytes", 0))
    size = min(wanted, (limit - in_use) // 4) if limit else wanted
    on_cuda = bench.setting.device == "cuda"
    before = _under_our_pid() if on_cuda else None
    held = _ones(size)
    after = _under_our_pid() if on_cuda else None
    rise = int((first.memory_stats() or {}).get("bytes_in_use", 0)) - in_use
    del held
    counter = f"{'NVML does not list our process; ' if on_cuda else ''}what jax has in use on the device"
    return proving.device_memory(size, before=before, after=after, rise=rise, counter=counter)


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
    sample = gpu_memory(0, uuids)
    return sample.used_bytes if sample is not None and sample.by == "nvml" else None


def speed(bench: Bench) -> Proved:
    """How fast the product and a copy are. No verdict: a slow device still computes rightly."""
    import jax
    import jax.numpy as jnp

    on_cpu = bench.setting.device == "cpu"
    size = 8192
    if on_cpu:
        size = proving.affordable_size(lambda trial: _seconds(*_squares(bench, trial)), largest=1024, limit=0.2)
    left, right = _squares(bench, size)
    limit, times = (0.4, 1) if on_cpu else (1.0, 8)
    product_seconds = proving.median_seconds(lambda: _seconds(left, right, times), limit=limit)
    source = jnp.ones((16 if on_cpu else 128) << 20, dtype=jnp.float32)
    shifted = jax.jit(lambda array: array + 1)  # reads and writes all; a plain copy might be left out
    copy_seconds = proving.median_seconds(lambda: _timed(lambda: shifted(source), times), limit=limit)
    return proving.speed_of(product_seconds, size, copy_seconds, source.nbytes)


def _squares(bench: Bench, size: int) -> tuple[Any, Any]:
    """Normal numbers, not zeros: an accelerator draws less power on zeros, and is faster."""
    import jax

    keys = jax.random.split(jax.random.key(0), 2)
    left, right = (jax.random.normal(key, (size, size)).astype(bench.setting.dtype) for key in keys)
    return left.block_until_ready(), right.block_until_ready()


def _seconds(left: Any, right: Any, times: int = 1) -> float:
    return _timed(lambda: _product(left, right), times)


def _timed(once: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one of `times` calls in a row. The device works them off in order: the last one ends the time."""
    started = time.perf_counter()
    for _ in range(times):
        last = once()
    last.block_until_ready()
    return (time.perf_counter() - started) / times


PROOFS = (device, product, attention, loss, optimizer, proving.placement, memory, speed)


if __name__ == "__main__":
    asked = proving.read_setting()
    set_variables(asked)
    sys.exit(proving.run_proofs(PROOFS, asked))
