"""Which of the GPUs CUDA shows to a program: masks and slices."""

import re
from dataclasses import replace

from tunix_rt.doctor.facts import Facts, Gpu


def visible_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs CUDA shows under CUDA_VISIBLE_DEVICES: a list ends at the first entry that names none, a repeat empties it.

    A GPU in MIG mode shows as one of its slices, with the slice's memory. Without a mask CUDA gives a process whole GPUs, or
    the first slice where there are none.
    """
    gpus = facts.nvidia.gpus
    mask = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        whole = tuple(gpu for gpu in gpus if not gpu.mig)
        slices = [shown for gpu in gpus if gpu.mig and (shown := _as_cuda_sees(gpu)) is not None]
        return whole or tuple(slices[:1])
    named: list[Gpu] = []
    for entry in mask.split(","):
        gpu = _named_by(entry.strip(), gpus)
        if gpu is None:
            break
        if any(gpu.uuid == other.uuid and gpu.index == other.index for other in named):
            return ()
        named.append(gpu)
    return tuple(named)


def _as_cuda_sees(gpu: Gpu) -> Gpu | None:
    if not gpu.mig:
        return gpu
    return _slice_of(gpu, gpu.slices[0].uuid) if gpu.slices else None


def _slice_of(gpu: Gpu, uuid: str) -> Gpu | None:
    for part in gpu.slices:
        if part.uuid == uuid:
            return replace(
                gpu, name=part.name, uuid=part.uuid, total_bytes=part.total_bytes, free_bytes=part.free_bytes
            )
    return None


def _named_by(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.startswith("MIG-"):
        return next((found for gpu in gpus if (found := _slice_of(gpu, entry)) is not None), None)
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return _as_cuda_sees(matching[0]) if len(matching) == 1 else None
    digits = re.match(r"\+?\d+", entry)
    if not digits:
        return None
    return next((_as_cuda_sees(gpu) for gpu in gpus if gpu.index == int(digits[0])), None)
