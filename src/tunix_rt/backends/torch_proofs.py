"""What `doctor --prove` executes with PyTorch: the kernels of a run, on its device, in its type.

A child process: `python -m tunix_rt.backends.torch_proofs --device cuda --dtype bfloat16 --head-size 256`. A kernel that
comes later is proven by a function more in `PROOFS`.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from tunix_rt.backends import proof_samples, proving
from tunix_rt.backends.process_memory import RiseMeter
from tunix_rt.backends.proving import Bench, together
from tunix_rt.backends.torch_backend import make_optimizer
from tunix_rt.backends.torch_model import Engine, summed_loss
from tunix_rt.config import Training
from tunix_rt.doctor.prove import Proved
from tunix_rt.models import ModelSource

PRODUCT_SIZE = 4096


def _type(bench: Bench) -> torch.dtype:
    return getattr(torch, bench.setting.dtype)


def _put(bench: Bench, name: str, values: Any, *, grad: bool = False) -> torch.Tensor:
    """`values` on the device. Floats take the run's type, in which they are exact."""
    tensor = torch.from_numpy(values).to(bench.setting.device)
    if tensor.is_floating_point():
        tensor = tensor.to(_type(bench))
    return _seen(bench, name, tensor.requires_grad_(grad))


def _seen(bench: Bench, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"{name} was not computed")
    bench.homes[name] = str(tensor.device)
    return tensor


def _numbers(bench: Bench, name: str, tensor: torch.Tensor | None) -> Any:
    """The values of a result, after its place was noted. bfloat16 is unknown to numpy: exact in float32."""
    found = _seen(bench, name, tensor).detach()
    return (found if found.dtype == torch.float64 else found.float()).cpu().numpy()


def _wait(bench: Bench) -> None:
    if bench.setting.device == "cuda":
        torch.cuda.synchronize()


# --- the proofs -------------------------------------------------------------------------------------------------------


def device(bench: Bench) -> Proved:
    """The device is there and wakes up. Warnings of torch that it cannot use it are made a failure by the runner."""
    about = {"torch": torch.__version__, "cuda_build": torch.version.cuda, "threads": torch.get_num_threads()}
    bench.about.update(about)
    if bench.setting.device == "cuda":
        bench.about.update(is_available=torch.cuda.is_available(), arch_list=torch.cuda.get_arch_list())
        torch.cuda.init()  # refuses with its reason where CUDA cannot be used
        known = torch.cuda.get_device_properties(0)
        bench.about.update(
            name=known.name,
            capability=[known.major, known.minor],
            uuid=_uuid(),
            total_bytes=known.total_memory,
            cudnn=torch.backends.cudnn.version(),
        )
        if not torch.cuda.is_available():
            return Proved(name="device", ok=False, detail="torch.cuda.is_available() is False")
    ones = torch.ones(1024, device=bench.setting.device)
    total = float(ones.sum())
    _wait(bench)
    bench.home = str(ones.device)
    words = f"{bench.about.get('name', 'CPU')}, torch {torch.__version__}"
    return Proved(
        name="device", ok=total == 1024.0, detail=words if total == 1024.0 else f"1,024 ones add up to {total}"
    )


def product(bench: Bench) -> Proved:
    """A whole 4096 x 4096 product without TF32. A CPU gets 2048, or less where it emulates the type, and says so."""
    torch.set_float32_matmul_precision("highest")
    size = PRODUCT_SIZE
    if bench.setting.device == "cpu":
        size = proving.affordable_size(lambda trial: _seconds(bench, *_squares(bench, trial)))
    sample = proof_samples.product_sample(bench.setting, size=size)
    left, right = _put(bench, "product left", sample.left), _put(bench, "product right", sample.right)
    result = torch.matmul(left, right)
    _wait(bench)
    return sample.judge(bench.setting, _numbers(bench, "product", result))


def attention(bench: Bench) -> Proved:
    """Forward and backward through the function the models call, with the model's head size and scaling.

    Eager is Gemma 2's own: it alone knows of soft-capped scores, and a run takes eager for nothing else."""
    setting = bench.setting
    eager = setting.attention == "eager"
    function = modeling_gemma2.eager_attention_forward if eager else ALL_ATTENTION_FUNCTIONS["sdpa"]
    more = {"softcap": proof_samples.score_cap(setting)} if eager else {}
    found = []
    samples = proof_samples.attention_samples(bench.setting)
    for sample in samples:
        names = ("q", "k", "v")
        inputs = [_put(bench, f"{sample.name} {name}", getattr(sample, name), grad=True) for name in names]
        layer = torch.nn.Module()
        layer.num_key_value_groups = sample.q.shape[1] // sample.k.shape[1]
        layer.is_causal, layer.head_dim = True, setting.head_size
        mask = None if sample.examples is None and not eager else _mask(bench, sample)
        out, _ = function(layer, *inputs, mask, scaling=setting.scaling, **more)
        out = out.transpose(1, 2)  # comes back as [rows, tokens, heads, size]
        gradients = torch.autograd.grad(out, inputs, _put(bench, f"{sample.name} upstream", sample.upstream))
        _wait(bench)
        parts = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
        got = {part: _numbers(bench, f"{sample.name} {part}", tensor) for part, tensor in parts.items()}
        found += sample.judge(setting, got)
    return together("attention", found, words=proof_samples.attention_words(setting, samples))


def _mask(bench: Bench, sample: proof_samples.AttentionSample) -> torch.Tensor:
    """As transformers makes it: true where a token may look; for eager a number that is added to the scores."""
    examples = np.zeros(sample.q.shape[2]) if sample.examples is None else sample.examples
    seen = _put(bench, f"{sample.name} mask", np.tril(examples[:, None] == examples[None, :])[None, None])
    if bench.setting.attention == "sdpa":
        return seen
    unseen = torch.full_like(seen, torch.finfo(_type(bench)).min, dtype=_type(bench))
    return unseen.masked_fill(seen, 0.0)


class _Head(torch.nn.Module):
    """A model whose hidden states are given: what is left of it is the head."""

    def __init__(self, states: torch.Tensor, head: torch.Tensor, softcap: float | None) -> None:
        super().__init__()
        self.states = states
        self.config = SimpleNamespace(final_logit_softcapping=softcap)
        self.head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        self.head.weight = torch.nn.Parameter(head)

    def base_model(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.states)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def loss(bench: Bench) -> Proved:
    """The loss of the engine itself, from hidden states and labels to gradients of states and head."""
    sample = proof_samples.loss_sample(bench.setting)
    states = _put(bench, "loss states", sample.states, grad=True)
    model = _Head(states, _put(bench, "loss head", sample.head), bench.setting.softcap)
    labels = _put(bench, "loss labels", sample.labels)
    summed = summed_loss(model, labels, labels, labels)
    summed.backward()
    _wait(bench)
    got = {
        "loss": _numbers(bench, "loss", summed),
        "d_states": _numbers(bench, "loss d_states", states.grad),
        "d_head": _numbers(bench, "loss d_head", model.head.weight.grad),
    }
    capped = f", soft-capped at {bench.setting.softcap:g}" if bench.setting.softcap else ""
    words = f"cross entropy of {sample.targets} targets with backward{capped}"
    return together("loss", sample.judge(bench.setting, got), words=words)


def optimizer(bench: Bench) -> Proved:
    """Two updates by the engine's own optimizer."""
    sample = proof_samples.optimizer_sample(bench.setting)
    model = torch.nn.Module()
    for name, values in sample.parameters.items():
        model.register_parameter(name, torch.nn.Parameter(_put(bench, f"optimizer {name}", values)))
    engine = Engine(
        model=model,
        source=ModelSource(name="proof", folder=Path(), revision="local", weights="random", config={}),
        device=torch.device(bench.setting.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        meter=RiseMeter(),
    )
    training = Training(
        learning_rate=proof_samples.RATE, weight_decay=proof_samples.DECAY, adam_epsilon=proof_samples.EPSILON,
        adam_beta1=proof_samples.BETA1, adam_beta2=proof_samples.BETA2,
    )  # fmt: skip
    adamw = make_optimizer(engine, training)
    for gradients in sample.gradients:
        for name, parameter in model.named_parameters():
            parameter.grad = _put(bench, f"optimizer gradient of {name}", gradients[name])
        adamw.step()
    _wait(bench)
    got = {}
    for name, parameter in model.named_parameters():
        state = adamw.state[parameter]
        _seen(bench, f"optimizer step of {name}", state["step"])
        got[name] = {
            "parameter": _numbers(bench, f"optimizer {name}", parameter),
            "first": _numbers(bench, f"optimizer exp_avg of {name}", state["exp_avg"]),
            "second": _numbers(bench, f"optimizer exp_avg_sq of {name}", state["exp_avg_sq"]),
        }
    return together("optimizer", sample.judge(bench.setting, got), words="two updates of fused AdamW")


def memory(bench: Bench) -> Proved:
    """What is allocated on the device is seen from outside of torch."""
    if bench.setting.device == "cpu":
        return proving.resident_memory(lambda size: torch.full((size,), 1, dtype=torch.uint8))
    from tunix_rt.doctor.gpu_memory import gpu_memory

    def listed() -> int | None:
        sample = gpu_memory(0, {_uuid()})
        return sample.used_bytes if sample is not None and sample.by == "nvml" else None

    torch.cuda.empty_cache()
    before, free_before = listed(), torch.cuda.mem_get_info(0)[0]
    size = min(proving.ALLOCATION, free_before // 4)
    held = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
    _wait(bench)
    rise, after = free_before - torch.cuda.mem_get_info(0)[0], listed()
    del held
    counter = "NVML does not list our process; memory in use on the device"
    return proving.device_memory(size, before=before, after=after, rise=rise, counter=counter)


def _uuid() -> str:
    """As NVML writes it. An index would not do: CUDA counts otherwise than NVML, and a mask shifts it."""
    bare = str(torch.cuda.get_device_properties(0).uuid)
    return bare if bare.startswith(("GPU-", "MIG-")) else f"GPU-{bare}"


def speed(bench: Bench) -> Proved:
    """How fast the product and a copy are. No verdict: a slow device still computes rightly."""
    on_cpu = bench.setting.device == "cpu"
    if on_cpu:
        size = proving.affordable_size(lambda trial: _seconds(bench, *_squares(bench, trial)), largest=1024, limit=0.2)
    else:
        size = 8192
    left, right = _squares(bench, size)
    limit = 0.4 if on_cpu else 1.0
    product_seconds = proving.median_seconds(
        lambda: _seconds(bench, left, right, times=1 if on_cpu else 4), limit=limit
    )
    source = torch.ones((64 if on_cpu else 512) << 20, dtype=torch.uint8, device=bench.setting.device)
    target = torch.zeros_like(source)
    copy_seconds = proving.median_seconds(lambda: _timed(bench, lambda: target.copy_(source)), limit=limit)
    return proving.speed_of(product_seconds, size, copy_seconds, source.numel())


def _squares(bench: Bench, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers, not zeros: a GPU draws less power on zeros, and is faster."""
    drawn = torch.randn(2, size, size, device=bench.setting.device)
    return drawn[0].to(_type(bench)), drawn[1].to(_type(bench))


def _seconds(bench: Bench, left: torch.Tensor, right: torch.Tensor, times: int = 1) -> float:
    return _timed(bench, lambda: torch.matmul(left, right), times)


def _timed(bench: Bench, once: Any, times: int = 1) -> float:
    """Seconds of one of `times` calls in a row; on CUDA by the device's own events."""
    if bench.setting.device == "cpu":
        started = time.perf_counter()
        for _ in range(times):
            once()
        return (time.perf_counter() - started) / times
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        once()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / times


PROOFS = (device, product, attention, loss, optimizer, proving.placement, memory, speed)


if __name__ == "__main__":
    sys.exit(proving.run_proofs(PROOFS, proving.read_setting()))
