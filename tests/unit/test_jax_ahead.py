"""The question to the TPU's compiler: what is asked, in which environment, how its refusals are read, and what is kept."""

import ast
import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tunix_rt.config.settings import Training
from tunix_rt.engines.jax import aot as jax_ahead
from tunix_rt.engines.jax.aot import Case, ask_compiler, case_hash, child_environment, read_refusal, topology_parts
from tunix_rt.errors import ConfigError, HardwareError, TunixError

GIB = 2**30
# Two messages of the compiler as it gives them (libtpu 0.0.42, and an older one), the paths in them shortened.
SHORT = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (23.04G) exceeds available "
    "HBM (15.75G)."
)
LONG = Path(__file__).with_name("tpu_compiler_refusal.txt").read_text()


@pytest.fixture
def case():
    return Case(config={"model_type": "gemma"}, training=Training(), tokens=64, topology="v5e:2x4")


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Versions as if the compiler were installed, a place to keep verdicts, and `write(code)`, a child that runs it."""
    monkeypatch.setattr(jax_ahead, "compiler_versions", lambda: {"jax": "1", "jaxlib": "1", "libtpu": "1"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'src'}")

    def write(code):
        (tmp_path / "a_child.py").write_text(code)
        return "a_child"

    return write


ANSWER = {
    "topology": "v5e:2x4", "device_kind": "TPU v5 lite", "devices": 8, "replicas": 1, "rows": 8, "tokens": 64,
    "accumulation": 1, "parameters": 10, "step": "words", "seconds": 1.5, "message": None,
    "memory": {"arguments": 5, "outputs": 4, "aliased": 3, "temporaries": 2, "code": 1, "peak": 8},
}  # fmt: skip


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_refusal_that_stops_at_the_temporaries_is_read():
    found = read_refusal(SHORT)
    assert found.needed == found.temporaries == round(23.04 * GIB)
    assert found.usable == round(15.75 * GIB)
    assert found.over == found.needed - found.usable
    assert found.largest == ()
    assert found.message == SHORT


def test_a_refusal_with_all_its_parts_is_read():
    found = read_refusal(LONG)
    assert (found.needed, found.usable, found.over) == (round(19.07 * GIB), round(15.75 * GIB), round(3.32 * GIB))
    assert (found.temporaries, found.arguments) == (round(17.02 * GIB), round(2.05 * GIB))
    assert found.largest == ("4.00G f32[512000,2048] jit(step)/add", "1.95G f32[256000,2048]")


def test_what_a_refusal_does_not_say_is_zero():
    found = read_refusal("RESOURCE_EXHAUSTED: of another kind")
    assert (found.needed, found.usable, found.over, found.arguments) == (0, 0, 0, 0)


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, parts", [("v5e:2x4", ("v5e", (2, 4))), ("v4:2x2x1", ("v4", (2, 2, 1)))])
def test_a_topology_is_a_kind_and_its_chips(name, parts):
    assert topology_parts(name) == parts


@pytest.mark.parametrize("name", ["v5e", "v5e-8", "v5e:8", "v5e:0x4", "2x4", "v5e:2x4;rm", ""])
def test_what_names_no_topology_is_refused_with_one_that_does(name):
    with pytest.raises(ConfigError, match="no TPU topology") as caught:
        topology_parts(name)
    assert "v5e:2x4" in caught.value.fix


def test_the_hash_is_of_everything_that_decides_the_verdict(case):
    versions = {"jax": "0.10.2", "libtpu": "0.0.42"}
    others = [
        dataclasses.replace(case, tokens=65),
        dataclasses.replace(case, topology="v5e:1x1"),
        dataclasses.replace(case, config={"model_type": "gemma2"}),
        dataclasses.replace(case, training=Training(optim="adafactor")),
        dataclasses.replace(case, child="benchmarks.published_step"),
    ]
    hashes = [case_hash(one, versions) for one in [case, *others]] + [case_hash(case, versions | {"libtpu": "0.0.43"})]
    assert len(set(hashes)) == len(hashes)
    assert case_hash(case, versions) == hashes[0]


def test_every_module_that_the_step_is_made_of_is_part_of_the_hash():
    """Of engine and plan, but for what describes memory and decides no code."""
    package = ROOT / "src" / "tunix_rt"
    found, pending = set(), ["engines/jax/aot_worker.py"]
    while pending:
        name = pending.pop()
        if name in found or name == "engines/jax/aot.py":  # the parent, which compiles nothing
            continue
        found.add(name)
        for node in ast.walk(ast.parse((package / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("tunix_rt.engines.jax", "tunix_rt.plan")
            ):
                module = node.module.removeprefix("tunix_rt.").replace(".", "/")
                named = [f"{module}.py", *(f"{module}/{one.name}.py" for one in node.names)]
                pending += [one for one in named if (package / one).is_file()]
    describing = {"plan/activations.py", "plan/memory.py", "plan/footprint.py", "plan/phases.py", "plan/backward.py"}
    assert found - describing <= set(jax_ahead.STEP_SOURCES)
    assert len(found) > 10


# --- where it runs ---------------------------------------------------------------------------------------------------

FOREIGN = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "CUDA_VISIBLE_DEVICES": "7", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "JAX_PLATFORMS": "cuda",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0", "LIBTPU_INIT_ARGS": "--nothing", "TPU_ACCELERATOR_TYPE": "v4-8",
    "JAX_ENABLE_X64": "1",
}  # fmt: skip


def test_nothing_that_steers_cuda_xla_or_a_tpu_reaches_the_child():
    inherited = {"PATH": "/bin", "HOME": "/h", **FOREIGN}
    assert child_environment(inherited) == {"PATH": "/bin", "HOME": "/h", **jax_ahead.TPU_VARIABLES}


def test_the_child_sees_no_variable_of_the_user(case, compiler, monkeypatch):
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    child = compiler(
        "import json, os, sys\n"
        f"answer = {ANSWER!r}\n"
        "answer['step'] = ' '.join(sorted(os.environ))\n"
        "print(json.dumps(answer))\n"
    )
    seen = ask_compiler(dataclasses.replace(case, child=child)).step.split()
    assert "JAX_PLATFORMS" in seen
    assert not set(seen) & (set(FOREIGN) - set(jax_ahead.TPU_VARIABLES))


# --- what comes back -------------------------------------------------------------------------------------------------


def test_a_verdict_is_kept_and_not_asked_for_again(case, compiler, tmp_path):
    counted = tmp_path / "times"
    child = compiler(f"import json\nopen({str(counted)!r}, 'a').write('x')\nprint(json.dumps({ANSWER!r}))\n")
    asked = dataclasses.replace(case, child=child)
    said = []
    first, second = ask_compiler(asked), ask_compiler(asked, say=said.append)
    assert first == second
    assert counted.read_text() == "x"
    assert "cached, compiled in" in said[0]
    assert first.memory.total == 5 + 4 - 3 + 2 + 1 > first.memory.peak
    assert dataclasses.replace(first.memory, peak=10).total == 10
    assert first.fits
    assert first.usable == int(15.75 * GIB)
    assert ask_compiler(asked, fresh=True) == first
    assert counted.read_text() == "xx"


def test_a_kept_refusal_reads_as_it_was(case, compiler):
    child = compiler(f"import json\nprint(json.dumps({ANSWER | {'memory': None, 'message': LONG}!r}))\n")
    asked = dataclasses.replace(case, child=child)
    first = ask_compiler(asked)
    assert not first.fits
    assert ask_compiler(asked) == first


def test_what_was_kept_and_is_damaged_is_asked_again(case, compiler, tmp_path):
    child = compiler(f"import json\nprint(json.dumps({ANSWER!r}))\n")
    asked = dataclasses.replace(case, child=child)
    first = ask_compiler(asked)
    (kept,) = (tmp_path / "cache" / "tunix-rt" / "topology").glob("*.json")
    for damage in ("", "[]", json.dumps({"verdict": {"memory": None}})):
        kept.write_text(damage)
        assert ask_compiler(asked) == first


def test_a_compiler_that_takes_too_long_is_ended_and_said(case, compiler, monkeypatch):
    monkeypatch.setattr(jax_ahead, "REPORT_EVERY_SECONDS", 0.1)
    child, said = compiler("import time\ntime.sleep(60)\n"), []
    with pytest.raises(TunixError, match=r"compiling for v5e:2x4 took more than 0 s") as caught:
        ask_compiler(dataclasses.replace(case, child=child), say=said.append, limit_seconds=0.35)
    assert "--time-limit" in caught.value.fix
    assert said and said[0].startswith("compiling the training step for v5e:2x4")


def test_a_compiler_that_dies_is_no_verdict(case, compiler):
    child = compiler("raise SystemExit('a library is missing')\n")
    with pytest.raises(TunixError, match="the TPU compiler failed: a library is missing"):
        ask_compiler(dataclasses.replace(case, child=child))


def test_what_the_engine_refuses_is_refused_in_its_words(case, compiler):
    child = compiler(
        "import json, sys\nprint(json.dumps({'problem': 'training.lora_rank', 'fix': 'leave it out'}))\nsys.exit(2)\n"
    )
    with pytest.raises(ConfigError, match=r"training\.lora_rank"):
        ask_compiler(dataclasses.replace(case, child=child))


def test_without_libtpu_it_says_what_to_install(case, monkeypatch):
    real = importlib.metadata.version

    def version(package):
        if package == "libtpu":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(HardwareError, match="libtpu is not installed") as caught:
        ask_compiler(case)
    assert "tunix-rt[tpu]" in caught.value.fix
    assert caught.value.cause == "libtpu-missing"


@pytest.mark.parametrize(
    "kind, gib", [("TPU v5 lite", 15.75), ("TPU v4", 30.75), ("TPU v5", 95.74), ("TPU v6 lite", 31.25)]
)
def test_the_usable_memory_is_that_of_a_device_as_jax_counts_them(kind, gib):
    assert jax_ahead.usable_bytes(kind) == int(gib * GIB)


def test_the_usable_memory_of_an_unknown_device_is_not_guessed():
    assert jax_ahead.usable_bytes("TPU v99") is None
