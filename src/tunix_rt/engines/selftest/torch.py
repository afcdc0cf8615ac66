"""What `doctor --prove` executes with PyTorch: the kernels of a run, on its device, in its type.

A child process: `python -m tunix_rt.engines.selftest.torch --device cuda --dtype bfloat16 --head-size 256`. A kernel that
comes later is proven by a function more in `PROOFS`.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from tunix_rt.data.packing import MicroBatch
from tunix_rt.doctor.selftest import Proved
from tunix_rt.engines.base import RiseMeter
from tunix_rt.engines.selftest import cases as proof_samples
from tunix_rt.engines.selftest import optimizer_cases as optimizer_samples
from tunix_rt.engines.selftest import runner as proving
from tunix_rt.engines.selftest.runner import Bench, Setting, together
from tunix_rt.engines.torch.attention import FLEX, Attention, boundaries
from tunix_rt.engines.torch.loop import make_optimizer
from tunix_rt.engines.torch.model import Engine, LossScale, attention_for, be_deterministic, summed_loss
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.optimizers import state_tensors
from tunix_rt.plan.precision import recipe_of

PRODUCT_SIZE = 4096


def _type(bench: Bench) -> torch.dtype:
    return getattr(torch, bench.setting.dtype)


def _put(bench: Bench, name: str, values: Any, *, dtype: str | None = None, grad: bool = False) -> torch.Tensor:
    """`values` on the device, never the array itself: updates are in place. Floats take the run's type, in which they are
    exact, or a wider one."""
    tensor = torch.from_numpy(values.copy()).to(bench.setting.device)
    if tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype or bench.setting.dtype))
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


# --- the engine of such a run -----------------------------------------------------------------------------------------


def _attention_of(setting: Setting) -> Attention:
    """The attention that a run of such a model takes here, tried as `load` tries it."""
    said = SimpleNamespace(
        head_dim=setting.head_size,
        attn_logit_softcapping=proof_samples.score_cap(setting),
        attention_dropout=0.5 if setting.dropout else 0.0,
    )
    chosen = attention_for(said, setting.device, setting.training)
    if chosen.training == FLEX:
        torch.compiler.reset()  # the trial had another cap: the compiler would take ours for a number that varies
    return chosen


_NO_LAYERS = Attention(name="none", training="none", generating="none", why="there are no layers")


def _engine(bench: Bench, model: Any, attention: Attention = _NO_LAYERS) -> Engine:
    """The recipe of the run around `model`."""
    setting = bench.setting
    return Engine(
        model=model,
        source=ModelSource(name="proof", folder=Path(), revision="local", weights="random", config={}),
        device=torch.device(setting.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        meter=RiseMeter(),
        recipe=recipe_of(setting.training),
        attention=attention,
        deterministic=setting.deterministic,
    )


# --- the proofs -------------------------------------------------------------------------------------------------------


def device(bench: Bench) -> Proved:
    """The device is there and wakes up. Warnings of torch that it cannot use it are made a failure by the runner."""
    about = {"torch": torch.__version__, "cuda_build": torch.version.cuda, "threads": torch.get_num_threads()}
    bench.about.update(about)
    if bench.setting.deterministic:
        be_deterministic(bench.setting.device, True)
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
    """Forward and backward through the function the layers of the run call, with the model's head size and scaling.

    Eager is Gemma 2's own: it alone knows of soft-capped scores, and a run takes eager for nothing else."""
    setting = bench.setting
    chosen = _attention_of(setting)
    engine = _engine(bench, torch.nn.Module(), chosen)
    bench.about["attention"] = f"{chosen.name}, {chosen.why}"
    eager = chosen.training == "eager"
    function = modeling_gemma2.eager_attention_forward if eager else ALL_ATTENTION_FUNCTIONS[chosen.training]
    samples = proof_samples.attention_samples(setting)
    if chosen.training == FLEX:  # each shape is compiled, for seconds; a packed row has all that the others have
        samples = [sample for sample in samples if sample.examples is not None]
    found = []
    for sample in samples:
        got = _attend(bench, engine, sample, function)
        found += sample.judge(setting, got, spelled_out=eager)
    return together("attention", found, words=proof_samples.attention_words(setting, samples, chosen.name))


def _attend(bench: Bench, engine: Engine, sample: proof_samples.AttentionSample, function: Any) -> dict[str, Any]:
    """Output and gradients. Where weights are wider than products, queries and keys come from their rotation as wide."""
    setting = bench.setting
    types = {"q": engine.recipe.weights, "k": engine.recipe.weights, "v": engine.recipe.compute}
    inputs = [
        _put(bench, f"{sample.name} {name}", getattr(sample, name), dtype=dtype, grad=True)
        for name, dtype in types.items()
    ]
    layer = torch.nn.Module()
    layer.num_key_value_groups = sample.q.shape[1] // sample.k.shape[1]
    layer.is_causal, layer.head_dim = True, setting.head_size
    mask = _mask(bench, engine, sample)
    windows = () if sample.window is None else (sample.window,)
    more = boundaries(sample.positions, engine.device, engine.attention, windows=windows)
    if cap := proof_samples.score_cap(setting):
        more["softcap"] = cap
    with engine.kernels():
        with engine.computing():
            out, _ = function(layer, *inputs, mask, scaling=setting.scaling, sliding_window=sample.window, **more)
        out = out.transpose(1, 2)  # comes back as [rows, tokens, heads, size]
        upstream = _put(bench, f"{sample.name} upstream", sample.upstream).to(out.dtype)
        gradients = torch.autograd.grad(out, inputs, upstream)
    _wait(bench)
    parts = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    return {part: _numbers(bench, f"{sample.name} {part}", tensor) for part, tensor in parts.items()}


def _mask(bench: Bench, engine: Engine, sample: proof_samples.AttentionSample) -> torch.Tensor | None:
    """As transformers makes it for a layer of the run, from positions: none where attention is told the borders."""
    positions = _put(bench, f"{sample.name} positions", sample.positions)
    said = SimpleNamespace(_attn_implementation=engine.attention.training, sliding_window=sample.window)
    make = (
        masking_utils.create_causal_mask if sample.window is None else masking_utils.create_sliding_window_causal_mask
    )
    states = torch.empty(*positions.shape, 1, dtype=getattr(torch, engine.recipe.weights), device=engine.device)
    mask = make(config=said, inputs_embeds=states, attention_mask=None, past_key_values=None, position_ids=positions)
    return None if mask is None else _seen(bench, f"{sample.name} mask", mask)


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
    """The loss of the engine itself, from hidden states and labels to gradients of states and head.

    Its scale is that of a run's first step, and is divided out again."""
    setting = bench.setting
    sample = proof_samples.loss_sample(setting)
    states = _put(bench, "loss states", sample.states, dtype=setting.weights, grad=True)
    model = _Head(states, _put(bench, "loss head", sample.head, dtype=setting.weights), setting.softcap)
    engine = _engine(bench, model)
    micro = MicroBatch(
        ids=np.zeros_like(sample.labels),
        labels=sample.labels,
        positions=np.tile(np.arange(sample.labels.shape[1]), (len(sample.labels), 1)),
    )
    scale = (LossScale().value if engine.recipe.loss_scaled else 1.0) / micro.targets
    summed = summed_loss(engine, micro, scale=scale)
    summed.backward()
    _wait(bench)
    results = {"loss": summed, "d_states": states.grad, "d_head": model.head.weight.grad}
    got = {
        name: _numbers(bench, f"computed {name}", tensor).astype(np.float64) / scale for name, tensor in results.items()
    }
    capped = f", soft-capped at {setting.softcap:g}" if setting.softcap else ""
    words = f"cross entropy of {sample.targets} targets with backward{capped}, weights in {setting.weights}"
    return together("loss", sample.judge(setting, got), words=words)


def optimizer(bench: Bench) -> Proved:
    """Two updates by the engine's own optimizer: of all parameters together, then of each by itself, as in backward.

    They round to nearest, which has a bound. Rounding at random is tried by itself, where the run does it."""
    setting = bench.setting
    sample = optimizer_samples.optimizer_sample(setting)
    model, rule = _optimizer(bench, sample.parameters, stochastic_rounding=False)
    got = []
    for step, gradients in enumerate(sample.gradients, 1):
        rule.begin(step, optimizer_samples.RATE)
        for name, parameter in model.named_parameters():
            parameter.grad = _put(bench, f"gradient of {name}", gradients[name], dtype=setting.weights)
        scale = torch.tensor(optimizer_samples.SCALES[step - 1], device=setting.device)
        if step == 1:
            rule.step(scale=scale)
        else:
            for parameter in model.parameters():
                rule.update(parameter, scale=scale, sound=torch.ones((), dtype=torch.bool, device=setting.device))
        _wait(bench)
        got.append({name: _state(bench, rule, name, parameter) for name, parameter in model.named_parameters()})
    found = sample.judge(setting, got)
    words = f"two updates of {setting.optim}, weights in {setting.weights}"
    if setting.weights == "bfloat16":
        found += _rounding(bench)
        words += ", rounded to nearest and at random"
    return together("optimizer", found, words=words)


def _optimizer(bench: Bench, parameters: Any, *, stochastic_rounding: bool) -> tuple[torch.nn.Module, Optimizer]:
    model = torch.nn.Module()
    for name, values in parameters.items():
        tensor = _put(bench, f"optimizer {name}", values, dtype=bench.setting.weights)
        model.register_parameter(name, torch.nn.Parameter(tensor))
    training = bench.setting.training.model_copy(
        update={
            "stochastic_rounding": stochastic_rounding,
            "weight_decay": optimizer_samples.DECAY,
            "adam_epsilon": optimizer_samples.EPSILON,
            "adam_beta1": optimizer_samples.BETA1,
            "adam_beta2": optimizer_samples.BETA2,
        }
    )
    engine = _engine(bench, model)
    engine.recipe = recipe_of(training)
    return model, make_optimizer(engine, training)


def _state(bench: Bench, rule: Optimizer, name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """The parameter and what is kept of it, each by a copy: the next update is in place."""
    kept = rule.state_of(parameter)
    for slot, tensor in kept.items():
        _seen(bench, f"optimizer {slot} of {name}", tensor)
    found = {"parameter": _numbers(bench, f"optimizer {name}", parameter)}
    for slot in state_tensors(tuple(parameter.shape), bench.setting.optim, bench.setting.weights):
        found[slot] = _numbers(bench, f"optimizer {slot} of {name}", kept[slot])
    return {slot: values.copy() for slot, values in found.items()}


def _rounding(bench: Bench) -> list[Proved]:
    sample = optimizer_samples.rounding_sample(bench.setting)
    model, rule = _optimizer(bench, {"rounded": sample.parameter}, stochastic_rounding=True)
    rule.begin(1, optimizer_samples.ROUNDING_RATE)
    model.rounded.grad = _put(bench, "gradient of rounded", sample.gradient, dtype=bench.setting.weights)
    rule.step()
    _wait(bench)
    return sample.judge(_numbers(bench, "optimizer rounded", model.rounded))


def memory(bench: Bench) -> Proved:
    """What is allocated on the device is seen from outside of torch."""
    if bench.setting.device == "cpu":
        return proving.resident_memory(lambda size: torch.full((size,), 1, dtype=torch.uint8))
    from tunix_rt.doctor.nvidia import gpu_memory

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
