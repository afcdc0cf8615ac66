"""The pages say what the code does: generated parts are fresh, links lead somewhere, names and keys are the real ones."""

import ast
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml

from docs import answer_pages, data_pages, generate
from tests.conftest import REFERENCE
from tests.program import in_process, tunix_rt
from tunix_rt import errors
from tunix_rt.cli.main import cli
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import SETTINGS, build_config
from tunix_rt.data import text as sketch
from tunix_rt.data import token_cache as store
from tunix_rt.data.containers import MAX_DOCUMENT_BYTES
from tunix_rt.data.tokenize import INDEX
from tunix_rt.doctor.facts import Facts
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.evidence.checks import CHECKS
from tunix_rt.evidence.facts import MEANINGS, Label
from tunix_rt.models.families import FAMILIES
from tunix_rt.plan.fit import SAFETY_SHARE, Fit
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of
from tunix_rt.runs import schemas
from tunix_rt.runs.folder import RunDir, _File
from tunix_rt.scoring.score import SectionScores

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tunix_rt"
FOLDERS = ("docs", "models", "recipes", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
FIGURES = (
    generate.MEMORY,
    generate.CARD / "manifest.json",
    generate.CARD / "model.safetensors",
    *(
        path.relative_to(ROOT)
        for path in sorted((ROOT / "benchmarks" / "results").rglob("*"))
        if path.is_file() and path.name != "demo.json"
    ),
)
RUN_FOLDER = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
BUNDLE = (ROOT / "docs" / "reference" / "bundle.md").read_text(encoding="utf-8")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    """What stands below the heading `title`, up to the next heading."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert match, f"no heading {title!r}"
    return match[1]


def keys_in_table(text: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))


def function_in(path: Path, name: str) -> ast.FunctionDef:
    found = [
        node for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert found, f"{path.name} has no function {name}"
    return found[0]


def names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


# --- generated parts -------------------------------------------------------------------------------------------------


def test_a_stale_page_and_missing_figures_are_named_with_their_command(tmp_path):
    for path in (*generate.pages(), *FIGURES):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    shutil.copytree(ROOT / "tests/dialects", tmp_path / "tests/dialects")
    cli_page = tmp_path / "docs/reference/cli.md"
    cli_page.write_text(text_of(cli_page).replace("--resume", "--continue"), encoding="utf-8")
    problems = generate.list_problems(tmp_path)
    stale = [problem for problem in problems if problem.startswith("stale: docs/reference")]
    assert stale == ["stale: docs/reference/cli.md: run python -m docs.generate"]
    (missing,) = [problem for problem in problems if "is missing" in problem]
    assert answer_pages.DEMO_COMMAND in missing


def test_the_figures_of_the_demo_come_from_its_file():
    rates = {"accuracy": 0.125, "accuracy_lenient": 0.25, "format_rate": 1.0}
    demo = {
        "minutes": 2.5, "before": rates, "after": rates, "control": rates, "predicted_bytes": 3 * 2**20,
        "measured_bytes": 2 * 2**20, "tokens_per_second": 1234.5, "machine": "a test",
        "told_before": {"situations": 9, "worked_out": 7},
    }  # fmt: skip
    block = answer_pages.demo_block(demo)
    assert "| right, strict | 12.5 % | 12.5 % | 12.5 % |" in block
    assert "2.5 minutes on a test, 1,234 tokens/s" in block
    assert "3 MiB predicted, 2 MiB measured" in block
    assert "it worked out 7 of 9 before any training" in block
    del demo["control"]
    with pytest.raises(errors.TunixError, match="control"):
        answer_pages.demo_block(demo)


def test_the_figures_of_the_data_stage_come_from_their_files_and_missing_ones_are_said(tmp_path):
    said = {
        "examples": 1_200, "tokens": 3_000, "trained_tokens": 1_500, "max_length": 2_048, "rows": 17, "fill": 0.985,
        "seconds": 1.5,
    }  # fmt: skip
    first = {"seconds": 12.25, "peak_bytes": 300 * 2**20, "processes": 3, "said": said}
    second = {"seconds": 0.75, "peak_bytes": 90 * 2**20, "processes": 1, "said": {**said, "seconds": 0.0}}
    gsm8k, scale = (tmp_path / path for path in (data_pages.GSM8K, data_pages.SCALE))
    gsm8k.parent.mkdir(parents=True)
    block = data_pages.measured_block(tmp_path)
    assert [f"`{data_pages.COMMAND} {what}` records them" in block for what in ("gsm8k", "scale")] == [True, True]
    gsm8k.write_text(json.dumps({"machine": "a test", "first": first, "second": second}))
    block = data_pages.measured_block(tmp_path)
    figures = ("2,048", "17, 98.5 %", "2,000 tokens/s", "0.8 s", "300 MiB", "90 MiB", "on a test")
    assert [figure for figure in figures if figure not in block] == []
    assert "The figures of `scale` are not recorded yet" in block
    row = {"megabytes": 5, "bytes": 5_000_123, "first": first, "second": second}
    scale.write_text(json.dumps({"machine": "a test", "rows": [row]}))
    block = data_pages.measured_block(tmp_path)
    assert "| 5 MB | 1,200 | 3,000 | 12 s | 2,000 | 3 | 300 MiB | 0.8 s | 90 MiB |" in block
    assert "not recorded" not in block
    del row["first"]
    scale.write_text(json.dumps({"machine": "a test", "rows": [row]}))
    with pytest.raises(errors.TunixError, match=r"data_scale\.json lacks or misspells 'first'"):
        data_pages.measured_block(tmp_path)


def test_the_page_about_scale_has_the_numbers_of_the_code():
    page = " ".join(text_of(ROOT / "docs/concepts/data-at-scale.md").split())
    for words in (
        f"{INDEX.itemsize} bytes per example", f"below {store.ONE_PROCESS_BYTES >> 20} MiB", f"at most {store.MOST_PROCESSES}.",
        f"more than {sketch.CAPACITY:,} records", f"take {sketch.CAPACITY * 32 * 4 / 1e6:.0f} MB",
        f"limited to {MAX_DOCUMENT_BYTES // 10**6} MB",
    ):  # fmt: skip
        assert words in page


def test_every_flag_of_the_frozen_command_lines_is_documented():
    calls = re.findall(r"add_argument\(([^)]*)\)", text_of(SOURCE / "cli" / "train.py"))
    flags = [flag for call in calls for flag in re.findall(r'"(--\w+)"', call)]
    page = section(text_of(ROOT / "docs/reference/cli.md"), "The command lines of the founding documents")
    assert flags and set(re.findall(r"`(--\w+)`", page)) == set(flags)


def test_every_error_class_is_documented_with_its_exit_code():
    page = text_of(ROOT / "docs/reference/exit-codes.md")
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) == 10
    for kind in classes:
        assert f"| {kind.exit_code} | `{kind.__name__}` |" in page


def test_an_error_shown_as_an_example_has_a_problem_and_a_fix():
    shown = {page.name: [one for one in blocks(text_of(page), "text") if one.startswith("error: ")] for page in PAGES}
    assert {"exit-codes.md", "CONTRIBUTING.md"} <= {name for name, examples in shown.items() if examples}
    assert [one for examples in shown.values() for one in examples if "\n  fix: " not in one] == []


# --- README ----------------------------------------------------------------------------------------------------------


def commands_of(part: str) -> list[str]:
    return [line.split("#")[0].strip() for block in blocks(part, "sh") for line in block.splitlines()]


def test_the_readme_gives_a_newcomer_exactly_two_commands():
    readme = text_of(ROOT / "README.md")
    assert set(re.findall(r"scripts/\w+", readme)) == {"scripts/demo", "scripts/test"}
    assert commands_of(section(readme, "Two commands")) == ["scripts/demo", "scripts/test"]


@pytest.mark.parametrize(
    "level", ["L1", pytest.param("L2", marks=pytest.mark.slow), pytest.param("L3", marks=pytest.mark.slow)]
)
def test_the_readme_gives_a_reviewer_commands_that_hold(level):
    name, *commands = commands_of(section(text_of(ROOT / "README.md"), "Verify somebody else's run"))
    assert len(commands) == 3 and all(("--require L" + str(number)) in commands[number - 1] for number in (2, 3))
    script = f"{name}\n{commands[int(level[1]) - 1]}".replace(".venv/bin/tunix-rt", f"{sys.executable} -m tunix_rt")
    done = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"submission_runs/demo_v1: level {level}" in done.stdout


def test_the_readme_says_where_to_find_things_in_four_lines_that_are_true():
    lines = section(text_of(ROOT / "README.md"), "Where to find things").strip().split("\n\n")[0].splitlines()
    assert len(lines) == 4
    for line in lines:
        paths = re.findall(r"`((?:src|docs)/[^`]+)`", line) + re.findall(r"\]\(([^)]+)\)", line)
        assert paths, line
        assert [path for path in paths if not (ROOT / path).is_file()] == []
    for path, function in re.findall(r"`(src/[^`]+\.py)` \(`(\w+)`\)", lines[0]):
        function_in(ROOT / path, function)
    assert re.findall(r"\(`(\w+)`\)", lines[0]) == ["train_run", "optimizer_steps"]


def test_the_readme_names_the_shipped_configurations_that_are_refused():
    refused = set()
    for path in sorted((ROOT / "training" / "configs").glob("*.yaml")):
        try:
            require_runnable(build_config(yaml.safe_load(text_of(path)), path.name))
        except errors.ConfigError:
            refused.add(path.name)
    absent = section(text_of(ROOT / "README.md"), "What does not exist yet")
    assert set(re.findall(r"`(\w+\.yaml)`", absent)) == refused


# --- the run folder --------------------------------------------------------------------------------------------------


def test_every_file_of_a_run_is_in_the_table_and_no_other():
    run = RunDir(Path("DIR"))
    known = {getattr(run, name) for name, value in vars(RunDir).items() if isinstance(value, _File)}
    known |= {of(when) for of in (run.scores, run.predictions) for when in ("before", "after")}
    table = RUN_FOLDER.split("\n## ")[0]
    assert keys_in_table(table) == {path.relative_to("DIR").as_posix() for path in known}


SHAPES = {
    "doctor.json": schemas.Doctor, "plan.json": schemas.Plan, "precommit.json": schemas.Commitment,
    "rows.jsonl": schemas.RowLine, "checkpoints.json": schemas.CheckpointEntry, "processes.json": schemas.Process,
    "extensions.json": schemas.schemas_host.Extension,
    "metrics.jsonl": schemas.StepLine, "eval/before.json and eval/after.json": schemas.ScoresFile,
    "eval/predictions-before.jsonl and eval/predictions-after.jsonl": schemas.PredictionLine,
    "rollouts/step-NNNNNN.jsonl": schemas.RolloutGroup, "eval/along.jsonl": schemas.AlongLine,
    "eval/heldout.jsonl": schemas.HeldoutLine, "eval_summary.json": schemas.EvalSummary,
    "state.json": schemas.CheckpointState, "MANIFEST.json": schemas.CheckpointManifest,
    "memory.json": schemas.MemoryReport, "profile/profile.json": schemas.Profile, "result.json": schemas.Result,
    "run_manifest.json": schemas.Manifest,
}  # fmt: skip
"""Heading in run-folder.md or bundle.md -> the schema of the file."""


def keys_of(schema: type) -> set[str]:
    if dataclasses.is_dataclass(schema):
        return names(schema)
    return {field.alias or name for name, field in schema.model_fields.items()}


def test_the_keys_of_every_file_are_those_of_its_schema():
    """Documented in the table or below it, and no others."""
    wrong = {}
    for heading, schema in SHAPES.items():
        page, keys = section(BUNDLE if heading == "run_manifest.json" else RUN_FOLDER, heading), keys_of(schema)
        wrong[heading] = keys_in_table(page) - keys | {key for key in keys if f"`{key}`" not in page}
    assert {heading: keys for heading, keys in wrong.items() if keys} == {}


def test_the_reference_of_a_bundle_has_every_option_check_level_and_label():
    for command in ("collect", "verify"):
        options = {
            name for name in re.findall(r"^ +(--[a-z-]+)", dict(generate.help_texts())["evidence", command], re.M)
        }
        assert set(re.findall(r"^\| `(--[a-z-]+)` \|", section(BUNDLE, command), re.M)) == options - {"--help"}
    code = "".join(text_of(path) for path in sorted((SOURCE / "evidence").rglob("*.py")))
    calls = r'\.(?:check|fail)\((?:"L\d"|level), "([a-z-]+)"|\.add\(\s*"([a-z-]+)"'
    literals = re.findall(rf'"?check"?(?:=|: )"([a-z-]+)"|{calls}', code)
    checks = set(CHECKS) | {name for found in literals for name in found if name}
    assert keys_in_table(section(BUNDLE, "What is checked")) == checks
    evidence = text_of(ROOT / "docs/concepts/evidence.md")
    for level, meaning in MEANINGS.items():
        assert level == "none" or f"| {level} {meaning} |" in section(evidence, "Levels")
    assert set(re.findall(r"^\| ([a-z-]+(?: checked)?) \|", section(evidence, "Claims and labels"), re.M)) >= set(
        get_args(Label)
    )


def test_the_inner_keys_of_facts_verdicts_and_sections_are_named():
    for heading, kinds in {
        "doctor.json": (Facts, DeviceChoice),
        "plan.json": (Fit,),
        "eval/before.json and eval/after.json": (SectionScores,),
    }.items():
        page = section(RUN_FOLDER, heading)
        for kind in kinds:
            assert {name for name in names(kind) if f"`{name}`" not in page} == set()


def test_the_examples_have_the_keys_of_their_tables():
    for heading in ("rows.jsonl", "metrics.jsonl", "eval/heldout.jsonl", "MANIFEST.json", "result.json"):
        page = section(RUN_FOLDER, heading)
        (example,) = blocks(page, "json")
        on_gpus = set(
            re.findall(r"^\| `(\w+)` \| on a GPU:", page, flags=re.MULTILINE)
        )  # the examples are of a CPU run
        assert set(json.loads(example)) == keys_in_table(page) - on_gpus, heading


# --- bring your own data ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.reference
def test_the_figures_in_the_guide_to_data_are_those_of_the_program(tmp_path):
    """Of every command of `tunix-rt data` that has output below it."""
    gsm8k = REFERENCE / "data" / "gsm8k" / "train.jsonl"
    if not gsm8k.is_file():
        pytest.skip("GSM8K is not beside this clone (../shared/data/gsm8k)")
    (tmp_path / "gsm8k-train.jsonl").write_bytes(gsm8k.read_bytes())
    (tmp_path / "problems.csv").write_text("Problem;Solution\nWhere is the café?;Here.\n", encoding="cp1252")
    page = text_of(ROOT / "docs/guides/bring-your-own-data.md")
    pairs = re.findall(
        r"^```sh\ntunix-rt (data [^\n]*)\n```\n\n```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL
    )
    assert len(pairs) == 5
    for command, shown in pairs:
        done = tunix_rt(*shlex.split(command), cwd=tmp_path, COLUMNS="110")
        figures = set(re.findall(r"\d[\d,.]*", shown))
        assert figures - set(re.findall(r"\d[\d,.]*", done.stdout + done.stderr)) == set(), command


# --- the other pages -------------------------------------------------------------------------------------------------


def test_every_relative_link_leads_to_a_file():
    links = [(page, target.split("#")[0]) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page))]
    near = [(page, target) for page, target in links if target and "://" not in target]
    assert [(page.name, target) for page, target in near if not (page.parent / target).exists()] == []


def test_every_example_in_json_or_yaml_can_be_read():
    for page in PAGES:
        for example in blocks(text_of(page), "json"):
            json.loads(example)
        for example in blocks(text_of(page), "yaml"):
            build_config(yaml.safe_load(example), page.name)


def test_every_command_shown_is_one_the_program_takes():
    shown = [block.replace("\\\n", " ") for page in PAGES for block in blocks(text_of(page), "sh")]
    lines = [line for block in shown for line in block.splitlines()]
    for words in (shlex.split(line, comments=True) for line in lines):
        if words and words[0] == "tunix-rt":
            context = cli.make_context("tunix-rt", list(words[1:]))
            command = cli.get_command(context, words[1])
            assert command is not None, words
            command.make_context(words[1], list(words[2:]), parent=context)
        elif words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file(), words


def test_no_page_names_a_machine_a_registry_or_sells():
    forbidden = (
        r"(?i)(?:^|[\s`(])/(?:work|root|home|tmp|mnt|users)\b|\bsimply\b|\bblazing|\bseamless|\b(?:AI|coding) assistant"
    )
    for page in PAGES:
        text = text_of(page)
        hosts = set(re.findall(r"https?://([^/\s)]+)", text))
        named_by_a_fix = {"download.pytorch.org"}
        assert hosts <= {"keepachangelog.com", "semver.org", "127.0.0.1:8000"} | named_by_a_fix, page
        assert re.findall(forbidden, text) == [], page
        assert [letter for letter in text if ord(letter) > 0x2BFF] == [], f"an emoji in {page}"


def test_the_ways_to_name_a_model_are_counted_once_and_its_architectures_listed():
    from tunix_rt.models.families import FAMILIES

    guide, index = text_of(ROOT / "docs" / "guides" / "models.md"), text_of(ROOT / "docs" / "index.md")
    ways = guide.partition("| name | example |")[2].partition("\n\n")[0].count("\n|") - 1
    word = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")[ways]
    assert f"takes {word} kinds of names" in guide and f"the {word} ways to name a model" in index
    listed = guide.partition("| **exact**:")[2].partition("|")[0]
    assert re.findall(r"`(\w+)`", listed) == list(FAMILIES)


def test_a_decision_is_one_page_with_context_choice_and_consequence():
    index = text_of(ROOT / "docs" / "index.md")
    for page in DECISIONS:
        text = text_of(page)
        assert re.match(rf"# {page.stem[:4]}: ", text), page
        assert re.findall(r"^## (.+)", text, flags=re.MULTILINE) == ["Context", "Choice", "Consequence"], page
        assert len(text.splitlines()) <= 60 and f"decisions/{page.name}" in index, page


def test_every_page_of_the_documentation_is_in_the_index():
    linked = re.findall(r"\]\(([^)]+\.md)\)", text_of(ROOT / "docs" / "index.md"))
    listed = {(ROOT / "docs" / target).resolve() for target in linked}
    assert {page for page in (ROOT / "docs").rglob("*.md")} - listed == {ROOT / "docs" / "index.md"}


def test_a_milestone_without_a_bundle_is_said_to_be_not_yet_recorded():
    page = " ".join(text_of(ROOT / "tunix-rt.md").split())
    for bundle in ("m39_v1", "m39_cpu_v1", "m40_v1"):
        recorded = (ROOT / "submission_runs" / bundle / "README.md").is_file()
        said = re.search(rf"`submission_runs/{bundle}`[^.:]*: not yet recorded", page)
        assert bool(said) != recorded, bundle


def test_the_changelog_has_an_entry_for_every_milestone_and_this_version():
    import tunix_rt

    changelog = text_of(ROOT / "CHANGELOG.md")
    assert re.findall(r"^### (M\d+)", changelog, flags=re.MULTILINE) == ["M36", "M37", "M38", "M39", "M40"]
    assert tunix_rt.__version__ in re.findall(r"^## .*?(\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)


@pytest.mark.parametrize("tutorial", ["gpu-8gb", "eight-gpus"])
def test_a_tutorial_has_the_verdicts_of_its_plans(tutorial):
    """The first does not fit, the second does."""
    part = section(text_of(ROOT / "docs" / "tutorials" / f"{tutorial}.md"), "2. Does it fit?")
    lines = "".join(blocks(part, "sh")).splitlines()
    commands = [shlex.split(line.removeprefix("tunix-rt ")) for line in lines]
    written, changed = (json.loads(in_process(*words, "--json").stdout)["fit"] for words in commands)
    assert not written["fits"] and changed["fits"]
    needed = [f"{one['predicted_bytes'] / 2**30:.0f} GiB" for one in (written, changed)]
    assert re.findall(r"needs? (\d+ GiB)", part) == needed[: 1 if tutorial == "gpu-8gb" else 2]


def test_the_page_on_installing_has_every_extra_and_the_wheel_of_this_version():
    import tunix_rt

    page = text_of(ROOT / "docs/guides/install.md")
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", section(page, "Extras"), re.M)))
    assert sorted(listed) == sorted(extras)
    assert set(re.findall(r"tunix_rt-([\d.]+)-py3", page)) == {tunix_rt.__version__}


def test_the_memory_page_names_the_parts_the_families_and_the_margin_of_the_planner():
    page = text_of(ROOT / "docs/concepts/memory-model.md")
    config = build_config({"model": {"model_name_or_path": "tiny-gemma3"}}, "test")
    shape = shape_of(json.loads(text_of(ROOT / "models/tiny-gemma3/config.json")))
    parts = {
        name
        for device in ("cpu", "cuda")
        for phase in predict(shape, config, device=device).phases
        for name in phase.parts
    }
    assert keys_in_table(page) == parts
    assert [family for family in FAMILIES if family not in page] == []
    assert f"{SAFETY_SHARE:.0%}".replace("%", " %") in page


def test_the_model_card_states_the_architecture_of_the_config():
    card = section(text_of(ROOT / "models/tiny-gemma3/README.md"), "Architecture")
    config = json.loads(text_of(ROOT / "models/tiny-gemma3/config.json"))
    for said, key in {
        "{} layers": "num_hidden_layers", "width {},": "hidden_size", "{} query heads": "num_attention_heads",
        "{} key-value head": "num_key_value_heads", "head of size {};": "head_dim", "MLP of width {};": "intermediate_size",
        "(window {})": "sliding_window", "{} positions": "max_position_embeddings",
    }.items():  # fmt: skip
        assert said.format(config[key]) in " ".join(card.split()), key
    assert f"{config['vocab_size']:,}" in card


def test_every_marker_and_test_folder_is_explained_to_contributors():
    page = text_of(ROOT / "CONTRIBUTING.md")
    markers = re.findall(r'^  "(\w+): ', text_of(ROOT / "pyproject.toml"), flags=re.MULTILINE)
    assert markers and [marker for marker in markers if f"| `{marker}` |" not in page] == []
    folders = {path.parent.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/test_*.py")}
    assert [folder for folder in folders if f"| `tests/{folder}` |" not in page] == []


def test_the_budget_of_settings_is_stated_with_what_it_came_to():
    assert f"({len(SETTINGS)} now: [0018]" in text_of(ROOT / "CONTRIBUTING.md")
    assert f"settings to {len(SETTINGS)}, over" in " ".join(
        text_of(ROOT / "docs/decisions/0018-precision-and-optimizers.md").split()
    )


def test_the_help_of_click_is_taken_at_a_fixed_width():
    assert all(len(line) <= generate.HELP_COLUMNS for _, text in generate.help_texts() for line in text.splitlines())
