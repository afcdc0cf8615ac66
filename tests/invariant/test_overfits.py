"""A real pretrained model learns one batch by heart: the whole engine pulls in the right direction, in every precision."""

from functools import partial

import numpy as np
import pytest

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import Example
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.models.resolve import resolve_model

TEXTS = [
    "The blue cat took 7 stones to the moon and sold them for 3 drums.",
    "Nobody told the clock that Sunday had been moved to Friday night.",
    "A red train sang to the lake until all the fish were fast asleep.",
]


@pytest.mark.reference
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"dtype": "bfloat16", "master_dtype": "bfloat16", "optim": "adafactor", "optim_in_backward": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float32 AdamW", "bfloat16 Adafactor in backward"],
)
def test_a_real_model_of_260k_parameters_learns_one_batch_by_heart(reference_model, settings):
    training = Training(learning_rate=5e-3, lr_scheduler_type="cosine", warmup_steps=5, **settings)
    engine = engine_of.load(resolve_model(str(reference_model)), device="cpu", training=training)
    tokenizer = load_tokenizer(reference_model)
    examples = [[*tokenizer.prefix, *tokenizer.encode(text)] for text in TEXTS]
    rows = make_rows(
        [Example(ids=np.asarray(ids, np.int32), trained=np.ones(len(ids), np.bool_)) for ids in examples],
        max_length=256,
        packing=True,
    )
    batches = partial(batch_of_step, rows, micro_batch_size=len(rows), accumulation=1, seed=1, pad_id=0)
    optimizer = engine_of.make_optimizer(engine, training)
    losses = [s.loss for s in engine_of.optimizer_steps(engine, optimizer, batches, training, first=1, total=150)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.05
