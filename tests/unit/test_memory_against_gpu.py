"""What the planner says now of every run that was measured on an H200, beside what its allocator gave out."""

import statistics
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.generation_memory import cap_of, predicted_parts
from docs import family_pages, memory_pages
from docs.memory_pages import Compared, compared, failures, gpu_cases, kind_of, plan_of, ran
from docs.solver_pages import HOPPER, read, shape_named
from tests.conftest import ROOT
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan import activations, phases
from tunix_rt.plan.activations import Batch, SavedTensors, saved_by_layer, widths_of
from tunix_rt.plan.fit import CUDA_SAFETY_BYTES, CUDA_SAFETY_SHARE, least_room
from tunix_rt.plan.memory import predict
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.tensors import tensors_of

CASES = gpu_cases(ROOT)
KINDS = sorted({kind_of(case) for case in CASES})
KEPT_CASES = read(ROOT, "memory_cuda_kept.json")["cases"]
MOST_MEDIAN = 0.0005
"""Half of the cases of a kind are nearer than this."""
each_run = pytest.mark.parametrize("one", ran(CASES), ids=lambda one: one.case["name"])
each_kept = pytest.mark.parametrize("case", KEPT_CASES, ids=lambda case: case["name"])


# --- predicted beside measured ----------------------------------------------------------------------------------------


def test_no_peak_is_outside_the_stated_band():
    assert [one.case["name"] for one in ran(CASES) if not one.in_band] == []


def test_newer_families_and_adapters_are_in_the_band_and_traced_models_within_a_tenth():
    for case in read(ROOT, family_pages.FILE)["cases"]:
        band = 0.1 if case.get("traced") else memory_pages.EAGER_BAND
        assert "failed" in case or abs(family_pages.predicted_now(case)[0] / case["peak_bytes"] - 1) <= band, case[
            "name"
        ]


@each_run
def test_training_itself_is_predicted_within_the_band_in_every_case(one):
    plan = replace(one.plan, peak_bytes=one.predicted["steps"])
    assert replace(one, plan=plan, measured={"steps": one.measured["steps"]}).in_band


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_most_peaks_are_predicted_to_the_tensor(kind):
    assert median_error(ran(case for case in CASES if kind_of(case) == kind)) <= MOST_MEDIAN


def median_error(found: list[Compared]) -> float:
    return statistics.median(abs(one.error) for one in found)


@each_run
def test_the_least_room_is_never_below_what_was_given_out(one):
    assert least_room(one.plan) >= one.peak_bytes + one.plan.context_bytes


@each_run
def test_a_case_was_seen_to_run_in_no_more_than_the_plan_asks_for(one):
    asked = least_room(one.plan) - one.plan.context_bytes
    reserved = (size for part, size in one.case["reserved_bytes"].items() if part in {*one.measured, "prepare"})
    assert asked >= min(one.case["cap_bytes"], max(reserved))


@each_run
def test_held_out_losses_and_answers_take_no_more_than_was_predicted_with_the_margin(one):
    for part in {"held-out", "answers"} & set(one.measured):
        allowed = one.predicted[part] * (1 + CUDA_SAFETY_SHARE) + CUDA_SAFETY_BYTES
        assert one.measured[part] <= allowed, part


def test_what_ran_out_of_memory_is_not_said_to_fit_there_any_more():
    for case in failures(ROOT):
        plan = plan_of(case)
        assert least_room(plan) - plan.context_bytes > max(case["cap_bytes"], case["peak_bytes"])
        assert case["name"] in [one.case["name"] for one in ran(CASES)]  # measured again, it ran


def test_every_peak_of_generation_is_predicted_within_5_percent_and_ran_with_no_more_than_that():
    cases = read(ROOT, "generation_memory.json")["cases"]
    assert len(cases) >= 24 and {case["dtype"] for case in cases} == {"bfloat16", "float32", "trained"}
    for case in cases:
        predicted = sum(predicted_parts(case, HOPPER).values())
        assert abs(predicted / case["peak_bytes"] - 1) <= 0.05, case
        assert case["fits_under_the_cap"] and min(case["cap_bytes"], case["reserved_bytes"]) <= cap_of(predicted), case


def test_the_plan_foretells_how_layers_are_computed():
    assert [one.case["name"] for one in ran(CASES) if one.plan.layers != one.case["code"]["layers"]] == []


def test_there_are_as_many_cases_as_were_asked_for_and_a_third_of_them_are_drawn():
    drawn = [case for case in CASES if "drawn" in case]
    assert len(CASES) >= 60 and len(drawn) >= len(CASES) / 3


# --- the comparison can fail ------------------------------------------------------------------------------------------


def predicted_afresh(case: dict[str, Any]) -> Compared:
    """With the code as it is patched: `plan_of` remembers."""
    settings = RunConfig.model_validate(case["settings"])
    layers = case["code"]["layers"]
    shape = shape_named(case["preset"])
    return compared(case, predict(shape, settings, device="cuda", capability=HOPPER, layers=layers))


def named(name: str) -> dict[str, Any]:
    return next(case for case in CASES if case["name"] == name)


def test_a_plan_that_forgets_a_tensor_of_the_mlp_is_outside_the_band(monkeypatch):
    plain, compiled = named("gemma-2b 8x1024 bfloat16 AdamW"), named("gemma-2b 8x1024 compiled, bfloat16 products")
    assert predicted_afresh(plain).in_band and predicted_afresh(compiled).in_band
    counted, compiled_counted = activations._saved_by_mlp, activations._saved_compiled

    def one_less(*given: Any) -> SavedTensors:
        kept = compiled_counted(*given)
        return replace(kept, mlp=kept.mlp[:-1])

    monkeypatch.setattr(phases, "_layer_of", phases._layer_of.__wrapped__)  # which remembers
    monkeypatch.setattr(activations, "_saved_by_mlp", lambda *given: counted(*given)[:-1])
    monkeypatch.setattr(activations, "_saved_compiled", one_less)
    assert not predicted_afresh(plain).in_band
    assert not predicted_afresh(compiled).in_band


def test_a_plan_that_forgets_a_small_tensor_of_every_layer_is_seen_by_the_median(monkeypatch):
    eager = [case for case in CASES if kind_of(case)[0] == "eager" and "failed" not in case]
    assert median_error([predicted_afresh(case) for case in eager]) <= MOST_MEDIAN
    inputs = activations._inputs
    monkeypatch.setattr(phases, "_layer_of", phases._layer_of.__wrapped__)  # which remembers
    monkeypatch.setattr(activations, "_inputs", lambda *given: inputs(*given)[:-1])
    assert median_error([predicted_afresh(case) for case in eager]) > MOST_MEDIAN


# --- what compiled layers keep ----------------------------------------------------------------------------------------


def counted_and_kept(case: dict[str, Any]) -> tuple[int, int]:
    """By the planner, and by the engine without casts of weights, sine and cosine, and whole numbers."""
    config, shape = RunConfig.model_validate(case["settings"]), shape_named(case["preset"])
    widths = widths_of(recipe_of(config.training), None)
    rows, length = config.training.per_device_train_batch_size, config.data.max_length
    batch = Batch(rows=rows, length=length, packed=True, device="cuda", compiled=True)
    casts = {tuple(sorted(one)) for one in tensors_of(shape).matrices} if widths.casts else set()
    kept = [
        size
        for dimensions, dtype, size in case["kept"]
        if "int" not in dtype
        and tuple(sorted(dimensions)) not in casts
        and dimensions != [rows, length, shape.head_dim]
    ]
    return sum(saved_by_layer(shape, widths, batch).all), sum(kept)


@each_kept
def test_what_a_compiled_layer_keeps_is_counted_tensor_by_tensor(case):
    assert near(*counted_and_kept(case))


def near(counted: int, kept: int) -> bool:
    return abs(counted / kept - 1) <= 0.005


def test_a_kept_tensor_more_or_less_would_be_seen():
    case = next(case for case in KEPT_CASES if case["name"] == "gemma-2b 8x1024 compiled, bfloat16 products")
    normed = next(one for one in case["kept"] if one[0] == [8192, 2048])
    for kept in ([one for one in case["kept"] if one is not normed], [*case["kept"], normed]):
        assert not near(*counted_and_kept(case | {"kept": kept}))


# --- the page ---------------------------------------------------------------------------------------------------------


def test_every_constant_of_the_memory_model_is_listed_and_no_more_than_twelve_are_fitted():
    found = {name for module in memory_pages.MODULES for name in memory_pages.values_in(module)}
    assert found == set(memory_pages.FITTED) | set(memory_pages.KNOWN)
    assert len(memory_pages.FITTED) <= 12


def test_a_sum_by_hand_that_is_not_the_planners_is_refused(monkeypatch):
    counted = memory_pages._beside
    monkeypatch.setattr(memory_pages, "_beside", lambda *given: counted(*given)[:-1])
    with pytest.raises(memory_pages.TunixError, match="by hand the loss comes to"):
        memory_pages.by_hand_block(ROOT)
