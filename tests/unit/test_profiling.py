"""Where the time of a step went: a trace written by hand, whose answer is known."""

import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.program import ROOT
from tunix_rt.engines import step_time as parts
from tunix_rt.engines.step_time import DenseMatmul, breakdown, part_of, short_name
from tunix_rt.engines.trace import BACKWARD, BATCH, FORWARD, HEAD, OPTIMIZER, STEP, Span, read_trace, stretches
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.evidence.checks import may_stay_out
from tunix_rt.plan.timing import StepFlops
from tunix_rt.runs.folder import RunDir
from tunix_rt.train import profiling

MAIN, AUTOGRAD = 1, 2


class Writer:
    """A trace in the form of torch's profiler; times in microseconds."""

    def __init__(self):
        self.events = []

    def on_host(self, name, start, end, *, thread=MAIN, kind="cpu_op"):
        self.events.append(
            {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": thread, "pid": 9}
        )

    def region(self, name, start, end, *, thread=MAIN):
        self.on_host(name, start, end, thread=thread, kind="user_annotation")

    def kernel(self, name, launched, start, end, *, thread=MAIN, kind="kernel", call="cuda_runtime"):
        number = len(self.events) + 1
        args = {"correlation": number}
        self.events.append(
            {"ph": "X", "cat": call, "name": "launch", "ts": launched, "dur": 1, "tid": thread, "args": args}
        )
        self.events.append(
            {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": 7, "args": args}
        )

    def read(self, folder):
        path = folder / "trace.json.gz"
        noise = [{"ph": "M", "name": "process_name"}, {"ph": "s", "cat": "ac2g", "ts": 1, "tid": 1}]
        whole = {"schemaVersion": 1, "traceEvents": noise + self.events + noise, "traceName": "x"}
        with gzip.open(path, "wt") as file:
            json.dump(whole, file, indent=2)
        return read_trace(path)


@pytest.fixture
def gpu_step(tmp_path):
    """One step of 100 us: batch, forward, head, backward from another thread with an update in it, optimizer."""
    w = Writer()
    w.region(STEP, 0, 90)
    w.region(BATCH, 0, 10)
    w.kernel("Memcpy HtoD (Pinned -> Device)", 9, 10, 14, kind="gpu_memcpy")
    w.region(FORWARD, 10, 30)
    w.on_host("_Lookup", 11, 13)
    w.kernel("void at::native::vectorized_gather_kernel<16, long>(char*)", 12, 13, 16)  # the copy's last us is hidden
    w.kernel("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 15, 16, 26, call="cuda_driver")
    w.kernel("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>(Params)", 18, 26, 30)
    w.kernel("triton_poi_fused_gelu_mul_1", 20, 30, 32)
    w.region(HEAD, 30, 40)
    w.kernel("sm90_xmma_gemm_bf16f32", 31, 32, 40)
    w.kernel("_softmax_and_slopes", 35, 40, 43)
    w.region(BACKWARD, 40, 70)
    w.kernel("nvjet_tst_128x256", 45, 45, 61, thread=AUTOGRAD)
    w.region(OPTIMIZER, 60, 64, thread=AUTOGRAD)
    w.kernel("_adamw_rounded", 61, 61, 65, thread=AUTOGRAD)
    w.kernel("a_kernel_nobody_knows", 66, 66, 69, thread=AUTOGRAD)
    w.region(OPTIMIZER, 70, 80)
    w.kernel("void at::native::reduce_kernel<512>(NormOps)", 71, 71, 75)
    w.kernel("after the step", 95, 95, 99)  # an evaluation: no part of it
    return w.read(tmp_path)


def milliseconds(found):
    return {part.name: pytest.approx(part.milliseconds * 1e3, abs=1e-6) for part in found.parts}


def test_each_kernel_belongs_to_the_part_that_launched_it_and_the_parts_sum_to_the_step(gpu_step):
    found = breakdown(gpu_step)
    assert found.on_gpu and found.steps == 1 and found.milliseconds == pytest.approx(0.090)
    assert milliseconds(found) == {
        parts.LAYER_MATMULS: 10 + 16,
        parts.HEAD_MATMULS: 8,
        parts.HEAD_REST: 3,
        parts.ATTENTION: 4,
        parts.ELEMENTWISE: 2,
        parts.UPDATE: 4 + 4,
        parts.LOOKUP: 3,
        parts.COPIES: 3,
        f"{parts.OTHER} (mostly a_kernel_nobody_knows)": 3,
        parts.WAITED: 90 - 26 - 8 - 3 - 4 - 2 - 8 - 3 - 3 - 3,
    }
    assert math.fsum(part.share for part in found.parts) == pytest.approx(1)
    (waited,) = (part for part in found.parts if part.name == parts.WAITED)
    assert {one.name: round(one.milliseconds * 1e3) for one in waited.largest} == {
        "in the optimizer": 6, "elsewhere in the step": 10, "while the batch was prepared": 10,
    }  # fmt: skip


def test_the_time_of_a_cpu_belongs_to_the_innermost_operation(tmp_path):
    w = Writer()
    w.region(STEP, 0, 50)
    w.region(FORWARD, 5, 30)
    w.on_host("aten::linear", 6, 20)
    w.on_host("aten::addmm", 8, 18)
    w.on_host("aten::copy_", 9, 11)
    w.on_host("aten::scaled_dot_product_attention", 20, 28)
    w.on_host("aten::mul", 21, 23)
    found = breakdown(w.read(tmp_path))
    assert not found.on_gpu
    assert milliseconds(found) == {parts.LAYER_MATMULS: 8, parts.ELEMENTWISE: 2, parts.ATTENTION: 8, parts.BETWEEN: 32}
    assert {part.name: part.calls for part in found.parts}[parts.LAYER_MATMULS] == 1


def test_a_step_waits_for_the_step_before_it_and_not_for_what_ran_between(tmp_path):
    w = Writer()
    for begin in (0, 100):
        w.region(STEP, begin, begin + 20)
        w.region(OPTIMIZER, begin + 1, begin + 19)
        w.kernel("_adamw", begin + 2, begin + 10, begin + 30)  # goes on after the program is done with the step
    w.kernel("nvjet_of_an_evaluation", 40, 40, 90)
    found = breakdown(w.read(tmp_path))
    assert found.steps == 2 and found.milliseconds == pytest.approx(0.030)
    assert milliseconds(found) == {parts.UPDATE: 20, parts.WAITED: 10}


def test_nested_spans_are_cut_where_the_innermost_changes():
    spans = [Span(0, 10, "a"), Span(2, 4, "b"), Span(4, 6, "c"), Span(5, 6, "d"), Span(12, 13, "e")]
    assert [tuple(one) for one in stretches(spans)] == [
        (0, 2, ("a",)), (2, 4, ("a", "b")), (4, 5, ("a", "c")), (5, 6, ("a", "c", "d")), (6, 10, ("a",)), (12, 13, ("e",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", parts.LAYER_MATMULS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)", parts.LAYER_MATMULS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(Params)", parts.LAYER_MATMULS),
        ("triton_tem_fused_mm_3", parts.LAYER_MATMULS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", parts.ATTENTION),
        ("fmha_cutlassB_bf16_aligned_128x64_k96_sm80(Params)", parts.ATTENTION),
        ("triton_tem_fused_flex_attention_backward_2", parts.ATTENTION),
        (
            "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Traits<256, cutlass::bfloat16_t>>(Params)",
            parts.ATTENTION,
        ),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", parts.ELEMENTWISE),
        ("triton_red_fused_mul_sum_5", parts.ELEMENTWISE),
        ("void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<float>>(int)", parts.ELEMENTWISE),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>(int)", parts.ELEMENTWISE),
        ("void cub::CUB_200700_900_NS::DeviceScanKernel<Policy>(int)", parts.ELEMENTWISE),
        ("Memset (Device)", parts.ELEMENTWISE),
        ("ncclDevKernel_AllReduce", parts.OTHER),
    ],
)
def test_kernels_are_known_by_their_names(name, part):
    assert part_of(name, (STEP, BACKWARD)) == part
    assert part_of(name, (STEP, BACKWARD, OPTIMIZER)) == parts.UPDATE
    assert part_of(name, (STEP, HEAD)) in (parts.HEAD_MATMULS, parts.HEAD_REST)


def test_the_norm_of_all_gradients_is_counted_with_the_update():
    name = "void at::native::multi_tensor_apply_kernel<Metadata<1>, at::native::LpNormFunctor<float>>(int)"
    assert part_of(name, (STEP,)) == parts.UPDATE
    assert part_of("aten::linalg_vector_norm", (STEP, "aten::_foreach_norm")) == parts.UPDATE
    assert part_of("aten::add", (STEP,)) == parts.ELEMENTWISE


def test_a_copy_within_the_device_is_work_and_one_from_the_host_is_a_copy():
    assert part_of("Memcpy DtoD (Device -> Device)", (STEP, FORWARD), kind="gpu_memcpy") == parts.ELEMENTWISE
    assert part_of("Memcpy HtoD (Pinned -> Device)", (STEP, FORWARD), kind="gpu_memcpy") == parts.COPIES


def test_long_names_of_kernels_are_cut_to_what_they_compute():
    gelu = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>(int)"
    assert short_name(gelu) == "vectorized_elementwise_kernel: GeluCUDA"
    assert short_name("triton_poi_fused_mul_1") == "triton_poi_fused_mul_1"
    assert short_name("void (anonymous namespace)::mine<int>(float*)") == "mine"


@pytest.mark.parametrize("text", [b"", b"{}", b'{"traceEvents": [{"ph": "X"', b"\x1f\x8b\x08"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(text if text.startswith(b"\x1f") else gzip.compress(text))
    with pytest.raises(InputError, match="cannot be read as a trace"):
        read_trace(path)


def test_a_trace_without_steps_is_refused(tmp_path):
    w = Writer()
    w.on_host("aten::mm", 0, 1)
    with pytest.raises(InputError, match="no step"):
        breakdown(w.read(tmp_path))


# --- which steps ------------------------------------------------------------------------------------------------------


def test_steps_are_recorded_once_it_is_warm_and_nothing_is_saved_between_them():
    every_five = {"is_busy": lambda step: step % 5 == 0}
    assert profiling.choose_first(3, done=0, total=100, is_busy=lambda step: False) == 4
    assert profiling.choose_first(3, done=0, total=100, **every_five) == 7, "step 5 is saved, and 6 warms up"
    assert profiling.choose_first(3, done=40, total=100, **every_five) == 47
    assert profiling.choose_first(10, done=0, total=100, **every_five) == 4, (
        "no ten steps without a save: as early as is warm"
    )
    assert profiling.choose_first(6, done=0, total=6, **every_five) == 1, "too short to warm up"


def test_more_steps_than_are_taken_are_refused():
    profiling.refuse_too_many(6, done=0, total=6)
    with pytest.raises(ConfigError, match="--profile 7: more steps than are taken; the run has 6"):
        profiling.refuse_too_many(7, done=0, total=6)
    with pytest.raises(ConfigError, match="2 of 6 steps are left") as caught:
        profiling.refuse_too_many(3, done=4, total=6)
    assert "--profile 2" in caught.value.fix


def test_the_lengths_of_packed_examples_are_read_from_their_positions():
    assert profiling.example_lengths(np.array([0, 1, 2, 0, 0, 1])) == [3, 1, 2]


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def profile(gpu_step):
    flops = StepFlops(layers=20e6, head=4e6, attention=2e6, executed_layers=26e6, executed_attention=2.5e6)
    dense = DenseMatmul(device="NVIDIA H200", size=8192, dtype="bfloat16", tflops=2.0)
    return profiling.Profile(first=4, warmed=3, breakdown=breakdown(gpu_step), flops=flops, tokens=512, dense=dense)


def test_the_table_says_how_fast_each_part_is_beside_the_plain_product(profile):
    lines = profiling.profile_lines(profile)
    assert lines[0] == "Where the time of a step went: 0.090 ms for 512 tokens (step 4, NVIDIA H200)"
    products = next(line for line in lines if parts.LAYER_MATMULS in line)
    assert products.split()[-3:] == ["1.00", "50", "%"], "26e6 operations in 26 us, of 2 TFLOP/s"
    together = next(line for line in lines if "together" in line)
    assert together.split()[-2:] == ["14", "%"] and together.split()[1] == "0.090"
    assert any("14 % of the 2.00 TFLOP/s" in line and "dense 8192 x 8192 matmul in bfloat16" in line for line in lines)
    assert any("25 % more than the method needs" in line for line in lines)
    assert not any("went by before the recording" in line for line in lines)


def test_what_is_not_known_is_left_out(profile):
    said = profiling.profile_json(replace(profile, dense=None))
    assert "dense_product" not in said and "share_of_dense_product" not in said and said["tflops"] > 0
    assert None not in [value for part in said["parts"] for value in part.values()]
    assert "of dense" not in "\n".join(profiling.profile_lines(replace(profile, dense=None)))


def test_every_key_of_the_file_is_in_the_page_of_the_run_folder(profile):
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    section = page.split("\n## profile/profile.json\n")[1].split("\n## ")[0]
    said = profiling.profile_json(replace(profile, unrecorded_milliseconds=1.0))
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(said)
    for inner in (said["parts"][0], said["flops"], said["dense_product"]):
        for key in inner:
            assert f"`{key}`" in section, key


def test_a_bundle_carries_the_table_and_not_the_trace_which_names_the_computer():
    run = RunDir(Path("run"))
    left_out = [
        may_stay_out(path.relative_to("run").as_posix()) for path in (run.profile_trace, run.profile, run.profile_page)
    ]
    assert left_out == [True, False, False]


def test_a_short_warm_up_and_the_price_of_recording_are_told(profile):
    text = profiling.profile_markdown(replace(profile, warmed=1, unrecorded_milliseconds=0.08), trace="`trace.json.gz`")
    assert "Only 1 step went by before the recording" in text
    assert "the steps after it took 0.080 ms (median)" in text
    assert "ui.perfetto.dev" in text and "chrome://tracing" in text
    assert "| idle device |" in text and "| while the batch was prepared |" in text


def test_figures_have_three_digits_that_count():
    assert [profiling.figure(value) for value in (0.0123, 1.234, 12.34, 123.4, 1234.5)] == [
        "0.012", "1.23", "12.34", "123.4", "1,234",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["aten::bmm", "aten::baddbmm"])
def test_products_of_scores_in_eager_attention_are_attention(name):
    assert part_of(name, (STEP, FORWARD, "aten::matmul")) == parts.ATTENTION
    assert part_of("nvjet_sm90_tst_128x256", (STEP, FORWARD, "aten::matmul", name)) == parts.ATTENTION
