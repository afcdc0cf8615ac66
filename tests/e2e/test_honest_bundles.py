"""Honest runs of every kind become bundles that are accepted, wherever they are verified: a verifier that refuses the truth is of
no use. Runs and verifications are those of the real program."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.bundles import git, make_repository
from tests.forging.bases import ROUGH, WITH_JAX
from tests.program import ROOT, command, environment, tunix_rt
from tunix_rt.storage import read_json

TORCH = ("smoke_tiny",)
SHORT = ("--max-steps", 6, "--set", "training.save_steps=2", "--set", "training.eval_steps=3")
SHORT += ("--set", "evaluation.max_new_tokens=4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """One kind of run: its settings, how its first processes end, and the level that its bundle reaches."""

    name: str
    engine: tuple[object, ...] = TORCH
    settings: tuple[str, ...] = ()
    more: tuple[object, ...] = ()
    ends: tuple[object, ...] = ()
    """How each process but the last ends: a signal after three steps, or options that make it stop by itself."""
    collect: tuple[str, ...] = ()
    without_weights: bool = False
    level: str = "L1"
    extra: dict[str, str] = field(default_factory=dict)


RUNS = (
    Honest(name="torch", level="L3"),
    Honest(name="torch-deterministic", settings=("training.deterministic=true",)),
    Honest(
        name="torch-bf16", settings=("training.dtype=bfloat16", "training.save_dtype=bfloat16"), collect=("--with-model",),
        level="L2",
    ),
    Honest(name="torch-adafactor", settings=("training.optim=adafactor",), level="L3"),
    Honest(name="torch-adamw-8bit", settings=("training.optim=adamw_8bit",), collect=("--with-model",), level="L2"),
    Honest(name="torch-lora", settings=("training.lora_rank=4",), level="L3"),
    Honest(
        name="torch-lora-continued", ends=(("--stop-after", 3),), level="L4",
        settings=(
            "training.lora_rank=4", "training.lora_alpha=6", "training.lora_target_modules=[q_proj,v_proj]",
            "training.lora_dropout=0.1",
        ),
    ),
    Honest(name="torch-accumulation", settings=("training.gradient_accumulation_steps=2",)),
    Honest(name="torch-one-example-per-row", settings=("data.packing=false",)),
    Honest(name="torch-without-answers", settings=("evaluation.enabled=false",)),
    Honest(
        name="torch-without-heldout",
        settings=("data.validation_fraction=0", "evaluation.evalset=eval_v2", "training.eval_steps=null"),
    ),
    Honest(name="torch-memory-auto", settings=("training.memory=auto",)),
    Honest(name="torch-profiled", more=("--profile", 2)),
    Honest(name="torch-continued", ends=(("--stop-after", 3),), level="L3"),
    Honest(name="torch-continued-twice", ends=(("--stop-after", 1), ("--stop-after", 5))),
    Honest(name="torch-sigterm", ends=(signal.SIGTERM,), settings=("training.max_steps=14",)),
    Honest(name="torch-killed", ends=(signal.SIGKILL,), settings=("training.max_steps=14",)),
    Honest(name="torch-time-budget", ends=(("--set", "training.time_budget=9"),), settings=("training.max_steps=60",)),
    Honest(name="torch-without-weights", without_weights=True),
    Honest(name="torch-with-checkpoints", collect=("--with-checkpoints", "--checkpoint-mib", "128"), level="L3"),
    Honest(name="jax", engine=WITH_JAX, level="L3"),
    Honest(name="jax-continued", engine=WITH_JAX, ends=(("--stop-after", 3),)),
    Honest(
        name="jax-four-devices", engine=WITH_JAX,
        extra={"XLA_FLAGS": f"{ROUGH} --xla_force_host_platform_device_count=4"},
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return make_repository(tmp_path_factory.mktemp("repository"))


def _train(run: Path, honest: Honest, repository: Path) -> None:
    """To the end, through all processes."""
    given = [part for setting in honest.settings for part in ("--set", setting)]
    arguments = ("train", *honest.engine, "--device", "cpu", *SHORT, *given, "--output", run)
    extra = {"PYTHONPATH": str(repository / "src"), "XLA_FLAGS": ROUGH} | honest.extra
    resume: tuple[str, ...] = ()
    for end in honest.ends:
        if isinstance(end, signal.Signals):
            _interrupted(command(*arguments, *resume), run, end, extra)
        else:
            done = tunix_rt(*arguments, *end, *resume, **extra)
            assert done.returncode == 7, done.stderr
        resume = ("--resume",)
    done = tunix_rt(*arguments, *honest.more, *resume, **extra)
    assert done.returncode == 0, done.stderr


def _interrupted(program: list[str], run: Path, how: signal.Signals, extra: dict[str, str]) -> None:
    """A process that gets the signal `how` after three steps."""
    with subprocess.Popen(
        program, env=environment(**extra), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= 3:
                process.send_signal(how)
                break
            time.sleep(0.002)
        assert process.wait(timeout=200) == (7 if how is signal.SIGTERM else -how)


@pytest.mark.slow
@pytest.mark.parametrize("honest", RUNS, ids=lambda one: one.name)
def test_an_honest_run_is_collected_and_its_bundle_accepted(honest, repository, tmp_path):
    if honest.name.startswith("jax") and importlib.util.find_spec("jax") is None:
        pytest.skip("needs jax")
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    _train(run, honest, repository)
    for weights in run.rglob("*.safetensors") if honest.without_weights else ():
        weights.unlink()
    done = tunix_rt("evidence", "collect", run, "--to", bundle, "--repository", repository, *honest.collect)
    assert done.returncode == 0, done.stderr
    extra = {"XLA_FLAGS": ROUGH} | honest.extra
    _accepted(tunix_rt("evidence", "verify", bundle, "--require", honest.level, **extra), honest.level)
    done = tunix_rt("evidence", "verify", bundle, "--repository", repository)
    _accepted(done, "L1")
    assert re.search(r"consistent +reachable from main", done.stdout)


def test_the_committed_bundles_are_of_both_engines_on_a_cpu_and_a_gpu():
    stated = [read_json(file) for file in (ROOT / "submission_runs").glob("*/run_manifest.json")]
    assert {one["device"] for one in stated} == {"cpu", "cuda"}
    assert {one["backend"] for one in stated} == {"torch", "jax"}


# --- wherever a bundle is verified ------------------------------------------------------------------------------------


def _accepted(done: subprocess.CompletedProcess[str], level: str = "L1") -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f": level {level} (" in done.stdout and "untouched copy" not in done.stdout + done.stderr


def _run(*arguments: object, before: tuple[str, ...] = (), **options: object) -> subprocess.CompletedProcess[str]:
    """`tunix-rt evidence verify` behind the commands of `before`."""
    line = [*before, *command("evidence", "verify", *arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, **{"env": environment()} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"},
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "TZ": "Etc/GMT+12"},
    ],
    ids=["turkish-in-kiritimati", "c-in-the-far-west"],
)
def test_a_bundle_is_accepted_in_another_locale_and_time_zone(cpu_bundle, where):
    _accepted(tunix_rt("evidence", "verify", cpu_bundle, **where))


@pytest.mark.slow
def test_a_bundle_is_accepted_in_a_folder_with_any_name(cpu_bundle, tmp_path):
    moved = shutil.copytree(cpu_bundle, tmp_path / "a 'b\" $x;y" / "Prüfung Ä" / "証拠 *")
    _accepted(tunix_rt("evidence", "verify", moved))


CLOCK = Path(__file__).with_name("wrong_clock.c")
DAY = 86_400


@pytest.mark.parametrize(
    "seconds", [-2 * DAY, pytest.param(3650 * DAY, marks=pytest.mark.slow)], ids=["two-days-behind", "ten-years-ahead"]
)
def test_a_bundle_is_accepted_by_a_verifier_whose_clock_is_wrong(cpu_bundle, tmp_path, seconds):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"], check=True)
    off = {"LD_PRELOAD": str(library), "CLOCK_OFF_BY": str(seconds)}
    shown = subprocess.run(
        [command()[0], "-c", "import time; print(time.time())"], env=environment(**off), capture_output=True
    )
    assert abs(float(shown.stdout) - time.time() - seconds) < 600, "the clock is wrong"
    _accepted(tunix_rt("evidence", "verify", cpu_bundle, **off))


@pytest.mark.slow
def test_a_bundle_is_accepted_on_a_read_only_file_system(cpu_bundle):
    place = str(cpu_bundle)
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/new" 2>/dev/null && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", script, place)
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    _accepted(_run(place, before=before))


@pytest.mark.slow
def test_a_bundle_survives_a_clone_that_converts_line_ends(cpu_bundle, tmp_path):
    origin = tmp_path / "origin"
    shutil.copytree(cpu_bundle, origin / "bundle")
    shutil.copy(ROOT / ".gitattributes", origin)
    git(origin, "init", "-q", "-b", "main")
    git(origin, "add", "-A")
    git(origin, "commit", "-q", "-m", "bundle")
    settings = ["-c", "core.autocrlf=true", "-c", "core.eol=crlf"]
    subprocess.run(["git", *settings, "clone", "-q", origin, tmp_path / "clone"], check=True)
    _accepted(tunix_rt("evidence", "verify", tmp_path / "clone" / "bundle"))


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may read; pytest's folders are its user's alone."""
    with tempfile.TemporaryDirectory(prefix="tunix-rt-public-") as place:
        Path(place).chmod(0o755)
        yield Path(place)


@pytest.mark.parametrize(
    ("bundle", "repository", "level"),
    [("cpu_bundle", "source_repo", "L1"), pytest.param("tiny_replayable", "tiny_repo", "L3", marks=pytest.mark.slow)],
)
def test_another_user_without_a_home_and_with_umask_077_verifies(public, bundle, repository, level, request):
    """Nobody may search folders, for the interpreter may lie in the home of root; write they may not."""
    reads = "+dac_read_search"
    caps = (f"--inh-caps={reads}", f"--ambient-caps={reads}")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *caps)
    if os.geteuid() or shutil.which("setpriv") is None or subprocess.run([*nobody, "true"]).returncode:
        pytest.skip("needs root and setpriv")
    kept = {name: value for name, value in environment().items() if name not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for name, source in (("bundle", bundle), ("repository", repository)):
        shutil.copytree(request.getfixturevalue(source), public / name)
    subprocess.run(["chmod", "-R", "a+rX", public], check=True)
    arguments = (public / "bundle", "--repository", public / "repository", "--require", level)
    done = _run(*arguments, before=nobody, env=kept, umask=0o077, cwd="/")
    _accepted(done, level)
    assert re.search(r"consistent +reachable from main", done.stdout), "a clone of another owner is read"
