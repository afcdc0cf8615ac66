"""What one optimizer step promises besides its loss: the clipping, the loss scale of float16, which layers are computed
again, and the deterministic mode."""

import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from tests.conftest import write_small_model
from tests.optimizer_checks import float64
from tests.tables import parametrize
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.optimizers import Hyperparameters
from tunix_rt.engines.optimizers.adamw import reference
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch import model as torch_model
from tunix_rt.engines.torch.model import LossScale
from tunix_rt.errors import ConfigError
from tunix_rt.models.resolve import resolve_model

VOCABULARY = 1024


def drawn_rows():
    draw = np.random.default_rng(4)
    examples = [
        Example(ids=draw.integers(3, VOCABULARY, size, dtype=np.int32), trained=np.ones(size, dtype=np.bool_))
        for size in draw.integers(5, 30, 24).tolist()
    ]
    return make_rows(examples, max_length=48, packing=True)


class Run:
    """A small model with its optimizer; the rows are the same for all."""

    def __init__(self, folder, *, accumulation=1, at_once=2, **settings):
        self.training = Training(seed=3, lr_scheduler_type="constant", **settings)
        source = resolve_model(str(folder), weights="random")
        self.engine = engine_of.load(source, device="cpu", training=self.training)
        self.optimizer = engine_of.make_optimizer(self.engine, self.training)
        self.rows = len(drawn_rows())
        self.batch = partial(
            batch_of_step, drawn_rows(), micro_batch_size=at_once, accumulation=accumulation, seed=5, pad_id=0
        )

    def steps(self, *, first=1, total=6):
        return engine_of.optimizer_steps(
            self.engine, self.optimizer, self.batch, self.training, first=first, total=total
        )

    def walk(self, *, first=1, last, total=6):
        return list(itertools.islice(self.steps(first=first, total=total), last - first + 1))

    @property
    def parameters(self):
        return dict(self.engine.model.named_parameters())

    def everything(self):
        """Weights and the optimizer's state, copied."""
        both = {**self.parameters, **self.optimizer.tensors()}
        return {name: tensor.detach().clone() for name, tensor in both.items()}


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# --- clipping --------------------------------------------------------------------------------------------------------

LIMIT = 0.05
PRECISIONS = {
    "float64": ({"dtype": "float64"}, 1e-12),
    "float32": ({}, 1e-5),
    "bfloat16 products": ({"dtype": "bfloat16"}, 1e-5),
    "bfloat16 weights": ({"dtype": "bfloat16", "master_dtype": "bfloat16", "stochastic_rounding": False}, 1e-4),
    "float16": ({"dtype": "float16"}, 1e-5),
}
# AdamW hardly notices by how much a gradient is scaled, unless epsilon is far above its size.
LINEAR = {"adam_epsilon": 1.0, "learning_rate": 1.0, "weight_decay": 0.0}


def gradients_of(twin, run, step, multiplied):
    """What a step of `run` starts from, computed by another engine with the same weights: gradients of the mean loss over
    all micro-batches, in float64, without the loss scale."""
    model, batch = twin.engine.model, run.batch(step)
    assert len(batch.micro_batches) > 1
    with torch.no_grad():
        for name, parameter in twin.parameters.items():
            parameter.copy_(run.parameters[name])
    model.train()
    model.zero_grad(set_to_none=True)
    for micro in batch.micro_batches:
        engine_of.summed_loss(twin.engine, micro, scale=multiplied / batch.target_tokens).backward()
    return {name: float64(parameter.grad) / multiplied for name, parameter in twin.parameters.items()}


def global_norm(gradients):
    return math.sqrt(math.fsum(float((gradient**2).sum()) for gradient in gradients.values()))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_update_is_that_of_gradients_clipped_by_their_global_norm(small_model, precision):
    """And the norm that is told is the one before clipping, of all tensors together and of the whole step."""
    settings, close = PRECISIONS[precision]
    run, twin = (
        Run(small_model("gemma3"), accumulation=3, max_grad_norm=LIMIT, **LINEAR, **settings) for _ in range(2)
    )
    nothing = {name: np.zeros(p.shape) for name, p in run.parameters.items()}
    moments, stepping = {"exp_avg": nothing, "exp_avg_sq": nothing}, run.steps()
    for number in (1, 2):
        multiplied = run.engine.loss_scale.value if run.engine.loss_scale else 1.0
        gradients = gradients_of(twin, run, number, multiplied)
        before = {name: float64(p).copy() for name, p in run.parameters.items()}
        step = next(stepping)
        norm = global_norm(gradients)
        assert norm > 4 * LIMIT, "nothing was clipped"
        assert step.grad_norm == pytest.approx(norm, rel=close)
        right = {
            name: reference(
                before[name],
                {slot: of[name] for slot, of in moments.items()},
                gradient * (LIMIT / (norm + 1e-6)),
                Hyperparameters(step=number, lr=step.lr, decay=0.0, epsilon=1.0),
            )
            for name, gradient in gradients.items()
        }  # fmt: skip
        moments = {
            "exp_avg": {name: now["exp_avg"] for name, now in right.items()},
            "exp_avg_sq": {name: now["exp_avg_sq"] for name, now in right.items()},
        }
        check_update(run, before, right, close)


def check_update(run, before, right, close):
    """Moments and weights are those of the reference: `close` is the error of a moment as a share of its largest element;
    a weight may be rounded besides."""
    for name, parameter in run.parameters.items():
        kept, found, want = run.optimizer.state_of(parameter), float64(parameter), right[name]
        narrow = 0.0 if parameter.dtype == torch.float64 else 5e-5  # float32 knows 1 - 0.999 to so much of it only
        for slot, bound in (("exp_avg", close), ("exp_avg_sq", max(close, narrow))):
            assert np.abs(float64(kept[slot]) - want[slot]).max() <= bound * np.abs(want[slot]).max(), (name, slot)
        moved = np.abs(want["parameter"] - before[name]).max()
        rounded = torch.finfo(parameter.dtype).eps * np.abs(found)
        assert (np.abs(found - want["parameter"]) <= rounded + 2 * close * moved).all(), name
        assert moved > 0


@pytest.mark.parametrize("precision", ["bfloat16 products", "bfloat16 weights", "float16"])
def test_16_bits_clip_as_float32_does(small_model, precision):
    """Nothing of the loss scale is left in the norm or in the update."""
    runs = [
        Run(small_model("gemma3"), accumulation=3, max_grad_norm=LIMIT, **LINEAR, **PRECISIONS[which][0])
        for which in (precision, "float32")
    ]
    (ours,), (right,) = (run.walk(last=1) for run in runs)
    assert ours.grad_norm == pytest.approx(right.grad_norm, rel=0.02)
    for name in runs[0].parameters:
        got, want = (float64(run.optimizer.state_of(run.parameters[name])["exp_avg"]) for run in runs)
        assert np.linalg.norm(got - want) <= 0.1 * np.linalg.norm(want), name


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_norm_below_the_limit_changes_no_bit(small_model, precision):
    far, none = (
        Run(small_model("llama"), accumulation=2, max_grad_norm=limit, **LINEAR, **PRECISIONS[precision][0])
        for limit in (1e6, 0.0)
    )
    norms = [[step.grad_norm for step in run.walk(last=2)] for run in (far, none)]
    assert norms[0] == norms[1] and 0 < norms[0][0] < 1e6
    assert same_bits(far.everything(), none.everything())


# --- the loss scale --------------------------------------------------------------------------------------------------

TOO_MUCH = 2.0**30


def overflowing(folder):
    """float16 with dropout, and a loss scale that is too high for its first step."""
    run = Run(folder, dtype="float16", learning_rate=1e-3)
    run.engine.loss_scale.value = TOO_MUCH
    return run


def scale_of(run):
    return run.engine.loss_scale.value, run.engine.loss_scale.steps


def test_a_step_that_overflowed_is_to_the_last_bit_the_step_at_the_scale_it_settled_on(small_model):
    """Nothing of the attempts is left: no gradient, no random number, no update."""
    run = overflowing(small_model("gpt2-dropout"))
    (step,) = run.walk(last=1)
    settled, _ = scale_of(run)
    assert 1 < settled < TOO_MUCH
    calm = Run(small_model("gpt2-dropout"), dtype="float16", learning_rate=1e-3)
    calm.engine.loss_scale.value = settled
    (right,) = calm.walk(last=1)
    assert scale_of(calm)[0] == settled
    assert (step.loss, step.grad_norm) == (right.loss, right.grad_norm)
    assert same_bits(run.everything(), calm.everything())


def whole_and_resumed(folder, checkpoint):
    """Two runs of 4 steps whose first overflows, the second of them interrupted after 3."""
    whole, first = overflowing(folder), overflowing(folder)
    curve = whole.walk(last=4)
    seen = first.walk(last=3)
    kept = scale_of(first)
    assert kept[0] < TOO_MUCH and kept[0] != LossScale().value
    checkpoint.mkdir()
    engine_of.write_direct(first.engine, first.optimizer, checkpoint)
    second = Run(folder, dtype="float16", learning_rate=1e-3)
    engine_of.restore_state(second.engine, second.optimizer, checkpoint, step=3)
    found = scale_of(second)
    seen += second.walk(first=4, last=4)
    curves = [[(step.loss, step.grad_norm) for step in steps] for steps in (curve, seen)]
    return {
        "scale": (found, kept),
        "scale at the end": (scale_of(second), scale_of(whole)),
        "curve": tuple(curves),
        "bits": (same_bits(second.everything(), whole.everything()), True),
    }


def test_a_run_that_was_interrupted_after_an_overflow_continues_with_its_scale(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_model, "STEPS_TO_GROW", 4)
    compared = whole_and_resumed(small_model("gpt2-dropout"), tmp_path / "checkpoint")
    assert [name for name, (found, right) in compared.items() if found != right] == []
    assert compared["scale"][0][1] > 0, "steps without an overflow go on being counted"


def test_a_scale_that_was_not_restored_would_be_found(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_model, "STEPS_TO_GROW", 4)
    monkeypatch.setattr(LossScale, "restore", lambda scale, tensors: None)
    compared = whole_and_resumed(small_model("gpt2-dropout"), tmp_path / "checkpoint")
    assert {"scale", "scale at the end"} <= {name for name, (found, right) in compared.items() if found != right}


def test_the_scale_grows_in_the_steps_of_a_run_and_an_overflow_begins_the_count_again(small_model, monkeypatch):
    monkeypatch.setattr(torch_model, "STEPS_TO_GROW", 2)
    run = Run(small_model("gemma3"), dtype="float16")
    run.engine.loss_scale.value = 64.0
    run.engine.loss_scale.steps = 1
    scales = [(scale_of(run)) for _ in run.steps(total=3)]
    assert scales == [(128.0, 0), (128.0, 1), (256.0, 0)]
    run = overflowing(small_model("gemma3"))
    run.engine.loss_scale.steps = 1
    scales = [(scale_of(run)) for _ in run.steps(total=2)]
    settled = scales[0][0]
    assert settled < TOO_MUCH and scales == [(settled, 1), (2 * settled, 0)]


def test_the_scale_is_capped(monkeypatch):
    monkeypatch.setattr(torch_model, "STEPS_TO_GROW", 2)
    scale, values = LossScale(value=torch_model.HIGHEST_LOSS_SCALE / 4), []
    for _ in range(12):
        scale.held()
        values.append(scale.value / torch_model.HIGHEST_LOSS_SCALE)
    assert values == [0.25, 0.5, 0.5, *[1.0] * 9]


def test_the_scale_waits_a_thousand_steps():
    scale = LossScale()
    for _ in range(999):
        scale.held()
    assert scale == LossScale(steps=999)
    scale.held()
    assert scale == LossScale(value=2 * LossScale().value)


# --- layers that are computed again ----------------------------------------------------------------------------------


def four_layers(kind, folder):
    write_small_model(kind, folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"] * 2
    settings["n_layer" if kind.startswith("gpt2") else "num_hidden_layers"] = 4
    path.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["gemma3", "gpt2-dropout"])
@parametrize("asked", "again")
def test_the_first_layers_are_computed_again_and_the_last_are_not(tmp_path, kind, asked, again):
    run = Run(four_layers(kind, tmp_path / "model"), gradient_checkpointing=asked)
    layers = [m for m in run.engine.model.modules() if isinstance(m, transformers.GradientCheckpointingLayer)]
    passes = [0, 0, 0, 0]
    for place, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, place=place: passes.__setitem__(place, passes[place] + 1))
    assert len(run.batch(1).micro_batches) == 1
    run.walk(last=1)
    assert [layer.gradient_checkpointing for layer in layers] == again
    assert passes == [2 if repeated else 1 for repeated in again]


@pytest.mark.parametrize("written", [0, 1, 0.0, 1.0])
def test_a_share_of_kept_layers_that_says_all_or_none_as_a_number_is_refused(written):
    """1 could mean all layers kept, or checkpointing on."""
    with pytest.raises(ConfigError, match=r"training\.gradient_checkpointing"):
        build_config({"training": {"gradient_checkpointing": written}}, "x")


@pytest.mark.parametrize("written", [True, False, 0.25])
def test_yes_no_and_a_share_are_taken_as_they_are(written):
    got = build_config({"training": {"gradient_checkpointing": written}}, "x").training.gradient_checkpointing
    assert got == written and type(got) is type(written)


# --- deterministic ---------------------------------------------------------------------------------------------------


@pytest.fixture
def switches():
    """As they are before any load, and again so afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_a_load_turns_deterministic_algorithms_on_and_a_later_one_off_again(small_model, switches):
    Run(small_model("llama"), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False, "every new tensor would be written twice"
    Run(small_model("llama"))
    assert not torch.are_deterministic_algorithms_enabled()
    Run(small_model("llama"), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_run_takes_the_steps_of_a_plain_one(small_model, switches):
    """And what is not deterministic refuses to run in it."""
    plain = Run(small_model("gemma3"))
    right = [step.loss for step in plain.walk(last=2)]
    run = Run(small_model("gemma3"), deterministic=True)
    assert [step.loss for step in run.walk(last=2)] == pytest.approx(right, rel=1e-6)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=False)
