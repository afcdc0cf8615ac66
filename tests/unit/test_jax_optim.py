"""The JAX engine's optimizers against numpy in float64, and against the PyTorch engine's.

Where numbers are float64, the test runs with JAX's 64-bit types turned on for its length.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.optimizer_checks import make
from tunix_rt.config.optimizers import optimizers_of
from tunix_rt.config.settings import Training
from tunix_rt.engines.jax import optim as jax_optim
from tunix_rt.engines.optimizers import Hyperparameters, module_of
from tunix_rt.errors import ConfigError

SHAPES = {
    "embedding": (12, 8),
    "last_norm": (8,),
    "layers": {"up": (3, 16, 8), "mlp_norm": (3, 8), "cube": (3, 4, 2, 6)},
}
STEPS = 6
RATES = [1e-2 * (1 - step / 10) for step in range(STEPS)]
DECAY = 0.1

each_kind = pytest.mark.parametrize("kind", optimizers_of("jax"))


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def optim(kind="adamw", *, stochastic=True, decay=DECAY):
    return jax_optim.Optim(
        kind=kind, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=decay, stochastic=stochastic
    )  # fmt: skip


def drawn(seed, dtype):
    numbers = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: numbers.standard_normal(shape).astype(dtype),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def walked(kind, dtype, *, scale=1.0):
    rule, params = optim(kind), jax.tree.map(jnp.asarray, drawn(0, dtype))
    state = jax_optim.init(params, rule)
    once = jax.jit(partial(jax_optim.update, scale=scale, optim=rule))
    for step in range(1, STEPS + 1):
        key = jax.random.fold_in(jax.random.key(0), step)
        params, state = once(params, drawn(step, dtype), state, step=jnp.int32(step), lr=RATES[step - 1], key=key)
    return params, state


def tensors(tree):
    """Every tensor by a name of its own, the layers of a stacked array apart."""
    found = {name: np.asarray(array) for name, array in tree.items() if name != "layers" and array is not None}
    for name, array in tree["layers"].items():
        found |= {} if array is None else {f"{name}.{layer}": of for layer, of in enumerate(np.asarray(array))}
    return found


def expected(kind, *, scale=1.0):
    """Parameters, and moments by their names, that the reference comes to: every tensor by itself."""
    params, moments = {}, {}
    gradients = [tensors(drawn(step, "float64")) for step in range(1, STEPS + 1)]
    for name, weights in tensors(drawn(0, "float64")).items():
        decay = DECAY if weights.ndim >= 2 else 0.0
        states = {"parameter": weights}
        for step, (gradient, lr) in enumerate(zip(gradients, RATES, strict=True), 1):
            at = Hyperparameters(step=step, lr=lr, decay=decay)
            states = module_of(kind).reference(states.pop("parameter"), states, gradient[name] * scale, at)
        params[name] = states.pop("parameter")
        moments |= {f"{part}/{name}": array for part, array in states.items()}
    return params, moments


def assert_close(found, wanted, **closeness):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name], "float64"), array, err_msg=name, **closeness)


@each_kind
@pytest.mark.parametrize(("dtype", "off"), [("float64", 1e-12), ("float32", 3e-6)])
def test_several_steps_are_those_of_the_reference_for_every_layer_by_itself(kind, dtype, off):
    params, state = walked(kind, dtype, scale=0.5)
    wanted, moments = expected(kind, scale=0.5)
    assert_close(tensors(params), wanted, rtol=off, atol=off)
    found = {f"{part}/{name}": array for part, tree in state.items() for name, array in tensors(tree).items()}
    assert_close(found, moments, rtol=2 * off, atol=off / 10)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, state))} == {dtype}


@each_kind
def test_the_numbers_are_those_of_the_torch_optimizers(kind):
    weights = {
        name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in tensors(drawn(0, "float32")).items()
    }
    theirs = make(weights, kind, decay=DECAY)
    for step in range(1, STEPS + 1):
        slopes = tensors(drawn(step, "float32"))
        for name, parameter in weights.items():
            parameter.grad = torch.from_numpy(slopes[name].copy())
        theirs.begin(step, RATES[step - 1])
        theirs.step()
    params, _ = walked(kind, "float32")
    assert_close(tensors(params), {name: of.detach().numpy() for name, of in weights.items()}, rtol=2e-6, atol=2e-6)


@each_kind
def test_matrices_decay_and_vectors_do_not_though_they_are_stacked(kind):
    rule, params = optim(kind), drawn(0, "float64")
    nothing = jax.tree.map(jnp.zeros_like, params)
    after, _ = jax_optim.update(
        params, nothing, jax_optim.init(params, rule), step=1, lr=0.01, scale=1.0, key=jax.random.key(0), optim=rule
    )
    for name, array in tensors(params).items():
        kept = 1 - 0.01 * DECAY if array.ndim >= 2 else 1.0
        np.testing.assert_allclose(tensors(after)[name], kept * array, rtol=1e-14)


def test_moments_of_bfloat16_weights_are_float32_and_known_without_arrays():
    params = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, jnp.bfloat16), drawn(0, "float32"))
    state = jax.eval_shape(lambda given: jax_optim.init(given, optim("adafactor")), params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32"}
    assert state["exp_avg_sq_row"]["layers"]["up"].shape == (3, 16)
    assert state["exp_avg_sq_col"]["layers"]["up"].shape == (3, 8)
    assert state["exp_avg_sq"]["layers"]["cube"].shape == (3, 4, 2, 6)
    assert state["exp_avg_sq"]["embedding"] is None


def test_rounding_at_random_is_right_on_average_and_takes_one_of_the_two_neighbours():
    values = jnp.asarray([1.001, -1.001, 3e-3, -7.77e5, 1e-40], jnp.float32)
    keys = jax.random.split(jax.random.key(1), 20_000)
    found = np.asarray(jax.vmap(lambda key: jax_optim.round_to_bfloat16(values, key))(keys), "float64")
    for column, value in zip(found.T, np.asarray(values, "float64"), strict=True):
        neighbours = np.unique(column)
        assert len(neighbours) == 2 and neighbours[0] < value < neighbours[1]
        step = neighbours[1] - neighbours[0]
        assert abs(column.mean() - value) < 5 * step / 2 / np.sqrt(len(keys))


def test_rounding_leaves_what_is_a_bfloat16_or_beyond_as_it_is():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    values = jnp.asarray([0.0, -0.0, 1.5, -2.0, largest, 3.4e38, np.inf, -np.inf, np.nan], jnp.float32)
    for seed in range(20):
        found = np.asarray(jax_optim.round_to_bfloat16(values, jax.random.key(seed)), "float64")
        np.testing.assert_array_equal(found, [0.0, -0.0, 1.5, -2.0, largest, largest, np.inf, -np.inf, np.nan])


def test_small_updates_of_bfloat16_weights_add_up_at_random_and_are_lost_to_the_nearest():
    params = {"up": jnp.ones((64, 64), jnp.bfloat16)}
    moved = {}
    for stochastic in (True, False):
        rule = optim(stochastic=stochastic, decay=0.0)
        now, state = params, jax_optim.init(params, rule)
        step_once = jax.jit(lambda *given, step, rule=rule: jax_optim.update(
            *given, step=step, lr=1e-4, scale=1.0, key=jax.random.fold_in(jax.random.key(0), step), optim=rule
        ))  # fmt: skip
        for step in range(1, 101):
            now, state = step_once(now, params, state, step=jnp.int32(step))
        moved[stochastic] = 1 - float(now["up"].astype("float64").mean())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(0.01, rel=0.05)


def test_random_bits_are_a_function_of_the_key_and_of_the_place():
    params = {"first": jnp.ones((256,), jnp.bfloat16), "second": jnp.ones((256,), jnp.bfloat16)}
    rule = optim(decay=0.0)

    def once(seed):
        return jax_optim.update(
            params, params, jax_optim.init(params, rule),
            step=1, lr=1e-3, scale=1.0, key=jax.random.key(seed), optim=rule,
        )[0]  # fmt: skip

    assert jnp.array_equal(once(0)["first"], once(0)["first"])
    assert not jnp.array_equal(once(0)["first"], once(1)["first"])
    assert not jnp.array_equal(once(0)["first"], once(0)["second"])


@pytest.mark.parametrize(
    ("setting", "named"), [({"optim": "adamw_8bit"}, "adamw_8bit"), ({"optim_in_backward": True}, "optim_in_backward")]
)
def test_what_is_not_there_is_refused_by_name(setting, named):
    with pytest.raises(ConfigError, match=named):
        jax_optim.optim_of(Training(**setting))


def test_what_training_asks_for_is_what_the_rule_has():
    asked = Training(optim="adafactor", weight_decay=0.2, dtype="bfloat16", master_dtype="bfloat16")
    found = jax_optim.optim_of(asked)
    assert (found.kind, found.weight_decay, found.stochastic) == ("adafactor", 0.2, True)
    assert not jax_optim.optim_of(Training(dtype="bfloat16")).stochastic
