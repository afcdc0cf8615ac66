"""The device contract of one run: the device asked for is the device used, proven before and watched during training."""

import logging
from collections.abc import Mapping
from typing import Any

from tunix_rt.accelerators import find_accelerator, peaks
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Ask, Facts, visible_gpus
from tunix_rt.doctor.nvidia import gpu_memory, nvidia_smi_text
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.report import device_lines, env_info_text, torch_version_text
from tunix_rt.doctor.selection import DeviceChoice, choose_device, set_environment, with_virtual_devices
from tunix_rt.doctor.selftest import cuda_check_text, proof_lines, proof_problem, prove
from tunix_rt.errors import HardwareError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES
from tunix_rt.plan.shape import ModelShape
from tunix_rt.runs.journal import Record
from tunix_rt.storage import to_plain, write_json, write_text

logger = logging.getLogger(__name__)

GIB = 2**30


def find_device(asked: str, dtype: str) -> DeviceChoice:
    """The device for what is no run and keeps no report: the one that was asked for, or a HardwareError. It is said."""
    ask = Ask(device={"gpu": "cuda"}.get(asked, asked), backend="torch", dtype=dtype)
    facts = gather_facts(backend="torch", device=ask.device)
    choice = choose_device(ask, facts)
    set_environment(choice.device, "torch")
    for line in device_lines(choice, facts):
        logger.info("%s", line)
    return choice


def settle_device(report: Record, config: RunConfig) -> tuple[Facts, DeviceChoice]:
    """Facts, verdict, device. A refusal leaves its whole report in `doctor.json`."""
    run, training = report.run, config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    facts = gather_facts(run.root, backend=training.backend, device=training.device)
    report.write(write_text, run.env_info, env_info_text(facts))
    report.write(write_text, run.torch_version, torch_version_text(facts))
    judged = {"facts": facts, "checks": judge(facts, ask)}
    report.write(write_json, run.doctor, judged)
    try:
        choice = with_virtual_devices(choose_device(ask, facts), training.backend)
    except HardwareError as error:
        raise _with_report(error, report, judged) from error
    report.write(write_json, run.doctor, judged | {"choice": choice})
    set_environment(choice.device, training.backend, memory_share=_share(training, choice))
    for line in device_lines(choice, facts):
        logger.info("%s", line)
    return facts, choice


def _share(training: Training, choice: DeviceChoice) -> float | None:
    """Of a device's memory, what `training.memory_limit_gib` leaves to its engine beside the context of CUDA."""
    if training.memory_limit_gib is None:
        return None
    return max(0.0, training.memory_limit_gib * GIB - CUDA_CONTEXT_BYTES) / choice.memory_bytes


def prove_device(
    report: Record, config: RunConfig, model: ModelSource, shape: ModelShape, facts: Facts, choice: DeviceChoice
) -> frozenset[str]:
    """Run the kernels of this run on its accelerator, in a child process, before anything else does. The uuid of its GPU."""
    run, training = report.run, config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    logger.info("Proving %s in a child process: kernels against float64, up to half a minute", choice.device)
    asked: dict[str, Any] = {"backend": training.backend, "device": choice.device, "dtype": training.dtype}
    proof = prove(**asked, **step_of(training), **kernels_of(model.config, shape))
    judged = {"facts": facts, "checks": judge(facts, ask), "choice": choice, "proof": proof}
    report.write(write_json, run.doctor, judged)
    if choice.device == "cuda":
        report.write(write_text, run.cuda_check, cuda_check_text(proof))
    known = find_accelerator(choice.kind, choice.memory_bytes)
    for line in proof_lines(proof, peaks(known, training.dtype) if known else (None, None)):
        logger.info("%s", line)
    if problem := proof_problem(proof):
        raise _with_report(HardwareError(problem[0], fix=problem[1], cause="not-proven"), report, judged)
    if choice.device != "cuda":
        return frozenset()
    told = proof.about.get("uuid")  # jax does not tell, and computes on all that it sees
    return frozenset({str(told)} if told else {gpu.uuid for gpu in visible_gpus(facts)})


def kernels_of(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """What of a model decides its kernels, as `prove` takes it."""
    inner = config.get("text_config", config)
    scalar = inner.get("query_pre_attn_scalar")
    return {
        "head_size": shape.head_dim,
        "query_heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "softcap": inner.get("final_logit_softcapping", 30.0) if shape.capped_logits else None,
        "capped_scores": shape.capped_scores,
        "scaling": scalar**-0.5 if isinstance(scalar, int | float) and scalar > 0 else None,
        "window": _window(inner),
        "dropout": shape.attention_dropout > 0,
    }


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of some layers, or None. What is left out is as in the classes of transformers 5.22."""
    has_one = {"gemma2": True, "gemma3_text": True, "qwen2": False, "qwen3": False}.get(str(config.get("model_type")))
    if has_one is None or not config.get("use_sliding_window", has_one):
        return None
    if "sliding_attention" not in (config.get("layer_types") or ["sliding_attention"]):
        return None
    window = config.get("sliding_window", 4096)
    return window if isinstance(window, int) and window > 0 else None


def step_of(training: Training) -> dict[str, Any]:
    """What of the settings decides how a step is computed, beside its type, as `prove` takes it."""
    return {
        "master_dtype": training.master_dtype,
        "optim": training.optim,
        "deterministic": training.deterministic,
    }


def _with_report(error: HardwareError, report: Record, judged: Mapping[str, Any]) -> HardwareError:
    """`error` with the path of the report. A refused continuation leaves its folder as it was, so that one lies beside."""
    where = report.run.doctor
    if report.continued and not report.accepted:
        where = report.run.root.with_name(f"{report.run.root.name}.refused-doctor.json")
        write_json(where, judged)
    return HardwareError(error.problem, fix=f"{error.fix}; the whole report: {where}", cause=error.cause)


def note_step(report: Record, uuids: frozenset[str], sampled: tuple[int, int], said: dict[str, Any]) -> None:
    """Keep what the loop says of a step; on a GPU, also what NVML and nvidia-smi say after the first and the last."""
    report.facts.update(said)
    if uuids and said["steps_completed"] in sampled:
        sample_gpu(report, uuids, said["steps_completed"])


def sample_gpu(report: Record, uuids: frozenset[str], step: int) -> None:
    """What this process holds on its GPU, told by NVML; the first time also by nvidia-smi."""
    sample = gpu_memory(step, uuids)
    if "gpu_memory" not in report.facts:
        report.write(write_text, report.run.nvidia_smi, nvidia_smi_text(sample, step))
        report.facts["gpu_memory"] = []
    if sample is not None:
        report.facts["gpu_memory"].append(to_plain(sample))
        whose = "under our process id" if sample.by == "nvml" else "in use on the device; NVML hides process ids here:"
        logger.info(
            "GPU memory: %.3f GiB %s %d (NVML, after step %d)", sample.used_bytes / GIB, whose, sample.pid, step
        )
