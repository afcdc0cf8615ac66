"""The prediction for the engine that a configuration names."""

from tunix_rt.config import RunConfig
from tunix_rt.plan.jax_memory import predict_jax
from tunix_rt.plan.memory import MemoryPlan, predict
from tunix_rt.plan.shape import ModelShape


def predict_run(
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
    """Of the PyTorch engine on its one device; of the JAX engine on each of `devices`, with micro-batches of `rows`."""
    if config.training.backend == "jax":
        return predict_jax(
            shape, config, device=device, devices=devices, rows=rows, row_tokens=row_tokens, target_share=target_share,
            capability=capability,
        )  # fmt: skip
    return predict(
        shape, config, device=device, row_tokens=row_tokens, target_share=target_share, capability=capability
    )
