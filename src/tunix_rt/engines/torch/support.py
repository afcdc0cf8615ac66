"""What a loaded model supports, tried on a few tokens: for models whose family has no row in `models/families.py`.

Each self-test compares with the plain forward pass of the model, one example at a time. Where one fails, training does without:
rows of one example each, the model's own logits, no activation checkpointing, eager layers.
"""

import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import IGNORED, MicroBatch
from tunix_rt.engines.torch.attention import unpackable
from tunix_rt.engines.torch.compile import checkpoint_layers, layers_of
from tunix_rt.engines.torch.head_check import other_head
from tunix_rt.engines.torch.model import Engine, summed_loss, without_cache
from tunix_rt.errors import InputError
from tunix_rt.models.secrets import one_line

logger = logging.getLogger(__name__)

TOKENS = 8
"""Of an example in a self-test."""


def check_support(engine: Engine, training: Training) -> None:
    """Try what training would use, and set `engine.support` to what equals the model's own forward pass. One line each."""
    _refuse_auxiliary_loss(engine)
    examples = _examples(engine)
    engine.model.eval()
    with torch.no_grad(), engine.kernels():
        alone = sum((_own_loss(engine, example) for example in examples), torch.zeros((), dtype=torch.float64))
        if not torch.isfinite(alone):
            raise InputError(f"{engine.source.name}: its loss is {alone.item()}", fix="the weights are corrupt")
        _refuse_padding(engine, examples, alone)
        with engine.attending(engine.attention.generating), engine.computing(once=True):
            chunked = other_head(engine.model, examples[0].to(engine.device))
        chunked = chunked or _reason(engine, alone, lambda: sum(map(_row_loss(engine, chunked_head=True), examples)))
        engine.support = replace(engine.support, chunked_head=chunked is None)
        packed = unpackable(engine.model) or _reason(engine, alone, lambda: _packed_loss(engine, examples))
    engine.support = replace(engine.support, packing=packed is None)
    _log("Packing", packed, "packed rows equal single examples", "one example per row, grouped by length")
    _log("Loss head", chunked, "the chunked loss equals the model's own", "the model's own logits")
    _freeze_unused(engine, examples[0])
    if training.gradient_checkpointing is not False:
        _check_checkpointing(engine, examples)


def _refuse_auxiliary_loss(engine: Engine) -> None:
    config = engine.model.config
    if getattr(config, "output_router_logits", False):
        factor = getattr(config, "router_aux_loss_coef", None)
        raise InputError(
            f"{engine.source.name}: config.json asks for the auxiliary loss of the router (output_router_logits, "
            f"router_aux_loss_coef {factor}), which is not added to the token mean",
            fix="set output_router_logits: false in a copy of the model's config.json",
        )


def _examples(engine: Engine) -> list[torch.Tensor]:
    """Two examples of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(engine.vocabulary, (1, size), generator=generator) for size in (TOKENS, TOKENS - 3)]


def _own_loss(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of one example, through the model's own head."""
    with engine.attending(engine.attention.generating), engine.computing(once=True):
        logits = engine.model(input_ids=ids.to(engine.device), **without_cache(engine.model)).logits[:, :-1].double()
    targets = ids[:, 1:].to(engine.device).flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").cpu()


def _row_loss(engine: Engine, *, chunked_head: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        with _supporting(engine, packing=False, chunked_head=chunked_head):
            return summed_loss(engine, _micro([ids])).cpu()

    return loss


def _packed_loss(engine: Engine, examples: list[torch.Tensor]) -> torch.Tensor:
    """Both examples in one row; NaN if the loss of the second depends on its neighbour, which 16 bits would hide in the sum: its
    gradient there must be zero, however an expert rounds that gets more tokens."""
    micro = _micro([torch.cat(examples, dim=1)], examples)
    with _supporting(engine, packing=True):
        whole = summed_loss(engine, micro).cpu()
        micro.labels[:, : examples[0].shape[1]] = IGNORED
        with torch.enable_grad():
            neighbour = _input_gradient(engine, micro)[:, : examples[0].shape[1]]
    return whole * torch.nan if neighbour.count_nonzero() else whole


def _refuse_padding(engine: Engine, examples: list[torch.Tensor], alone: torch.Tensor) -> None:
    """A batch of rows of different lengths must give the losses of its rows."""
    with _supporting(engine, packing=False, chunked_head=False):
        reason = _reason(engine, alone, lambda: summed_loss(engine, _micro(examples)).cpu())
    if reason is not None:
        raise InputError(
            f"{engine.source.name}: a row changes with the padding behind it, so rows cannot share a batch ({reason})",
            fix="use a causal language model: one whose tokens depend on earlier tokens alone",
        )


def _freeze_unused(engine: Engine, ids: torch.Tensor) -> None:
    """Freeze the parameters that a step gives no gradient (of an index of tokens, for example), which no loop would update."""
    used = {id(parameter) for parameter in engine.embeddings}

    def seen(parameter: torch.nn.Parameter) -> None:
        used.add(id(parameter))
        parameter.grad = None  # all of them together may not fit

    trained = {name: one for name, one in engine.model.named_parameters() if one.requires_grad}
    hooks = [parameter.register_post_accumulate_grad_hook(seen) for parameter in trained.values()]
    try:
        with engine.kernels():
            summed_loss(engine, _micro([ids])).backward()
    finally:
        for hook in hooks:
            hook.remove()
        engine.model.zero_grad(set_to_none=True)
    # An expert that these few tokens do not choose is trained by others.
    unused = {name: one for name, one in trained.items() if id(one) not in used and "expert" not in name}
    for parameter in unused.values():
        parameter.requires_grad_(False)
    if unused:
        count = sum(parameter.numel() for parameter in unused.values())
        logger.info("Frozen: %s parameters get no gradient, first %s", f"{count:,}", next(iter(unused)))


def _check_checkpointing(engine: Engine, examples: list[torch.Tensor]) -> None:
    """Gradients of the looked-up embeddings with and without recomputation."""
    if not layers_of(engine.model):
        reason: str | None = "the model has no layers that can be recomputed"
    else:
        plain = _input_gradient(engine, _micro(examples[:1]))
        checkpoint_layers(engine)
        try:
            recomputed = _input_gradient(engine, _micro(examples[:1]))
            same = torch.allclose(recomputed, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
            reason = None if same else "its gradients differ with recomputed layers"
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
        engine.model.gradient_checkpointing_disable()
    engine.support = replace(engine.support, checkpointing=reason is None)
    _log("Activation checkpointing", reason, "gradients equal those without it", "off: every activation is saved")


def _input_gradient(engine: Engine, micro: MicroBatch) -> torch.Tensor:
    """Of the looked-up embeddings."""
    looked_up: list[torch.Tensor] = []
    handle = engine.model.get_input_embeddings().register_forward_hook(
        lambda *given: looked_up.append(given[2].requires_grad_())  # with adapters the embeddings are frozen
    )
    engine.model.train()
    try:
        with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
            torch.manual_seed(0)
            loss = summed_loss(engine, micro)
        return torch.autograd.grad(loss, looked_up[:1])[0].float()
    finally:
        handle.remove()
        engine.model.zero_grad(set_to_none=True)
        engine.model.eval()


@contextmanager
def _supporting(engine: Engine, **what: bool) -> Any:
    before = engine.support
    engine.support = replace(before, **what)
    try:
        yield
    finally:
        engine.support = before


def _reason(engine: Engine, expected: torch.Tensor, compute: Callable[[], Any]) -> str | None:
    """Why `compute` does not give the `expected` loss; None if it does."""
    try:
        actual = compute()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  code of any model: whatever it raises, the model does not support it
        return f"{type(error).__name__}: {one_line(error)[:120]}"
    if torch.allclose(actual, expected, rtol=tolerance_of(engine)):
        return None
    if torch.isnan(actual):
        return "a packed example changes with its neighbour"
    return f"loss {actual.item():.6f} instead of {expected.item():.6f}"


def tolerance_of(engine: Engine) -> float:
    return 1e-4 if engine.compute.itemsize >= 4 else 1e-2


def _micro(rows: list[torch.Tensor], examples: list[torch.Tensor] | None = None) -> MicroBatch:
    """Rows padded on the right; the positions restart with each of `examples`, which a single row consists of."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    positions = torch.arange(width).repeat(len(rows), 1)
    for place, row in enumerate(rows):
        ids[place, : row.shape[1]] = row[0]
        labels[place, 1 : row.shape[1]] = row[0, 1:]
    if examples is not None:
        positions = torch.cat([torch.arange(one.shape[1]) for one in examples])[None]
        labels[positions == 0] = IGNORED
    return MicroBatch(ids=ids.numpy(), labels=labels.numpy(), positions=positions.numpy())


def _log(what: str, reason: str | None, holds: str, instead: str) -> None:
    logger.info("%s: %s", what, holds if reason is None else f"{instead} ({reason})")
