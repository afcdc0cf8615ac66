"""The device of a run: the requested device is the device used, tested before training and sampled during it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunix_rt.accelerators import find_accelerator, peaks
from tunix_rt.config.capabilities import refuse_rollouts
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.doctor import selection
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Ask, Facts, visible_gpus
from tunix_rt.doctor.nvidia import gpu_memory, nvidia_smi_text
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.doctor.selftest import cuda_check_text, run_selftest, selftest_lines, selftest_problem
from tunix_rt.errors import HardwareError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.fit import limited
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.runs.journal import RunJournal
from tunix_rt.storage import to_plain, write_json, write_text

logger = logging.getLogger(__name__)

GIB = 2**30


def find_device(requested: str, dtype: str) -> DeviceChoice:
    """The requested device for work that is not a run, or a HardwareError. Logged."""
    ask = Ask(device={"gpu": "cuda"}.get(requested, requested), backend="torch", dtype=dtype)
    facts = gather_facts(backend="torch", device=ask.device)
    choice = selection.choose_device(ask, facts)
    selection.set_environment(choice.device, "torch")
    for line in selection.device_lines(choice, facts):
        logger.info("%s", line)
    return choice


def settle_device(journal: RunJournal, config: RunConfig) -> tuple[Facts, DeviceChoice]:
    """Facts, verdict, device, with no more free memory than the memory limit. A refusal leaves its report in `doctor.json`."""
    run, training = journal.run, config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    facts = gather_facts(run.root, backend=training.backend, device=training.device)
    journal.write(write_text, run.env_info, selection.env_info_text(facts))
    journal.write(write_text, run.torch_version, selection.torch_version_text(facts))
    judged = {"facts": facts, "checks": judge(facts, ask)}
    journal.write(write_json, run.doctor, judged)
    try:
        choice = selection.with_virtual_devices(selection.choose_device(ask, facts), training.backend)
    except HardwareError as error:
        raise _with_report(error, journal, judged) from error
    journal.write(write_json, run.doctor, judged | {"choice": choice})
    refuse_rollouts(training, choice.device)
    selection.set_environment(choice.device, training.backend, memory_share=memory_share(training, choice))
    for line in selection.device_lines(choice, facts):
        logger.info("%s", line)
    journal.result.device = choice.device
    return facts, within_limit(choice, training)


def within_limit(choice: DeviceChoice, training: Training) -> DeviceChoice:
    """`choice` with no more free memory than `training.memory_limit_gib`. Logs what enforces it."""
    if training.memory_limit_gib is None:
        return choice
    if choice.device == "cuda":
        enforced = "the allocator enforces it"
    else:
        enforced = f"only the plan is judged by it: nothing limits a run on a {choice.device.upper()}"
    logger.info(
        "Memory limit: %.2f GiB of the %.2f GiB free on %s; %s",
        training.memory_limit_gib, choice.free_bytes / GIB, choice.device, enforced,
    )  # fmt: skip
    return replace(choice, free_bytes=limited(choice.free_bytes, training.memory_limit_gib))


def memory_share(training: Training, choice: DeviceChoice) -> float | None:
    """The fraction of a device's memory that `training.memory_limit_gib` leaves to its engine beside the CUDA context."""
    if training.memory_limit_gib is None:
        return None
    return max(0.0, training.memory_limit_gib * GIB - CUDA_CONTEXT_BYTES) / choice.memory_bytes


def check_kernels(
    journal: RunJournal, config: RunConfig, model: ModelSource, shape: ModelShape, facts: Facts, choice: DeviceChoice
) -> frozenset[str]:
    """The kernel self-test: run the kernels of this run on its accelerator, in a child process. Returns UUIDs of its GPUs."""
    if choice.device == "cpu":
        return frozenset()
    run, training = journal.run, config.training
    ask = Ask(device=training.device, backend=training.backend, dtype=training.dtype)
    logger.info("Kernel self-test on %s: comparing with float64 in a child process, up to half a minute", choice.device)
    where: dict[str, Any] = {"backend": training.backend, "device": choice.device, "dtype": training.dtype}
    proof = run_selftest(**where, **step_of(training), **kernels_of(model.config, shape))
    judged = {"facts": facts, "checks": judge(facts, ask), "choice": choice, "proof": proof}
    journal.write(write_json, run.doctor, judged)
    if choice.device == "cuda":
        journal.write(write_text, run.cuda_check, cuda_check_text(proof))
    known = find_accelerator(choice.kind, choice.memory_bytes)
    for line in selftest_lines(proof, peaks(known, training.dtype) if known else (None, None)):
        logger.info("%s", line)
    if problem := selftest_problem(proof):
        raise _with_report(HardwareError(problem[0], fix=problem[1], cause="not-proven"), journal, judged)
    if choice.device != "cuda":
        return frozenset()
    uuid = proof.about.get("uuid")  # jax has none, and uses every GPU it sees
    return frozenset({str(uuid)} if uuid else {gpu.uuid for gpu in visible_gpus(facts)})


def kernels_of(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The facts about a model that decide its kernels, as keywords of the self-test."""
    scalar = config.get("query_pre_attn_scalar")
    return {
        "head_size": shape.head_dim,
        "query_heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "softcap": config.get("final_logit_softcapping", 30.0) if shape.capped_logits else None,
        "capped_scores": shape.capped_scores,
        "scaling": scalar**-0.5 if isinstance(scalar, int | float) and scalar > 0 else None,
        "window": shape.window,
        "dropout": shape.attention_dropout > 0,
    }


def step_of(training: Training) -> dict[str, Any]:
    """The settings that decide how a step is computed, as keywords of the self-test."""
    return {name: getattr(training, name) for name in ("master_dtype", "optim", "deterministic")}


def _with_report(error: HardwareError, journal: RunJournal, judged: Mapping[str, Any]) -> HardwareError:
    """`error` with the path of the journal. A refused continuation leaves its folder as it was, so that one lies beside."""
    where = journal.run.doctor
    if journal.continued and not journal.accepted:
        where = journal.run.root.with_name(f"{journal.run.root.name}.refused-doctor.json")
        write_json(where, judged)
    return HardwareError(error.problem, fix=f"{error.fix}; the whole report: {where}", cause=error.cause)


def sample_gpu(journal: RunJournal, gpus: frozenset[str], step: int) -> None:
    """What this process holds on its GPU, by NVML; the first time also by nvidia-smi."""
    sample, result = gpu_memory(step, gpus), journal.result
    if result.gpu_memory is None:
        journal.write(write_text, journal.run.nvidia_smi, nvidia_smi_text(sample, step))
        result.gpu_memory = []
    if sample is not None:
        result.gpu_memory.append(to_plain(sample))
        whose = "under our process id" if sample.by == "nvml" else "in use on the device; NVML hides process ids here:"
        size = sample.used_bytes / GIB
        logger.info("GPU memory: %.3f GiB %s %d (NVML, after step %d)", size, whose, sample.pid, step)
    elif not result.gpu_memory:
        journal.warn(
            "GPU memory: NVML reports none; without a sample by the end, the run does not verify (exit code 6)"
        )
