"""Peak memory of a run of the JAX engine on one of its devices, as a sum of named parts. Loads nothing.

What is cut over the devices is divided by their number, as `engines/jax/mesh.py` cuts it: an array that no dimension of
divides is on every device whole. XLA reuses memory where it can, and how well is known only once it has compiled. On a TPU the
fullest moment of a step is counted (`tpu_step.py`). Elsewhere, and with google-tunix's model, parts that may share a place are
counted side by side, as an upper bound. The compiler's own figure follows at compile time, before a weight is loaded, and is
then the one that decides.
"""

from collections.abc import Iterable, Iterator

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.activations import Dimensions, elements, tensors_of
from tunix_rt.plan.compile_policy import compiled_length
from tunix_rt.plan.jax_activations import (
    CUDNN_TOKENS_PER_EXAMPLE as CUDNN_TOKENS_PER_EXAMPLE,  # the engine asks here for it
)
from tunix_rt.plan.jax_activations import everything_of_a_layer, kept
from tunix_rt.plan.jax_run import Run, all_arrays, on_device, summed
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES, EVAL_ROWS, SPARE, MemoryPlan, longest_row
from tunix_rt.plan.optimizers import state_tensors
from tunix_rt.plan.phases import Phase
from tunix_rt.plan.precision import Recipe, loss_rows, recipe_of
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.tpu_step import LANES as TPU_LANES
from tunix_rt.plan.tpu_step import tpu_step

MIB = 2**20
OVERHEAD_BYTES = {"cpu": 320 * MIB, "cuda": 512 * MIB, "tpu": 128 * MIB}
"""Compiled code, constants, workspaces of libraries; on a CPU what the compiler itself leaves behind in the heap; on a TPU code
(15 to 40 MiB) and gaps between arrays."""
CPU_BYTES_OF_BFLOAT16 = 20
"""Temporaries of XLA's update of a weight that a CPU keeps in bfloat16."""
_BYTES = {"float32": 4, "float64": 8}


def row_length(tokens: int, device: str) -> int:
    """How long rows of up to `tokens` tokens are in a compiled step: a TPU's attention takes multiples of 128."""
    return -(-tokens // TPU_LANES) * TPU_LANES if device == "tpu" else compiled_length(tokens)


def has_kernel(
    shape: ModelShape, recipe: Recipe, *, device: str, tokens: int, capability: tuple[int, int] | None
) -> bool:
    """Whether attention over rows of `tokens` makes no scores. A GPU of unknown capability is taken to have no kernel."""
    if device == "cuda":
        fits = shape.head_dim % 8 == 0 and shape.head_dim <= 256 and not shape.capped_scores
        return recipe.compute == "bfloat16" and fits and capability is not None and capability >= (9, 0)
    return device == "tpu" and recipe.compute != "float64" and not (tokens % TPU_LANES or shape.head_dim % TPU_LANES)


def predict_jax(
    shape: ModelShape,
    config: RunConfig,
    *,
    device: str,
    devices: int = 1,
    rows: int | None = None,
    row_tokens: int | None = None,
    target_share: float = 1.0,
    capability: tuple[int, int] | None = None,
) -> MemoryPlan:
    """What training `shape` under `config` needs on each of `devices`; on a CPU, whose devices share one memory, on all of
    them together. `rows` are those of a micro-batch, `per_device_train_batch_size` for each device unless given."""
    training = config.training
    all_rows = rows or training.per_device_train_batch_size * devices
    length = longest_row(shape, config, row_tokens or config.data.max_length)
    recipe, tokens = recipe_of(training), row_length(length, device)
    run = Run(
        shape=shape,
        recipe=recipe,
        device=device,
        parts=max(1, devices // training.data_replicas),
        rows=-(-all_rows // devices),
        all_rows=all_rows,
        tokens=tokens,
        accumulation=training.gradient_accumulation_steps,
        kernel=has_kernel(shape, recipe, device=device, tokens=tokens, capability=capability),
        ours=config.model.implementation == "auto",
        lean=devices == 1 and config.model.implementation == "auto",
    )
    state = _state(run)
    copied = sum(state[name] for name in ("weights", "optimizer")) if device == "cpu" else 0
    during = {"snapshot": copied if training.save_steps is not None else 0}
    loading = run.width * max(elements([one]) for one in all_arrays(run)) if device == "cpu" else 0
    phases = [
        _phase("load", **{"weights": state["weights"], "overhead": state["overhead"]}, loading=loading),
        _phase("step", **state, **during, **_step(run)),
        _phase("save", **state, snapshot=copied),
    ]
    eval_rows = config.evaluation.per_device_eval_batch_size
    asking = {
        asked: list(_asking(run, config, state | during, asked, devices, length)) for asked in _eval_rows(eval_rows)
    }
    room = max(_least(phase) for phase in phases)
    chosen = next((asked for asked, found in asking.items() if all(_least(one) <= room for one in found)), min(asking))
    shared = devices if device == "cpu" else 1
    phases = [_times(phase, shared) for phase in (*phases, *asking[chosen])]
    peak = max(phases, key=lambda phase: phase.total_bytes)
    return MemoryPlan(
        layers="compiled",
        device=device,
        dtype=training.dtype,
        parameters=shape.parameters,
        rows=all_rows,
        row_tokens=length,
        target_share=target_share,
        phases=tuple(phases),
        peak_phase=peak.name,
        peak_bytes=peak.total_bytes,
        least_bytes=max(map(_least, phases)),
        context_bytes=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
        eval_rows=chosen,
        devices=devices,
    )


def _eval_rows(asked: int | None) -> tuple[int, ...]:
    return EVAL_ROWS if asked is None else (asked,)


def _phase(name: str, **parts: int) -> Phase:
    return Phase(name=name, parts=parts, total_bytes=sum(parts.values()))


def _times(phase: Phase, count: int) -> Phase:
    """`phase` on so many devices of one memory. Code and libraries are there once."""
    return _phase(
        phase.name, **{name: size * (1 if name == "overhead" else count) for name, size in phase.parts.items()}
    )


def _least(phase: Phase) -> int:
    return sum(size for name, size in phase.parts.items() if name not in SPARE)


# --- what is there all the time ---------------------------------------------------------------------------------------


def _state(run: Run) -> dict[str, int]:
    tensors = tensors_of(run.shape)
    others = [*tensors.tables, *tensors.others]

    def moments(of: Iterable[Dimensions]) -> Iterator[tuple[Dimensions, int]]:
        for one in of:
            moments_of = state_tensors(one, run.recipe.optimizer, run.recipe.weights).values()
            yield from ((shape, _BYTES[stored]) for shape, stored in moments_of)

    optimizer = sum(summed(run, [shape], []) * size for shape, size in moments(tensors.layer)) + sum(
        summed(run, [], [shape]) * size for shape, size in moments(others)
    )
    return {
        "weights": run.width * summed(run, tensors.layer, others),
        "optimizer": optimizer,
        "overhead": OVERHEAD_BYTES[run.device],
    }


# --- a step ----------------------------------------------------------------------------------------------------------


def _step(run: Run) -> dict[str, int]:
    """Everything besides the state while a step is computed."""
    if run.device == "tpu" and run.ours:
        return tpu_step(run)
    tensors = tensors_of(run.shape)
    gradients = run.width * summed(run, tensors.layer, [*tensors.tables, *tensors.others])
    sums = 2 if run.accumulation > 1 else 1
    return {
        "gradients": sums * gradients,
        "updates": _updates(run),
        "gathered": _gathered(run),
        "activations": kept(run),
        "in_flight": 5 * (everything_of_a_layer(run) + _exact_row(run)) // 4,
        "loss_head": _loss_head(run),
        "batch": 20 * run.accumulation * run.positions,
    }


def _updates(run: Run) -> int:
    """Gradient, weights and steps in the type of the work, and random bits: of the largest array while it is updated. A CPU
    has no bfloat16: there, all that are kept in it are there once more in float32, with their gradients and bits."""
    tensors = tensors_of(run.shape)
    if run.device == "cpu" and run.width == 2:
        return CPU_BYTES_OF_BFLOAT16 * summed(run, tensors.layer, [*tensors.tables, *tensors.others])
    largest = max(on_device(run, one, stacked=False) for one in all_arrays(run))
    if run.device != "cpu":  # in one pass over each array
        return largest * max(4, run.width)
    return largest * max(4, run.width) * (3 if run.width == 2 or run.recipe.optimizer != "adamw" else 2)


def _gathered(run: Run) -> int:
    """One layer's weights in the type of the products, and its gradients before they are cut: two of each, since the next
    is fetched while one is computed. On one device the casts alone."""
    layer = elements(tensors_of(run.shape).layer)
    casts = layer * run.compute if run.compute != run.width else 0
    if run.parts == 1:
        return casts + layer * run.wide
    return 2 * layer * (run.compute + run.wide + (run.width if run.device == "cpu" else 0))


def _exact_row(run: Run) -> int:
    """cuDNN's kernel takes a limited number of examples in a row; a row with more is computed by its scores, one at a time."""
    scores = run.tokens * run.shape.heads * run.tokens * (3 * run.wide + run.compute + 1)
    return scores if run.kernel and run.device == "cuda" else 0


def _loss_head(run: Run) -> int:
    """Logits of a chunk with what they turn into; then the table in the type of the products, and its gradient: as it is
    summed up, of one chunk, and of the lookup of the input tokens. Where the table is cut, tokens go to its parts."""
    shape = run.shape
    chunk = max(1, loss_rows(run.all_rows * run.tokens) // run.all_rows) * run.rows
    copies = 2 if run.device == "cpu" else 1
    logits = chunk * shape.vocab * (copies * run.wide + run.compute + (run.wide if shape.capped_logits else 0))
    table = on_device(run, (shape.vocab, shape.hidden), stacked=False)
    states = 4 * chunk * run.parts * shape.hidden * run.wide if run.parts > 1 else 0
    casts = run.compute if run.compute != run.width else 0
    return logits + states + table * (casts + run.wide + 2 * run.width)


# --- evaluation ------------------------------------------------------------------------------------------------------


def _asking(
    run: Run, config: RunConfig, state: dict[str, int], asked: int, devices: int, length: int
) -> Iterator[Phase]:
    """What is measured and asked beside training, with so many rows on all devices together."""
    shape, rows = run.shape, -(-asked // devices)
    tokens = row_length(min(length, shape.max_positions), run.device)
    layer = elements(tensors_of(shape).layer)
    gathered = 2 * layer * (run.compute + run.width) if run.parts > 1 else layer * run.compute
    table = shape.vocab * shape.hidden * run.compute
    if config.data.validation_fraction:
        held = Run(
            shape=shape, recipe=run.recipe, device=run.device, parts=run.parts, rows=rows, all_rows=rows * devices,
            tokens=tokens, accumulation=1, kernel=run.kernel,
        )  # fmt: skip
        chunk = max(1, loss_rows(held.all_rows * tokens) // held.all_rows) * rows  # rows are filled up to all devices
        parts = {"gathered": gathered + table, "in_flight": everything_of_a_layer(held)}
        yield _phase("held-out loss", **state, **parts, loss_head=2 * chunk * shape.vocab * run.wide)
    if config.evaluation.enabled:
        columns = 1 << max(7, (length + config.evaluation.max_new_tokens - 1).bit_length())
        rows = 1 << max(0, (rows - 1).bit_length())
        casts = shape.parameters * run.compute if run.compute != run.width or run.parts > 1 else 0
        cache = 2 * shape.layers * rows * columns * shape.kv_size * run.compute
        scores = (
            rows * shape.heads * 64 * columns * (3 * run.wide + run.compute)
        )  # a prompt is read 64 tokens at a time
        work = rows * 64 * (shape.hidden * 6 + shape.ffn * 4 + shape.query_size * 4) * run.wide
        yield _phase(
            "generation",
            **state,
            casts=casts + gathered,
            kv_cache=2 * cache,
            in_flight=scores + work,
            loss_head=3 * rows * shape.vocab * run.wide,
        )
