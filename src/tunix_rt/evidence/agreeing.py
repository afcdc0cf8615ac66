"""A bundle against itself: its copies against the hashes their runs ended with, its second run against the first, and what
its own files say against what the copies give."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.evidence.bringing import is_of_the_run
from tunix_rt.evidence.claims import (
    OLDER_SCHEMA,
    SCHEMA,
    SCHEMAS,
    RunFiles,
    engine_of,
    read_object,
    require,
    value_at,
)
from tunix_rt.evidence.doubtful import parse_object, read_bytes, shown
from tunix_rt.evidence.hashes import parse_hashes
from tunix_rt.evidence.manifest import MANIFEST, fault_of_name, manifest_of
from tunix_rt.evidence.provenance import PROVENANCE, provenance_of
from tunix_rt.evidence.readme import readme_text
from tunix_rt.evidence.source import COMMIT, NEWEST_COMMITS, find_commit, is_shallow, source_of_commit
from tunix_rt.evidence.told import as_json, differences, flat
from tunix_rt.rundir import json_text

SAYS = "bundle.json"
README = "README.md"
RUN_HASHES = "run-SHA256SUMS"
OWN = (SAYS, README, RUN_HASHES, MANIFEST, PROVENANCE)
OF_CPU_RUN = (
    "config.yaml", "doctor.json", "precommit.json", "metrics.jsonl", "result.json", "env_info.txt", "torch_version.txt",
    "training_log.txt",
)  # fmt: skip
LEFT_OUT = ("checkpoints/", "final_model/", "tensorboard/", "profile/trace.json.gz")
"""What of a run a bundle need not carry; its hashes it does. A trace is large, and names the computer and its folders."""
ALWAYS = ("final_model/config.json",)
"""What of it there is room for: the shape of the model, by which its size and speed are judged."""
NAMES = re.compile(
    r"(?:config\.yaml|(?:doctor|plan|precommit|processes|checkpoints|eval_summary|memory|result)\.json"
    r"|(?:metrics|rows)\.jsonl|(?:training_log|env_info|torch_version|cuda_check|nvidia_smi)\.txt"
    r"|(?:samples|comparison)\.md|eval/(?:before|after)\.json|eval/(?:predictions-(?:before|after)|heldout|samples)\.jsonl"
    r"|checkpoints/step-\d{6,9}/(?:(?:model|optimizer)\.safetensors|(?:state|MANIFEST)\.json)"
    r"|final_model/[\w.-]{1,200}\.(?:json|jinja|safetensors|txt|md|model)|tensorboard/[\w./-]{1,200}"
    r"|profile/[\w.-]{1,200}\.(?:json|md|json\.gz))"
)
"""Every file that a run writes. Whatever else lies in a bundle, its own run did not bring."""
CODE = (".py", ".pyc", ".pyd", ".pth", ".so", ".dll", ".dylib", ".sh", ".bat", ".exe")
"""Of a run, whose folder is somebody's own, only this is refused: what a computer would run."""
LEDGERS = "ledgers.py"
"""A source that has this file notes its rows, checkpoints and processes, so that its bundles are of the newest schema."""


def is_bundle(folder: Path) -> bool:
    return os.path.lexists(folder / SAYS)


def schema_of(says: Mapping[str, Any]) -> str:
    """The schema that a bundle says it has; what is none is held to the newest."""
    told = says.get("schema")
    return told if told in SCHEMAS else SCHEMA


def schema_problems(says: Mapping[str, Any], run: RunFiles) -> Iterator[str]:
    """A run cannot pass for an older one: it names its source by hash."""
    newest = LEDGERS in run.need("precommit.json", "source_files", dict)
    if newest != (schema_of(says) == SCHEMA):
        yield f"{SAYS}: schema is {shown(says.get('schema'))}, the source of the run is {'newer' if newest else 'older'}"


def own_files(schema: str) -> set[str]:
    """The files that a bundle has beside those of its run."""
    lacking = {OLDER_SCHEMA: {MANIFEST, PROVENANCE}, SCHEMA: set()}.get(schema, {PROVENANCE})
    return set(OWN) - lacking


def may_stay_out(name: str, schema: str = SCHEMA) -> bool:
    return name.startswith(LEFT_OUT) and not (schema == SCHEMA and name in ALWAYS)


def has_cpu_run(folder: Path, run: RunFiles, schema: str) -> bool:
    """Whether there is a run on the CPU to be held against. Older bundles of PyTorch on a GPU must have one."""
    if run.result.get("device") != "cuda":
        return False
    return (schema != SCHEMA and engine_of(run) != "jax") or os.path.lexists(folder / "cpu")


def run_hashes(path: Path, where: str = "") -> dict[str, str]:
    data, unread = read_bytes(path)
    claimed, malformed = parse_hashes(data or b"")
    if data is None or malformed:
        raise EvidenceError(where + (unread or f"{path.name}: {malformed[0]}"), fix="ask for an untouched copy")
    return claimed


def canonical_problems(path: Path, where: str = "") -> Iterator[str]:
    """Whether a SHA256SUMS is as tunix-rt writes it: sorted by name, each once, two spaces, one newline."""
    claimed = run_hashes(path, where)
    if read_bytes(path)[0] != "".join(f"{digest}  {name}\n" for name, digest in sorted(claimed.items())).encode():
        yield f"{where}{path.name} is not in its canonical form: sorted by name"


def copy_problems(folder: Path, schema: str, *, with_cpu: bool) -> list[str]:
    """The copied files against the hashes their runs ended with; and whether the bundle's own are there."""
    present = run_hashes(folder / "SHA256SUMS")
    ended = run_hashes(folder / RUN_HASHES)
    wanted = {name: digest for name, digest in ended.items() if name in present or not may_stay_out(name, schema)}
    if schema != SCHEMA:
        wanted = {name: digest for name, digest in ended.items() if not name.startswith(LEFT_OUT)}
    own = own_files(schema)
    if with_cpu:
        theirs = run_hashes(folder / "cpu" / RUN_HASHES, "cpu/")
        wanted |= {f"cpu/{name}": theirs.get(name, "") for name in OF_CPU_RUN}
        own.add(f"cpu/{RUN_HASHES}")
    problems = [f"missing: {name}" for name in sorted(own - present.keys())]
    problems += [f"no run writes such a file: {shown(name)}" for name in sorted(ended) if not NAMES.fullmatch(name)]
    problems += [f"missing, though the run had it: {name}" for name in sorted(wanted.keys() - present.keys())]
    problems += [f"not of the run: {name}" for name in sorted(present.keys() - wanted.keys() - own)]
    problems += [
        f"not as the run left it: {name}"
        for name in sorted(wanted.keys() & present.keys())
        if wanted[name] != present[name]
    ]
    return problems


def code_problems(names: Iterable[str]) -> Iterator[str]:
    """Programs among the files of a run, which writes none."""
    yield from (f"no run writes a program: {shown(name)}" for name in sorted(names) if name.lower().endswith(CODE))


def commit_of(source_sha256: str, repository: Path) -> str:
    commit = find_commit(source_sha256, repository)
    if commit is None:
        raise EvidenceError(
            f"none of the newest {NEWEST_COMMITS} commits of {repository} has the source this run was made from "
            f"(source_sha256 {source_sha256[:12]})",
            fix="commit that source, or point --repository at the clone that has it",
        )
    return commit


def commit_problems(says: Mapping[str, Any], repository: Path | None) -> Iterator[str]:
    """That it is one; and with a repository, that it has the source of the run, so that nothing was uncommitted."""
    commit = require(SAYS, says, "commit", str)
    if not COMMIT.fullmatch(commit):
        yield f"{SAYS}: commit is no commit"
        return
    if repository is None:
        return
    source = require(SAYS, says, "source_sha256", str)
    if (found := find_commit(source, repository, commit)) == commit:
        return
    if found is not None:
        yield f"{SAYS}: commit is {commit}, the source of the run is that of {found}"
    elif source_of_commit(commit, repository) is not None:
        yield f"{SAYS}: commit is {commit}, which has another source than the run, and so have all others of {repository}"
    else:
        yield (
            f"{SAYS}: commit {commit} could not be looked up: {repository} has it not, nor another with the source of the "
            "run; fetch the history"
        )


def refuse_without_commit(folder: Path, repository: Path) -> None:
    """A clone that lacks the commit shows nothing against a bundle. What can be shown is left to `commit_problems`."""
    data, _ = read_bytes(folder / SAYS)
    says = parse_object(data or b"")
    commit = says.get("commit") if isinstance(says, dict) else None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or source_of_commit(commit, repository) is not None:
        return
    shallow = is_shallow(repository)
    if shallow or find_commit(str(value_at(says, "source_sha256")), repository) is None:
        raise InputError(
            f"commit {commit} could not be looked up: {repository} has it not{', it is a shallow clone' * shallow}",
            fix=f"fetch the history: git -C {repository} fetch {'--unshallow' if shallow else '--all'}; "
            "or leave --repository out, and the commit is not looked up",
        )


def claim_problems(folder: Path, says: dict[str, Any], run: RunFiles, computed: dict[str, Any]) -> list[str]:
    """What the bundle says, figure by figure and then in words, against what its files give. That one of its own files is
    missing is said elsewhere."""
    commit = require(SAYS, says, "commit", str)
    ended, present = run_hashes(folder / RUN_HASHES), run_hashes(folder / "SHA256SUMS")
    left_out = {name: digest for name, digest in ended.items() if name not in present}
    if says.get("left_out") != left_out:
        return [f"{SAYS}: left_out is not what {RUN_HASHES} has beyond the files here"]
    whole = computed | {"commit": commit, "left_out": left_out}
    if is_of_the_run(says.get("to_bring", []), run.precommit, run.config):
        whole = {name: value for name, value in whole.items() if name != "to_bring"}
        whole |= {"to_bring": says["to_bring"]} if says.get("to_bring") else {}
    problems = differences(SAYS, says, as_json(whole), "the files")
    if (
        not problems
        and README in present
        and read_bytes(folder / README)[0] != readme_text(whole).encode("utf-8", "surrogatepass")
    ):
        problems.append(f"{README} is not what this version of tunix-rt writes of {SAYS}")
    return problems


def form_problems(folder: Path) -> Iterator[str]:
    """The bundle's own objects are written as tunix-rt writes JSON, to the byte."""
    for name in (SAYS, MANIFEST, PROVENANCE):
        data = read_bytes(folder / name)[0]
        if data is not None and data != json_text(read_object(folder / name)).encode("utf-8", "surrogatepass"):
            yield f"{name} is not in the form that tunix-rt writes"


def provenance_problems(folder: Path, says: dict[str, Any], run: RunFiles) -> list[str]:
    """The provenance against what the files give."""
    told = read_object(folder / PROVENANCE)
    name = value_at(told, "predicate.buildDefinition.internalParameters.run_id")
    if os.path.lexists(folder / MANIFEST):  # that it is missing is said elsewhere
        name = read_object(folder / MANIFEST).get("run_id")
    given = as_json(provenance_of(run, says, run_hashes(folder / RUN_HASHES), str(name)))
    return differences(PROVENANCE, told, given, "the files")


def manifest_problems(folder: Path, says: dict[str, Any], run: RunFiles) -> list[str]:
    """The manifest against what the files give; the name of the run is somebody's choice, which the provenance repeats."""
    told = read_object(folder / MANIFEST)
    if fault := fault_of_name(told.get("run_id")):
        return [f"{MANIFEST}: {fault}"]
    return differences(MANIFEST, told, as_json(manifest_of(run, says, told["run_id"])), "the files")


# --- two runs of one configuration ------------------------------------------------------------------------------------

SAME = (
    "source_sha256", "dataset.sha256", "dataset.merkle_root", "base_model.files", "base_model.weights",
    "tokenizer_sha256", "seeds",
)  # fmt: skip


def refuse_another_setup(run: RunFiles, cpu: RunFiles) -> None:
    """The run on the CPU must be this run on another device: same settings, source, data and model."""
    if cpu.result.get("device") != "cpu":
        raise EvidenceError(
            f"the run to compare with ran on {shown(cpu.result.get('device'))}, not on the CPU",
            fix="give a run on the CPU",
        )
    differ = [*different_settings(run.config, cpu.config), *_different_inputs(run.precommit, cpu.precommit)]
    if differ:
        raise EvidenceError(
            f"the run on the CPU is another run: {', '.join(differ)} differ(s)",
            fix="run the same configuration, of the same source, with --device cpu",
        )


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted names of the settings in which two configurations differ, but for the device."""
    ours, theirs = flat(one), flat(other)
    names = sorted((ours.keys() | theirs.keys()) - {"training.device"})
    return [name for name in names if name not in ours or name not in theirs or ours[name] != theirs[name]]


def _different_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in SAME:
        if value_at(one, name) is None or value_at(one, name) != value_at(other, name):
            yield f"precommit.json: {name}"


FROM_THE_ROWS = ("batch", "tokens", "target_tokens")


def refuse_other_batches(run: RunFiles, cpu: RunFiles) -> None:
    """Both runs took the same rows in each step, so that their speeds compare. JAX spreads its batch over the devices that
    it sees, of which there may be more on one side: there the rows alone tell, and the check of their order."""
    if any(engine_of(one) == "jax" for one in (run, cpu)):
        return
    for number, (ours, theirs) in enumerate(zip(run.metrics, cpu.metrics, strict=False), start=1):
        for name in FROM_THE_ROWS:
            if ours.get(name) != theirs.get(name):
                raise EvidenceError(
                    f"cpu/metrics.jsonl:{number}: {name} is {shown(theirs.get(name))}, on the GPU {shown(ours.get(name))}",
                    fix="ask for an untouched copy",
                )


LIKELY_COPIED = 8
"""Steps whose losses do not come out to the same bit on a CPU and a GPU, which add up in another order."""


def refuse_the_same_steps(run: RunFiles, cpu: RunFiles) -> None:
    """A run on a GPU is not that on the CPU with other seconds."""
    ours, theirs = ([line.get("loss_hex") for line in one.metrics] for one in (run, cpu))
    if len(ours) >= LIKELY_COPIED and ours == theirs:
        raise EvidenceError(
            f"all {len(ours)} losses are those of the run on the CPU, to the last bit: one is a copy of the other",
            fix="ask for an untouched copy",
        )
