"""Memory of the experts of a layer on the PyTorch engine, as transformers computes them: sorted by expert, two grouped matmuls.

Grouped matmuls compute in the dtype of the weights, also under autocast: their weights are never cast.
"""

from typing import TYPE_CHECKING

from tunix_rt.plan.sizes import Dimensions, ModelShape

if TYPE_CHECKING:
    from tunix_rt.plan.activations import Widths


def saved_by_experts(shape: ModelShape, widths: "Widths", tokens: int, *, device: str) -> list[int]:
    """What autograd saves in router and experts, without the two norms behind MLP and experts."""
    if (experts := shape.experts) is None:
        return []
    stream, chosen = tokens * shape.hidden, tokens * experts.active
    copies = [stream * widths.norm] * 2 if widths.stream != widths.norm else []  # the norms before router and experts
    roots = [tokens * widths.norm] * 4
    scores = [tokens * experts.count * 4, 4 * tokens, 2 * chosen * 4, chosen * widths.stream]
    indices = [chosen * 8] * 4 + [chosen * 4]
    inner = [chosen * experts.ffn * widths.stream] * 3 + [chosen * shape.hidden * widths.stream]
    if (adapters := widths.adapters) is not None:
        inputs = adapters.saved_inputs(stream, adapters.router, compute=widths.compute, device=device)
        return copies + roots + scores + indices + inner + inputs + [4 * tokens * adapters.rank] * adapters.router
    normed = [stream * widths.stream, stream * widths.compute, stream * widths.norm]
    gathered = [chosen * shape.hidden * widths.stream, chosen * experts.ffn * widths.stream]
    return copies + roots + scores + indices + inner + normed + gathered


def forward_of_experts(shape: ModelShape, widths: "Widths", tokens: int) -> list[int]:
    """Alive at once without autograd: result and norms of the MLP and the router beside it; gathered inputs and results, those
    weighted in float32, and these in the order of the tokens."""
    if (experts := shape.experts) is None:
        return []
    chosen = tokens * experts.active * shape.hidden
    return [tokens * shape.hidden * widths.stream] * 4 + [chosen * widths.stream] * 2 + [chosen * widths.norm] * 2


def gradients_of_experts(shape: ModelShape, widths: "Widths", tokens: int) -> int:
    """Alive at once in the backward pass: gradients of both matmuls' results, and of the larger of both weights; or of weighted
    results, in float32: as it arrives, times the weight, rounded, and times the result."""
    if (experts := shape.experts) is None:
        return 0
    chosen = tokens * experts.active
    weights = 2 * experts.count * experts.ffn * shape.hidden * widths.stream * (widths.adapters is None)
    matmuls = chosen * (2 * shape.hidden + 3 * experts.ffn) * widths.stream + weights
    rounded = widths.stream * (widths.stream != widths.norm)
    return max(matmuls, chosen * shape.hidden * (3 * widths.norm + rounded))


def cast_matrices(matrices: list[Dimensions]) -> list[Dimensions]:
    """Those that autocast casts."""
    return [one for one in matrices if len(one) == 2]
