"""`run_manifest.json` follows from the facts of a run alone, contains no null, and every value of it is computed again."""

import copy
import json
from pathlib import Path

import pytest

from tunix_rt.config.load import dump_yaml
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.evidence.facts import Run, completed_run
from tunix_rt.evidence.manifest import companion_problems, incomplete, manifest_of, manifest_problems
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import json_line, to_plain, write_json, write_text

FACTS = Path(__file__).parents[1] / "facts"
DIGEST, MOMENT = "ab" * 32, "2026-11-16T10:00:00+00:00"
ABOUT = {"name": "NVIDIA H200", "capability": [9, 0], "uuid": "GPU-00000001"}
PROOF = {
    "backend": "torch", "device": "cuda", "dtype": "float32", "head_size": 64, "results": [], "about": ABOUT, "pid": 9,
    "seconds": 1.0, "problem": None, "ok": True,
}  # fmt: skip
SAMPLES = [
    {"step": 1, "pid": 4711, "used_bytes": 3_000_000, "by": "nvml", "at": MOMENT},
    {"step": 3, "pid": 4711, "used_bytes": 2_000_000, "by": "nvml", "at": MOMENT},
    {"step": 3, "pid": 4711, "used_bytes": 9_000_000, "by": "device", "at": MOMENT},
]


def write_run(folder: Path, device: str = "cuda", *, seconds=(5.0, 1.0, 3.0), **changed) -> Run:
    """The files that a manifest is computed from; `changed` are top-level values of files by their stem."""
    computer = json.loads(
        (FACTS / ("h200-masked-empty.json" if device == "cuda" else "cpu-machine-auto.json")).read_text()
    )
    facts = to_plain(facts_from_json(computer["facts"]))
    facts["host"]["cpu"] = "unknown"
    choice = {
        "device": device, "kind": "NVIDIA H200" if device == "cuda" else "unknown", "count": 1, "memory_bytes": 150_000_000,
        "free_bytes": 149_000_000, "reason": "", "capability": [9, 0] if device == "cuda" else None,
    }  # fmt: skip
    on_gpu = {"gpu_memory": SAMPLES} if device == "cuda" else {}
    files = {
        "precommit": {
            "schema": "tunix-rt/precommit/1", "format": 4, "numerics": 1, "created": MOMENT, "device": device,
            "versions": {"torch": "2.13.0+cu130", "transformers": "5.22.2", "jax": "not installed"}, "source_files": {},
            "config_sha256": DIGEST, "source_sha256": DIGEST, "tokenizer_sha256": DIGEST, "seeds": {"seed": 0, "data_seed": 0},
            "dataset": {
                "key": "/home/somebody/traces.jsonl", "sha256": DIGEST, "traces": 9, "heldout_traces": 1, "rows": 4,
                "format": "auto", "template": "none", "style_sha256": DIGEST, "merkle_root": DIGEST,
            },
            "base_model": {"name": "tiny-gemma3", "revision": "shipped", "weights": "random", "files": {"config.json": DIGEST}},
        },
        "result": {
            "schema": "tunix-rt/result/1", "status": "completed", "exit_code": 0, "reason": "", "started": MOMENT,
            "finished": MOMENT, "seconds": 12.5, "device": device, "steps_completed": len(seconds), "resumed_from": 0,
            "final_loss": 0.5, **on_gpu,
        },
        "doctor": {"facts": facts, "checks": [], "choice": choice} | ({"proof": PROOF} if device == "cuda" else {}),
    }  # fmt: skip
    for stem, value in files.items():
        write_json(folder / f"{stem}.json", value | changed.get(stem, {}))
    lines = [
        {
            "step": step, "loss": 0.5, "loss_hex": 0.5.hex(), "lr": 0.1, "grad_norm": 1.0, "target_tokens": 10, "tokens": 100,
            "seconds": took, "peak_bytes": 1000 + step, "batch": DIGEST, "prev": DIGEST,
        }
        for step, took in enumerate(seconds, start=1)
    ]  # fmt: skip
    write_text(folder / "metrics.jsonl", "".join(map(json_line, lines)))
    held = [{"step": step, "loss": 2.0 - step, "loss_hex": (2.0 - step).hex(), "target_tokens": 5} for step in (0, 1)]
    write_text(folder / "eval" / "heldout.jsonl", "".join(map(json_line, held)))
    write_text(folder / "SHA256SUMS", f"{DIGEST}  final_model/model.safetensors\n")
    settings = {
        "model": {"model_name_or_path": "tiny-gemma3"},
        "training": {"device": device} | changed.get("training", {}),
    }
    write_text(folder / "config.yaml", dump_yaml(RunConfig.model_validate(settings | {"data": {"dataset": "x"}})))
    return opened(folder)


def opened(folder: Path, where: str = "") -> Run:
    record = RunRecord(folder, where)
    run = completed_run(record)
    assert run is not None and len(run.metrics) and not record.problems, record.problems
    return run


@pytest.fixture
def gpu(tmp_path):
    return write_run(tmp_path / "gpu")


@pytest.fixture
def cpu(tmp_path):
    return write_run(tmp_path / "cpu", "cpu", seconds=(9.0, 10.0, 30.0))


def stated(run, cpu=None):
    return manifest_of(run, cpu, name="m40", commit="c0" * 20)


def leaves(value, place=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    else:
        yield place, value


def holder(value, place):
    for key in place[:-1]:
        value = value[key]
    return value


def test_a_manifest_states_the_run_and_contains_no_null(gpu, cpu):
    manifest = stated(gpu, cpu)
    assert list(incomplete(manifest)) == []
    assert None not in [value for _, value in leaves(manifest)]
    assert (manifest["format"], manifest["run_id"], manifest["precommit_sha256"]) == (4, "m40", gpu.run_id)
    assert manifest["versions"] == {"torch": "2.13.0+cu130", "transformers": "5.22.2", "cuda": "13.0"}
    assert manifest["hardware"] | {"host": {}} == {
        "name": "NVIDIA H200", "memory_bytes": 150_000_000, "capability": "9.0", "driver": "580.126.09", "driver_cuda": "13.0",
        "count": 1, "uuid": "GPU-00000001", "host": {},
    }  # fmt: skip
    assert manifest["heldout_loss"] == {"first": {"step": 0, "loss": 2.0}, "last": {"step": 1, "loss": 1.0}}
    assert manifest["configuration"]["training"]["device"] == "cuda"
    assert "training.time_budget" in manifest["configuration_left_open"]
    assert manifest["left_out"] == {"final_model/model.safetensors": DIGEST} and manifest["peak_bytes"] == 1003
    assert manifest["seconds"] == {"run": 12.5, "steps": 9.0}
    assert "commit" not in manifest_of(gpu, None, name="m40", commit=None)


def test_speed_is_tokens_over_seconds_after_the_first_step_and_with_it(gpu, cpu):
    assert stated(gpu)["tokens_per_second"] == {"device": 50.0, "device_with_first_step": 300 / 9}
    speeds = stated(gpu, cpu)["tokens_per_second"]
    assert (speeds["cpu"], speeds["ratio"]) == (5.0, 10.0)


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 0.0), (1e308, 1e308, 1e308), (1.0, 5e-324)])
def test_a_run_without_a_speed_is_refused_and_nothing_raises(tmp_path, seconds):
    problems = list(incomplete(stated(write_run(tmp_path / "run", "cpu", seconds=seconds))))
    assert problems and all(problem.endswith(": missing") for problem in problems)


def test_the_largest_sample_under_our_process_id_is_stated_and_of_the_device_where_ids_are_hidden(tmp_path, gpu):
    peak = {"samples": 2, "by": "nvml", "step": 1, "pid": 4711, "used_bytes": 3_000_000}
    assert stated(gpu)["gpu_memory"] == peak
    hidden = write_run(tmp_path / "hidden", result={"gpu_memory": SAMPLES[2:]})
    assert stated(hidden)["gpu_memory"] == {**peak, "samples": 1, "by": "device", "step": 3, "used_bytes": 9_000_000}


def test_a_cpu_without_a_name_goes_by_its_architecture_and_no_folder_of_the_machine_is_stated(cpu):
    manifest = stated(cpu)
    assert manifest["hardware"]["name"] == manifest["hardware"]["host"]["cpu"] == "x86_64"
    assert manifest["dataset"] == manifest["inputs"]["dataset"]["name"] == "traces.jsonl"
    assert "somebody" not in json.dumps(manifest)


def test_a_validation_file_of_its_own_is_stated(tmp_path, cpu):
    validation = {"key": "/home/somebody/held.jsonl", "sha256": "cd" * 32, "items": 1}
    dataset = {**json.loads((cpu.record.root / "precommit.json").read_text())["dataset"], "validation": validation}
    manifest = stated(write_run(tmp_path / "run", "cpu", precommit={"dataset": dataset}))
    assert manifest["inputs"]["validation"] == {"name": "held.jsonl", "sha256": "cd" * 32}
    assert list(incomplete(manifest)) == [] and "validation" not in stated(cpu)["inputs"]


def test_a_gpu_without_a_driver_or_a_sample_of_its_memory_is_incomplete(tmp_path, gpu):
    manifest = stated(gpu)
    del manifest["hardware"]["driver"], manifest["gpu_memory"]
    assert list(incomplete(manifest)) == ["hardware.driver: missing", "gpu_memory: missing"]


@pytest.mark.parametrize("name", ["", " ", "two\nlines", "m39 ", "TODO", "unknown", "x" * 201, "a|b", "\u202e"])
def test_a_name_that_names_no_run_is_refused(gpu, name):
    (problem,) = incomplete(manifest_of(gpu, None, name=name, commit=None))
    assert problem.startswith("run_id: ")


def test_every_value_of_a_manifest_is_computed_again(tmp_path, gpu, cpu):
    folder, manifest = tmp_path / "gpu", stated(gpu, cpu)
    write_text(folder / "run-SHA256SUMS", (folder / "SHA256SUMS").read_text())

    def problems(value):
        write_json(folder / "run_manifest.json", value)
        return list(manifest_problems(opened(folder), cpu))

    assert problems(manifest) == [] and problems(manifest | {"run_id": "another"}) == []
    values = {place: value for place, value in leaves(manifest) if place not in (("run_id",), ("commit",))}
    forged, emptied = copy.deepcopy(manifest), copy.deepcopy(manifest)
    for place, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        holder(forged, place)[place[-1]] = value + 1 if number else not value if isinstance(value, bool) else "forged"
        del holder(emptied, place)[place[-1]]
    for changed in (forged, emptied):
        found = problems(changed)
        assert [place for place in values if not any(".".join(place) in problem for problem in found)] == []
    assert any("accuracy" in problem for problem in problems(manifest | {"accuracy": 1.0}))


def test_only_the_device_may_differ_in_the_run_on_the_cpu(tmp_path, gpu, cpu):
    assert list(companion_problems(gpu, cpu)) == []
    assert list(companion_problems(gpu, gpu)) == ["result.json: ran on cuda, not on the CPU"]
    other = write_run(tmp_path / "seed", "cpu", training={"seed": 4}, precommit={"tokenizer_sha256": "cd" * 32})
    problems = list(companion_problems(gpu, opened(tmp_path / "seed", "cpu/")))
    assert problems[0].startswith("cpu/config.yaml: training.seed: 4, the run has 0")
    assert problems[1] == "cpu/precommit.json: tokenizer_sha256 is not that of the run on cuda"
    fewer = write_run(tmp_path / "fewer", "cpu", seconds=(1.0, 1.0))
    assert list(companion_problems(gpu, fewer)) == ["metrics.jsonl: other batches than on cuda"]
    assert other.total == gpu.total
