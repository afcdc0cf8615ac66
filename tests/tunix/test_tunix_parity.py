"""transformers, our JAX engine and google-tunix agree on the same weights and batches, and read what the others wrote.

Each is a process of its own (`benchmarks/parity_sides.py`); transformers runs in `.venv`, google-tunix in `.venv-tunix`.
"""

import importlib.util

import pytest

from benchmarks import parity

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="needs google-tunix: run scripts/tunix"),
]
OTHERS = ("ours", "tunix", "adapter")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folders = parity.prepare_tiny(tmp_path_factory.mktemp("parity"))
    parity.run_sides(list(folders.values()))
    return {name: parity.compared(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    [(name, folder)] = parity.prepare_real(tmp_path_factory.mktemp("parity")).items()
    parity.run_sides([folder])
    return {name: parity.compared(folder)}


@pytest.fixture
def figures(request):
    return request.getfixturevalue("real" if request.param == parity.REAL else "tiny")[request.param]


each_model = pytest.mark.parametrize(
    "figures",
    [*(f"tiny {name}" for name in parity.TINY), pytest.param(parity.REAL, marks=pytest.mark.slow)],
    indirect=True,
)
each_side = pytest.mark.parametrize("side", OTHERS)


@each_model
@each_side
def test_the_loss_before_the_first_step_is_that_of_transformers(figures, side):
    assert figures[side]["loss"] <= 1e-5


@each_model
@each_side
def test_twenty_steps_have_the_losses_of_transformers(figures, side):
    losses = figures["losses"]
    assert len(losses[side]) == len(losses["transformers"]) == 20
    assert losses["transformers"][-1] != losses["transformers"][0]
    assert figures[side]["curve"] <= 1e-4


@each_model
@each_side
@pytest.mark.parametrize("text", ["short", "long"])
def test_logits_are_those_of_transformers_within_and_past_the_window(figures, side, text):
    found = figures[side]["logits"][text]
    assert found["of the largest logit"] <= 1e-5
    assert found["same first choice"] == 1.0


@each_model
@each_side
def test_what_was_read_is_written_back_bit_by_bit(figures, side):
    assert figures[side]["same tensors written back"]


@each_model
@pytest.mark.parametrize("reader", ["ours", "tunix"])
def test_weights_that_anyone_trained_have_the_same_loss_for_all(figures, reader):
    """Plain transformers is the measure: it reads what each of them saved. In Tunix it is a step of its PeftTrainer."""
    exchanged = figures["exchanged"][reader]
    assert exchanged.keys() == {f"trained-{side}" for side in ("transformers", *OTHERS)}
    assert max(exchanged.values()) <= 1e-5
