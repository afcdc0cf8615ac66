"""Whether a loaded model is what the training loop assumes: its attention, its lm_head, its loss, its packing."""

import contextlib
import logging
from collections.abc import Iterator

import torch

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import IGNORED, MicroBatch
from tunix_rt.engines.failures import memory_errors_named
from tunix_rt.engines.torch.attention import supported_attention, unpackable
from tunix_rt.engines.torch.chunked_loss import lean_lookup
from tunix_rt.engines.torch.model import Engine, embeddings_of, hidden_states, summed_loss
from tunix_rt.engines.torch.support import check_support, tolerance_of
from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES

logger = logging.getLogger(__name__)


def check_model(engine: Engine, training: Training) -> None:
    """Choose the attention that the model supports, and refuse a model that is not what the loop assumes. Above one rank every
    rank computes the same."""
    model, source = engine.model, engine.source
    known = model.config.model_type in FAMILIES
    if known:
        _refuse_unknown_head(engine)
        if reason := unpackable(model):
            raise InputError(f"{source.name}: {reason}", fix="correct config.json: it is not a model of this family")
    for table in embeddings_of(model):
        lean_lookup(table)
    engine.attention = engine.through_root(supported_attention, model, engine.attention)
    model.config._attn_implementation = engine.attention.training
    logger.info("Attention: %s; %s", engine.attention.name, engine.attention.why)
    with memory_errors_named("the check of the loaded model"):
        _refuse_wrong_loss(engine) if known else check_support(engine, training)
    if engine.sharding is not None:
        engine.sharding.reshard()


def _refuse_unknown_head(engine: Engine) -> None:
    head = engine.model.get_output_embeddings()
    biased = getattr(head, "bias", None) is not None
    if not isinstance(head, torch.nn.Linear) or biased:
        raise InputError(
            f"{engine.source.name}: its lm_head is a {type(head).__name__}{' with a bias' if biased else ''}",
            fix="use a model whose lm_head is a linear layer without bias",
        )


def _refuse_wrong_loss(engine: Engine) -> None:
    """Compare loss and packing with the model's own logits on a few tokens; refuse a model that differs."""
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    first, second, other = (torch.randint(vocabulary, (1, 8), generator=generator) for _ in range(3))
    positions = torch.cat([torch.arange(8), torch.arange(8)]).unsqueeze(0)
    ids, beside_other = (torch.cat([one, second], dim=1) for one in (first, other))
    labels = ids.clone()
    labels[:, [0, 8]] = IGNORED
    engine.model.eval()
    with torch.no_grad(), _full_precision(), engine.kernels():
        packed = _micro(ids, labels, positions)
        ours = summed_loss(engine, packed)
        theirs = torch.zeros((), device=engine.device, dtype=torch.float64)
        for half in ids.to(engine.device).split(8, dim=1):  # each alone, through the model's head
            with engine.attending(engine.attention.generating), engine.computing(once=True):
                logits = engine.model(input_ids=half, use_cache=False).logits[:, :-1].double()
            theirs += torch.nn.functional.cross_entropy(logits.flatten(0, 1), half[:, 1:].flatten(), reduction="sum")
        states = engine.through_root(hidden_states, engine, packed)[:, 8:]
        beside = engine.through_root(hidden_states, engine, _micro(beside_other, labels, positions))[:, 8:]
    if not torch.isfinite(theirs):
        raise InputError(f"{engine.source.name}: its loss is {theirs.item()}", fix="the weights are corrupt")
    if not torch.allclose(ours, theirs, rtol=tolerance_of(engine)):
        raise InputError(
            f"{engine.source.name}: two packed examples give loss {ours.item():.6f}, unpacked they give {theirs.item():.6f}",
            fix="this architecture ignores the boundaries of packed examples, or has an unknown kind of lm_head",
        )
    # The same kernels over the same shapes, except that an expert rounds by how many tokens choose it.
    experts = any(".experts." in name for name, _ in engine.model.named_parameters())
    nearly = tolerance_of(engine) if experts else 1e-5
    if not torch.allclose(states, beside, rtol=0, atol=nearly * float(states.abs().max())):
        raise InputError(
            f"{engine.source.name}: a packed example changes with its neighbour",
            fix="this architecture cannot be trained on packed rows",
        )


def _micro(ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> MicroBatch:
    return MicroBatch(ids=ids.numpy(), labels=labels.numpy(), positions=positions.numpy())


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Without TF32, whose rounding is larger than the differences that are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
