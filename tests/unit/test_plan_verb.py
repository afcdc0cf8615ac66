"""`tunix-rt plan` says which total it judged, judges the disk, and refuses what a run would refuse."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.tables import parametrize
from tunix_rt.cli.main import cli
from tunix_rt.cli.views.plan import disk_line, rounded, shell_lines, show_outlook
from tunix_rt.config.load import find_config, load_config, with_settings
from tunix_rt.engines.jax import aot as jax_ahead
from tunix_rt.models.resolve import resolve_architecture
from tunix_rt.plan.calibration import SeenError, add
from tunix_rt.plan.jax_floor import row_length
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.report import look, most_rows, steps_known
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.target import target_named
from tunix_rt.storage import to_plain

SMALL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
GIB = 2**30


def shown(capsys, free_bytes: int) -> tuple[float, str, str]:
    """The largest judged total of the table in MiB, its header, and all of the text, on a CPU with so much free memory."""
    overrides = ("data.max_length=64", "training.save_steps=1", "evaluation.enabled=false")
    config, shape = load_config(None, overrides=overrides), shape_of(SMALL)
    cpu = replace(target_named("8gb"), device="cpu", capability=None, free_bytes=free_bytes)
    seen = look(shape, config, cpu)
    show_outlook(seen, None, exact=False, disk="")
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if line.startswith(" phase"))
    ends = header.index("(judged)") + len("(judged)")
    rows = [line for line in text.splitlines() if re.match(r" [a-z][a-z -]+ +[\d,.]+ ", line)]
    assert [re.split(r" {2,}", row.strip())[0] for row in rows] == [phase.name for phase in seen.plan.judged]
    judged = max(float(row[:ends].split()[-1].replace(",", "")) for row in rows)
    assert judged == pytest.approx(seen.fit.predicted_bytes / 2**20, abs=0.06), "the verdict and the table agree"
    return judged, header, text


def test_with_enough_memory_the_whole_total_is_judged(capsys):
    _, header, text = shown(capsys, 64 * GIB)
    assert text.startswith("fits: ") and re.search(r"total \(judged\) +without \* ", header)
    assert "snapshot * " in text and "* dropped when memory is short\n" in text
    reload = next(line for line in text.splitlines() if line.startswith("reload check of the final model: "))
    assert reload.endswith("not judged: if it does not fit, the check is skipped with a warning")


def test_where_memory_is_short_the_total_without_spare_parts_is_judged(capsys):
    judged, header, text = shown(capsys, 1)
    assert text.startswith("does not fit: ") and " predicted without mapped file and snapshot (+" in text
    assert re.search(r" total +without \* \(judged\)", header) and judged < shown(capsys, 64 * GIB)[0]


@pytest.mark.parametrize("columns", [80, 200])
def test_the_tables_fit_their_terminal(monkeypatch, capsys, columns):
    monkeypatch.setattr("tunix_rt.cli.views.text.WIDTH_OF_A_PIPE", columns)
    _, _, text = shown(capsys, 64 * GIB)
    table = [line for line in text.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= columns
    assert all(name in text for name in ("held-out loss", "activations", "allocator"))


def test_a_mixture_of_experts_states_what_a_token_uses():
    asked = ["plan", "--model", "gemma-4-26b-a4b", "--on", "h200", "--set", "training.dtype=bfloat16"]
    line = "Experts: 3,822,530,560 of 25,233,141,760 parameters are active for a token"
    assert line in CliRunner().invoke(cli, asked).output
    assert json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)["active_parameters"] == 3_822_530_560


def test_a_multimodal_checkpoint_states_what_is_not_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some", "text_config": SMALL}))
    done = CliRunner().invoke(cli, ["plan", "--model", str(tmp_path), "--on", "h200"])
    assert "vision and audio towers are not loaded" in done.output and done.exit_code == 0


def test_the_disk_has_a_verdict_of_its_own():
    assert disk_line(GIB, GIB) == "disk: up to 1.00 GiB needed, 1.00 GiB free; fits"
    assert disk_line(2 * GIB, GIB).endswith("does not fit: a run would be refused with exit code 8")
    assert disk_line(2 * GIB, None) == "disk: up to 2.00 GiB needed"


def test_the_json_of_the_plan_says_whether_the_disk_suffices():
    done = CliRunner().invoke(cli, ["plan", "smoke_tiny", "--device", "cpu", "--json"])
    told = json.loads(done.stdout)
    assert told["disk_fits"] is (told["disk_bytes"] <= told["disk_free_bytes"])


UNFIT = "training: {optim_in_backward: true, gradient_accumulation_steps: 2}\n"


@pytest.mark.parametrize("verb", [["plan", "--model", "tiny-gemma3", "--device", "cpu"], ["doctor", "--device", "cpu"]])
def test_settings_that_no_run_takes_together_are_refused_without_a_dataset_too(tmp_path, verb):
    (tmp_path / "unfit.yaml").write_text(UNFIT)
    done = CliRunner().invoke(cli, [verb[0], str(tmp_path / "unfit.yaml"), *verb[1:]])
    assert done.exit_code == 2 and "training.optim_in_backward" in done.stderr


def test_the_doctor_speaks_json_of_settings_that_no_run_takes_together(tmp_path):
    (tmp_path / "unfit.yaml").write_text(UNFIT)
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path / "unfit.yaml"), "--device", "cpu", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["verdict"]) == (2, "refused") and "training.optim_in_backward" in told["problem"]


# --- another device ---------------------------------------------------------------------------------------------------

GPU = ["plan", "submission_local_gpu"]
TPU = ["plan", "submission_tpu"]


def invoke(*asked):
    return CliRunner().invoke(cli, list(asked))


def test_a_card_that_has_room_ends_with_0_and_says_bytes_time_and_what_is_faster():
    done = invoke(*GPU, "--on", "rtx5090")
    assert done.exit_code == 0, done.stderr
    assert re.match(r"fits: [\d.]+ GiB predicted \(\+ [\d.]+ GiB margin\) of 31.36 GiB free on rtx5090\n", done.stdout)
    assert re.search(r"^[\d.]+ GiB to spare; peak in phase: ", done.stdout, flags=re.MULTILINE)
    assert "memory at the peak" in done.stdout and "█" in done.stdout
    assert re.search(r"time: [\d,]+ tokens/s \([\d,]+ to [\d,]+\), .* a step of 512 tokens", done.stdout)
    assert re.search(r"300 steps, 153,600 tokens: .* to .* of training", done.stdout)
    assert "faster, with nothing changed in the result" in done.stdout and "--set " in done.stdout
    assert "disk: up to" in done.stdout


def first_change(done) -> list[str]:
    """The settings of number 1, as a shell reads them."""
    return done.stdout.split("\n  1. ")[1].split("\n", 1)[1].split("\n  2. ")[0].replace("\\\n", " ").split()


def test_a_card_that_is_too_small_ends_with_5_and_its_first_proposal_is_taken_and_fits():
    done = invoke(*GPU, "--on", "8gb")
    assert done.exit_code == 5 and done.stdout.startswith("does not fit: ")
    assert "what makes it fit" in done.stdout
    assert "fix: add the settings of 1. above" in done.stderr and "--set" not in done.stderr, "a change is printed once"
    again = invoke(*GPU, "--on", "8gb", *first_change(done))
    assert (again.exit_code, again.stdout[:6]) == (0, "fits: "), again.stderr


def test_what_nothing_makes_fit_says_what_is_left():
    done = invoke(*GPU, "--on", "2gb")
    assert done.exit_code == 5 and "fix: one of the changes above" in done.stderr
    assert re.search(
        "nothing that keeps the rows of a step(.|\n)*use a smaller model or a device with more memory", done.stdout
    )


def test_bfloat16_on_a_card_without_it_ends_with_4_and_a_line_that_runs_there():
    done = invoke(*GPU, "--on", "t4")
    assert done.exit_code == 4 and "bfloat16 only by emulation" in done.stderr
    assert invoke(*GPU, "--on", "t4", *first_change(done)).exit_code == 0


def test_a_limit_of_memory_is_what_is_judged():
    done = invoke(*GPU, "--on", "h200", "--set", "training.memory_limit_gib=8")
    assert done.exit_code == 5 and "of 8.00 GiB free on h200" in done.stdout


@parametrize("asked", "code", "words")
def test_what_cannot_be_planned_for_is_refused_with_the_way_out(asked, code, words):
    done = invoke(*asked)
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr


# --- the compiler ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked_before(tmp_path, monkeypatch):
    """A verdict in the cache, as if the compiler had been asked for this configuration before; `memory` None: it refused."""
    monkeypatch.setattr(jax_ahead, "compiler_versions", lambda: {"jax": "1", "jaxlib": "1", "libtpu": "1"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def keep(memory, refusal=None):
        config = load_config(find_config("submission_tpu"))
        case = jax_ahead.Case(
            config=resolve_architecture("google/gemma-2b").config, training=config.training,
            tokens=row_length(config.data.max_length, "tpu"), topology="v5e:2x4",
        )  # fmt: skip
        found = jax_ahead.Verdict(
            topology="v5e:2x4", device_kind="TPU v5 lite", devices=8, replicas=1, rows=8, tokens=512, accumulation=1,
            parameters=10, step="words", usable=16 * GIB, memory=memory, refusal=refusal, seconds=83.0,
            versions={"jax": "1", "libtpu": "1"},
        )  # fmt: skip
        kept = jax_ahead.kept_at(case, jax_ahead.compiler_versions())
        kept.parent.mkdir(parents=True)
        kept.write_text(json.dumps({"verdict": to_plain(found)}))

    return keep


EXACT = [*TPU, "--exact", "--on", "tpu-v5e-8"]


def test_what_the_compiler_was_asked_before_is_answered_from_the_cache_beside_the_arithmetic(asked_before):
    sizes = {"arguments": GIB, "outputs": GIB, "aliased": GIB, "temporaries": 2 * GIB, "code": 0, "peak": 3 * GIB}
    asked_before(jax_ahead.ChipMemory(**sizes))
    done = invoke(*EXACT)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("fits: 3.00 GiB at the peak of 16.00 GiB on each of 8 x TPU v5 lite (v5e:2x4)")
    assert "from the cache: this step was compiled before" in done.stdout
    assert re.search(r"without the compiler: at least [\d.]+ GiB", done.stdout)
    told = json.loads(invoke(*EXACT, "--json").stdout)
    assert told["from_cache"] is True and told["arithmetic"]["devices"] == 8
    assert invoke(*TPU, "--topology", "v5e:2x4").stdout == done.stdout


def test_a_refusal_of_the_compiler_ends_with_5(asked_before):
    sizes = {"needed": 20 * GIB, "usable": 16 * GIB, "over": 4 * GIB, "temporaries": 0, "arguments": 0}
    asked_before(None, jax_ahead.Refusal(**sizes, largest=(), message="Ran out of memory"))
    done = invoke(*EXACT)
    assert done.exit_code == 5 and done.stdout.startswith("does not fit: refused for each of 8")
    assert "without the compiler: at least " in done.stdout and "it needs 20.00 GiB or more" in done.stderr
    assert "--set training." in done.stderr


# --- the facts of another computer ------------------------------------------------------------------------------------


def facts_file(path: Path, **changes) -> str:
    facts = json.loads((ROOT / "tests/facts/h100-busy-warns.json").read_text())["facts"]
    path.write_text(json.dumps({"schema": "tunix-rt/facts/1", **facts, **changes}))
    return str(path)


def test_the_facts_of_another_computer_stand_for_it(tmp_path):
    file = facts_file(tmp_path / "facts.json")
    done = invoke(*GPU, "--on", file)
    assert done.exit_code == 0 and "of 59.53 GiB free on NVIDIA H100 80GB HBM3 (facts.json)" in done.stdout
    assert "disk: up to 23.43 GiB needed, 400.00 GiB free; fits" in done.stdout
    told = json.loads(invoke(*GPU, "--on", file, "--json").stdout)
    assert (told["device"]["id"], told["device"]["capability"]) == ("h100-sxm", [9, 0])


def test_the_answer_of_the_doctor_holds_facts_too(tmp_path):
    (tmp_path / "said.json").write_text(invoke("doctor", "--device", "cpu", "--json").stdout)
    done = invoke("plan", "smoke_tiny", "--device", "cpu", "--on", str(tmp_path / "said.json"))
    assert done.exit_code == 0 and "(said.json)" in done.stdout


@parametrize("content", "words")
def test_broken_facts_end_with_3_and_the_key_is_named(tmp_path, content, words):
    (tmp_path / "facts.json").write_text(content)
    done = invoke(*GPU, "--on", str(tmp_path / "facts.json"))
    assert (done.exit_code, words in done.stderr) == (3, True), done.stderr


def test_a_key_that_is_no_fact_and_an_unknown_schema_are_named(tmp_path):
    done = invoke(*GPU, "--on", facts_file(tmp_path / "facts.json", colour="red"))
    assert (done.exit_code, "colour: " in done.stderr) == (3, True)
    done = invoke(*GPU, "--on", facts_file(tmp_path / "facts.json", schema="tunix-rt/facts/9"))
    assert (done.exit_code, "schema is 'tunix-rt/facts/9'" in done.stderr) == (3, True)


# --- the catalogue ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, device", [(GPU, "rtx5090"), (TPU, "tpu-v5e-8"), (["plan", "--model", "gemma-2b"], "t4")]
)
def test_the_table_over_all_devices_has_80_columns_and_tells_how_long_it_took(asked, device):
    done = invoke(*asked, "--on", "all")
    assert done.exit_code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.search(rf"^ {device} ", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^of \d+ devices: .* planned in \d+\.\d s$", done.stdout, flags=re.MULTILINE)


def test_every_letter_of_the_table_over_all_devices_is_explained():
    said = invoke("plan", "--model", "gemma-2b", "--on", "all").stdout
    used = set(re.findall(r" with ([A-Z])\b", said))
    assert used and used == set(re.findall(r"^([A-Z]) = --set ", said, flags=re.MULTILINE))


def test_the_table_and_the_plan_for_one_device_say_the_same():
    every = {one["device"]["name"]: one for one in json.loads(invoke(*GPU, "--on", "all", "--json").stdout)["devices"]}
    for name in ("rtx3060-12", "h200", "t4"):
        alone = json.loads(invoke(*GPU, "--on", name, "--json").stdout)
        assert every[name]["fit"] == alone["fit"] and every[name]["time"] == alone["time"]
        assert every[name]["proposals"] == alone["proposals"]


OF_ONE = {
    "schema", "model", "shape", "run", "steps_exact", "disk_bytes", "disk_free_bytes", "disk_fits", "seen_errors",
    "active_parameters", "cluster",
}  # fmt: skip
OF_EACH = {
    "device", "runs", "unable", "compiler_decides", "memory", "fit", "time", "proposals", "faster", "last_resorts",
}  # fmt: skip
FIT_KEYS = {"fits", "predicted_bytes", "safety_bytes", "available_bytes", "margin_bytes"}
DEVICE_KEYS = {"name", "id", "kind", "device", "count", "memory_bytes", "free_bytes", "capability", "tflops", "fp32_tflops",
               "bandwidth_gb_s", "links"}  # fmt: skip
PROPOSAL_KEYS = {"line", "settings", "costs", "level", "predicted_bytes", "tokens_per_second"}


@pytest.mark.parametrize("name", ["rtx5090", "8gb", "t4", "2gb"])
def test_the_keys_of_the_json_stay_whatever_is_known(name):
    told = json.loads(invoke(*GPU, "--on", name, "--json").stdout)
    assert told["schema"] == "tunix-rt/plan-answer/1" and set(told) == OF_ONE | OF_EACH
    assert set(told["device"]) == DEVICE_KEYS and set(told["fit"]) == FIT_KEYS
    assert all(set(one) == PROPOSAL_KEYS for one in (*told["faster"], *told["proposals"]))
    assert told["disk_free_bytes"] is told["disk_fits"] is told["seen_errors"] is None
    assert (told["unable"] is None) is (name != "t4") and bool(told["last_resorts"]) is (name == "2gb")


def test_the_keys_of_the_json_over_all_devices_stay():
    every = json.loads(invoke(*GPU, "--on", "all", "--json").stdout)
    assert every["schema"] == "tunix-rt/plan-all/1" and set(every) == {"schema", "model", "shape", "seconds", "devices"}
    assert all(set(one) == OF_EACH for one in every["devices"])


# --- how long it is, and who decides ----------------------------------------------------------------------------------


def test_a_run_that_is_too_short_for_compiling_is_planned_without_it():
    short, long = (
        json.loads(invoke(*GPU, "--on", "rtx5090", "--set", f"training.max_steps={steps}", "--json").stdout)
        for steps in (300, 300_000)
    )
    assert (short["memory"]["layers"], long["memory"]["layers"]) == ("plain", "compiled")
    assert short["run"]["steps"] == 300


def test_steps_that_only_the_dataset_tells_count_too():
    config = load_config(find_config("submission_local_gpu"), overrides=["training.max_steps=null"])
    target = target_named("rtx5090")
    rows = most_rows(config)
    assert rows and steps_known(config, target) == -(-rows // 4) * config.training.num_train_epochs
    unknown = with_settings(config, {"data.dataset": "a/folder"})
    assert steps_known(unknown, target) is None
    shape = shape_of(resolve_architecture("google/gemma-2b").config)
    assert look(shape, unknown, target).plan.layers == "compiled", "taken to be long"


def test_a_lower_bound_that_fits_is_left_to_the_compiler_and_another_is_refused():
    options = ["plan", "--model", "gemma-3-1b", "--backend", "jax"]
    refused = invoke(*options, "--on", "t4")
    assert refused.exit_code == 5 and refused.stdout.startswith("does not fit: at least ")
    assert "what makes it fit; the compiler decides" in refused.stdout
    fits = invoke(*options, "--on", "24gb")
    assert fits.exit_code == 0 and fits.stdout.startswith("may fit, the compiler decides: at least ")
    assert "margin" not in fits.stdout and "the compiler decides before a weight is loaded" in fits.stdout
    assert re.search(r"^ rtx3090 .* maybe ", invoke(*options, "--on", "all").stdout, flags=re.MULTILINE)


def test_bfloat16_on_a_card_without_it_where_nothing_fits_says_what_is_left():
    asked = ["plan", "--model", "gemma-2b", "--set", "training.dtype=bfloat16", "--on", "t4"]
    done = invoke(*asked)
    assert done.exit_code == 4
    line = next(line for line in done.stdout.splitlines() if line.startswith("  - ")).removeprefix("  - ")
    assert "fits, but is another training" in line and "training.dtype=float" in line
    assert invoke(*asked, *line.partition("  (")[0].split()).exit_code == 0


# --- a device and another one -----------------------------------------------------------------------------------------


def test_a_device_that_contradicts_is_refused_and_a_configuration_for_another_is_said_to_be():
    refused = invoke(*GPU, "--device", "cpu", "--on", "h200")
    assert refused.exit_code == 2 and "--device cpu and --on h200 contradict" in refused.stderr
    assert invoke(*GPU, "--device", "cpu", "--on", "all").exit_code == 2
    same = invoke(*GPU, "--device", "gpu", "--on", "h200")
    assert (same.exit_code, same.stderr) == (0, "") == (invoke(*GPU, "--on", "h200").exit_code, same.stderr)
    other = invoke(*TPU, "--on", "h200")
    assert other.stderr.startswith("training.device is tpu; --on h200 plans for cuda\n")
    assert "TPU" not in invoke(*TPU, "--device", "cuda", "--on", "all").stdout


def test_all_is_read_in_any_case():
    assert invoke(*GPU, "--on", "ALL").stdout.splitlines()[:5] == invoke(*GPU, "--on", "all").stdout.splitlines()[:5]


# --- what earlier runs measured, speed, words ---------------------------------------------------------------------------


def test_what_earlier_runs_on_the_device_were_off_by_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = facts_file(tmp_path / "facts.json")
    assert "on this device" not in invoke(*GPU, "--on", file).stdout
    recipe = recipe_of(load_config(find_config("submission_local_gpu")).training).describe()
    run = SeenError(
        device="NVIDIA H100 80GB HBM3", backend="torch", layers="plain", recipe=recipe, model="any", parameters=2_000_000_000,
        predicted_bytes=103, measured_bytes=100,
    )  # fmt: skip
    add(run)
    add(replace(run, predicted_bytes=98))
    add(replace(run, predicted_bytes=150, layers="recorded"))
    assert (
        "on this device: median error +0.5 % over 2 similar runs (-2.0 % to +3.0 %)"
        in invoke(*GPU, "--on", file).stdout
    )


def test_planning_for_another_device_imports_no_engine_and_takes_under_a_second_of_cpu():
    script = (
        "import sys, time; sys.argv = ['tunix-rt', 'plan', 'submission_local_gpu', '--on', sys.argv[1]]\n"
        "from tunix_rt.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'jax', 'transformers', 'safetensors', 'huggingface_hub', 'pynvml', 'tokenizers'}\n"
        "    print('HEAVY', sorted(heavy & set(sys.modules)), end.code, time.process_time())"
    )
    for name, most in (("h200", 1.0), ("all", 3.0)):
        done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
        told = re.search(r"HEAVY \[\] 0 ([\d.]+)$", done.stdout.strip())
        assert told and float(told[1]) < most, done.stdout[-300:]


@pytest.mark.parametrize(
    "rate, said",
    [(0, "0"), (3.14159, "3.1"), (42.4, "42"), (1234, "1,200"), (98_765, "99,000"), (999_999, "1,000,000")],
)
def test_a_rate_has_two_digits(rate, said):
    assert rounded(rate) == said


def test_a_line_of_settings_is_cut_between_settings_as_a_shell_reads_on():
    line = "--set training.optim=adafactor --set training.gradient_checkpointing=true --set data.max_length=128"
    lines = shell_lines(line, 60)
    assert all(len(one) <= 60 for one in lines) and all(one.endswith(" \\") for one in lines[:-1])
    assert " ".join(one.removesuffix(" \\") for one in lines) == line
