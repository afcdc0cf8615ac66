"""Every JSON file of a run has a closed schema: real files pass, anything else is named."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.conftest import ROOT
from tests.tables import parametrize
from tunix_rt.config.load import build_config
from tunix_rt.doctor import facts
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Ask
from tunix_rt.engines import step_time as parts
from tunix_rt.plan import fit, shape
from tunix_rt.plan import timing as flops
from tunix_rt.runs import fields as types
from tunix_rt.runs import schemas, schemas_host
from tunix_rt.runs.checksums import LONGEST_LINE, parse_object
from tunix_rt.runs.record import RunRecord
from tunix_rt.runs.schemas import SCHEMAS, problems_of, schema_of
from tunix_rt.scoring.score import Prediction
from tunix_rt.storage import to_plain
from tunix_rt.train import profiling as table

BUNDLES = ROOT / "submission_runs"
A_RUN = ("demo_v1", "m40_v1")
ALL_MODELS = sorted(
    {
        model
        for module in (schemas, schemas_host)
        for model in vars(module).values()
        if isinstance(model, type) and issubclass(model, types.Facts) and model.model_config["extra"] == "forbid"
    },
    key=lambda model: model.__name__,
)


OPEN = {"configuration", "decoding", "comparison", "final_model", "about", "fitting"}
"""Settings, and figures that follow from other files or that nothing is computed from."""


def objects(bundle: Path) -> Iterator[tuple[str, schemas.Schema, dict[str, Any]]]:
    for path in sorted(bundle.rglob("*.json*")):
        name = path.relative_to(bundle).as_posix()
        if schema := schema_of(name):
            texts = path.read_text(encoding="utf-8").split("\n")[:-1] if schema.lines else [path.read_text("utf-8")]
            for text in texts:
                yield name, schema, json.loads(text)


def problems(model: Any, value: Any) -> list[str]:
    schema = next((schema for schema in SCHEMAS if schema.model is model), None) or replace(SCHEMAS[0], model=model)
    try:
        schema.validate(json.dumps(value).encode())
    except ValidationError as error:
        return list(problems_of(error))
    return []


def nested(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all objects in `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        yield path
    for key, one in inner:
        yield from nested(one, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("name", [*A_RUN, "m39_v1", "m39_cpu_v1", "gemma3_270m_gsm8k_v1", "m40_v1/cpu"])
def test_every_file_of_a_real_run_has_the_declared_shape(name: str) -> None:
    seen = set()
    for file, schema, value in objects(BUNDLES / name):
        assert problems(schema.model, value) == [], file
        seen.add(file)
    assert seen >= {"precommit.json", "doctor.json", "result.json", "metrics.jsonl"}


def test_a_schema_knows_no_other_key() -> None:
    assert [model for model in ALL_MODELS if "surplus: unknown key" not in problems(model, {"surplus": 1})] == []


@pytest.mark.parametrize("bundle", A_RUN)
def test_no_object_in_a_run_has_room_for_another_key_or_a_null(bundle: str) -> None:
    """At any depth; but an object whose keys are names has values of one type, and one of any figures has any."""
    seen: set[tuple[str, tuple[Any, ...]]] = set()
    for file, schema, value in objects(BUNDLES / bundle):
        for path in nested(value):
            kind = (file, tuple("" if isinstance(key, int) else key for key in path))
            if kind in seen or OPEN & set(path):
                continue
            seen.add(kind)
            at(value, path)["surplus"] = None
            assert problems(schema.model, value), (file, path)
            del at(value, path)["surplus"]
    assert len(seen) > 80


def test_null_is_refused_where_a_key_is_left_out_instead() -> None:
    result = json.loads((BUNDLES / "demo_v1" / "result.json").read_text())
    for name in schemas.Result.model_fields:
        key = schemas.Result.model_fields[name].alias or name
        (problem,) = problems(schemas.Result, result | {key: None})
        assert problem.startswith(f"{key}: ") and problem.endswith(": None")


def test_a_refused_run_needs_no_more_than_how_it_ended() -> None:
    result = json.loads((BUNDLES / "demo_v1" / "result.json").read_text())
    kept = ("schema", "status", "exit_code", "reason", "started", "finished", "seconds")
    assert problems(schemas.Result, {key: result[key] for key in kept}) == []
    assert problems(schemas.Result, {key: result[key] for key in kept[1:]}) == ["schema: missing"]
    assert get_args(types.Status) == ("completed", "refused", "failed", "preempted")


def test_doctor_reports_of_every_known_computer_have_the_declared_shape() -> None:
    known = sorted((ROOT / "tests" / "facts").glob("*.json"))
    assert len(known) > 100
    for path in known:
        case = json.loads(path.read_text())
        seen = facts.facts_from_json(case["facts"])
        report = to_plain({"facts": seen, "checks": judge(seen, Ask(**case["ask"]))})
        assert problems(schemas.Doctor, report) == [], path.name


@pytest.mark.parametrize(
    ("device", "devices", "settings"),
    [("cpu", 1, {}), ("cuda", 1, {"lora_rank": 8, "dtype": "bfloat16"}), ("tpu", 8, {"backend": "jax"})],
)
def test_plans_of_both_engines_have_the_declared_shape(device: str, devices: int, settings: dict[str, Any]) -> None:
    gemma = shape.shape_of(json.loads((ROOT / "presets" / "gemma-3-270m" / "config.json").read_text()))
    config = build_config({"max_length": 256, "per_device_train_batch_size": 8, **settings}, "x")
    plan = fit.predict_run(gemma, config, device=device, devices=devices, capability=(9, 0))
    assert problems(schemas_host.PlannedMemory, to_plain(plan)) == []


def test_a_profile_has_the_declared_shape() -> None:
    kernel = parts.Share(name="void at::native<|>\n", milliseconds=1.0, calls=2.0)
    part = parts.Part(name=parts.LAYER_MATMULS, milliseconds=1.0, share=0.5, calls=2.0, largest=(kernel,))
    profile = table.Profile(
        first=4, warmed=3, tokens=512.0, unrecorded_milliseconds=2.5,
        breakdown=parts.Breakdown(steps=2, milliseconds=2.0, on_gpu=True, parts=(part,)),
        flops=flops.StepFlops(layers=2e7, head=4e6, attention=2e6, executed_layers=3e7, executed_attention=3e6),
        dense=table.DenseMatmul(device="NVIDIA H200", size=8192, dtype="bfloat16", tflops=2.0),
    )  # fmt: skip
    assert problems(schemas.Profile, to_plain(table.profile_json(profile))) == []


LINE = json.loads((BUNDLES / "demo_v1" / "metrics.jsonl").read_text().partition("\n")[0])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"step": True}, "step: Input should be a valid integer: True"),
        ({"step": 1.0}, "step: Input should be a valid integer: 1.0"),
        ({"tokens": -1}, "tokens: Input should be greater than or equal to 0: -1"),
        ({"tokens": 2**63}, f"tokens: Input should be less than or equal to {2**63 - 1}: {2**63}"),
        ({"loss": "1.0"}, "loss: Input should be a valid number: '1.0'"),
        ({"loss": float("nan")}, "loss: Input should be a finite number: nan"),
        ({"seconds": float("inf")}, "seconds: Input should be a finite number: inf"),
        ({"loss": -1e-9}, "loss: Input should be greater than or equal to 0: -1e-09"),
        ({"loss_hex": "0x1.8p+1024"}, "loss_hex: not of the declared form: '0x1.8p+1024'"),
        ({"prev": "A" * 64}, f"prev: not of the declared form: '{'A' * 64}'"),
        ({"prev": "a" * 64 + "\n"}, f"prev: not of the declared form: '{'a' * 64}\\n'"),
        ({"states": {"05": "a" * 64}}, "states.05.[key]: not of the declared form: '05'"),
        ({"\x1b[31mred": 1}, "'\\x1b[31mred': unknown key"),
        ({"batch": "\u202e" * 1000}, "batch: not of the declared form: '" + "\\u202e" * 12 + "\\u20..."),
    ],
)
def test_a_wrong_value_is_named_in_one_printable_line(wrong: dict[str, Any], problem: str) -> None:
    assert problems(schemas.StepLine, LINE | {"states": {"50": "a" * 64}} | wrong) == [problem]


UNSEEN = ("a\u202eb", "a\u200bb", "a\nb", "a\x1b[31mb", "a\u2028b", "\ud800")
REFUSED = {
    types.Text: (*UNSEEN, "x" * 501),
    types.Name: (*UNSEEN, "", " a", "a ", "a|b", "a<b", "a>b", "a`b", "a\\b", "x" * 201),
    types.Moment: ("2026-02-30T00:00:00+00:00", "2026-01-01T00:00:00", "2026-01-01T00:00:00+02:00", "x"),
}


@pytest.mark.parametrize(("kind", "texts"), REFUSED.items(), ids=["text", "name", "moment"])
def test_a_text_has_nothing_unseen_a_name_is_safe_in_a_table_and_a_moment_is_a_real_one(kind: Any, texts: Any) -> None:
    for text in texts:
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(text)


def test_honest_names_pass() -> None:
    for name in ("cpu", "NVIDIA H200", "google/gemma-3-270m", "Intel(R) Xeon(R) @ 2.2 GHz", "é 中"):
        assert TypeAdapter(types.Name).validate_python(name) == name


def test_a_list_over_its_limit_is_refused_and_findings_are_few() -> None:
    processes = json.loads((BUNDLES / "demo_v1" / "processes.json").read_text())
    many = processes | {"processes": processes["processes"] * 10_001}
    assert len(problems(schemas.Processes, many)) == 1
    commitment = json.loads((BUNDLES / "demo_v1" / "precommit.json").read_text())
    found = problems(schemas.Commitment, commitment | {f"key{number}": 0 for number in range(1_000)})
    assert len(found) == 51 and found[-1] == "more than 50 problems of this kind"


ANSWER = json.loads((BUNDLES / "demo_v1" / "eval" / "predictions-after.jsonl").read_text().partition("\n")[0])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"surplus": 1}, "surplus: unknown key"),
        ({"equations": "1"}, "equations: Input should be a valid integer: '1'"),
        ({"strict": 1}, "strict: Input should be a valid boolean: 1"),
        ({"output": "x" * 400_001}, "output: String should have at most 400000 characters: '" + "x" * 76 + "..."),
    ],
)
def test_a_dataclass_is_held_as_strictly_as_a_schema(wrong: dict[str, Any], problem: str) -> None:
    assert problems(schemas.PredictionLine, ANSWER | wrong) == [problem]
    assert problems(schemas.SampleLine, ANSWER | {"step": 3} | wrong) == [problem]


@parametrize("path", "value")
def test_facts_of_a_computer_are_not_converted(path: tuple[Any, ...], value: Any) -> None:
    report = json.loads((BUNDLES / "m40_v1" / "doctor.json").read_text())
    at(report, path[:-1])[path[-1]] = value
    (problem,) = problems(schemas.Doctor, report)
    assert problem.startswith(".".join(map(str, path)) + ": ")


def test_a_plan_has_no_batch_of_nothing() -> None:
    plan = json.loads((BUNDLES / "demo_v1" / "plan.json").read_text())
    plan["memory"]["eval_rows"] = 0
    assert problems(schemas.Plan, plan) == ["memory.eval_rows: Input should be greater than or equal to 1: 0"]


def test_answers_are_read_as_the_predictions_that_were_written() -> None:
    schema = schema_of("eval/predictions-after.jsonl")
    assert schema is not None and schema.validate(json.dumps(ANSWER).encode()) == Prediction(**ANSWER)


def test_a_flood_of_mistakes_is_one_finding() -> None:
    """Also where no list has a limit."""
    began = time.process_time()
    many = {"facts": {"nvidia": {"libcuda": [0] * 200_000}}, "checks": [0] * 200_000}
    assert problems(schemas.Doctor, many) == ["200,002 mistakes"]
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a": 1, "a": 2}', "not JSON: a key is given twice"),
        (b'{"a": NaN}', "not JSON: NaN is not a number"),
        (b'{"a": -Infinity}', "not JSON: -Infinity is not a number"),
        (b'{"a": 1' + b"0" * 5_000 + b"}", "not JSON: 1" + "0" * 29 + " is not a number"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b"\xff", "not UTF-8 text"),
        (b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_object_of_numbers_and_text_is_not_read(text: bytes, problem: str) -> None:
    found = parse_object(text)
    assert isinstance(found, str) and found.startswith(problem)


def test_the_largest_integers_are_read() -> None:
    assert parse_object(b'{"a": %d, "b": %d}' % (2**63 - 1, -(2**63))) == {"a": 2**63 - 1, "b": -(2**63)}


def test_a_record_holds_the_valid_lines_before_a_wrong_one(tmp_path: Path) -> None:
    line = json.dumps(LINE).encode() + b"\n"
    for wrong, problem in (
        (b'{"step": 2}', "loss: missing"),
        (b" " * (LONGEST_LINE + 1), "a line of more than 4,194,304 bytes"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(line + wrong + b"\n" + line)
        record = RunRecord(tmp_path, where="cpu/")
        assert [one.step for one in record.metrics] == [1]
        assert record.problems["metrics.jsonl"][0] == f"cpu/metrics.jsonl:2: {problem}"


def test_the_reader_of_runs_starts_without_an_engine() -> None:
    loads = "import sys, tunix_rt.runs.record; print([name for name in ('torch', 'jax', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True).stdout == "[]\n"


def test_files_without_a_schema_have_none() -> None:
    for name in ("config.yaml", "README.md", "eval/during.json", "x/result.json", "checkpoints/step-1/state.json"):
        assert schema_of(name) is None
    assert all(schema.most_bytes >= 2**20 for schema in SCHEMAS)


@pytest.mark.slow
def test_a_hundred_thousand_steps_are_read_within_five_seconds_of_cpu(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(LINE | {"step": step}) + "\n" for step in range(1, 100_001))
    )
    began = time.process_time()
    assert sum(line.step for line in RunRecord(tmp_path).metrics) == 5_000_050_000
    assert time.process_time() - began < 5.0
