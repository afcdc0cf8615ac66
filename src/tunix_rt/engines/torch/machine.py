"""What decides the bits of a step beside its inputs: the machine and the versions of the libraries that compute."""

from typing import Any

import torch
import transformers

from tunix_rt.doctor.nvidia import driver_version
from tunix_rt.doctor.probe import cpu_facts
from tunix_rt.engines.torch.model import Engine


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def machine_facts(engine: Engine) -> dict[str, Any]:
    """What decides the bits of a step beside its inputs; runs on machines with equal facts give equal bits."""
    facts = {
        "backend": "torch",
        "device": engine.device.type,
        **cpu_facts(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "deterministic": engine.deterministic,
        "devices": len(engine.devices),
    }
    if engine.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(engine.device)
        gpu = {
            "name": torch.cuda.get_device_name(engine.device),
            "capability": f"{major}.{minor}",
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),
        }
        facts["gpu"] = {name: value for name, value in gpu.items() if value is not None}
    return facts
