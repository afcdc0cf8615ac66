"""One rule per engine names the attention kernel; the planner derives the memory of a step from the same rule."""

import itertools

from tunix_rt.models.resolve import preset_names, resolve_model
from tunix_rt.plan.attention_kernels import capability_class, jax_attention, torch_attention, torch_kernel
from tunix_rt.plan.shape import shape_of

CAPABILITIES = ((6, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
HEADS = (8, 12, 64, 128, 200, 208, 224, 256, 288)
DTYPES = {"bfloat16": 2, "float32": 4, "float64": 8}


def with_heads(size, model_type="llama", **more):
    return shape_of({"model_type": model_type, "head_dim": size, **more})


def test_gpus_of_one_class_have_the_same_kernels():
    for capability, size, dtype, softcap in itertools.product(CAPABILITIES, HEADS, DTYPES, (False, True)):
        facts = {"device": "cuda", "dtype": dtype, "softcap": softcap, "dropout": False, "head_dim": size}
        chosen, alike = (
            torch_attention(**facts, capability=one)[0] for one in (capability, capability_class(capability, size))
        )
        assert chosen == alike, (capability, size, dtype, softcap)


def test_the_plan_has_no_mask_exactly_where_the_engine_has_none():
    for capability, size, dtype, kind, dropout in itertools.product(
        CAPABILITIES, HEADS, DTYPES, ("llama", "gemma2"), (0.0, 0.1)
    ):
        shape = with_heads(size, kind, attention_dropout=dropout)
        name, _ = torch_attention(
            device="cuda", dtype=dtype, capability=capability, softcap=shape.capped_scores, dropout=dropout > 0,
            head_dim=size,
        )  # fmt: skip
        kernel = torch_kernel(
            shape, device="cuda", compute_bytes=DTYPES[dtype], capability=capability, deterministic=False, packed=True
        )
        assert (kernel == "fused") == (name in ("varlen", "flex")), (capability, size, dtype, kind)
        assert (kernel == "eager") == (name == "eager"), (capability, size, dtype, kind)


def test_the_kernels_of_jax_need_their_device_dtype_and_head_size():
    def name(size=128, *, platform, compute="bfloat16", tokens=256, capability=(9, 0), model_type="llama"):
        shape = with_heads(size, model_type)
        return jax_attention(shape, platform=platform, compute=compute, tokens=tokens, capability=capability)[0]

    assert {name(platform="cuda", compute=compute) for compute in ("bfloat16", "float16")} == {"cudnn"}
    assert {name(platform="cuda", capability=one) for one in (None, (8, 9))} == {"exact"}
    assert {name(size, platform="cuda") for size in (12, 288)} == {"exact"}
    assert {name(platform="cuda", compute=compute) for compute in ("float32", "float64")} == {"exact"}
    assert (
        name(platform="cuda", model_type="gemma2") == "exact" and name(platform="tpu", model_type="gemma2") == "splash"
    )
    assert [name(size, platform="tpu") for size in (128, 256, 64)] == ["splash", "splash", "exact"]
    assert {name(platform="tpu", tokens=200), name(platform="tpu", compute="float64"), name(platform="cpu")} == {
        "exact"
    }


def test_the_engine_reads_the_head_size_that_the_plan_does():
    """Without one, a model would fall back to masks of tokens x tokens."""
    import transformers

    from tunix_rt.engines.torch.load import largest_head
    from tunix_rt.engines.torch.model import text_config

    for name in preset_names():
        source = resolve_model(name, weights="random")
        shape = shape_of(source.config)
        config = text_config(transformers.AutoConfig.from_pretrained(source.folder))
        assert largest_head(config) == (shape.largest_head or shape.head_dim), name
    assert largest_head(transformers.MambaConfig()) is None
