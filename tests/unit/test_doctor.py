"""The doctor's judgement: one check per cause, masks, wheels, and a choice that never falls back. The machines people
really have are in tests/facts; here are the rules behind them."""

import json
import os
from dataclasses import replace
from itertools import product

import pytest
from click.testing import CliRunner

from tests.tables import parametrize
from tunix_rt.cli.main import cli
from tunix_rt.doctor.checks import EVERY_CHECK, first_failure, judge
from tunix_rt.doctor.facts import (
    Ask,
    DeviceNode,
    Facts,
    Gpu,
    GpuSlice,
    Host,
    Jax,
    Nvidia,
    PciDevice,
    Torch,
    Tpu,
    facts_from_json,
    visible_gpus,
)
from tunix_rt.doctor.selection import (
    choose_device,
    device_lines,
    env_info_text,
    environment_for,
    set_environment,
    torch_version_text,
)
from tunix_rt.doctor.wheels import fits, fitting_wheels, number, why_no_wheel
from tunix_rt.errors import ConfigError, HardwareError, InputError
from tunix_rt.storage import to_plain

GIB = 2**30
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = Gpu(name="NVIDIA H200", uuid="GPU-aa", total_bytes=140 * GIB, free_bytes=139 * GIB, capability=(9, 0))
RTX = Gpu(index=1, name="RTX 5090", uuid="GPU-bb", total_bytes=32 * GIB, free_bytes=31 * GIB, capability=(12, 0))
CUDA_TORCH = Torch(version="2.13.0+cu130", cuda_build="13.0", arch_list=ARCHES, cuda_available=True, cuda_devices=1)
NODES = tuple(DeviceNode(path=path) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"))
CPU_ONLY = Facts(
    host=Host(ram_total_bytes=24 * GIB, ram_available_bytes=20 * GIB, disk_free_bytes=100 * GIB, cpu="A CPU"),
    nvidia=Nvidia(nvml_problem="NVMLError_LibraryNotFound: NVML Shared Library Not Found"),
    torch=Torch(version="2.13.0+cpu"),
)
WITH_GPU = replace(
    CPU_ONLY,
    nvidia=Nvidia(
        pci=(PciDevice(address="0000:01:00.0", vendor="0x10de", device="0x2335"),), module_version="580.95.05",
        module_flavour="open", nodes=NODES, libcuda=("/usr/lib/libcuda.so.1",), driver_version="580.95.05",
        driver_cuda="13.0", gpus=(H200,),
    ),
    torch=CUDA_TORCH,
)  # fmt: skip
TPU_CHIP = PciDevice(address="0000:00:04.0", vendor="0x1ae0", device="0x0063")
WITH_TPU = replace(CPU_ONLY, tpu=Tpu(pci=(TPU_CHIP,) * 8, libtpu="0.0.51"), jax=Jax(version="0.10.2", jaxlib="0.10.2"))


def masked(facts: Facts, mask: str | None) -> Facts:
    return replace(facts, environment={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})


def with_gpus(*gpus: Gpu, **more: object) -> Facts:
    return replace(WITH_GPU, nvidia=replace(WITH_GPU.nvidia, gpus=gpus, **more))


# --- the choice ------------------------------------------------------------------------------------------------------


def test_a_gpu_that_fits_is_chosen_by_auto_cuda_and_gpu() -> None:
    for asked in ("auto", "cuda", "gpu"):
        choice = choose_device(Ask(device=asked), WITH_GPU)
        assert (choice.device, choice.kind, choice.count) == ("cuda", "NVIDIA H200", 1)
        assert (choice.memory_bytes, choice.free_bytes) == (140 * GIB, 139 * GIB)
        assert device_lines(choice, WITH_GPU)[-1] == "Using device: cuda"
    assert "torch 2.13.0+cu130 for CUDA 13.0 has its kernels" in choose_device(Ask(), WITH_GPU).reason
    assert choose_device(Ask(), replace(WITH_GPU, tpu=WITH_TPU.tpu)).device == "cuda", "a GPU goes before a TPU"


def test_without_an_accelerator_auto_is_the_cpu_and_says_why() -> None:
    choice = choose_device(Ask(), CPU_ONLY)
    assert (choice.device, choice.reason) == ("cpu", "no NVIDIA GPU or TPU present")
    assert (choice.memory_bytes, choice.free_bytes) == (24 * GIB, 20 * GIB)
    lines = device_lines(choice, CPU_ONLY)
    assert lines[-1] == "Using device: cpu"
    assert "A CPU; count 1; memory 24.0 GiB, 20.0 GiB free" in lines[1]


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_what_is_asked_for_and_not_there_is_refused_with_a_way_out(device: str) -> None:
    with pytest.raises(HardwareError, match=f"no {'GPU' if device == 'cuda' else 'TPU'} present") as refused:
        choose_device(Ask(device=device), CPU_ONLY)
    assert (refused.value.exit_code, refused.value.cause) == (4, "no-gpu" if device == "cuda" else "no-tpu")
    assert "--device cpu" in refused.value.fix


def test_auto_never_takes_the_cpu_beside_an_accelerator() -> None:
    """Every failing GPU check, and a TPU beside the torch engine."""
    broken = [
        masked(WITH_GPU, ""), replace(WITH_GPU, torch=Torch(version="2.13.0")), replace(WITH_GPU, torch=None), WITH_TPU,
        with_gpus(driver_version="580.95.05"),
    ]  # fmt: skip
    for facts in broken:
        with pytest.raises(HardwareError) as refused:
            choose_device(Ask(), facts)
        assert refused.value.cause
        assert "--device cpu" in refused.value.fix


@pytest.mark.parametrize("facts", [CPU_ONLY, WITH_GPU, WITH_TPU, masked(WITH_GPU, "")])
def test_the_cpu_works_wherever_torch_is_installed(facts: Facts) -> None:
    assert choose_device(Ask(device="cpu"), facts).device == "cpu"


def test_variables_of_accelerators_do_not_touch_a_cpu_run() -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "7", "JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    set_up = replace(CPU_ONLY, environment=variables)
    for asked in ("cpu", "auto"):
        assert choose_device(Ask(device=asked), set_up) == choose_device(Ask(device=asked), CPU_ONLY)


def test_a_plan_needs_no_engine() -> None:
    assert choose_device(Ask(device="cpu", backend=None), replace(CPU_ONLY, torch=None)).device == "cpu"
    assert choose_device(Ask(device="cuda", backend=None), replace(WITH_GPU, torch=None)).device == "cuda"


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'npu'"):
        choose_device(Ask(device="npu"), CPU_ONLY)


def test_eight_chips_of_a_tpu_are_counted_with_the_memory_of_one() -> None:
    choice = choose_device(Ask(backend="jax"), WITH_TPU)
    assert (choice.device, choice.kind, choice.count) == ("tpu", "TPU v5 lite", 8)
    assert choice.memory_bytes == round(15.75 * GIB)
    cores = replace(WITH_TPU, tpu=Tpu(pci=(replace(TPU_CHIP, device="0x0027", subsystem="0x004f"),) * 4, libtpu="1"))
    choice = choose_device(Ask(backend="jax"), cores)
    assert (choice.kind, choice.count) == ("TPU v3", 8)


def test_variables_and_vfio_nodes_alone_make_no_tpu() -> None:
    other = replace(CPU_ONLY, tpu=Tpu(nodes=(DeviceNode(path="/dev/vfio/0"),), libtpu="0.0.51"))
    assert choose_device(Ask(), other).device == "cpu"


def test_an_engine_is_given_exactly_one_platform() -> None:
    for device in ("cpu", "cuda", "tpu"):
        assert environment_for(device, "jax")["JAX_PLATFORMS"] == device
    assert "JAX_PLATFORMS" not in environment_for("cuda", "torch")
    assert environment_for("cpu", "torch") == {}


def test_the_order_of_gpus_is_that_of_nvml_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    set_environment("cuda", "jax")
    assert (os.environ["CUDA_DEVICE_ORDER"], os.environ["JAX_PLATFORMS"]) == ("PCI_BUS_ID", "cuda")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    set_environment("cuda", "torch")
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


# --- masks and slices ------------------------------------------------------------------------------------------------


@parametrize("mask", "shown")
def test_a_mask_shows_what_cuda_would_show(mask: str | None, shown: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(masked(with_gpus(H200, RTX), mask))] == shown


def test_a_slice_of_a_gpu_counts_with_its_own_memory() -> None:
    slices = tuple(
        GpuSlice(uuid=f"MIG-{i}", name="H200 MIG 1g.18gb", total_bytes=(i + 1) * GIB, free_bytes=GIB) for i in (0, 1)
    )
    cut = with_gpus(replace(H200, mig=True, slices=slices))
    assert [gpu.total_bytes for gpu in visible_gpus(cut)] == [GIB], "CUDA takes the first"
    assert [gpu.total_bytes for gpu in visible_gpus(masked(cut, "MIG-1"))] == [2 * GIB]
    assert choose_device(Ask(), masked(cut, "MIG-1")).memory_bytes == 2 * GIB
    assert first_failure(judge(masked(cut, "MIG-9"), Ask())).cause == "mig-without-slice"  # type: ignore[union-attr]


def test_beside_whole_gpus_a_cut_one_is_not_shown() -> None:
    part = GpuSlice(uuid="MIG-0", name="a slice", total_bytes=GIB, free_bytes=GIB)
    assert visible_gpus(with_gpus(replace(H200, mig=True, slices=(part,)), RTX)) == (RTX,)


def test_two_gpus_offer_the_memory_of_the_smaller() -> None:
    choice = choose_device(Ask(), with_gpus(H200, RTX))
    assert (choice.count, choice.memory_bytes, choice.kind) == (2, 32 * GIB, "NVIDIA H200, RTX 5090")
    assert choice.free_bytes == 31 * GIB


def test_memory_shared_with_the_cpu_is_ram() -> None:
    spark = with_gpus(Gpu(name="NVIDIA GB10", capability=(12, 1)))
    assert choose_device(Ask(), spark).memory_bytes == 24 * GIB


# --- checks ----------------------------------------------------------------------------------------------------------


def test_a_healthy_computer_fails_and_warns_of_nothing() -> None:
    for facts, ask in ((WITH_GPU, Ask(device="cuda")), (CPU_ONLY, Ask(device="cpu")), (WITH_TPU, Ask(backend="jax"))):
        assert [check for check in judge(facts, ask) if check.verdict in ("fail", "warn")] == []


def test_every_cause_has_one_check() -> None:
    causes = [check.cause for check in judge(WITH_GPU, Ask())]
    assert len(causes) == len(set(causes)) == len(EVERY_CHECK) > 40


def test_a_cause_hides_what_follows_from_it_and_nothing_else() -> None:
    def failing(facts: Facts, **ask: str) -> list[str]:
        return [check.cause for check in judge(facts, Ask(**ask)) if check.verdict == "fail"]

    assert failing(CPU_ONLY, device="cuda") == ["no-gpu"]
    assert failing(replace(CPU_ONLY, torch=None), device="cuda") == ["no-gpu", "torch-missing"]
    assert failing(masked(replace(WITH_GPU, torch=Torch(version="2.13.0")), "")) == ["masked", "cpu-wheel"]


def test_no_mixture_of_facts_makes_a_check_stumble() -> None:
    """Each failing part of the computer with each other: an answer for every one, and a refusal that has a cause."""
    unknown = Gpu(name="?")
    odd_bus = Nvidia(pci=(PciDevice(address="?", vendor="0x10de", device=""),), module_version="none")
    nvidia = (
        Nvidia(), odd_bus, WITH_GPU.nvidia, replace(WITH_GPU.nvidia, gpus=()), replace(WITH_GPU.nvidia, nodes=()),
        Nvidia(gpus=(unknown,)), Nvidia(nvml_problem="NVMLError_Timeout: Timeout"), Nvidia(module_version="535.1"),
        Nvidia(nodes=(DeviceNode(path="/dev/dxg", usable=False),), libcuda=("/usr/lib/wsl/lib/libcuda.so.1",)),
    )  # fmt: skip
    torches = (None, CUDA_TORCH, Torch(version="nonsense", cuda_build="abc", problem="a hang"))
    plugin = Jax(version="0.10.2", plugins={"jax-cuda13-plugin": "0.10.1"}, platform="cpu")
    jaxes = (None, Jax(version="0.10.2"), plugin)
    masks = ({}, {"CUDA_VISIBLE_DEVICES": "GPU-zz", "JAX_PLATFORMS": "cuda,cpu", "NVIDIA_VISIBLE_DEVICES": "void"})
    refusals = 0
    for parts in product(nvidia, torches, jaxes, masks, (None, "docker"), (False, True)):
        host = replace(CPU_ONLY.host, container=parts[4], wsl=parts[5])
        facts = Facts(host=host, nvidia=parts[0], torch=parts[1], jax=parts[2], environment=parts[3])
        for device, backend in (("auto", "torch"), ("cuda", "jax"), ("tpu", "jax"), ("cuda", None)):
            failing = first_failure(judge(facts, Ask(device=device, backend=backend, dtype="bfloat16")))
            if failing is None:
                choose_device(Ask(device=device, backend=backend, dtype="bfloat16"), facts)
                continue
            refusals += 1
            assert failing.saw and failing.why and failing.fix, failing
    assert refusals > 400


@parametrize("said", "words")
def test_the_words_of_torch_lead_to_their_own_way_out(said: str | None, words: str) -> None:
    facts = replace(WITH_GPU, torch=replace(CUDA_TORCH, cuda_available=False, said=said))
    failure = first_failure(judge(facts, Ask()))
    assert failure is not None and failure.cause == "torch-sees-no-gpu"
    assert words in failure.fix


@pytest.mark.parametrize(
    ("facts", "ask", "cause", "words"),
    [
        # WSL has the driver of Windows, whose floor is another
        (
            Facts(
                host=replace(CPU_ONLY.host, wsl=True),
                nvidia=Nvidia(
                    nodes=(DeviceNode(path="/dev/dxg"),), libcuda=("/usr/lib/wsl/lib/libcuda.so.1",), gpus=(H200,),
                    driver_version="526.86",
                ),
                torch=replace(CUDA_TORCH, cuda_build="12.6", cuda_available=False),
            ),
            Ask(), "driver-below-wheel", "update the",
        ),
        (
            replace(
                WITH_GPU, nvidia=replace(WITH_GPU.nvidia, gpus=()), host=replace(CPU_ONLY.host, container="docker"),
                environment={"NVIDIA_VISIBLE_DEVICES": "none"},
            ),
            Ask(), "container-without-runtime", "--gpus all",
        ),
        (
            replace(with_gpus(replace(H200, capability=(6, 0))), jax=Jax(version="0.10.2")),
            Ask(backend="jax"), "jax-without-plugin", "jax[cuda12]",
        ),
        *[
            (replace(WITH_TPU, jax=replace(WITH_TPU.jax, problem=said)), Ask(backend="jax"), "jax-broken", "end the process")
            for said in ("The TPU is already in use by process 5", "in use by process 7", "Device or resource busy")
        ],
    ],
)  # fmt: skip
def test_what_a_computer_is_told(facts: Facts, ask: Ask, cause: str, words: str) -> None:
    failure = first_failure(judge(facts, ask))
    assert failure is not None and failure.cause == cause
    assert words in failure.fix


def test_what_torch_does_is_worth_more_than_a_missing_node_or_an_old_driver() -> None:
    """CUDA that starts refutes the tables: a Jetson has no uvm node, a compatibility package lifts a driver."""
    odd = with_gpus(H200, driver_version="570.1", nodes=NODES[:2])
    assert choose_device(Ask(), odd).device == "cuda"
    refused = replace(odd, torch=replace(CUDA_TORCH, cuda_available=False))
    assert first_failure(judge(refused, Ask())).cause == "uvm-missing"  # type: ignore[union-attr]


def test_a_warning_of_torch_about_the_architecture_is_a_failure_whatever_the_list_says() -> None:
    said = "NVIDIA H200 with CUDA capability sm_90 is not compatible with the current PyTorch installation."
    failure = first_failure(judge(replace(WITH_GPU, torch=replace(CUDA_TORCH, said=said)), Ask()))
    assert failure is not None and failure.cause == "wheel-lacks-architecture"


@parametrize("platforms", "device", "cause")
def test_a_list_of_platforms_that_ends_at_the_cpu_is_refused(platforms: str, device: str, cause: str | None) -> None:
    jax = replace(CPU_ONLY, jax=Jax(version="0.10.2"), environment={"JAX_PLATFORMS": platforms})
    causes = [check.cause for check in judge(jax, Ask(device=device, backend="jax")) if check.verdict == "fail"]
    assert (cause in causes) if cause else causes == []


# --- wheels ----------------------------------------------------------------------------------------------------------


@parametrize("capability", "arches", "cuda", "expected")
def test_a_wheel_fits_by_major_and_minor(
    capability: tuple[int, int], arches: tuple[str, ...], cuda: str, expected: bool
) -> None:
    assert fits(capability, arches, cuda) is expected


def test_no_wheel_is_chosen_that_has_no_kernels_or_no_driver() -> None:
    """Over every GPU generation and driver branch: what is chosen fits, and where nothing fits there is a reason."""
    codes = ("5.2", "6.0", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
    drivers = ("470.1", "525.60.13", "560.35.05", "570.124.06", "575.57.08", "580.65.06", "590.44", "615.71")
    platforms = ("Linux x86_64", "Linux aarch64", "Windows AMD64", "Darwin arm64")
    for capability, driver, platform in product(map(number, codes), drivers, platforms):
        found = fitting_wheels([capability], driver, *platform.split())
        for wheel in found:
            assert fits(capability, wheel.architectures, wheel.cuda)
            assert number(driver) >= number({"12": "525.60.13", "13": "580.65.06"}[wheel.cuda[:2]])
            assert capability < (10, 0) or number(driver) >= (570, 26)
            assert capability >= (7, 5) or number(driver)[0] <= 580
        assert found or all(why_no_wheel([capability], driver, *platform.split()))


# --- facts in files, words --------------------------------------------------------------------------------------------


def test_facts_survive_a_json_file() -> None:
    for facts in (CPU_ONLY, WITH_GPU, WITH_TPU):
        assert facts_from_json(json.loads(json.dumps(to_plain(facts)))) == facts


@pytest.mark.parametrize(
    "damage", [[], {"host": {}}, {**to_plain(CPU_ONLY), "gpus": []}, {**to_plain(CPU_ONLY), "schema": "x/2"}]
)
def test_what_is_no_facts_file_is_refused_with_the_place(damage: object) -> None:
    with pytest.raises(InputError, match=r"^here\.json: "):
        facts_from_json(damage, source="here.json")


def test_the_text_files_hold_driver_gpu_and_wheel() -> None:
    text = env_info_text(WITH_GPU)
    assert "driver version: 580.95.05\ncuda version the driver reports: 13.0\n" in text
    assert "gpu 0: NVIDIA H200, GPU-aa, 150323855360 bytes, compute capability 9.0" in text
    assert torch_version_text(WITH_GPU).startswith("torch: 2.13.0+cu130\ncuda build: 13.0\narchitectures: sm_75")
    assert torch_version_text(replace(WITH_GPU, torch=None)) == "torch: not installed\n"


# --- the verb --------------------------------------------------------------------------------------------------------


def judged(tmp_path, facts: Facts, *arguments: str):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(to_plain(facts)))
    return CliRunner().invoke(cli, ["doctor", "--facts", str(path), *arguments])


def test_the_verdict_comes_first_then_what_to_do(tmp_path) -> None:
    ready = judged(tmp_path, WITH_GPU)
    assert ready.exit_code == 0
    assert ready.stdout.startswith("ready: cuda, NVIDIA H200, 139.0 of 140.0 GiB free")
    refused = judged(tmp_path, masked(WITH_GPU, ""))
    first, saw, fix, more = refused.stdout.splitlines()[:4]
    assert refused.exit_code == 4 and refused.stderr == ""
    assert first == "not ready: the GPU is masked by CUDA_VISIBLE_DEVICES"
    assert "CUDA_VISIBLE_DEVICES=''" in saw and "unset CUDA_VISIBLE_DEVICES" in fix and "docs/doctor/masked.md" in more
    assert len(refused.stdout.splitlines()) < 14, "no wall of facts"


def test_the_json_has_verdict_cause_kind_and_facts(tmp_path) -> None:
    ready = json.loads(judged(tmp_path, WITH_GPU, "--json").stdout)
    assert (ready["verdict"], ready["choice"]["device"]) == ("ready", "cuda")
    assert facts_from_json(ready["facts"]) == WITH_GPU
    refused = judged(tmp_path, replace(WITH_GPU, torch=Torch(version="2.13.0+cpu")), "--json")
    said = json.loads(refused.stdout)
    assert (refused.exit_code, said["verdict"], said["cause"], said["kind"]) == (4, "refused", "cpu-wheel", "wheel")
    assert "torch==2.13.0+cu130" in said["fix"] and "choice" not in said


def test_a_facts_file_cannot_be_proven(tmp_path) -> None:
    assert judged(tmp_path, WITH_GPU, "--prove").exit_code == 2


def test_a_file_that_is_no_json_is_named(tmp_path) -> None:
    (tmp_path / "facts.json").write_text("GPU: yes")
    refused = CliRunner().invoke(cli, ["doctor", "--facts", str(tmp_path / "facts.json")])
    assert refused.exit_code == 3 and "facts.json" in refused.stderr
