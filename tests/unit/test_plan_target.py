"""A device is named as people name it, and what is not known is said with the nearest."""

import re
from types import SimpleNamespace

import pytest

from tests.tables import parametrize
from tunix_rt.accelerators import accelerators
from tunix_rt.errors import ConfigError
from tunix_rt.plan.target import FLOAT16_TFLOPS, PLACES, TPU_SLICES, all_targets, target_here, target_named, topology_of

GIB = 2**30


@pytest.mark.parametrize("name", ["rtx5090", "RTX 5090", "rtx-5090", "GeForce RTX 5090", "NVIDIA GeForce RTX 5090"])
def test_a_card_is_found_by_its_id_and_by_the_names_it_has_elsewhere(name):
    found = target_named(name)
    assert (found.name, found.device, found.count, found.capability) == ("rtx5090", "cuda", 1, (12, 0))
    assert found.memory_bytes == found.free_bytes == round(31.36 * GIB)
    assert (found.tflops, found.bandwidth_gb_s) == (209.5, 1792)


@pytest.mark.parametrize("name, gigabytes", [("8gb", 8), ("24GB", 24), ("12 GiB", 12), ("0.5gb", 0.5)])
def test_a_size_is_a_gpu_with_a_little_less_than_it_says(name, gigabytes):
    found = target_named(name)
    assert found.memory_bytes == found.free_bytes == round(0.97 * gigabytes * GIB)
    assert (found.device, found.tflops, found.bandwidth_gb_s) == ("cuda", None, None)


@parametrize("name", "id_", "count", "topology")
def test_a_slice_of_tpus_is_so_many_devices_and_has_a_topology(name, id_, count, topology):
    found = target_named(name)
    assert (found.id, found.device, found.count) == (id_, "tpu", count)
    assert topology_of(found) == topology


@pytest.mark.parametrize("name", ["tpu-v5e-7", "tpu-v3-8", "h200", "8gb"])
def test_what_the_compiler_has_no_arrangement_for_is_refused_with_one_that_it_has(name):
    with pytest.raises(ConfigError) as caught:
        topology_of(target_named(name))
    assert "--on tpu-v5e-8" in caught.value.fix


@pytest.mark.parametrize(
    "name, nearest",
    [("rtx509", "rtx5090"), ("h20", "h200"), ("a100", "a100-40-pcie or a100-40-sxm"), ("tpu-v5e8x", "tpu-v5e-8")],
)
def test_an_unknown_device_is_refused_with_the_nearest_names(name, nearest):
    with pytest.raises(ConfigError, match=re.escape(f"--on {name}: no such device")) as caught:
        target_named(name)
    assert nearest in caught.value.fix


@parametrize("name", "why")
def test_a_device_that_cannot_be_planned_for_is_refused_with_the_reason(name, why):
    with pytest.raises(ConfigError, match=why):
        target_named(name)


def test_every_device_of_the_table_over_all_can_be_named_and_has_memory():
    targets = all_targets()
    assert len(targets) > 40 and len({target.name for target in targets}) == len(targets)
    for target in targets:
        found = target_named(target.name)
        assert (found.memory_bytes, found.count) == (target.memory_bytes, target.count) and target.memory_bytes > GIB


def test_what_stands_beside_the_catalogue_agrees_with_it():
    ids = {device.id: device for device in accelerators()}
    assert set(FLOAT16_TFLOPS) == {id_ for id_, one in ids.items() if one.capability and one.capability < (8, 0)}
    assert all(ids[id_].bf16_tflops is None for id_ in FLOAT16_TFLOPS)
    assert all("= 1 jax device" in ids[id_].name for id_, _ in TPU_SLICES.values())
    assert all(target_named(place).name == target_named(device).name for place, device in PLACES.items())


def test_a_device_at_hand_keeps_what_is_free_and_gets_the_rates_of_its_name():
    choice = SimpleNamespace(
        device="cuda", kind="NVIDIA H200", count=2, memory_bytes=round(139.8 * GIB), free_bytes=7 * GIB,
        capability=(9, 0),
    )  # fmt: skip
    found = target_here(choice)
    assert (found.name, found.id, found.free_bytes, found.tflops) == ("NVIDIA H200 (here)", "h200", 7 * GIB, 989)
    unknown = target_here(SimpleNamespace(**{**vars(choice), "kind": "NVIDIA X1"}))
    assert (unknown.id, unknown.tflops, unknown.free_bytes) == (None, None, 7 * GIB)
    cpu = target_here(SimpleNamespace(**{**vars(choice), "device": "cpu"}))
    assert (cpu.device, cpu.tflops) == ("cpu", None)
