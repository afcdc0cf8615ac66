"""How arrays are laid over devices. Devices here are those of a mesh without any: shapes are enough."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tunix_rt.engines.jax.mesh import batch_sharding, make_mesh, parameter_shardings, rows_for, sharded_dimension
from tunix_rt.errors import ConfigError

EIGHT = AbstractMesh((1, 8), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))
TWO_BY_FOUR = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def specs(mesh, **shapes):
    def arrays(tree):
        if isinstance(tree, dict):
            return {name: arrays(of) for name, of in tree.items()}
        return jax.ShapeDtypeStruct(tree, "float32")

    return jax.tree.map(lambda sharding: sharding.spec, parameter_shardings(mesh, arrays(shapes)))


def test_every_array_is_cut_along_its_largest_dimension_that_divides():
    found = specs(EIGHT, last_norm=(16,), positions=(20, 64), wide=(8, 24))
    assert found == {
        "last_norm": PartitionSpec("fsdp"),
        "positions": PartitionSpec(None, "fsdp"),
        "wide": PartitionSpec(None, "fsdp"),
    }


def test_layers_are_never_cut_apart():
    found = specs(EIGHT, layers={"up": (16, 8, 64), "mlp_norm": (16, 8), "odd": (16, 7)})["layers"]
    assert found["up"] == PartitionSpec(None, None, "fsdp")
    assert found["mlp_norm"] == PartitionSpec(None, "fsdp")
    assert found["odd"] == PartitionSpec()


def test_tables_are_cut_by_the_vocabulary_where_that_goes():
    found = specs(EIGHT, embedding=(16, 64), head=(15, 64))
    assert found == {"embedding": PartitionSpec("fsdp"), "head": PartitionSpec(None, "fsdp")}


def test_what_cannot_be_cut_is_whole_on_every_device():
    assert specs(EIGHT, last_norm=(7,), scalar=()) == {"last_norm": PartitionSpec(), "scalar": PartitionSpec()}


def test_optimizer_state_is_cut_as_its_parameters():
    found = specs(EIGHT, exp_avg={"embedding": (16, 64), "layers": {"up": (16, 8, 64)}})["exp_avg"]
    assert found["embedding"] == PartitionSpec("fsdp")
    assert found["layers"]["up"] == PartitionSpec(None, None, "fsdp")


def test_layers_of_a_model_that_has_them_apart_are_arrays_as_any_other():
    assert specs(EIGHT, layers={0: {"up": (64, 8)}})["layers"][0]["up"] == PartitionSpec("fsdp")


def test_over_replicas_the_state_is_copied_and_rows_are_split():
    assert specs(TWO_BY_FOUR, wide=(4, 2)) == {"wide": PartitionSpec("fsdp")}
    assert batch_sharding(TWO_BY_FOUR).spec == PartitionSpec(None, ("data", "fsdp"), None)


@pytest.mark.parametrize(("rows", "filled"), [(1, 8), (8, 8), (9, 16)])
def test_rows_are_filled_up_to_the_devices(rows, filled):
    assert rows_for(EIGHT, rows) == filled


def test_of_equal_dimensions_the_first_is_cut():
    assert sharded_dimension((8, 8), 4) == 0
    assert sharded_dimension((8, 8), 4, first=1) == 1
    assert sharded_dimension((0, 3), 4) is None


def test_a_mesh_has_all_devices_and_refuses_replicas_that_do_not_divide_them():
    devices = jax.devices()
    mesh = make_mesh()
    assert (mesh.axis_names, mesh.devices.shape) == (("data", "fsdp"), (1, len(devices)))
    assert list(np.ravel(mesh.devices)) == devices
    with pytest.raises(ConfigError, match=rf"data_replicas: 3 does not divide the {len(devices[:1])} devices"):
        make_mesh(devices[:1], replicas=3)
