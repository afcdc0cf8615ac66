"""A training step of the JAX engine on one chip of a TPU, besides its state, as a sum of named parts. Loads nothing.

A step has four moments at which it may be fullest, and the compiler gives the place of what is gone to what comes after. So
the fullest moment counts, not the sum of them all: the head, where all is kept and the vocabulary is met; the backward pass
of the last layer, by when the gradients of all have their place; the gradient of the looked-up tokens; and the update. What
is there at each was read from the compiler's own lists of arrays (benchmarks/results/tpu_arrays.txt), and is held against it
by benchmarks/plan_against_compiler.py. There is one figure for each kind of array, and none for a setting.
"""

from tunix_rt.plan.activations import elements, tensors_of
from tunix_rt.plan.jax_activations import kept_of_layer
from tunix_rt.plan.jax_run import Run, all_arrays, on_device, summed
from tunix_rt.plan.precision import loss_rows

MIB = 2**20
LOSS_TOKENS = 1024
"""As in `engines/jax/step.py`: of all rows, that meet the vocabulary at once, unless weights are kept in bfloat16."""
MLP_TOKENS = 1024
"""As in `engines/jax/step.py`: of a chip, that are in the MLP at once, where every layer is computed again. Rows that so many
do not divide have somewhat more, which is left out: a plan that grows with the rows can only follow from above or below."""
LANES = 128
"""Of a TPU: the last dimension of an array is filled up to so many, also that of the sums of a softmax, which is 1."""
ON_CHIP_BYTES = 112 * MIB
"""Arrays inside a layer that the compiler keeps beside the cores (VMEM, 128 MiB), of what would be in flight."""
STATES, QUERIES, KEYS, INNER = 12, 6, 4, 6
"""Arrays in flight while a layer's backward pass runs, of the width of the states, of all queries, of the keys and of the
MLP, in the type of the products. Counted in the lists of `gemma-2b 8x1024`, `gemma-3-1b 4x2048` and `gemma-3-1b 8x1024`."""
HEAD_STATES = 3
"""The states before the head: as they are, cut into chunks, and their gradient."""
PARTS = ("gradients", "updates", "casts", "gathered", "activations", "in_flight", "loss_head", "batch")


def tpu_step(run: Run) -> dict[str, int]:
    """The parts of the fullest moment; 0 for what is not there then."""
    fullest = max(_moments(run), key=lambda parts: sum(parts.values()))
    return dict.fromkeys(PARTS, 0) | fullest


def _moments(run: Run) -> list[dict[str, int]]:
    tensors = tensors_of(run.shape)
    layers, layer = summed(run, tensors.layer, []), elements(tensors.layer)
    gradients = run.width * (layers + summed(run, [], [*tensors.tables, *tensors.others]))
    sums = gradients if run.accumulation > 1 else 0
    passes = {
        "casts": layers * _cast_bytes(run),  # of all layers at once: the compiler takes them out of the loop
        "activations": _kept(run, layer),
        "batch": 20 * run.accumulation * run.positions,
    }
    # A layer's weights, and its gradients until they are cut.
    gathered = 2 * layer * run.compute if run.parts > 1 else 0
    return [
        {"gradients": gradients + sums, **passes, "gathered": gathered, "in_flight": _in_flight(run)},
        {"gradients": sums, **passes, "loss_head": _head(run)},
        {"gradients": gradients + sums, "loss_head": _looked_up(run)},
        {"gradients": gradients, "updates": max(4, run.width) * _largest(run)},
    ]


def _cast_bytes(run: Run) -> int:
    return run.compute if run.compute != run.width else 0


def _largest(run: Run) -> int:
    return max(on_device(run, one, stacked=False) for one in all_arrays(run))


def _kept(run: Run, layer: int) -> int:
    """What the layers keep. Where nothing is computed again and weights are cut, the compiler gathers those of all layers and
    keeps them; and scores a second time in the type of the products, where there is no kernel."""
    each = kept_of_layer(run)
    if run.recipe.kept_share == 1.0 and run.parts > 1:
        each += layer * run.compute
    if run.recipe.kept_share == 1.0 and not run.kernel and not run.lean:
        each += run.positions * run.shape.heads * run.tokens * run.compute
    return run.shape.layers * each


def _in_flight(run: Run) -> int:
    """Inside one layer while its backward pass runs, less what stays on the chip."""
    shape, tokens = run.shape, run.positions
    width = STATES * shape.hidden + QUERIES * shape.query_size + KEYS * shape.kv_size
    in_mlp = tokens if run.recipe.kept_share > 0.0 else min(tokens, MLP_TOKENS)
    inner = INNER * in_mlp * shape.ffn
    # Of a query: two sums of its softmax, or its scores and the shares that they become.
    of_query = 2 * LANES * 4 if run.kernel else run.tokens * (run.wide + run.compute)
    scores = tokens * shape.heads * of_query
    return max(0, (tokens * width + inner) * run.compute + scores - ON_CHIP_BYTES)


def _head(run: Run) -> int:
    """Logits of a chunk; the table in the type of the products, and its gradient, to which each chunk adds in place."""
    shape = run.shape
    at_once = loss_rows(run.all_rows * run.tokens)
    if run.recipe.weights != "bfloat16":
        at_once = min(at_once, LOSS_TOKENS)
    of_chip = -(-max(at_once, run.all_rows) * run.rows // run.all_rows)
    logits = of_chip * shape.vocab * run.wide * (2 if shape.capped_logits else 1)
    return logits + _table(run) * (_cast_bytes(run) + run.width) + HEAD_STATES * run.passed_on


def _table(run: Run) -> int:
    """Elements of the head's table where it is used: one whose vocabulary the chips do not divide is gathered whole."""
    whole = run.shape.vocab * run.shape.hidden
    return whole if run.shape.vocab % run.parts else whole // run.parts


def _looked_up(run: Run) -> int:
    """The gradient of the input tokens' table. Every chip takes the gradients of the tokens of all into its part: as they
    come, in the type of the products, and as they are added, in at least float32."""
    tokens = run.positions * (run.parts if run.shape.vocab % run.parts == 0 else 1)
    return _table(run) * run.width + tokens * run.shape.hidden * (run.wide + 2 * run.compute)
