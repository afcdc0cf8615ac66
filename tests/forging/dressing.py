"""A CPU bundle dressed as that of a GPU run with its CPU companion. No GPU is needed, and L1 accepts it: device and speed are
self-reported."""

import json
import shutil
from pathlib import Path

from tests.forging.bases import copy_of
from tests.forging.edits import configure, each_line, edited, put
from tests.forging.sealing import OWN, reseal
from tests.program import ROOT
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.rundir import to_plain
from tunix_rt.runs.checksums import RUN_SUMS, SUMS

GPU = "NVIDIA H200"


def dressed_as_gpu(bundle: Path, to: Path) -> Path:
    """A copy of `bundle`, which has no weights, on an H200 ten times as fast, with the run itself in `cpu/`."""
    copy_of(bundle, to)
    shutil.copytree(bundle, to / "cpu", ignore=shutil.ignore_patterns(*OWN))
    put(to / "cpu" / SUMS, (bundle / RUN_SUMS).read_bytes())
    configure(to, "training", device="cuda")
    facts = json.loads((ROOT / "tests" / "facts" / "h200-masked-empty.json").read_text())["facts"] | {"environment": {}}
    with edited(to / "doctor.json") as doctor:
        doctor["facts"] = to_plain(facts_from_json(facts))
        doctor["choice"] |= {"device": "cuda", "kind": GPU, "memory_bytes": 150_754_820_096, "capability": [9, 0]}
        doctor["proof"] = {
            "backend": "torch", "device": "cuda", "dtype": "float32", "head_size": 64, "pid": 4712, "seconds": 1.0,
            "about": {"name": GPU, "capability": [9, 0], "uuid": "GPU-1"}, "problem": None, "ok": True,
            "results": [{"name": "product", "ok": True, "detail": "", "seconds": 0.1, "figures": {}}],
        }  # fmt: skip
    with edited(to / "processes.json") as listed:
        for process in listed["processes"]:
            process["machine"] |= {"device": "cuda", "gpu": {"name": GPU, "capability": "9.0"}}
    for name in ("precommit.json", "result.json", "eval_summary.json"):
        with edited(to / name) as facts:
            facts["device"] = "cuda"
    with edited(to / "result.json") as result:
        sample = {"step": 6, "pid": listed["processes"][0]["pid"], "used_bytes": 3_000_000_000, "by": "nvml"}
        result["gpu_memory"] = [sample | {"at": result["finished"]}]
    each_line(to / "metrics.jsonl", lambda line: line.update(seconds=line["seconds"] / 10))
    for name in ("cuda_check.txt", "nvidia_smi.txt"):
        put(to / name, f"{GPU}\n")
    reseal(to)
    return to
