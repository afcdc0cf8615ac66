"""What the layers of the JAX engine keep for the backward pass, by what is computed again. Loads nothing."""

from tunix_rt.plan.jax_run import Run
from tunix_rt.plan.shape import ModelShape

CUDNN_TOKENS_PER_EXAMPLE = 32
"""As in `engines/jax/attention.py`: cuDNN keeps a statistic of every token for each example that a row may have."""


def kept(run: Run) -> int:
    """What all layers keep for the backward pass, with what is kept before the first and after the last."""
    return run.shape.layers * kept_of_layer(run) + 4 * run.passed_on * run.wide // run.compute


def kept_of_layer(run: Run) -> int:
    """What one layer keeps, by what is computed again."""
    shape, positions = run.shape, run.positions
    if run.recipe.kept_share == 0.0:
        return run.passed_on
    if run.recipe.kept_share == 1.0:
        return everything_of_a_layer(run) if run.device == "cpu" else _for_the_derivative(run)
    products = run.passed_on + positions * run.compute * product_width(shape)  # the results of products with weights
    if run.kernel and run.device == "cuda":  # and what its attention gave
        products += positions * (shape.query_size * run.compute + of_scores(run))
    return products


def product_width(shape: ModelShape) -> int:
    """Of all products with weights of a layer, for one token."""
    inner = 2 * shape.ffn if shape.gated_mlp else shape.ffn
    return shape.query_size + 2 * shape.kv_size + 2 * shape.hidden + inner


def _for_the_derivative(run: Run) -> int:
    """What a layer keeps on an accelerator if nothing is computed again: every array that its derivative asks for, also those
    in at least float32. They are stacked over the layers, so no compiler joins them with what comes before or after."""
    shape, positions = run.shape, run.positions
    if run.lean and run.compute == 2:
        return positions * _narrow_values(run)
    norm = 3 * run.wide + 2 * run.compute
    normed = shape.norms_per_layer * shape.hidden + shape.head_norms * (shape.query_size + shape.kv_size)
    heads = 4 * (shape.query_size + shape.kv_size) * run.compute
    inner = shape.ffn * (5 * run.wide + (3 if shape.gated_mlp else 2) * run.compute)
    return positions * (normed * norm + heads + inner + of_scores(run))


def _narrow_values(run: Run) -> int:
    """Bytes of a token where products have 16 bits: they are kept, with what goes into them and the mask of scores. What
    norms, activations and softmax make in float32 is computed again (`engines/jax/model.py`). cuDNN's heads are kept in
    several shapes, with those for a row of too many examples beside them."""
    shape = run.shape
    packed = run.kernel and run.device == "cuda"
    heads = 8 * shape.query_size if packed else 2 * (shape.query_size + shape.kv_size)
    heads += shape.head_norms * (shape.query_size + shape.kv_size)
    inner = (4 if shape.gated_mlp else 2) * shape.ffn
    kept = 6 * shape.hidden + heads + inner
    return kept * run.compute + run.tokens + (of_scores(run) if run.kernel else 0)


def of_scores(run: Run) -> int:
    """What attention keeps of a token besides what goes in and comes out: statistics of a kernel, or its row of scores."""
    if not run.kernel:
        return run.shape.heads * run.tokens * (run.wide + run.compute + 1)
    examples = max(2, run.tokens // CUDNN_TOKENS_PER_EXAMPLE) if run.device == "cuda" else 2
    return run.shape.heads * examples * 4


def everything_of_a_layer(run: Run) -> int:
    """All that a layer computes. Norms, activations and scores are made in at least float32 and rounded afterwards."""
    shape, positions = run.shape, run.positions
    # A CPU makes the wide ones as arrays of their own, an accelerator within the code that rounds them.
    both = run.compute + run.wide if run.device == "cpu" else 2 * run.compute
    norms = (shape.norms_per_layer + 1) * positions * shape.hidden * (both + run.wide)
    heads = 2 * positions * (shape.query_size + shape.kv_size) * both
    inner = (4 if shape.gated_mlp else 3) * positions * shape.ffn * both
    each = 8 if run.kernel else run.tokens * (3 * run.wide + run.compute + 1)  # of a query: two sums, or its scores
    scores = positions * shape.heads * each
    return norms + heads + inner + scores + positions * run.compute * product_width(shape)
