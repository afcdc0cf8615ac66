"""Each static check of a bundle finds what it is there to find, in a bundle whose chain, hashes and words are made anew."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bundles import collect, edit_json, edit_text, files_of, reseal
from tests.forging.folder import configure
from tests.program import ROOT, environment, refused, tunix_rt
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.evidence.verifying import EVERY_CHECK, examine, findings_of
from tunix_rt.rundir import RunDir, sha256_file, write_json, write_text

pytestmark = pytest.mark.usefixtures("judged_once", "unsynced")


@pytest.fixture
def unsynced(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def copy(tiny_bundle, tmp_path):
    return shutil.copytree(tiny_bundle, tmp_path / "copy")


def each_step(name, value):
    return lambda path: path.write_text(re.sub(rf'("{name}": )[^,}}]+', rf"\g<1>{value}", path.read_text()))


def first(name, value):
    return lambda path: path.write_text(re.sub(rf'("{name}": )[^,}}]+', rf"\g<1>{value}", path.read_text(), count=1))


def swap(old, new):
    return lambda path: edit_text(path, old, new)


def append(text):
    return lambda path: path.write_text(path.read_text() + text)


def set_json(**changed):
    return lambda path: edit_json(path, **changed)


def inside(place, **changed):
    def edit(path):
        told = json.loads(path.read_text())
        found = told
        for part in place.split("."):
            found = found[int(part) if part.isdigit() else part]
        found |= changed
        write_json(path, told)

    return edit


def without_last_line(path):
    write_text(path, "".join(path.read_text().splitlines(keepends=True)[:-1]))


def without_entries(path):
    told = json.loads(path.read_text())
    write_json(path, told | {"checkpoints": told["checkpoints"] + [told["checkpoints"][0] | {"step": 2}]})


def other_weights(path):
    """Those of the last checkpoint, which the run still had when it ended."""
    before, found, after = path.read_text().rpartition('"sha256": "')
    path.write_text(before + found + "0" * 64 + after[64:])


def swap_rows(path):
    one, two, *rest = path.read_text().splitlines(keepends=True)
    digests = [re.search(r"[0-9a-f]{64}", line)[0] for line in (one, two)]
    write_text(path, one.replace(*digests) + two.replace(*reversed(digests)) + "".join(rest))


def log_loss(path):
    path.write_text(re.sub(r"(step 1/6  loss )[\d.]+", r"\g<1>0.1234", path.read_text()))


FORGERIES = {
    "a learning rate": ("metrics.jsonl", first("lr", 0.001), "learning-rate"),
    "a batch": ("metrics.jsonl", first("batch", f'"{"0" * 64}"'), "batch-order"),
    "the tokens of a step": ("metrics.jsonl", first("tokens", 1000), "batch-order"),
    "its targets": ("metrics.jsonl", first("target_tokens", 7), "batch-order"),
    "the order of the rows": ("rows.jsonl", swap_rows, "rows"),
    "a row less": ("rows.jsonl", without_last_line, "rows"),
    "a row of another length": ("rows.jsonl", each_step("tokens", 255), "batch-order"),
    "more steps in the settings": ("config.yaml", swap("max_steps: 6", "max_steps: 60"), "steps"),
    "another seed": ("precommit.json", inside("seeds", seed=7), "settings"),
    "another order of the data": ("precommit.json", inside("seeds", data_seed=7), "batch-order"),
    "a setting that there is not": ("config.yaml", append("accuracy: 1.0\n"), "settings"),
    "a negative loss": ("metrics.jsonl", first("grad_norm", -1.0), "figures"),
    "a figure more": ("metrics.jsonl", swap('"batch": ', '"accuracy": 1.0, "batch": '), "figures"),
    "a held-out loss less": ("eval/heldout.jsonl", without_last_line, "held-out"),
    "another best": ("result.json", set_json(best_heldout_loss=0.5), "held-out"),
    "a commitment after the end": ("precommit.json", set_json(created="2030-01-01T00:00:00+00:00"), "time-order"),
    "a time that is none": ("precommit.json", set_json(created="yesterday"), "provenance"),
    "a process from before": (
        "processes.json",
        inside("processes.0", started="2020-01-01T00:00:00+00:00"),
        "time-order",
    ),
    "steps that outlast the run": ("metrics.jsonl", first("seconds", 1e6), "step-time"),
    "a line of yesterday": ("training_log.txt", append("2020-01-01T00:00:00Z INFO Completed\n"), "log"),
    "a line without a time": ("training_log.txt", append("accuracy 100 %\n"), "log"),
    "a loss in the log": ("training_log.txt", log_loss, "log-steps"),
    "the traces in the log": ("training_log.txt", swap("522 traces", "9,522 traces"), "log-facts"),
    "the parameters": ("result.json", set_json(parameters=270_000_000), "parameters"),
    "the shape of the model": ("final_model/config.json", set_json(num_hidden_layers=99), "parameters"),
    "a speed that no CPU has": ("metrics.jsonl", each_step("seconds", 1e-9), "flop-rate"),
    "the memory": ("memory.json", set_json(measured_bytes=1), "memory"),
    "another device": ("processes.json", inside("processes.0.machine", device="cuda"), "processes"),
    "another version": ("processes.json", inside("processes.0.machine.versions", torch="1.0.0"), "processes"),
    "no threads": ("processes.json", inside("processes.0.machine", threads=0), "processes"),
    "a process that began later": ("processes.json", inside("processes.0", first_step=3), "resumed"),
    "a resumption in the log": (
        "training_log.txt",
        append("2030-01-01T00:00:00Z INFO Resumed from step-000002\n"),
        "resumed",
    ),
    "a checkpoint that nothing made": ("checkpoints.json", without_entries, "checkpoints"),
    "other weights in a checkpoint": ("checkpoints.json", other_weights, "checkpoints"),
    "another dataset of that name": ("precommit.json", inside("dataset", sha256="0" * 64), "dataset"),
    "fewer traces held out": ("precommit.json", inside("dataset", heldout_traces=27, traces=523), "overlap"),
    "a placeholder": ("result.json", set_json(note="TODO"), "schema"),
    "a number that is none": ("plan.json", set_json(note="NaN"), "schema"),
    "an escape": ("env_info.txt", append("\x1b[2J\n"), "text"),
    "text turned around": ("training_log.txt", append("  \u202egnol\n"), "text"),
    "a run that is not completed": ("result.json", set_json(status="preempted", exit_code=7), "evidence-files"),
    "a score": ("eval/after.json", set_json(correct=28), "answers"),
    "a loss": ("metrics.jsonl", first("loss", 0.5), "chain"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forgery_is_found_by_the_check_that_is_there_for_it(copy, what):
    name, change, check = FORGERIES[what]
    change(copy / name)
    reseal(copy)
    found = findings_of(copy)
    assert check in {finding.check for finding in found}, found
    assert check in EVERY_CHECK


def test_questions_that_are_not_those_that_were_held_out_are_found(copy):
    """Told as a run that asks its held-out questions, whose answers are to others."""
    edit_json(copy / "precommit.json", evalset=...)
    configure(copy, "evaluation", evalset=None)
    reseal(copy)
    assert any("not the questions that were held out" in one.problem for one in findings_of(copy))


def test_the_page_about_bundles_names_every_check():
    page = (ROOT / "docs" / "reference" / "bundle.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([\w-]+)` \| L\d", page, flags=re.MULTILINE)
    assert sorted(told) == sorted(EVERY_CHECK)


def test_an_untouched_copy_is_at_l1_and_every_check_was_made(copy):
    examined = examine(copy)
    assert (examined.findings, examined.unmade) == ((), ())


def test_a_bundle_cannot_pass_for_an_older_one(copy):
    for schema in ("tunix-rt/bundle/1", "tunix-rt/bundle/2"):
        edit_json(copy / "bundle.json", schema=schema)
        write_hashes(RunDir(copy))
        assert any("the source of the run is newer" in one.problem for one in findings_of(copy))


def test_files_of_a_gpu_beside_a_run_on_the_cpu_are_found(copy):
    (copy / "nvidia_smi.txt").write_text("| 4711 C python 2861MiB |\n")
    lines = (copy / "run-SHA256SUMS").read_text().splitlines()
    lines.append(f"{sha256_file(copy / 'nvidia_smi.txt')}  nvidia_smi.txt")
    write_text(copy / "run-SHA256SUMS", "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line[66:])))
    reseal(copy)
    assert "nvidia_smi.txt in a run on cpu" in [one.problem for one in findings_of(copy)]


def test_the_provenance_is_computed_again_figure_by_figure(copy):
    told = json.loads((copy / "provenance.intoto.json").read_text())
    assert told["_type"] == "https://in-toto.io/Statement/v1"
    assert told["predicateType"] == "https://slsa.dev/provenance/v1"
    assert "final_model/model.safetensors" in [one["name"] for one in told["subject"]]
    told["predicate"]["runDetails"]["metadata"]["invocationId"] = "0" * 64
    write_json(copy / "provenance.intoto.json", told)
    write_hashes(RunDir(copy))
    (finding,) = findings_of(copy)
    assert finding.check == "provenance" and "invocationId" in finding.problem


def test_hashes_in_another_order_are_malformed(copy):
    lines = (copy / "SHA256SUMS").read_text().splitlines(keepends=True)
    write_text(copy / "SHA256SUMS", "".join([lines[1], lines[0], *lines[2:]]))
    (finding,) = findings_of(copy)
    assert (finding.level, finding.check) == ("L0", "canonical")


def make_link(folder):
    (folder / "more").symlink_to("/etc/passwd")


def make_pipe(folder):
    os.mkfifo(folder / "pipe")


def make_huge(folder):
    with (folder / "plan.json").open("r+b") as file:
        file.truncate(17 * 2**20)


def make_deep(folder):
    (folder / "/".join("d" * 12)).mkdir(parents=True)


@pytest.mark.parametrize("make", [make_link, make_pipe, make_huge, make_deep])
def test_what_could_hurt_a_reader_is_not_read(copy, make):
    make(copy)
    assert [finding.check for finding in findings_of(copy)] == ["readable"]


HOSTILE = {
    "nested": b"[" * 200_000,
    "nested-objects": b'{"a": ' * 100_000,
    "twice": b'{"schema": 1, "schema": 2}\n',
    "huge-number": b'{"seconds": ' + b"9" * 5000 + b"}\n",
    "infinite": b'{"seconds": 1e999, "steps_planned": 99999999999999999999}\n',
    "escapes": b'{"status": "\\u001b[2J", "device": "\\u001b]0;x\\u0007"}\n',
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_json_is_found_without_a_traceback_and_no_escape_reaches_the_screen(copy, hostile):
    for name in ("result.json", "precommit.json", "bundle.json", "processes.json", "checkpoints.json", "rows.jsonl"):
        original = (copy / name).read_bytes()
        (copy / name).write_bytes(HOSTILE[hostile])
        write_hashes(RunDir(copy))
        found = findings_of(copy)
        assert found, name
        assert not any("\x1b" in finding.problem for finding in found)
        (copy / name).write_bytes(original)


def test_a_folder_from_before_hashes_is_read_and_reported_as_such(tmp_path):
    (tmp_path / "run_manifest.json").write_text('{"commit_sha": null, "device": "TODO", "steps": 3}')
    done = tunix_rt("evidence", "verify", tmp_path)
    assert done.returncode == 6
    assert "a folder without hashes, in which nothing can be checked" in done.stdout
    assert "'commit_sha' is null" in done.stdout and "'device' is null, empty or a placeholder" in done.stdout
    assert "level L0" in done.stdout


# --- collecting -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_in_the_readme_makes_the_run_again(tiny_bundle, tmp_path):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    readme = (bundle / "README.md").read_text()
    block = re.search(r"## Make it again\n.*?```bash\n(.*?)```", readme, re.DOTALL)[1]
    program = tmp_path / "bin" / "tunix-rt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tunix_rt "$@"\n')
    program.chmod(0o755)
    env = environment(PATH=f"{program.parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-ec", block], cwd=bundle, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    recorded, again = (
        [json.loads(line)["loss_hex"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (bundle, tmp_path / "reproduced")
    )
    assert again == recorded
    assert findings_of(bundle) == []


def test_checkpoints_and_the_model_are_taken_along_within_the_bytes_allowed(tiny_run, tiny_repo, tmp_path):
    words = refused(collect(tiny_run, tmp_path / "v1", tiny_repo, "--with-checkpoints", "--checkpoint-mib", 1), 6)
    assert "MiB, 1 are allowed" in words and "--checkpoint-mib" in words
    done = collect(tiny_run, tmp_path / "v1", tiny_repo, "--with-checkpoints", "--with-model")
    assert done.returncode == 0, done.stderr
    names = files_of(tmp_path / "v1")
    assert {"checkpoints/step-000004/model.safetensors", "final_model/model.safetensors"} <= set(names)
    left_out = json.loads((tmp_path / "v1" / "bundle.json").read_text())["left_out"]
    assert {Path(name).parts[1] for name in left_out} == {"step-000006"}  # from which nothing can be replayed
    assert findings_of(tmp_path / "v1", tiny_repo) == []
    (tmp_path / "v1" / "checkpoints" / "step-000004" / "state.json").write_text("{}")
    assert [finding.check for finding in findings_of(tmp_path / "v1")] == ["hashes"]


def test_a_token_in_a_file_of_the_run_is_never_collected(tiny_run, tiny_repo, tmp_path):
    home = shutil.copytree(tiny_run, tmp_path / "home")
    token = "hf_" + "a1" * 17
    write_text(home / "env_info.txt", f"ram: 8 GiB\nHF_TOKEN: {token}\n")
    write_hashes(RunDir(home))
    words = refused(collect(home, tmp_path / "bundle", tiny_repo), 6)
    assert "env_info.txt:2 holds what looks like a token" in words and token not in words
    assert not (tmp_path / "bundle").exists()


def test_where_a_bundle_goes_may_be_said_in_the_older_way_but_not_in_two_ways(tiny_run, tiny_repo, tmp_path):
    arguments = ["evidence", "collect", tiny_run, "--repository", tiny_repo]
    assert tunix_rt(*arguments, "--output", tmp_path / "v1").returncode == 0
    assert "name two folders" in refused(tunix_rt(*arguments, "--output", tmp_path / "a", "--to", tmp_path / "b"), 2)
    assert "where the bundle goes" in refused(tunix_rt(*arguments), 2)


def test_a_level_that_was_not_reached_is_exit_6_and_one_that_cannot_be_is_exit_2(tiny_bundle):
    assert "takes the weights" in refused(tunix_rt("evidence", "verify", tiny_bundle, "--require", "L2"), 2)
