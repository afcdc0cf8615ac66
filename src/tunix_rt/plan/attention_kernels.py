"""Which kernel computes attention: one rule per engine, called by the engine when it loads a model and by the planner.

Loads neither torch nor jax. A rule returns a name and the reason, as the log shows it.
"""

from tunix_rt.plan.sizes import ModelShape

Capability = tuple[int, int]

NARROW = ("bfloat16", "float16")
OLDEST_CAPABILITY = (8, 0)
"""CUDA compute capability that varlen and FlexAttention need."""
LARGEST_FLASH_HEAD = 256
TPU_LANES = 128
"""Width of a TPU's vector registers: its attention kernel takes head sizes and row lengths that are multiples."""
CUDNN_CAPABILITY = (9, 0)
"""CUDA compute capability that cuDNN's attention over packed examples needs."""
CUDNN_TOKENS_PER_EXAMPLE = 32
"""cuDNN saves a statistic for every example that a row may have, so the kernel is compiled for one example per 32 tokens of a
row. A batch with more is computed with masks, row by row."""
MASKED = "transformers makes a mask of tokens x tokens from positions that restart"


# --- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_attention(
    *,
    device: str,
    dtype: str,
    capability: Capability | None,
    softcap: bool,
    dropout: bool,
    head_dim: int,
    deterministic: bool = False,
    sdpa: bool = True,
    varlen_lacks: str | None = None,
) -> tuple[str, str]:
    """`varlen`, `flex`, `sdpa` or `eager`, and why: the fastest attention that is exact for packed rows of such a model.

    `dtype` is the compute dtype, `sdpa` whether the model's class supports that attention (`_supports_sdpa`), and
    `varlen_lacks` what the installed `varlen_attn` cannot do.
    """
    fallback = "sdpa" if sdpa and not softcap else "eager"
    if not sdpa and not softcap:
        return fallback, f"transformers has only eager attention for this architecture: {MASKED}"
    if device != "cuda":
        return fallback, f"on the CPU: {MASKED}"
    if capability is None or capability < OLDEST_CAPABILITY:
        return fallback, f"{_described(capability)}, and varlen and flex need 8.0: {MASKED}"
    if dropout:
        return fallback, f"the model has attention dropout, which varlen and flex do not have: {MASKED}"
    if softcap:
        if missing := _missing_in_flex(dtype, head_dim):
            return fallback, f"{missing}: {MASKED}"
        return "flex", "scores are soft-capped, which FlexAttention compiles into its kernel; masked blocks are skipped"
    if dtype not in NARROW:
        return fallback, f"flash attention does not support {dtype}: {MASKED}"
    if missing := varlen_lacks or _missing_in_flash(head_dim, capability):
        return fallback, f"{missing}: {MASKED}"
    order = "; its backward pass adds in a fixed order" if deterministic else ""
    return "varlen", f"torch's flash attention over each packed example; no mask is made{order}"


def _missing_in_flex(dtype: str, head_dim: int) -> str | None:
    if dtype not in (*NARROW, "float32"):
        return f"FlexAttention does not support {dtype}"
    return f"FlexAttention needs a head size of 16 or more, not {head_dim}" if head_dim < 16 else None


def _missing_in_flash(head_dim: int, capability: Capability) -> str | None:
    """Why flash attention has no forward or no backward kernel for this head size; None where it has both."""
    if head_dim % 8 or head_dim > LARGEST_FLASH_HEAD:
        return f"flash attention needs a head size of 8 to {LARGEST_FLASH_HEAD} in steps of 8, not {head_dim}"
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if small and 192 < head_dim <= 224:  # the same rule as in torch's own dispatch (sdp_utils.cpp)
        return f"flash attention has no backward pass for a head size of {head_dim} where the {_described(capability)}"
    return None


def capability_class(capability: Capability, head_dim: int) -> Capability:
    """The lowest compute capability with the same attention kernels for this head size."""
    if capability < OLDEST_CAPABILITY:
        return (0, 0)
    return capability if _missing_in_flash(head_dim, capability) else OLDEST_CAPABILITY


def _described(capability: Capability | None) -> str:
    return f"compute capability is {'not known' if capability is None else '{}.{}'.format(*capability)}"


def torch_kernel(
    shape: ModelShape,
    *,
    device: str,
    compute_bytes: int,
    capability: Capability | None,
    deterministic: bool,
    packed: bool,
) -> str:
    """What `torch_attention` means for memory: `fused` (no mask), `masked`, `math` or `eager` (both materialize the scores).

    A GPU of unknown capability is assumed to have one of 8.0."""
    name, _ = torch_attention(
        device=device, dtype=_DTYPES[compute_bytes], capability=capability or OLDEST_CAPABILITY,
        softcap=shape.capped_scores, dropout=shape.attention_dropout > 0,
        head_dim=shape.largest_head or shape.head_dim,
    )  # fmt: skip
    if name in ("varlen", "flex"):
        return "fused"
    if name == "eager":
        return "eager"
    # The kernel that scaled_dot_product_attention dispatches to.
    if device != "cuda":
        return "math" if shape.attention_dropout else "masked" if packed else "fused"
    if compute_bytes == 8 or deterministic:  # torch's memory-efficient kernel supports neither
        return "math"
    if packed:
        return "masked"
    # Without a mask, shared key-value heads are repeated only if they are large, and else need flash attention.
    flash = compute_bytes == 2 and (capability or OLDEST_CAPABILITY) >= OLDEST_CAPABILITY
    return "fused" if flash or repeats_shared_heads(shape) or shape.heads == shape.kv_heads else "math"


def repeats_shared_heads(shape: ModelShape) -> bool:
    """Whether transformers repeats key-value heads although there is no mask: flash attention has no heads so large."""
    return shape.head_dim > LARGEST_FLASH_HEAD


def torch_generation_kernel(
    shape: ModelShape, *, device: str, compute_bytes: int, capability: Capability | None, deterministic: bool
) -> str:
    """As `torch_kernel`, for generation with a cache: padding of shorter prompts is masked, and there is no dropout."""
    if shape.capped_scores:
        return "capped"
    # The memory-efficient kernel has no shared key-value heads; the others need 16-bit numbers and a newer GPU.
    newer = capability is None or capability >= OLDEST_CAPABILITY
    shared = shape.heads != shape.kv_heads and (compute_bytes == 4 or not newer)
    cannot = compute_bytes == 8 or deterministic or shared
    return "math" if device == "cuda" and cannot else "masked"


_DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}


# --- JAX -------------------------------------------------------------------------------------------------------------


def jax_attention(
    shape: ModelShape, *, platform: str, compute: str, tokens: int, capability: Capability | None
) -> tuple[str, str]:
    """`exact`, `cudnn` or `splash`, and why: the fastest for rows of `tokens` on `platform` (`cpu`, `gpu` or `cuda`, `tpu`).

    `exact` materializes scores of tokens x tokens. A GPU of unknown capability gets it."""
    if platform in ("gpu", "cuda"):
        missing = _missing_in_cudnn(shape, compute, capability)
        return ("exact", f"masks: {missing}") if missing else ("cudnn", "cuDNN flash attention over packed examples")
    if platform != "tpu":
        return "exact", "masks of tokens x tokens"
    if tokens % TPU_LANES or shape.head_dim % TPU_LANES:
        return "exact", (
            f"masks: splash attention takes multiples of {TPU_LANES}, not {tokens} tokens and a head size of {shape.head_dim}"
        )
    if compute == "float64":
        return "exact", "masks: splash attention has no float64"
    return "splash", "splash attention with segment ids"


def _missing_in_cudnn(shape: ModelShape, compute: str, capability: Capability | None) -> str | None:
    if compute not in NARROW:
        return f"cuDNN attention has no {compute}"
    if shape.capped_scores:
        return "cuDNN attention has no soft cap"
    if shape.head_dim % 8 or shape.head_dim > 256:
        return f"cuDNN attention needs a head size of 8 to 256 in steps of 8, not {shape.head_dim}"
    if capability is None or capability < CUDNN_CAPABILITY:
        return f"cuDNN attention over packed examples needs compute capability 9.0, and {_described(capability)}"
    return None
