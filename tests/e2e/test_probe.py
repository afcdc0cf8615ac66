"""Facts of a computer: had within a time limit whatever driver, torch or jax do, and without anything that must not travel."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.tables import parametrize
from tunix_rt.doctor import child_process as child
from tunix_rt.doctor import nvidia, probe
from tunix_rt.doctor.facts import (
    DeviceNode,
    GpuProcess,
    GpuSlice,
    Jax,
    Nvidia,
    PciDevice,
    Torch,
    facts_from_json,
    gpu_signs,
)
from tunix_rt.doctor.nvidia import ask_nvml, cached_libraries, nvidia_facts
from tunix_rt.doctor.packages import NoAnswer, ask_child, ask_jax, ask_torch, installed_jax, installed_torch
from tunix_rt.doctor.probe import gather_facts, host_facts, jax_platform, tpu_facts
from tunix_rt.storage import to_plain

GIB = 2**30


def made(root: Path, files: dict[str, str]) -> Path:
    """A root folder with these files. Device nodes are plain files in it: only their names and rights are looked at."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- this computer ---------------------------------------------------------------------------------------------------


def test_the_facts_of_this_computer_are_plausible_and_survive_a_file(tmp_path: Path) -> None:
    facts = gather_facts(tmp_path / "not" / "yet" / "made")
    assert 0 < facts.host.ram_available_bytes <= facts.host.ram_total_bytes
    assert facts.host.disk_path == str(tmp_path)
    assert facts.host.disk_free_bytes > 0
    assert 1 <= facts.host.cpu_cores <= (os.cpu_count() or 1)
    assert facts.host.cpu
    assert facts_from_json(json.loads(json.dumps(to_plain(facts)))) == facts


def test_the_path_of_the_output_stays_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()
    for given, kept in [(None, "."), ("runs/a/b", "runs"), ("runs/file/a", "runs"), ("a/b", "."), ("runs", "runs")]:
        assert host_facts(None if given is None else Path(given)).disk_path == kept


def test_only_the_listed_variables_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "nvidia_facts", Nvidia)
    for name in ("HF_TOKEN", "TPU_SECRET", "XLA_FLAGS", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    facts = gather_facts()
    assert facts.environment["JAX_PLATFORMS"] == "cuda,cpu"
    assert "a-secret" not in json.dumps(to_plain(facts))


def test_gathering_imports_no_engine_and_no_driver() -> None:
    code = (
        "import sys; from tunix_rt.doctor.probe import gather_facts; gather_facts()\n"
        "print(sorted({'torch', 'jax', 'transformers', 'pynvml', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_lower_limit_of_the_control_group_counts_as_the_memory(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    made(group, {"memory/memory.limit_in_bytes": "1073741824\n", "memory.current": "73741824\n"})
    assert probe._memory(tmp_path) == (1_073_741_824, 1_000_000_000)
    # Pages of files that nobody uses are given back when memory is asked for.
    made(group, {"memory.stat": "anon 5\nfile 60000000\ninactive_file 50000000\nactive_file 10000000\n"})
    host = host_facts(root=tmp_path)
    assert (host.ram_total_bytes, host.ram_available_bytes) == (1_073_741_824, 1_050_000_000)
    made(group, {"memory.stat": "inactive_file 1\ntotal_inactive_file 40000000\n"})  # version 1: with the groups below
    assert probe._memory(tmp_path)[1] == 1_040_000_000
    for damaged in ("", "nonsense", "inactive_file many"):
        made(group, {"memory.stat": damaged})
        assert probe._memory(tmp_path)[1] == 1_000_000_000
    made(group, {"memory.stat": "inactive_file 99999999999\n"})
    assert probe._memory(tmp_path)[1] == 1_073_741_824, "never more than the limit"
    made(group, {"memory.max": "max\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert probe._memory(tmp_path)[0] > 1_073_741_824


# --- containers, WSL, bus, module, nodes -----------------------------------------------------------------------------


@parametrize("files", "variables", "kind")
def test_a_container_is_known_by_its_marks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    variables: dict[str, str],
    kind: str | None,
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host_facts(root=made(tmp_path, files)).container == kind


def test_wsl_is_known_by_its_kernel_and_shows_its_gpu_by_dxg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@af282157c79e)"
    root = made(tmp_path / "root", {"proc/version": kernel, "dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""})
    shadow = made(tmp_path / "shadow", {"libcuda.so.1": ""})
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'absent'}:{shadow}")
    monkeypatch.setenv("HOME", str(tmp_path))
    facts = nvidia_facts(root)
    assert host_facts(root=root).wsl
    assert facts.nodes == (DeviceNode(path="/dev/dxg"),)
    assert facts.libcuda[0] == "~/shadow/libcuda.so.1", "first by the loader's order, without the home folder"
    assert facts.libcuda[-1] == "/usr/lib/wsl/lib/libcuda.so.1"
    assert not host_facts(root=tmp_path / "absent").wsl


def test_the_loader_takes_no_library_of_another_machine() -> None:
    listing = (
        "3 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so\n"
    )
    assert cached_libraries(listing, "libcuda.so.1", "x86_64") == ["/lib/x86_64-linux-gnu/libcuda.so.1"]
    assert cached_libraries("", "libcuda.so.1", "x86_64") == []


def test_a_gpu_without_a_driver_shows_on_the_bus(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices"
    root = made(
        tmp_path,
        {
            f"{bus}/0000:01:00.0/vendor": "0x10de\n",
            f"{bus}/0000:01:00.0/class": "0x030200\n",
            f"{bus}/0000:01:00.0/device": "0x2b85\n",
            f"{bus}/0000:01:00.1/vendor": "0x10de\n",  # the sound of the same card
            f"{bus}/0000:01:00.1/class": "0x040300\n",
            f"{bus}/0000:02:00.0/vendor": "0x1af4\n",
            "sys/module/nouveau/refcnt": "1",
        },
    )
    facts = nvidia_facts(root)
    assert facts.pci == (PciDevice(address="0000:01:00.0", vendor="0x10de", device="0x2b85"),)
    assert facts.nouveau
    assert (facts.module_version, facts.module_flavour, facts.nodes) == (None, None, ())
    assert gpu_signs(host_facts(), facts) == ["PCI device 0000:01:00.0"]


@parametrize("line", "version", "flavour")
def test_the_module_tells_its_version_and_flavour(tmp_path: Path, line: str, version: str, flavour: str) -> None:
    made(tmp_path, {"proc/driver/nvidia/version": f"{line}\nGCC version:  gcc version 12.2.0\n"})
    assert nvidia._module(tmp_path) == (version, flavour)
    made(tmp_path, {"sys/module/nvidia/version": "570.1\n"})
    assert nvidia._module(tmp_path) == ("570.1", flavour)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may open every file")
def test_a_node_that_this_user_may_not_open_is_told_apart(tmp_path: Path) -> None:
    made(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""})
    (tmp_path / "dev/nvidia0").chmod(0)
    assert [node.usable for node in nvidia_facts(tmp_path).nodes] == [False, True]


def test_nodes_come_by_number_and_then_the_control_nodes(tmp_path: Path) -> None:
    made(tmp_path, {f"dev/{name}": "" for name in ("nvidia-uvm", "nvidia10", "nvidia9", "nvidiactl", "nvidia-modeset")})
    names = [node.path for node in nvidia_facts(tmp_path).nodes]
    assert names == ["/dev/nvidia9", "/dev/nvidia10", "/dev/nvidiactl", "/dev/nvidia-uvm"]


def test_a_tpu_is_known_by_its_chip_and_not_by_the_network_card_of_google(tmp_path: Path) -> None:
    bus = tmp_path / "sys/bus/pci/devices"
    made(tmp_path, {"dev/vfio/0": "", "dev/vfio/vfio": ""})
    made(bus, {"0000:00:04.0/vendor": "0x1ae0\n", "0000:00:04.0/device": "0x0042\n"})
    assert (tpu_facts(tmp_path).pci, tpu_facts(tmp_path).nodes) == ((), ())
    made(bus, {"0000:00:05.0/vendor": "0x1ae0\n", "0000:00:05.0/device": "0x0063\n"})
    made(bus, {"0000:00:05.0/subsystem_device": "0x004f\n"})
    chip = PciDevice(address="0000:00:05.0", vendor="0x1ae0", device="0x0063", subsystem="0x004f")
    assert (tpu_facts(tmp_path).pci, tpu_facts(tmp_path).nodes) == ((chip,), (DeviceNode(path="/dev/vfio/0"),))
    assert tpu_facts(made(tmp_path / "v4", {"dev/accel0": ""})).nodes == (DeviceNode(path="/dev/accel0"),)


# --- NVML ------------------------------------------------------------------------------------------------------------

# A stand-in for the driver's library, so that pynvml's own code runs against every answer a driver can give. It knows
# two GPUs, the second with MIG on. NVML_STAND_IN holds "function gpu code": that call then fails, for that GPU (-1: all).
STAND_IN = Path(__file__).with_name("nvml_stand_in.c")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in, and below it `old` with one that lacks what old drivers lack."""
    compiler = shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the stand-in for libnvidia-ml.so.1 needs Linux and gcc")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "old").mkdir()
    for place, flags in ((folder, []), (folder / "old", ["-DOLD"])):
        library = str(place / "libnvidia-ml.so.1")
        subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", library, str(STAND_IN)], check=True)
    return folder


def test_nvml_tells_gpus_slices_and_the_processes_of_others(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    driver, cuda, (first, second), problem = ask_nvml()
    assert (driver, cuda, problem) == ("580.95.05", "13.1", None)
    assert (first.index, first.name, first.uuid, first.capability) == (0, "Stand-in 0", "GPU-0", (9, 0))
    assert (first.total_bytes, first.free_bytes, first.compute_mode) == (8 * GIB, 7 * GIB, "exclusive_process")
    name = psutil.Process(1).name()
    assert first.processes == (GpuProcess(pid=1, name=name, used_bytes=GIB),), "each once, and not our own"
    part = GpuSlice(uuid="GPU-103", name="Stand-in 103", total_bytes=8 * GIB, free_bytes=7 * GIB)
    assert (first.mig, first.slices, second.mig, second.slices) == (False, (), True, (part,))


def test_an_old_driver_leaves_out_only_what_it_does_not_know(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in / "old"))
    driver, cuda, gpus, problem = ask_nvml()
    assert (driver, cuda, problem, len(gpus)) == ("580.95.05", None, None, 2)
    assert (gpus[1].capability, gpus[1].mig, gpus[1].processes) == (None, False, ())
    assert gpus[1].total_bytes == 8 * GIB


NVML_ERRORS = {
    1: "Uninitialized", 2: "InvalidArgument", 3: "NotSupported", 4: "NoPermission", 6: "NotFound", 7: "InsufficientSize",
    8: "InsufficientPower", 9: "DriverNotLoaded", 10: "Timeout", 11: "IrqIssue", 12: "LibraryNotFound",
    13: "FunctionNotFound", 14: "CorruptedInforom", 15: "GpuIsLost", 16: "ResetRequired", 17: "OperatingSystem",
    18: "LibRmVersionMismatch", 19: "InUse", 20: "Memory", 21: "NoData", 27: "NotReady", 28: "GpuNotFound", 999: "Unknown",
}  # fmt: skip


def test_every_nvml_error_is_named_and_costs_no_other_fact(stand_in: Path) -> None:
    calls = (
        "nvmlInitWithFlags -1",
        "nvmlDeviceGetCount_v2 -1",
        "nvmlDeviceGetHandleByIndex_v2 0",
        "nvmlDeviceGetMemoryInfo 1",
    )
    orders = [f"{call} {code}" for code in (*NVML_ERRORS, 4242) for call in calls]
    code = (
        "import json, os, sys; from tunix_rt.doctor.nvidia import read_nvml\n"
        "for order in sys.argv[1:]: os.environ['NVML_STAND_IN'] = order; print(json.dumps(read_nvml()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *orders],
        env={**os.environ, "LD_LIBRARY_PATH": str(stand_in)},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(zip(orders, map(json.loads, done.stdout.splitlines()), strict=True))
    for number, error in {
        **{code: f"NVMLError_{name}" for code, name in NVML_ERRORS.items()},
        4242: "NVMLError",
    }.items():
        init, count, handle, memory = (answers[f"{call} {number}"] for call in calls)
        assert [words.partition(":")[0] for words in init["problems"]] == [error]
        assert (init["driver_version"], init["gpus"]) == (None, [])
        assert [words.partition(":")[0] for words in count["problems"]] == [error]
        assert (count["driver_version"], count["gpus"]) == ("580.95.05", [])
        assert handle["problems"][0].startswith(f"{error}: ")
        assert handle["problems"][0].endswith(" (GPU 0)")
        assert (handle["driver_version"], [gpu["index"] for gpu in handle["gpus"]]) == ("580.95.05", [1])
        if number in (3, 4, 13):  # not an error of the GPU: it has no memory of its own, or an old driver
            assert memory["problems"] == []
            assert [gpu["total_bytes"] for gpu in memory["gpus"]] == [8 * GIB, None]
        else:
            assert memory["problems"][0].startswith(f"{error}: ")
            assert [gpu["index"] for gpu in memory["gpus"]] == [0]


def test_an_nvml_that_hangs_or_crashes_is_told_in_time_and_no_engine_is_started(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    monkeypatch.setenv("NVML_STAND_IN", "nvmlDeviceGetMemoryInfo -1 -2")
    assert ask_nvml() == (None, None, (), "NVML was ended by SIGSEGV: no output")
    monkeypatch.setenv("NVML_STAND_IN", "nvmlInitWithFlags -1 -1")
    monkeypatch.setattr(nvidia, "ask_nvml", partial(ask_nvml, seconds=0.5))
    monkeypatch.setattr(probe, "nvidia_facts", partial(nvidia_facts, made(tmp_path, {"dev/nvidia0": ""})))
    started = time.monotonic()
    facts = gather_facts()
    assert time.monotonic() - started < 40, "the stand-in sleeps for a minute"
    assert facts.nvidia.nvml_problem == "NVML gave no answer within 0.5 s"
    assert facts.nvidia.nodes == (DeviceNode(path="/dev/nvidia0"),)
    assert facts.torch == installed_torch(), "as installed: it would hang on the same driver"


# --- torch and jax ---------------------------------------------------------------------------------------------------


def installed(folder: Path, packages: dict[str, str]) -> None:
    """Metadata of packages, as an installation leaves it."""
    for name, version in packages.items():
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        made(folder, {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": text})


@parametrize("version", "file", "cuda", "hip")
def test_the_build_of_torch_is_known_without_starting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, file: str, cuda: str | None, hip: str | None
) -> None:
    installed(tmp_path, {"torch": version, "nvidia-cudnn-cu12": "9.10.2.21", "nvidia-cudnn-cu13": "9.15.1.9"})
    made(tmp_path, {"torch/version.py": file})
    monkeypatch.syspath_prepend(tmp_path)
    cudnn = {"13": "9.15.1.9", "12": "9.10.2.21"}.get((cuda or "").partition(".")[0])
    assert installed_torch() == Torch(version=version, cuda_build=cuda, hip_build=hip, cudnn=cudnn)


def test_the_plugins_of_jax_are_known_without_starting_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = {"jax-cuda13-pjrt": "0.10.2", "jax-cuda13-plugin": "0.10.1"}
    installed(tmp_path, {"jax": "0.10.2", "jaxlib": "0.10.0", "jax-triton": "0.3", "libtpu": "0.0.42", **plugins})
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_jax() == Jax(version="0.10.2", jaxlib="0.10.0", plugins=plugins)
    assert tpu_facts(tmp_path).libtpu == "0.0.42"


def test_torch_is_started_where_a_gpu_shows_and_says_what_its_metadata_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "nvidia_facts", lambda: Nvidia(nodes=(DeviceNode(path="/dev/nvidia0"),)))
    known = installed_torch()
    assert known is not None
    assert gather_facts(device="cpu").torch == gather_facts(backend="jax").torch == known
    asked = gather_facts().torch
    assert asked is not None
    assert asked.problem is None
    assert asked.arch_list is not None
    assert (asked.cuda_build, asked.hip_build) == (known.cuda_build, known.hip_build)


def test_jax_is_asked_for_one_platform_whatever_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("JAX_PLATFORM_NAME", "cpu")
    script = (
        "import json, os; asked = os.environ['JAX_PLATFORMS'] + os.environ.get('JAX_PLATFORM_NAME', '')\n"
        "print(json.dumps({'platform': asked, 'devices': [os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']], 'said': ['a', 'a']}))"
    )
    asked = ask_jax(Jax(version="0.10.2"), "tpu", script=script)
    assert (asked.asked_for, asked.platform, asked.devices, asked.said) == ("tpu", "tpu", ("false",), "a")
    for device, platform in {"auto": "cuda", "cuda": "cuda", "tpu": "tpu", "cpu": "cpu"}.items():
        assert jax_platform(device, gpu=True, tpu=True) == platform
    for device in ("auto", "cuda", "tpu", "cpu"):
        assert jax_platform(device, gpu=False, tpu=False) is None
        assert jax_platform(device, gpu=False, tpu=False, deep=True) == "cpu"
    assert jax_platform("tpu", gpu=True, tpu=False) is None
    assert jax_platform("cuda", gpu=False, tpu=True) is None
    assert jax_platform("auto", gpu=False, tpu=True) == "tpu"


def test_torch_is_not_told_to_ask_the_driver_instead_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    script = (
        "import json, os; plain = dict.fromkeys(['cuda_build', 'hip_build', 'cudnn', 'nccl'])\n"
        "told = 'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ\n"
        "print(json.dumps({**plain, 'arch_list': [], 'cuda_available': told, 'cuda_devices': 0, 'said': []}))"
    )
    assert ask_torch(Torch(version="2.13.0"), script=script).cuda_available is False


def test_an_assertion_without_words_becomes_a_sentence() -> None:
    script = "import json; print(json.dumps({'error': 'AssertionError', 'words': '', 'said': []}))"
    asked = ask_jax(Jax(version="0.10.2"), "cuda", script=script)
    assert asked.problem == (
        "jax with JAX_PLATFORMS=cuda raised AssertionError without a message, as it does if there is no device node"
    )
    assert asked.devices is None


@parametrize("script", "words")
def test_a_child_that_hangs_crashes_or_babbles_becomes_a_reason(script: str, words: str) -> None:
    seconds = 0.3 if "sleep" in script else 60.0
    command = [sys.executable, "-c", script]
    torch = ask_torch(Torch(version="2.13.0", cuda_build="13.0"), script=script, seconds=seconds)
    jax = ask_jax(Jax(version="0.10.2"), "cuda", script=script, seconds=seconds)
    driver, cuda, gpus, nvml = ask_nvml(command, seconds)
    for who, problem in (("torch", torch.problem), ("jax", jax.problem), ("NVML", nvml)):
        assert problem is not None
        assert problem.startswith(words.format(who))
        assert problem.isprintable()
        assert len(problem) < 340
    assert (torch.cuda_build, torch.cuda_available, jax.devices) == ("13.0", None, None)
    assert (driver, cuda, gpus) == (None, None, ())


def test_a_child_without_a_program_is_a_reason(tmp_path: Path) -> None:
    assert ask_nvml([str(tmp_path / "absent")])[3] == (
        f"NVML could not be started: {tmp_path / 'absent'}: No such file or directory"
    )


def test_the_words_of_a_child_do_not_carry_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    asked = ask_torch(Torch(version="2.13.0"), script="raise SystemExit('/home/somebody/lib/x.so: undefined symbol')")
    assert asked.problem == "torch ended with code 1: ~/lib/x.so: undefined symbol"


def test_a_child_that_prints_without_end_is_ended_and_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The growth of this process is measured; the limit is lowered for the time of the test alone."""
    monkeypatch.setattr(child, "MOST_PRINTED", 32 << 20)
    process, flood = psutil.Process(), "while True: print('x' * 65536)"
    before = process.memory_info().rss
    with pytest.raises(NoAnswer, match="torch printed more than 32 MiB"):
        ask_child([sys.executable, "-S", "-c", flood], who="torch", seconds=60.0)
    assert process.memory_info().rss - before < 16 << 20


def test_the_answer_at_the_end_of_many_words_is_found() -> None:
    talk = "print('x' * 3_000_000)\nprint('{\"a\": 1}')"
    assert ask_child([sys.executable, "-S", "-c", talk], who="torch", seconds=60.0) == {"a": 1}


def test_without_a_place_for_files_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(child.tempfile, "TemporaryFile", full)
    with pytest.raises(NoAnswer, match="torch could not be started: true: No space left on device"):
        ask_child(["true"], who="torch", seconds=1.0)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="where a child is not seen ending before it is reaped")
def test_the_children_of_a_child_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        f"import subprocess, time; p = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write(str(p.pid))"
    )
    with pytest.raises(NoAnswer, match="torch: no output"):  # what it left behind holds its output open
        ask_child([sys.executable, "-c", script], who="torch", seconds=40.0)
    grandchild = int(note.read_text())
    for _ in range(1_000):
        if not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    os.kill(grandchild, signal.SIGKILL)
    pytest.fail("a process outlived the question")
