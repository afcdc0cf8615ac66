"""What else than the weight of the lm_head makes logits is seen in the operations of a forward pass, whatever its size."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tunix_rt.engines.torch.head_check import other_head  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
IDS = torch.arange(5)[None]


def model_of(name, **more):
    config = transformers.CONFIG_MAPPING[name](**SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "olmoe"])
def test_a_plain_head_and_the_scales_that_the_loss_knows_are_its_own(name):
    assert other_head(model_of(name), IDS) is None


def test_a_scale_behind_the_head_is_seen():
    assert "behind the lm_head (mul)" in other_head(model_of("cohere", logit_scale=1.0), IDS)


def test_a_soft_cap_that_hardly_changes_a_loss_is_seen():
    model = model_of("llama")
    forward = model.forward

    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 1e4 * torch.tanh(output.logits / 1e4)
        return output

    model.forward = capped
    assert "behind the lm_head (div)" in other_head(model, IDS)


def test_a_change_before_the_head_is_seen():
    model = model_of("llama")
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0] * 2,), prepend=True)
    assert "before the lm_head" in other_head(model, IDS)


def test_a_head_with_a_bias_is_another_one():
    model = model_of("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
    assert "lm_head.bias" in other_head(model, IDS)
