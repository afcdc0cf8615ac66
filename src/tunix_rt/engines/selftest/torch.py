"""The kernel self-test with PyTorch (`doctor --prove`): the kernels of a run, on its device, in its dtype.

A child process: `python -m tunix_rt.engines.selftest.torch --device cuda --dtype bfloat16 --head-size 256`. A new kernel is one
more function in `CHECKS`.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from tunix_rt.config.optimizers import state_tensors
from tunix_rt.data.packing import MicroBatch
from tunix_rt.doctor.selftest import CheckResult
from tunix_rt.engines.memory_meter import RiseMeter
from tunix_rt.engines.selftest import cases, runner
from tunix_rt.engines.selftest.runner import Bench, Setting, together
from tunix_rt.engines.torch.attention import FLEX, Attention, boundaries
from tunix_rt.engines.torch.load import attention_for, set_deterministic
from tunix_rt.engines.torch.loop import make_optimizer
from tunix_rt.engines.torch.model import Engine, LossScale, summed_loss
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.precision import recipe_of


@dataclass(frozen=True, slots=True)
class _Ops:
    """`runner.Ops` of PyTorch."""

    bench: Bench

    def put(self, name: str, values: Any, dtype: str | None = None, *, grad: bool = False) -> torch.Tensor:
        """A copy, because updates are in place."""
        tensor = torch.from_numpy(values.copy()).to(self.bench.setting.device)
        if tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype or self.bench.setting.dtype))
        return self.placed(name, tensor.requires_grad_(grad))

    def placed(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ValueError(f"{name} was not computed")
        self.bench.homes[name] = str(tensor.device)
        return tensor

    def numbers(self, name: str, tensor: torch.Tensor | None) -> Any:
        """NumPy has no bfloat16, which is exact in float32."""
        values = self.placed(name, tensor).detach()
        if values.device.type == "cuda":
            torch.cuda.synchronize()
        return (values if values.dtype == torch.float64 else values.float()).cpu().numpy()

    def squares(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randn(2, size, size, device=self.bench.setting.device)
        left, right = drawn.to(getattr(torch, self.bench.setting.dtype))
        return left, right

    def matmul(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.matmul(left, right)

    def copy_of(self, size: int) -> Callable[[], Any]:
        source = torch.ones(size, dtype=torch.uint8, device=self.bench.setting.device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def seconds(self, once: Callable[[], Any], times: int = 1) -> float:
        """On CUDA by the events of the device."""
        if self.bench.setting.device == "cpu":
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


# --- the engine of such a run -----------------------------------------------------------------------------------------


def _attention_of(setting: Setting) -> Attention:
    """The attention that a run of such a model uses here, tried as `load` tries it."""
    config = SimpleNamespace(
        head_dim=setting.head_size,
        attn_logit_softcapping=cases.score_cap(setting),
        attention_dropout=0.5 if setting.dropout else 0.0,
    )
    chosen = attention_for(config, setting.device, setting.training)
    if chosen.training == FLEX:
        torch.compiler.reset()  # the trial had another cap: the compiler would trace ours as symbolic
    return chosen


_NO_LAYERS = Attention(name="none", training="none", generating="none", why="there are no layers")


def _engine(bench: Bench, model: Any, attention: Attention = _NO_LAYERS) -> Engine:
    """The recipe of the run around `model`."""
    setting = bench.setting
    return Engine(
        model=model,
        source=ModelSource(name="self-test", folder=Path(), revision="local", weights="random", config={}),
        device=torch.device(setting.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        meter=RiseMeter(),
        recipe=recipe_of(setting.training),
        attention=attention,
        deterministic=setting.deterministic,
    )


# --- the checks -------------------------------------------------------------------------------------------------------


def device(bench: Bench) -> CheckResult:
    """The device initializes and adds up. The runner makes PyTorch's warning of an unsupported device a failure."""
    about = {"torch": torch.__version__, "cuda_build": torch.version.cuda, "threads": torch.get_num_threads()}
    bench.about.update(about)
    if bench.setting.deterministic:
        set_deterministic(bench.setting.device, True)
    if bench.setting.device == "cuda":
        bench.about.update(is_available=torch.cuda.is_available(), arch_list=torch.cuda.get_arch_list())
        torch.cuda.init()  # raises with the reason where CUDA cannot be used
        known = torch.cuda.get_device_properties(0)
        bench.about.update(
            name=known.name,
            capability=[known.major, known.minor],
            uuid=_uuid(),
            total_bytes=known.total_memory,
            cudnn=torch.backends.cudnn.version(),
        )
        if not torch.cuda.is_available():
            return CheckResult(name="device", ok=False, detail="torch.cuda.is_available() is False")
    ones = torch.ones(1024, device=bench.setting.device)
    total = float(ones.sum())
    bench.home = str(ones.device)
    return runner.added_up(total, f"{bench.about.get('name', 'CPU')}, torch {torch.__version__}")


def product(bench: Bench) -> CheckResult:
    """Without TF32."""
    torch.set_float32_matmul_precision("highest")
    return runner.checked_matmul(bench, _Ops(bench))


def attention(bench: Bench) -> CheckResult:
    """Forward and backward through the function that the layers of the run call, with the model's head size and scaling.

    Eager is Gemma 2's: only it has soft-capped scores, and a run uses eager for nothing else."""
    setting = bench.setting
    chosen = _attention_of(setting)
    engine = _engine(bench, torch.nn.Module(), chosen)
    bench.about["attention"] = f"{chosen.name}, {chosen.why}"
    eager = chosen.training == "eager"
    function = modeling_gemma2.eager_attention_forward if eager else ALL_ATTENTION_FUNCTIONS[chosen.training]
    samples = cases.attention_cases(setting)
    if chosen.training == FLEX:  # each shape is compiled, for seconds; a packed row covers the others
        samples = [case for case in samples if case.examples is not None]
    found = []
    for case in samples:
        got = _attend(_Ops(bench), engine, case, function)
        found += case.judge(setting, got, spelled_out=eager)
    return together("attention", found, words=cases.attention_words(setting, samples, chosen.name))


def _attend(ops: _Ops, engine: Engine, case: cases.AttentionCase, function: Any) -> dict[str, Any]:
    """Output and gradients. Where weights are wider than the compute dtype, RoPE leaves queries and keys as wide."""
    setting = ops.bench.setting
    types = {"q": engine.recipe.weights, "k": engine.recipe.weights, "v": engine.recipe.compute}
    inputs = [
        ops.put(f"{case.name} {name}", getattr(case, name), dtype=dtype, grad=True) for name, dtype in types.items()
    ]
    layer = torch.nn.Module()
    layer.num_key_value_groups = case.q.shape[1] // case.k.shape[1]
    layer.is_causal, layer.head_dim = True, setting.head_size
    mask = _mask(ops, engine, case)
    windows = () if case.window is None else (case.window,)
    more = boundaries(case.positions, engine.device, engine.attention, windows=windows)
    if cap := cases.score_cap(setting):
        more["softcap"] = cap
    with engine.kernels():
        with engine.computing():
            out, _ = function(layer, *inputs, mask, scaling=setting.scaling, sliding_window=case.window, **more)
        out = out.transpose(1, 2)  # from [rows, tokens, heads, size]
        upstream = ops.put(f"{case.name} upstream", case.upstream).to(out.dtype)
        gradients = torch.autograd.grad(out, inputs, upstream)
    parts = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    return {part: ops.numbers(f"{case.name} {part}", tensor) for part, tensor in parts.items()}


def _mask(ops: _Ops, engine: Engine, case: cases.AttentionCase) -> torch.Tensor | None:
    """As transformers makes it for a layer of the run, from positions; none where attention takes document boundaries."""
    positions = ops.put(f"{case.name} positions", case.positions)
    config = SimpleNamespace(_attn_implementation=engine.attention.training, sliding_window=case.window)
    make = masking_utils.create_causal_mask if case.window is None else masking_utils.create_sliding_window_causal_mask
    hidden = torch.empty(*positions.shape, 1, dtype=getattr(torch, engine.recipe.weights), device=engine.device)
    mask = make(config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions)
    return None if mask is None else ops.placed(f"{case.name} mask", mask)


class _Head(torch.nn.Module):
    """A model with given hidden states: only its head computes."""

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


def loss(bench: Bench) -> CheckResult:
    """The loss of the engine, from hidden states and labels to the gradients of hidden states and lm_head.

    Its scale is that of a run's first step, and is divided out again."""
    setting, ops = bench.setting, _Ops(bench)
    case = cases.loss_case(setting)
    states = ops.put("loss states", case.states, dtype=setting.weights, grad=True)
    model = _Head(states, ops.put("loss head", case.head, dtype=setting.weights), setting.softcap)
    engine = _engine(bench, model)
    micro = MicroBatch(
        ids=np.zeros_like(case.labels),
        labels=case.labels,
        positions=np.tile(np.arange(case.labels.shape[1]), (len(case.labels), 1)),
    )
    scale = (LossScale().value if engine.recipe.loss_scaled else 1.0) / micro.targets
    summed = summed_loss(engine, micro, scale=scale)
    summed.backward()
    results = {"loss": summed, "d_states": states.grad, "d_head": model.head.weight.grad}
    got = {name: ops.numbers(f"computed {name}", tensor).astype(np.float64) / scale for name, tensor in results.items()}
    capped = f", soft-capped at {setting.softcap:g}" if setting.softcap else ""
    words = f"cross entropy of {case.targets} targets with backward{capped}, weights in {setting.weights}"
    return together("loss", case.judge(setting, got), words=words)


def optimizer(bench: Bench) -> CheckResult:
    """Two updates by the engine's optimizer: of all parameters together, then of each by itself, as in backward.

    They round to nearest, which has a bound. Stochastic rounding is checked by itself, where the run has it."""
    setting, ops = bench.setting, _Ops(bench)
    case = cases.optimizer_case(setting)
    model, rule = _optimizer(ops, case.parameters, stochastic_rounding=False)
    got = []
    for step, gradients in enumerate(case.gradients, 1):
        rule.begin(step, cases.HYPERPARAMETERS.lr)
        for name, parameter in model.named_parameters():
            parameter.grad = ops.put(f"gradient of {name}", gradients[name], dtype=setting.weights)
        scale = torch.tensor(cases.SCALES[step - 1], device=setting.device)
        if step == 1:
            rule.step(scale=scale)
        else:
            for parameter in model.parameters():
                rule.update(parameter, scale=scale, finite=torch.ones((), dtype=torch.bool, device=setting.device))
        got.append({name: _state(ops, rule, name, parameter) for name, parameter in model.named_parameters()})
    found = case.judge(setting, got)
    words = f"two updates of {setting.optim}, weights in {setting.weights}"
    if setting.weights == "bfloat16":
        found += _rounding(ops)
        words += ", rounded to nearest and at random"
    return together("optimizer", found, words=words)


def _optimizer(ops: _Ops, parameters: Any, *, stochastic_rounding: bool) -> tuple[torch.nn.Module, Optimizer]:
    model = torch.nn.Module()
    for name, values in parameters.items():
        tensor = ops.put(f"optimizer {name}", values, dtype=ops.bench.setting.weights)
        model.register_parameter(name, torch.nn.Parameter(tensor))
    fixed = cases.HYPERPARAMETERS
    training = ops.bench.setting.training.model_copy(
        update={
            "stochastic_rounding": stochastic_rounding,
            "weight_decay": fixed.decay,
            "adam_epsilon": fixed.epsilon,
            "adam_beta1": fixed.beta1,
            "adam_beta2": fixed.beta2,
        }
    )
    engine = _engine(ops.bench, model)
    engine.recipe = recipe_of(training)
    return model, make_optimizer(engine, training)


def _state(ops: _Ops, rule: Optimizer, name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Copies of the parameter and its optimizer states: the next update is in place."""
    kept = rule.state_of(parameter)
    for slot, tensor in kept.items():
        ops.placed(f"optimizer {slot} of {name}", tensor)
    found = {"parameter": ops.numbers(f"optimizer {name}", parameter)}
    for slot in state_tensors(tuple(parameter.shape), ops.bench.setting.optim, ops.bench.setting.weights):
        found[slot] = ops.numbers(f"optimizer {slot} of {name}", kept[slot])
    return {slot: values.copy() for slot, values in found.items()}


def _rounding(ops: _Ops) -> list[CheckResult]:
    case = cases.rounding_case(ops.bench.setting)
    model, rule = _optimizer(ops, {"rounded": case.parameter}, stochastic_rounding=True)
    rule.begin(1, cases.ROUNDING.lr)
    model.rounded.grad = ops.put("gradient of rounded", case.gradient, dtype=ops.bench.setting.weights)
    rule.step()
    return case.judge(ops.numbers("optimizer rounded", model.rounded))


def memory(bench: Bench) -> CheckResult:
    """An allocation on the device shows outside of PyTorch."""
    if bench.setting.device == "cpu":
        return runner.resident_memory(lambda size: torch.full((size,), 1, dtype=torch.uint8))
    from tunix_rt.doctor.nvidia import gpu_memory

    def listed() -> int | None:
        case = gpu_memory(0, {_uuid()})
        return case.used_bytes if case is not None and case.by == "nvml" else None

    torch.cuda.empty_cache()
    before, free_before = listed(), torch.cuda.mem_get_info(0)[0]
    size = min(runner.ALLOCATION, free_before // 4)
    held = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    rise, after = free_before - torch.cuda.mem_get_info(0)[0], listed()
    del held
    counter = "NVML does not list our process; memory in use on the device"
    return runner.device_memory(size, before=before, after=after, rise=rise, counter=counter)


def _uuid() -> str:
    """As NVML spells it. An index would not do: CUDA and NVML count differently, and a mask shifts it."""
    bare = str(torch.cuda.get_device_properties(0).uuid)
    return bare if bare.startswith(("GPU-", "MIG-")) else f"GPU-{bare}"


def speed(bench: Bench) -> CheckResult:
    return runner.measured_speed(bench, _Ops(bench), times=4)


CHECKS = (device, product, attention, loss, optimizer, runner.placement, memory, speed)


if __name__ == "__main__":
    sys.exit(runner.run_checks(CHECKS, runner.read_setting()))
