"""The table of accelerators: a device is found by name and memory together, or not at all."""

import csv
from collections import Counter

import pytest

from tunix_rt.accelerators import TABLE, accelerators, find_accelerator, peaks

GIB = 2**30
MIB = 2**20


def found(name: str, memory_bytes: float | None) -> str | None:
    device = find_accelerator(name, None if memory_bytes is None else int(memory_bytes))
    return device.id if device else None


def test_every_row_is_read_and_names_its_source():
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert len({row["id"] for row in rows}) == len(rows) > 50
    devices = accelerators()
    assert [device.id for device in devices] == [row["id"] for row in rows if row["vendor"] not in ("kaggle", "colab")]
    for device in devices:
        assert device.names and all(device.names) and device.source
        assert (device.capability is not None) == (device.vendor == "nvidia")
        for figure in (device.memory_gib, device.bandwidth_gb_s, device.bf16_tflops, device.fp32_tflops):
            assert figure is None or figure > 0


def test_no_two_devices_share_name_and_memory():
    keys = Counter((name, device.memory_gib) for device in accelerators() for name in device.names if device.memory_gib)
    assert max(keys.values()) == 1


def test_every_device_with_a_known_memory_is_found_by_each_of_its_names():
    for device in accelerators():
        for name in device.names if device.memory_gib else ():
            assert found(name, device.memory_gib * GIB) == device.id


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA H200", 150754820096, "h200"),  # as NVML counts
        ("NVIDIA H200", 143155 * MIB, "h200"),  # as torch counts
        ("NVIDIA GeForce RTX 3060", 12288 * MIB, "rtx3060-12"),
        ("NVIDIA GeForce RTX 3060", 8192 * MIB, None),
        ("NVIDIA GeForce RTX 3060", None, None),
        ("NVIDIA GeForce RTX 4060 Ti", 16380 * MIB, "rtx4060ti-16"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB, None),
        ("GeForce RTX 3090", 24576 * MIB, "rtx3090"),  # by an old driver
        ("NVIDIA GeForce RTX 3090 Ti", 24564 * MIB, None),
        ("NVIDIA A100 80GB PCIe", 81920 * MIB, "a100-80-pcie"),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb", 9728 * MIB, None),
        ("NVIDIA A100 80GB PCIe", 9728 * MIB, None),
        ("TPU v3", 16 * GIB, "tpu-v3-core"),
        ("TPU v3", 32 * GIB, "tpu-v3-chip"),
        ("TPU v3", None, None),
        ("TPU v5 lite", None, "tpu-v5e"),
        ("Tesla T4", 15360 * MIB, "t4"),
        ("NVIDIA GB10", None, "gb10"),
        ("NVIDIA B300 SXM6 AC", 275 * GIB, "b300"),  # its memory is not in the table
        ("Orin", 61 * GIB, None),  # three devices of that name, none with a memory
        ("Apple M5", None, "apple-m"),
        ("NVIDIA GeForce RTX 9999", 32 * GIB, None),
    ],
)
def test_a_device_is_known_by_name_and_memory_together(name, memory, expected):
    assert found(name, memory) == expected


def test_peaks_follow_the_dtype_and_are_none_where_nothing_is_published():
    h200, t4 = find_accelerator("NVIDIA H200", 140 * GIB), find_accelerator("Tesla T4", 15 * GIB)
    assert peaks(h200, "bfloat16") == peaks(h200, "float16") == (989, 4800)
    assert peaks(h200, "float32") == (66.9, 4800)
    assert peaks(t4, "bfloat16") == (None, 320)
