"""Ranks compute what one process computes: losses, gradient norms, weights and optimizer states."""

from functools import partial

import numpy as np
import pytest

from tests.forging.ranks import on_ranks
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, batch_of_step

STEPS = 20
ROWS_PER_STEP = 8


def uneven_rows(count=17, vocabulary=1024):
    """Packed rows of very different numbers of targets. An epoch ends with a single row: most ranks have none."""
    draw = np.random.default_rng(3)
    rows = []
    for _ in range(count):
        sizes = draw.integers(4, 28, int(draw.integers(1, 4)))
        ids = [draw.integers(5, vocabulary, size, dtype=np.int32) for size in sizes]
        trained = [np.arange(size) >= draw.integers(1, size) for size in sizes]
        positions = [np.arange(size, dtype=np.int32) for size in sizes]
        rows.append(Row(ids=np.concatenate(ids), trained=np.concatenate(trained), positions=np.concatenate(positions)))
    return rows


def train(folder, steps=STEPS, defect="", accumulation=1, **settings):
    """(loss, norm) of each step, and the SHA-256 of every weight and optimizer state, gathered."""
    from tunix_rt.engines.torch import loop
    from tunix_rt.models.resolve import resolve_model

    plant(defect)
    settings = {"dtype": "float64", "learning_rate": 1e-3, "weight_decay": 0.01, "seed": 3, "compile": False} | settings
    training = Training(**settings, gradient_accumulation_steps=accumulation)
    engine = loop.load(resolve_model(folder, weights="random"), device="cpu", training=training)
    optimizer = loop.make_optimizer(engine, training)
    rows = uneven_rows(vocabulary=engine.vocabulary)
    batch_of = partial(
        batch_of_step, rows, micro_batch_size=ROWS_PER_STEP // accumulation, accumulation=accumulation, seed=5, pad_id=0
    )
    walked = loop.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=steps)
    curve = [(step.loss, step.grad_norm) for step in walked]
    heldout = loop.heldout_loss(engine, rows[:5], batch_size=1, pad_id=0)
    return {"curve": curve, "heldout": heldout, "state": state_of(engine, optimizer)}


def state_of(engine, optimizer):
    live = {**engine.weights, **optimizer.tensors()}
    parts = {name: optimizer.part_of(one) for name, one in engine.weights.items()} | optimizer.parts()
    if engine.sharding is not None:
        live = {name: engine.sharding.gathered(one, parts[name]) for name, one in live.items()}
    return {name: one.detach().double().numpy().copy() for name, one in live.items() if one is not None}


def plant(defect):
    """Break the code of this rank, as an engineer might."""
    from tunix_rt.engines.torch import model, sharding

    if defect == "mean":
        sharding.FSDPModule.set_gradient_divide_factor = lambda self, factor: None
        sharding.FSDPModule.set_force_sum_reduction_for_comms = lambda self, enable: None
    if defect == "copies":
        sharding.Sharding.replicas = property(lambda self: 1, lambda self, value: None)
    if defect == "local":
        whole = model.rank_loss
        model.rank_loss = lambda engine, placed, scale: whole(engine, placed, 1 / max(1, len(placed.targets)))
    if defect == "stale":
        taken = sharding.Sharding.__init__

        def copied(self, *arguments, **named):
            taken(self, *arguments, **named)
            self.weights = {name: model.torch.nn.Parameter(one.detach().clone()) for name, one in self.weights.items()}

        sharding.Sharding.__init__ = copied


def same(found, expected, tolerance):
    np.testing.assert_allclose(found["curve"], expected["curve"], rtol=tolerance)
    np.testing.assert_allclose(found["heldout"], expected["heldout"], rtol=tolerance)


def alone(folder, **settings):
    return on_ranks(1, partial(train, str(folder), **settings))[0]


def ranks(world, folder, **settings):
    """Of rank 0; every rank reports the same losses and norms."""
    answers = on_ranks(world, partial(train, str(folder), **settings))
    assert all(one["curve"] == answers[0]["curve"] for one in answers)
    return answers[0]


@pytest.mark.parametrize("family", ["gemma3", "llama", "gpt2"])
def test_two_and_four_ranks_and_two_replicas_compute_what_one_process_computes(small_model, family):
    folder = small_model(family)
    expected = alone(folder)
    for world, replicas in ((2, 1), (4, 1), (4, 2)):
        found = ranks(world, folder, data_replicas=replicas)
        same(found, expected, 1e-12)
        assert found["state"].keys() == expected["state"].keys()
        for name, values in expected["state"].items():
            np.testing.assert_allclose(found["state"][name], values, rtol=1e-9, atol=1e-11, err_msg=name)


SETTINGS = {
    "accumulation and checkpointing": {"accumulation": 2, "gradient_checkpointing": True},
    "optimizer in backward": {"optim_in_backward": True},
    "adafactor": {"optim": "adafactor"},
    "adafactor in backward, two replicas": {"optim": "adafactor", "optim_in_backward": True, "data_replicas": 2},
    "adapters": {"dtype": "float32", "lora_rank": 3},
    "adapters on replicas": {"dtype": "bfloat16", "lora_rank": 3, "data_replicas": 2},
    "8-bit states": {"optim": "adamw_8bit", "dtype": "float32"},
    "float32": {"dtype": "float32"},
    "bfloat16, rounded at random": {"dtype": "bfloat16", "master_dtype": "bfloat16"},
    "8-bit states in bfloat16": {"dtype": "bfloat16", "master_dtype": "bfloat16", "optim": "adamw_8bit"},
    "float16": {"dtype": "float16"},
    "compiled": {"dtype": "float32", "compile": True},
}
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one in ("compiled", "adapters on replicas"))) for one in SETTINGS],
)
def test_every_way_to_take_a_step_is_the_same_on_ranks(small_model, name):
    folder, settings = small_model("gemma3"), SETTINGS[name]
    replicas = settings.get("data_replicas", 1)
    expected = alone(folder, steps=6, **settings | {"data_replicas": 1})
    same(ranks(2 * replicas, folder, steps=6, **settings), expected, TOLERANCES[settings.get("dtype", "float64")])


@pytest.mark.parametrize("defect", ["mean", "copies", "local", "stale"])
def test_a_planted_defect_is_found(small_model, defect):
    folder = small_model("gemma3")
    world, replicas = (4, 2) if defect == "copies" else (2, 1)
    found = ranks(world, folder, steps=3, defect=defect, data_replicas=replicas)
    expected = alone(folder, steps=3)
    with pytest.raises(AssertionError):
        same(found, expected, 1e-5)
