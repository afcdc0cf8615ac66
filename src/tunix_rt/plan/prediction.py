"""The prediction for the engine that a configuration names."""

from functools import lru_cache

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.compile_policy import layers_planned
from tunix_rt.plan.jax_memory import predict_jax
from tunix_rt.plan.memory import MemoryPlan, longest_row, predict
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
    device_name: str | None = None,
    steps: int | None = None,
    layers: str | None = None,
) -> MemoryPlan:
    """Of the PyTorch engine on its one device; of the JAX engine on each of `devices`, with micro-batches of `rows`.

    The name of a GPU and the number of `steps` decide whether layers are compiled, and recorded, where that is left open.
    Asked again it is the same object: a search over many devices comes upon most settings several times."""
    if config.training.backend == "jax":
        layers = "compiled"
    elif layers is None:
        tokens = longest_row(shape, config, row_tokens or config.data.max_length)
        layers = layers_planned(
            config, shape, device=device, device_name=device_name, capability=capability, row_tokens=tokens, steps=steps
        )
    return _predicted(shape, config, device, devices, rows, row_tokens, target_share, capability, layers)


@lru_cache(maxsize=2048)
def _predicted(
    shape: ModelShape,
    config: RunConfig,
    device: str,
    devices: int,
    rows: int | None,
    row_tokens: int | None,
    target_share: float,
    capability: tuple[int, int] | None,
    layers: str,
) -> MemoryPlan:
    if config.training.backend == "jax":
        return predict_jax(
            shape, config, device=device, devices=devices, rows=rows, row_tokens=row_tokens, target_share=target_share,
            capability=capability,
        )  # fmt: skip
    return predict(
        shape,
        config,
        device=device,
        row_tokens=row_tokens,
        target_share=target_share,
        capability=capability,
        layers=layers,
    )
