"""The optimizers compute what docs/concepts/optimizers.md says, in every type, whole or in slices, interrupted or not."""

import importlib.util
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import optimizer_checks as checks
from tests.optimizer_checks import KINDS, SHAPES, copies, each_dtype, each_kind, give_gradients, make, parameters, walk
from tunix_rt.config.optimizers import BLOCK, FULL_BELOW, state_bytes
from tunix_rt.engines.torch import update_rules as torch_rounding
from tunix_rt.engines.torch import update_rules as torch_update_rules
from tunix_rt.errors import TunixError

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "optimizers.md"

wide = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


# --- what is computed ------------------------------------------------------------------------------------------------


@wide
@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_20_updates_are_those_of_the_float64_reference(kind, dtype, size):
    checks.check_reference(kind, dtype, size=size)


@wide
def test_adamw_is_torchs_own_fused_one_to_the_last_bit(dtype):
    checks.check_torchs_own(dtype)


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_a_zero_gradient_among_others_moves_nothing_and_divides_by_nothing(kind):
    """Rows and columns of zeros, as an embedding has for tokens that do not occur."""
    weights = torch.nn.Parameter(torch.ones(32, 16))
    optimizer = make({"table": weights}, kind, decay=0.0)
    for step in range(1, 6):
        weights.grad = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)) * 1e8
        weights.grad[10:] = 0.0
        weights.grad[:, 3] = 0.0
        optimizer.begin(step, 1e-2)
        optimizer.step()
    assert weights.isfinite().all()
    assert weights[10:].eq(1).all() and weights[:, 3].eq(1).all() and weights[:10, :3].ne(1).all()


@each_kind
@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
def test_bfloat16_weights_are_those_of_float32_rounded_once(kind, stochastic):
    """The neighbour above or below, or with nearest the nearer one. 8 bits of the moments do not matter in a first step."""
    named = parameters(torch.bfloat16)
    wide = {name: torch.nn.Parameter(parameter.detach().float()) for name, parameter in named.items()}
    for one in (named, wide):
        give_gradients(one, 1)
    for name, parameter in wide.items():
        parameter.grad = named[name].grad.float()
    for one in (named, wide):
        optimizer = make(one, kind, stochastic=stochastic)
        optimizer.begin(1, 1e-2)
        optimizer.step()
    for name, parameter in named.items():
        exact = wide[name].detach()
        if not stochastic:
            assert torch.equal(parameter.detach(), exact.bfloat16()), name
            continue
        bits = exact.view(torch.int32) & ~0xFFFF
        neighbours = bits.view(torch.float32), (bits + 0x1_0000).view(torch.float32)
        found = parameter.detach().float()
        assert ((found == neighbours[0]) | (found == neighbours[1])).all(), name


def test_8_bit_moments_give_the_updates_of_adamw_on_average():
    """Element by element the way is off by a few percent; over a matrix it is the same."""
    ways = {}
    for kind in ("adamw", "adamw_8bit"):
        weights = torch.nn.Parameter(torch.zeros(256, 256))
        drawn = torch.Generator().manual_seed(1)
        optimizer = make({"weights": weights}, kind, decay=0.0, beta2=0.95)
        slope = torch.randn(256, 256, generator=drawn)
        for step in range(1, 101):
            weights.grad = slope + torch.randn(256, 256, generator=drawn)
            optimizer.begin(step, 1e-3)
            optimizer.step()
        ways[kind] = weights.detach().double()
    exact, found = ways["adamw"], ways["adamw_8bit"]
    along = (found * exact).sum() / exact.square().sum()
    off = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert along.item() == pytest.approx(1.0, abs=0.01)
    assert 0.001 < off.item() < 0.05


@each_dtype
def test_a_small_tensor_has_whole_moments_under_8_bit_adamw(dtype):
    small, large = torch.nn.Parameter(torch.ones(4095, dtype=dtype)), torch.nn.Parameter(torch.ones(4096, dtype=dtype))
    found = []
    for kind in ("adamw", "adamw_8bit"):
        named = {
            "small": torch.nn.Parameter(small.detach().clone()),
            "large": torch.nn.Parameter(large.detach().clone()),
        }
        optimizer = make(named, kind)
        walk(optimizer, named)
        found.append((named["small"], optimizer.state_of(named["small"])))
        assert (optimizer.state_of(named["large"])["exp_avg"].dtype == torch.uint8) == (kind == "adamw_8bit")
    assert torch.equal(found[0][0], found[1][0])
    checks.assert_same_bits(found[1][1], found[0][1])


def test_matrices_are_decayed_and_vectors_are_not():
    for kind in KINDS:
        named = parameters(torch.float64)
        starts = copies(named)
        optimizer = make(named, kind, decay=0.5)
        give_gradients(named, 1, size=0.0)
        optimizer.begin(1, 0.1)
        optimizer.step()
        for name, parameter in named.items():
            kept = 0.95 if len(SHAPES[name]) >= 2 else 1.0
            torch.testing.assert_close(parameter.detach(), starts[name] * kept, rtol=1e-15, atol=0)


OPTAX = """
import sys, numpy as np, optax
theirs = optax.adafactor(1e-2, min_dim_size_to_factor=1, multiply_by_parameter_scale=False)
given = np.load(sys.argv[1])
weights = {name: np.ones_like(given[f"{name}.1"]) for name in ("matrix", "vector")}
state = theirs.init(weights)
for step in range(1, 5):
    updates, state = theirs.update({name: given[f"{name}.{step}"] for name in weights}, state, weights)
    weights = optax.apply_updates(weights, updates)
np.savez(sys.argv[2], **weights)
"""


def test_adafactor_is_optax_with_its_other_settings_turned_off(tmp_path):
    """In a process of its own: JAX's threads would stay in this one, and no later test could fork."""
    if importlib.util.find_spec("optax") is None:
        pytest.skip("optax is not installed")
    named = {name: torch.nn.Parameter(torch.ones(SHAPES[name])) for name in ("matrix", "vector")}
    optimizer, gradients = make(named, "adafactor", decay=0.0), {}
    for step in range(1, 5):
        give_gradients(named, step)
        gradients |= {f"{name}.{step}": parameter.grad.numpy() for name, parameter in named.items()}
        optimizer.begin(step, 1e-2)
        optimizer.step()
    np.savez(tmp_path / "gradients.npz", **gradients)
    files = [str(tmp_path / name) for name in ("gradients.npz", "weights.npz")]
    subprocess.run([sys.executable, "-c", OPTAX, *files], check=True, timeout=120)
    weights = np.load(files[1])
    for name, parameter in named.items():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=0, atol=5e-6)


# --- small updates of bfloat16 weights -------------------------------------------------------------------------------


@each_kind
def test_small_updates_of_bfloat16_weights_are_lost_to_the_nearest_and_kept_at_random(kind):
    """Steps of 1e-4 from 1.0, where bfloat16 has gaps of 0.0039 below. 40 of them are a gap, and nearest never moves.

    A weight then is a sum of coin tosses: after the way s its variance is at most s times the gap."""
    ends = {}
    for stochastic in (True, False):
        weights = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
        optimizer = make({"weights": weights}, kind, decay=0.0, stochastic=stochastic)
        for step in range(1, 41):
            weights.grad = torch.full_like(weights, 0.5)
            optimizer.begin(step, 1e-4)
            optimizer.step()
        ends[stochastic] = weights.detach().double()
    assert ends[False].eq(1).all(), "to the nearest, nothing moves"
    way, gap = 40 * 1e-4, 2.0**-8
    assert (1 - ends[True].mean()).item() == pytest.approx(way, abs=5 * (way * gap / 2**16) ** 0.5)
    assert set(ends[True].unique().tolist()) <= {1 - gap * count for count in range(20)}


@each_kind
def test_random_bits_are_a_function_of_seed_step_and_place(kind):
    def after(*, seed=0, first=1, names=("a", "b")):
        named = {name: torch.nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16)) for name in names}
        optimizer = make(named, kind, seed=seed)
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.begin(first, 1e-4)
        optimizer.step()
        return list(copies(named).values())

    same, again, renamed = after(), after(), after(names=("c", "d"))
    assert torch.equal(same[0], again[0]) and torch.equal(same[1], again[1])
    assert torch.equal(same[0], renamed[0]), "a name is no place"
    assert not torch.equal(same[0], same[1])
    assert not torch.equal(same[0], after(seed=1)[0])
    assert not torch.equal(same[0], after(first=2)[0])


# --- one by one, all together, in slices -----------------------------------------------------------------------------


@each_kind
@each_dtype
def test_one_by_one_backwards_gives_the_bits_of_all_together(kind, dtype):
    checks.check_one_by_one(kind, dtype)


@each_kind
@each_dtype
@pytest.mark.parametrize("first", [1, 4], ids=["at the first step", "later"])
@pytest.mark.parametrize("how", checks.HOW)
def test_an_update_that_is_not_sound_changes_nothing(kind, dtype, first, how):
    checks.check_not_finite(kind, dtype, first, how=how)


@each_kind
@each_dtype
@pytest.mark.parametrize("limit", [0.05, 1e6, None])
def test_clipped_by_its_own_norm_is_scaled_by_that_factor(kind, dtype, limit):
    checks.check_clipped(kind, dtype, limit)


@each_kind
@each_dtype
def test_a_scale_is_a_multiplied_gradient_and_leaves_the_gradient_to_update(kind, dtype):
    """Powers of two, another in each step: exact in every type."""
    scaled, plain = parameters(dtype), parameters(dtype)
    first, second = make(scaled, kind), make(plain, kind)
    for step, scale in enumerate((0.25, 4.0, 0.125), start=1):
        give_gradients(scaled, step)
        give_gradients(plain, step)
        first.begin(step, 1e-2)
        second.begin(step, 1e-2)
        for name, parameter in scaled.items():
            before = parameter.grad.clone()
            first.update(parameter, scale=torch.tensor(scale))
            assert torch.equal(parameter.grad, before)
            plain[name].grad *= scale
            second.update(plain[name])
    checks.assert_same_bits(checks.everything(first, scaled), checks.everything(second, plain))


@each_kind
def test_a_scale_in_float64_is_not_cut_to_float32(kind):
    scale, ends = torch.tensor(0.1, dtype=torch.float64), []
    for given in (scale, None):
        named = parameters(torch.float64)
        optimizer = make(named, kind)
        give_gradients(named, 1, size=1.0 if given is not None else scale.item())
        optimizer.begin(1, 1e-2)
        for parameter in named.values():
            optimizer.update(parameter, scale=given)
        ends.append(optimizer.state_of(named["vector"])["exp_avg_sq"])
    torch.testing.assert_close(*ends, rtol=1e-14, atol=0)


@each_kind
@each_dtype
@pytest.mark.parametrize("scale", [None, torch.tensor(0.5)], ids=["", "scaled"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_gradients_that_do_not_lie_in_order_give_the_same(kind, dtype, scale, together):
    """torch's fused kernel on a CPU would read them in the order of memory, without a word.

    Sums over rows and columns are taken in another order: the last bits of Adafactor may differ."""
    ends = []
    for ordered in (True, False):
        named = parameters(dtype)
        optimizer = make(named, kind, stochastic=False)
        for step in range(1, 4):
            give_gradients(named, step)
            for name, parameter in named.items() if not ordered else ():
                parameter.grad = _out_of_order(parameter.grad)
                assert name in ("scalar", "narrow") or not parameter.grad.is_contiguous()
            optimizer.begin(step, 1e-2)
            if together:
                optimizer.step(scale=scale)
            else:
                for parameter in named.values():
                    optimizer.update(parameter, scale=scale)
        ends.append(copies(named))
    _assert_same_up_to_sums(kind, dtype, *ends)


def _out_of_order(gradient):
    """The same values with other strides: a matrix turned in memory, of a vector every second number."""
    if gradient.dim() >= 2:
        return gradient.transpose(-1, -2).contiguous().transpose(-1, -2)
    return torch.stack([gradient, -gradient], dim=-1)[..., 0]


def _assert_same_up_to_sums(kind, dtype, found, expected):
    off = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 2e-2}[dtype] if kind == "adafactor" else 0.0
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=off, atol=off, msg=lambda words, name=name: f"{name}: {words}"
        )


class Watch(TorchDispatchMode):
    """Every operation that is no view with the elements of the largest tensor it touches, and the memory it makes."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.alive, self.most_bytes = [], [], {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given, made = (
            [leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)] for part in (args, result)
        )
        aliases = [argument.alias_info for argument in function._schema.arguments if argument.alias_info]
        name = function._schema.name.removeprefix("aten::")
        if all(alias.is_write for alias in aliases):
            self.calls.append((name, max((tensor.numel() for tensor in given + made), default=0)))
        if not aliases:
            self.made += [(name, tensor.numel()) for tensor in made]
            for tensor in made:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
            self.most_bytes = max(self.most_bytes, sum(self.alive.values()))
        return result

    def passes(self, elements):
        return [name for name, largest in self.calls if largest >= elements and not name.startswith("empty")]


@each_kind
@each_dtype
@pytest.mark.parametrize("finite", [None, torch.tensor(True)], ids=["", "finite"])
def test_no_temporary_is_larger_than_a_slice_and_nothing_waits_for_the_device(monkeypatch, kind, dtype, finite):
    monkeypatch.setattr(torch_update_rules, "SLICE_ELEMENTS", 1024)
    named = {name: torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    optimizer = make(named, kind)
    walk(optimizer, named, last=2)
    give_gradients(named, 3)
    optimizer.begin(3, 1e-2)
    with Watch() as watch:
        for parameter in named.values():
            optimizer.update(parameter, scale=torch.tensor(0.5), finite=finite)
    # What is as long as a matrix is high is no temporary of its elements: the sums over rows.
    allowed = max(1024, max(shape[0] for shape in SHAPES.values() if len(shape) == 2))
    largest = max(watch.made, key=lambda made: made[1])
    assert largest[1] <= allowed, largest
    assert {"_local_scalar_dense", "item", "is_nonzero", "equal"}.isdisjoint(name for name, _ in watch.calls)


@each_kind
@each_dtype
def test_slices_give_the_update_of_the_whole(monkeypatch, kind, dtype):
    """To the last bit where nothing is summed up. In the first step, the codes of 8-bit moments have not been read yet."""
    ends = []
    for elements in (2**20, 256):
        monkeypatch.setattr(torch_update_rules, "SLICE_ELEMENTS", elements)
        named = parameters(dtype)
        optimizer = make(named, kind, stochastic=False)
        walk(optimizer, named, last=1 if kind == "adamw_8bit" else 5)
        ends.append(copies(named))
    _assert_same_up_to_sums(kind, dtype, ends[1], ends[0])


# --- state -----------------------------------------------------------------------------------------------------------


@each_kind
@each_dtype
@pytest.mark.parametrize("kept", [1, 3])
def test_restored_after_some_steps_the_rest_is_the_same_to_the_last_bit(kind, dtype, kept):
    checks.check_restored(kind, dtype, kept)


@each_kind
def test_restoring_copies_and_a_parameter_without_a_gradient_is_left_alone(kind):
    named = parameters(torch.float32)
    optimizer = make(named, kind)
    give_gradients(named, 1)
    named["cube"].grad = None
    before = named["cube"].detach().clone()
    optimizer.begin(1, 1e-2)
    optimizer.step()
    optimizer.update(named["cube"])
    assert torch.equal(named["cube"], before) and optimizer.state_of(named["cube"]) == {}
    assert optimizer.state_of(named["matrix"])
    saved = optimizer.tensors()
    assert saved["exp_avg_sq.cube"].eq(0).all() and optimizer.state_of(named["cube"]) == {}
    kept = copies(saved)
    again = make(named, kind)
    again.restore(saved, step=1)
    walk(again, named, first=2, last=3)
    checks.assert_same_bits(copies(saved), kept)


@each_kind
def test_a_state_that_is_not_this_ones_is_refused_by_name(kind):
    named = parameters(torch.float32)
    optimizer = make(named, kind)
    walk(optimizer, named, last=1)
    saved = copies(optimizer.tensors())
    some = next(iter(saved))

    def refused(tensors, words):
        with pytest.raises(TunixError, match=re.escape(words)):
            make(named, kind).restore(tensors, step=1)

    refused({name: tensor for name, tensor in saved.items() if name != some}, f"lacks {some}")
    refused(saved | {"exp_avg.other": torch.zeros(1)}, "has the unexpected tensor exp_avg.other")
    refused(saved | {some: torch.zeros(7)}, f"has {some} as [7] float32")
    refused(saved | {some: saved[some].to(torch.float16)}, f"{some} as {list(saved[some].shape)} float16")
    other = next(name for name in KINDS if name != kind and name != "adamw_8bit")
    strange = make(named, other)
    strange.begin(1, 1e-2)
    refused(strange.tensors(), "tensor names differ")
    make(named, kind).restore(saved, step=1)


def test_a_step_that_was_restored_is_not_taken_again_and_none_before_it_has_begun():
    named = parameters(torch.float32)
    optimizer = make(named)
    give_gradients(named, 1)
    with pytest.raises(ValueError, match="begin"):
        optimizer.step()
    optimizer.restore(optimizer.tensors(), step=4)
    with pytest.raises(ValueError, match="the first after the restored state is 5"):
        optimizer.begin(4, 1e-2)
    optimizer.begin(5, 1e-2)


def test_weights_that_cannot_be_updated_well_are_refused_by_name():
    with pytest.raises(TunixError, match=r"wte: weights of type torch\.float16"):
        make({"wte": torch.nn.Parameter(torch.ones(4, dtype=torch.float16))})
    with pytest.raises(TunixError, match="head: its 12 weights do not lie in order"):
        make({"head": torch.nn.Parameter(torch.ones(3, 4).t())})


@each_kind
@each_dtype
@pytest.mark.parametrize(
    "shape", [(), (1,), (4095,), (4096,), (4097,), (64, 64), (65, 64), (3, 50, 40), (7, 1), (1, 5000)]
)
def test_the_bytes_of_the_state_are_those_the_planner_counts(kind, dtype, shape):
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make({"it": parameter}, kind)
    optimizer.begin(1, 1e-2)
    optimizer.step()
    kept = optimizer.state_of(parameter).values()
    assert all(tensor.device == parameter.device and tensor.is_contiguous() for tensor in kept)
    name = str(dtype).removeprefix("torch.")
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == state_bytes(shape, kind, name)


def test_the_bytes_of_the_state_written_out():
    assert state_bytes((4096,), "adamw", "bfloat16") == state_bytes((4096,), "adamw", "float32") == 2 * 4 * 4096
    assert state_bytes((64, 64), "adamw", "float64") == 2 * 8 * 4096
    assert state_bytes((64, 64), "adamw_8bit", "bfloat16") == 2 * (4096 + 4 * 16)
    assert state_bytes((4097,), "adamw_8bit", "float64") == 2 * (17 * 256 + 4 * 17)  # the last block is kept whole
    assert state_bytes((4095,), "adamw_8bit", "bfloat16") == 2 * 4 * 4095
    assert state_bytes((256_000, 2048), "adafactor", "bfloat16") == 4 * (256_000 + 2048)
    assert state_bytes((8, 64, 64), "adafactor", "bfloat16") == 4 * 8 * 64 * 64


# --- the page --------------------------------------------------------------------------------------------------------


def cells(heading):
    """Rows of the table below `heading`, by their first cell."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_page_has_the_bytes_the_passes_and_the_temporaries_of_the_code():
    shape, elements = (2048, 256), 2048 * 256
    said = cells("What it costs")
    assert set(said) == set(KINDS)
    for kind, row in said.items():
        measured = [f"{state_bytes((2048, 16384), kind, 'bfloat16') / (2048 * 16384):.3f}"]
        for dtype in (torch.float32, torch.bfloat16):
            parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
            optimizer = make({"it": parameter}, kind)
            parameter.grad = torch.ones_like(parameter)
            optimizer.begin(1, 1e-2)
            optimizer.update(parameter)
            with Watch() as watch:
                optimizer.update(parameter, scale=torch.tensor(0.5))
            measured.append(str(len(watch.passes(elements))))
        with Watch() as watch:
            optimizer.update(parameter, scale=torch.tensor(0.5), finite=torch.tensor(True))
        assert row[:3] == measured, kind
        assert watch.most_bytes / elements * torch_update_rules.SLICE_ELEMENTS / 2**20 == pytest.approx(
            int(row[3]), rel=0.01
        )


def test_the_page_has_the_numbers_of_the_code():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    _, unsigned = torch_rounding.tables(torch.device("cpu"))
    for words in (
        f"at most {torch_update_rules.SLICE_ELEMENTS:,} elements", f"blocks of {BLOCK}", f"fewer than {FULL_BELOW:,} elements",
        f"256 levels, from {unsigned[0].item():.1e} to 1", f"largest bfloat16 on ({torch_rounding.LARGEST:.3g})",
        f"128 levels from {torch_rounding.FOOT:.1e} to 1".replace("e-0", "e-"),
    ):  # fmt: skip
        assert words in page, words


def test_the_noise_of_8_bit_second_moments_is_what_the_page_says():
    """A mean of squares over blocks whose elements differ in size, beside the same mean in float32."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    _, table = torch_rounding.tables(torch.device("cpu"))
    found = {}
    for beta, steps in ((0.999, 2500), (0.95, 300)):
        drawn = torch.Generator().manual_seed(1)
        sizes = torch.randn(16, 256, generator=drawn).exp()
        exact = coded = torch.zeros(16, 256)
        for _ in range(steps):
            square = (torch.randn(16, 256, generator=drawn) * sizes).square()
            exact = exact.lerp(square, 1 - beta)
            codes, absmax = torch_rounding.encode_unsigned(
                coded.lerp(square, 1 - beta), torch_rounding.Bits(generator=drawn)
            )
            coded = torch_rounding.decode(codes, absmax, table)
        assert (coded / exact).mean().item() == pytest.approx(1.0, abs=0.02)
        found[beta] = (coded / exact).std().item()
    words = re.search(r"off by about (\d+) % of itself \(`beta2` 0.999; (\d+) % with 0.95\)", page)
    assert [found[0.999] * 100, found[0.95] * 100] == pytest.approx([int(words[1]), int(words[2])], abs=1.5)
