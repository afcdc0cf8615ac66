"""A weight per target: the loss and its gradient are those of weighted cross-entropy, however a step is split and packed."""

import numpy as np
import pytest
import torch

from tests.invariant.test_training_is_exact import load
from tunix_rt.data.packing import Row, collate
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch.chunked_loss import head_loss

LENGTHS = (9, 5, 12, 7)


def sampled_rows(vocabulary: int) -> list[Row]:
    """Rows as rollouts give them: a prompt of three tokens, then weighted ones; weights of both signs, and of 0."""
    draw = np.random.Generator(np.random.PCG64(7))
    rows = []
    for length, weight in zip(LENGTHS, (0.75, -0.25, 0.0, -1.5), strict=True):
        trained = np.arange(length) >= 3
        rows.append(
            Row(
                ids=draw.integers(3, vocabulary, length).astype(np.int32), trained=trained,
                positions=np.arange(length, dtype=np.int32), weights=np.where(trained, weight, 0.0),
                logprobs=np.zeros(length), names=(f"row of {length}",),
            )
        )  # fmt: skip
    return rows


def packed(rows: list[Row]) -> Row:
    parts = {name: np.concatenate([getattr(row, name) for row in rows]) for name in
             ("ids", "trained", "positions", "weights", "logprobs")}  # fmt: skip
    return Row(**parts, names=tuple(name for row in rows for name in row.names))


def gradients_by_hand(engine, rows: list[Row], scale: float):
    """Every row alone through the whole model, in float64, and `-weight * log p` of each target."""
    engine.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.tensor(row.ids, dtype=torch.long)
        logprobs = engine.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        of_tokens = logprobs.gather(1, ids[1:, None])[:, 0]
        total = total - (of_tokens * torch.tensor(row.weights[1:] * row.trained[1:])).sum() * scale
    total.backward()
    return total.item(), {name: one.grad.clone() for name, one in engine.model.named_parameters()}


SPLITS = {
    "one micro-batch": lambda rows: [rows],
    "a micro-batch of each row": lambda rows: [[row] for row in rows],
    "other order": lambda rows: [rows[::-1]],
    "packed": lambda rows: [[packed(rows[:2]), packed(rows[2:])]],
    "packed in one row, other order": lambda rows: [[packed(rows[::-1])]],
}


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
@pytest.mark.parametrize("split", SPLITS)
def test_the_gradient_is_that_of_weighted_cross_entropy_by_hand(small_model, family, split):
    engine = load(small_model(family))  # float64
    rows = sampled_rows(engine.vocabulary)
    scale = 1 / sum(int(row.trained.sum()) for row in rows)
    expected, gradients = gradients_by_hand(engine, rows, scale)
    engine.model.zero_grad()
    total = 0.0
    for part in SPLITS[split](rows):
        loss = engine_of.summed_loss(engine, collate(part, pad_id=0), scale=scale)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected, rel=1e-11)
    for name, parameter in engine.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("trains", [True, False])
def test_the_loss_of_each_target_is_its_negative_log_probability(trains):
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 8, generator=draw, dtype=torch.float64, requires_grad=trains)
    table = torch.nn.Parameter(torch.randn(30, 8, generator=draw, dtype=torch.float64), requires_grad=trains)
    targets, weights = torch.randint(30, (11,), generator=draw), torch.randn(11, generator=draw, dtype=torch.float64)
    losses = torch.empty(11, dtype=torch.float64)
    loss = head_loss(hidden, table, targets, scale=0.5, compute=torch.float64, rows=4, weights=weights, losses=losses)
    expected = torch.nn.functional.cross_entropy(hidden @ table.T, targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(loss, 0.5 * (weights * expected).sum())


def test_weights_are_part_of_the_identity_of_a_row():
    row = sampled_rows(50)[0]
    other = Row(ids=row.ids, trained=row.trained, positions=row.positions, weights=2 * row.weights)
    plain = Row(ids=row.ids, trained=row.trained, positions=row.positions)
    assert len({row.sha256, other.sha256, plain.sha256}) == 3


def test_rows_with_and_without_weights_are_never_one_batch():
    row = sampled_rows(50)[0]
    with pytest.raises(ValueError, match="some have none"):
        collate([row, Row(ids=row.ids, trained=row.trained, positions=row.positions)], pad_id=0)
