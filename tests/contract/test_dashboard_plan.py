"""The planner page is `tunix-rt plan --json`; the data page is what a run trains on; neither reads what an address names."""

import gc
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT, SHIPPED
from tests.pages import Read
from tests.samples import record, write_lines
from tests.tables import parametrize, tables
from tunix_rt.cli.main import cli
from tunix_rt.config.load import load_config
from tunix_rt.dashboard import datasets
from tunix_rt.dashboard.app import render
from tunix_rt.dashboard.pages import data as data_page
from tunix_rt.dashboard.pages import plan as plan_page
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.data.prepare import ModelFacts, recipe_of
from tunix_rt.data.preview import read_record
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.models.resolve import preset_names
from tunix_rt.plan import precision, timing
from tunix_rt.plan.answer import json_of
from tunix_rt.plan.calibration import SeenError, add
from tunix_rt.plan.target import all_targets

RUNS, KEY = ROOT / "submission_runs", "dev-reasoning-v2"
GEMMA: dict[str, Any] = json.loads((ROOT / "presets/gemma-3-270m/config.json").read_text())


@pytest.fixture
def site(monkeypatch) -> Site:
    monkeypatch.chdir(ROOT)
    found = Site.of(RUNS)
    found.index.runs()  # reads the run folders
    return found


def planned(site: Site, pairs: dict[str, str]) -> Page:
    return plan_page.page(site, Query(tuple(pairs.items())))


def browsed(site: Site, **pairs: object) -> tuple[Page, str]:
    query = Query.parse(urlencode(pairs))
    page = data_page.page(site, query)
    return page, render(page, "/data", query)


def say(*words: str) -> Any:
    return CliRunner().invoke(cli, ["plan", *words, "--json"])


# --- the answer is that of the command line ---------------------------------------------------------------------------


def drawn(seed: int) -> tuple[str, str, dict[str, str]]:
    """A model, a device and some settings."""
    dice, known = random.Random(seed), tables(__file__)["settings"]
    names = dice.sample([*known][:-1], dice.randint(0, 6)) + [*known][-1:] * (dice.random() < 0.03)
    on = dice.choice([*(target.name for target in all_targets()), "8gb", "24gb"])
    settings = {name: dice.choice(known[name]) for name in names}
    if on.startswith("tpu") and dice.random() < 0.8:
        settings |= {"training.backend": "jax"}
    return dice.choice(preset_names()), on, settings


def test_a_node_of_gpus_is_planned_as_on_the_command_line(site):
    page = planned(site, {"model": "gemma-3-270m", "on": "8xh100"})
    assert json_of(page.values.answer.value()) == say("--model", "gemma-3-270m", "--on", "8xh100").stdout.rstrip("\n")
    assert "on each of 8 devices" in render(page, "/plan", Query((("model", "gemma-3-270m"), ("on", "8xh100"))))


def compare_with_the_command_line(site: Site, seed: int) -> str:
    model, on, settings = drawn(seed)
    fields = {name: value for name, value in settings.items() if name in plan_page.FIELDS}
    lines = "\n".join(f"{name}={value}" for name, value in settings.items() if name not in fields)
    query = Query.parse(urlencode({"model": model, "on": on, "set": lines, **fields}))
    found = plan_page.page(site, query)
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    said = say("--model", model, "--on", on, *sets)
    if found.values.answer is None:
        assert found.status == 400 and said.exit_code in (2, 3) and not said.stdout, (seed, found.values.problem)
        assert found.values.problem.splitlines()[0] in said.stderr and found.values.fix in said.stderr, seed
        return "refused"
    assert found.status == 200 and json_of(found.values.answer.value()) + "\n" == said.stdout, seed
    assert found.values.view.good is (said.exit_code == 0), seed
    return "runs" if found.values.view.good else "does not run"


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 2000), marks=pytest.mark.slow)], ids=len)
def test_the_answer_for_random_settings_is_that_of_plan_json_byte_for_byte(site, seeds):
    seen = [compare_with_the_command_line(site, seed) for seed in seeds]
    assert all(seen.count(kind) >= 5 for kind in ("runs", "does not run", "refused"))


def test_this_computer_is_planned_for_with_its_errors_and_the_runs_behind_them(site, monkeypatch, tmp_path):
    kept = json.loads((ROOT / "tests/facts/h100-busy-warns.json").read_text())["facts"]
    facts = facts_from_json({"schema": "tunix-rt/facts/1", **kept}, source="test")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tunix_rt.doctor.probe.gather_facts", lambda: facts)
    monkeypatch.setattr(plan_page, "gather_facts", lambda: facts)
    asked = {"model": "gemma-3-1b", "training.dtype": "bfloat16"}
    first = planned(site, asked).values.answer
    recipe = precision.recipe_of(load_config(None, overrides=["training.dtype=bfloat16"]).training).describe()
    alike = {"layers": first.outlook.plan.layers, "parameters": first.outlook.plan.parameters, "recipe": recipe}
    for measured in (9, 10, 11):
        sizes = {"predicted_bytes": 10 * 2**30, "measured_bytes": measured * 2**30}
        add(SeenError(device=first.outlook.target.kind, backend="torch", model="<b>mine</b>", **alike, **sizes))
    found = planned(site, asked)
    said = say("--model", "gemma-3-1b", "--set", "training.dtype=bfloat16")
    html = render(found, "/plan", Query())
    assert first.band is None and json_of(found.values.answer.value()) + "\n" == said.stdout
    assert len(found.values.view.seen) == 3 and "median error +0.0 % over 3 similar runs" in html
    assert "&lt;b&gt;mine&lt;/b&gt;" in html and "<b>mine" not in html


def test_the_rate_of_this_cpu_is_measured_once_for_all_pages(site, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(timing, "_matmul_rate", lambda size: sizes.append(size) or 1e10)
    monkeypatch.setattr(timing, "_rate_of_this_cpu", cache(timing.measure_rate))
    for rows in "123":
        assert planned(site, {"model": "gpt2", "set": f"device=cpu\nbatch_size={rows}"}).values.answer.measured
    assert sizes == [timing.MATMUL_SIZE, timing.SINGLE_THREAD_SIZE]


def test_a_pasted_config_and_a_run_of_the_index_are_planned_as_their_folders_are(site, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    found = planned(site, {"config": json.dumps(GEMMA), "on": "rtx4090"}).values.answer
    said = json.loads(say("--model", str(tmp_path), "--on", "rtx4090").stdout)
    assert json.loads(json_of(found.value())) == said | {"model": "config.json"}
    run = next(one for one in site.index.runs() if one.name == "demo_v1")
    of_run = planned(site, {"model": run.id, "on": "8gb"}).values.answer
    assert json_of(of_run.value()) + "\n" == say("--model", str(run.root), "--on", "8gb").stdout
    assert f'value="{run.id}"' in render(planned(site, {}), "/plan", Query()), "the form offers it"


# --- the page shows the answer ----------------------------------------------------------------------------------------


def test_the_links_of_a_proposal_lead_to_a_page_that_runs_and_those_of_devices_choose_them(site):
    wide = {"model": "gemma-3-1b", "devices": "all", "set": "training.weight_decay=0.1\noptimizer=adamw"}
    split = {"training.per_device_train_batch_size": "1", "training.gradient_accumulation_steps": "16"}
    for on, kind, more in (("rtx4090", "proposals", {"data.max_length": "4096"}), ("h200", "faster", split)):
        values = planned(site, wide | more | {"on": on}).values
        changes = getattr(values.view, kind)
        assert changes and values.view.good is (kind == "faster")
        for href, settings, _ in changes:
            followed = plan_page.page(site, Query.parse(href.removeprefix("?"))).values
            assert followed.view.good and followed.choice.on == on
            assert followed.others == "training.weight_decay=0.1", "what was set before stays"
            assert all(f"--set {one}" in followed.view.command for one in settings.split(", "))
    for row in values.view.devices:
        assert plan_page.Choice.parse(Query.parse(row.href.removeprefix("?"))).on == row.name


def test_an_answer_takes_at_most_100_ms_and_the_catalogue_is_a_part_of_its_own(site):
    """15 ms where it fits and 30 to 70 ms where the solver searches, on 2 quiet cores. Busy ones are up to twice as slow: of
    the slowest quarter only that is required."""
    taken, name = [], "training.per_device_train_batch_size"
    gc.disable()  # it would walk all that other tests have left
    try:
        for rows, model in product(range(1, 16), ("gemma-3-1b", "gemma-4-e4b")):
            begun = time.process_time()
            found = planned(site, {"model": model, "on": "rtx4090", name: str(rows)})
            taken.append(time.process_time() - begun)
            assert found.status == 200 and not found.values.view.devices
    finally:
        gc.enable()
    assert sorted(taken)[len(taken) * 3 // 4] < 0.1 and max(taken) < 0.2, sorted(taken)
    query = Query.parse(found.values.view.catalogue.removeprefix("?"))
    part = render(plan_page.page(site, query), "/plan", query, "devices")
    assert part.count("<tr>") == len(plan_page.page(site, query).values.view.devices) + 1 > 20 and "<h1" not in part


@parametrize("given", "nearest")
def test_a_name_in_the_address_that_is_no_setting_is_refused_with_the_nearest(site, given, nearest):
    for more in ({}, {"model": "gpt2", "on": "t4"}):
        page = planned(site, {given: "64", **more})
        assert page.status == 400 and f"`{given}`" in page.values.problem and nearest in page.values.fix
    assert planned(site, {"batch_size": "64", "model": "gpt2", "on": "t4"}).values.answer.outlook.plan.rows == 64


# --- what an address must not do --------------------------------------------------------------------------------------

EVENTS: list[tuple[str, str]] = []
WATCHED = threading.local()
WATCHED_EVENTS = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo", "subprocess.Popen")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in WATCHED_EVENTS and getattr(WATCHED, "on", False):
        EVENTS.append((event, str(args[0])))


sys.addaudithook(_audit)


@contextmanager
def nothing_is_touched(*but: str) -> Iterator[None]:
    """No connection, no process, no file but those of the package, its assets and the index; within a second."""
    EVENTS.clear()
    WATCHED.on, begun = True, time.process_time()
    try:
        yield
    finally:
        WATCHED.on = False
    own = (str(ROOT), sys.prefix, sys.base_prefix, "/proc", *but)
    allowed = [what for kind, what in EVENTS if kind in WATCHED_EVENTS[:3] and what.startswith(own)]
    assert len(allowed) == len(EVENTS), [event for event in EVENTS if event[1] not in allowed]
    assert time.process_time() - begun < 1


def hostile_names(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GEMMA))
    os.mkfifo(tmp_path / "fifo")
    near = os.path.relpath(tmp_path / "model", ROOT)
    return [*tables(__file__)["names"], str(tmp_path / "model"), near, str(tmp_path / "fifo"), "x" * 4000]


def hostile_plans(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Names that no list has, settings that lead to a file or are none, and texts that are no model of an exact family."""
    for name in hostile_names(tmp_path):
        yield from ({"model": name, "on": "t4"}, {"model": "gpt2", "on": name})
        yield {"model": "gpt2", "on": "t4", "data.dataset": name}
    lines = [*tables(__file__)["lines"], f"x={'y' * 600}", f"training.max_steps={'9' * 400}"]
    for text in (*lines, *(f"training.weight_decay=0\n{line}" for line in lines)):
        yield {"model": "gpt2", "on": "rtx4090", "set": text}
    digits = json.dumps(GEMMA)[:-1] + ', "vocab_size": ' + "9" * 5000 + "}"
    changed = [json.dumps(GEMMA | text) if isinstance(text, dict) else text for text in tables(__file__)["pasted"]]
    for text in (*changed, "x" * 2**20, "[" * 10_000, '{"a":' * 2000 + "1" + "}" * 2000, digits):
        yield from ({"config": text, "on": "rtx4090", "training.backend": backend} for backend in ("torch", "jax"))


def test_a_hostile_address_is_refused_and_nothing_is_opened(site, tmp_path):
    for asked in hostile_plans(tmp_path):
        with nothing_is_touched():
            page = planned(site, asked)
        assert page.status == 400 and page.values.problem and page.values.fix, asked
        assert "<script>" not in render(page, "/plan", Query())


def test_names_of_a_model_in_settings_are_left_out_and_a_strange_model_within_the_limits_is_planned_in_a_second(site):
    assert planned(site, {"model": "gpt2", "on": "t4", "set": "model.name=/etc"}).values.answer.model == "gpt2"
    huge = GEMMA | {"num_hidden_layers": 1000, "layer_types": None, "vocab_size": 2**20}
    most = {"training.per_device_train_batch_size": "65536", "training.gradient_accumulation_steps": "65521"}
    most |= {"data.max_length": "1048576", "evaluation.per_device_eval_batch_size": "65536"}
    with nothing_is_touched():
        page = planned(site, {"config": json.dumps(huge), "on": "h200", **most})
    assert page.status == 200 and not page.values.view.good


def strange_run(below: Path, name: str) -> Path:
    (below / name / "final_model").mkdir(parents=True)
    (below / name / "result.json").write_text("{}")
    return below / name / "final_model"


def test_links_and_pipes_in_a_run_folder_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    runs, secret = tmp_path / "runs", tmp_path / "secret.json"
    secret.write_text(json.dumps(GEMMA))
    os.mkfifo(strange_run(runs, "pipe") / "config.json")
    (strange_run(runs, "link") / "config.json").symlink_to(secret)
    (linked := strange_run(runs, "tokenizer") / "config.json").write_text(secret.read_text())
    linked.with_name("tokenizer.json").write_text((SHIPPED / "tokenizer.json").read_text())
    linked.with_name("tokenizer_config.json").symlink_to(secret)
    site = Site.of(runs)
    found = {run.name: run.id for run in site.index.runs()}
    for name in ("pipe", "link"):
        with nothing_is_touched(str(runs), "config.json", "final_model"):
            assert planned(site, {"model": found[name], "on": "t4"}).status == 400
    assert planned(site, {"model": found["tokenizer"], "on": "t4"}).status == 200
    assert [browsed(site, data=KEY, model=run)[0].status for run in found.values()] == [400, 400, 400]


# --- data -------------------------------------------------------------------------------------------------------------


def of_a_run() -> tuple[Any, Any, Any]:
    config = load_config(None, overrides=[f"data.dataset={KEY}", "evaluation.enabled=false"])
    facts = ModelFacts(vocabulary=10**6, positions=32_768, model_type="gemma3_text")
    return config, load_tokenizer(SHIPPED, "gemma3_text"), facts


def test_a_record_marks_exactly_the_tokens_that_are_trained(site):
    recipe = recipe_of(*of_a_run())
    for number in (1, 2, 137):
        page, html = browsed(site, data=KEY, model="tiny-gemma3", record=number)
        row, seen = read_record(recipe, number).row, Read(html)
        titles, trained = [title for _, title, _ in seen.tokens], [one for *_, one in seen.tokens]
        assert titles == [f"token {at}, id {token}" for at, token in enumerate(row.ids.tolist())]
        assert trained == (row.trained & (row.positions > 0)).tolist() and any(trained)
        assert page.status == 200 and "the prompt: only completions are trained" in html


def test_hostile_texts_are_shown_and_findings_lead_to_their_record(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "datasets" / "odd").mkdir(parents=True)
    evil = record(2, prompt="<script>alert(1)</script>\u202e 中 {{7*7}} \n next")
    write_lines(folder / "dataset.jsonl", record(1), evil, record(1), *map(record, range(3, 30)))
    site = Site.of(tmp_path)
    page, html = browsed(site, data="odd", record=2)
    shown = Read(html)
    tokens = [text for text, *_ in shown.tokens]
    assert "<script>alert" not in html and "\u202e" not in html and "49" not in "".join(tokens)
    assert "<0xE4>" in tokens and "{{7*7}}" in "".join(tokens).replace("·", "")
    duplicate = next(one for one in page.values.findings if one.rule == "duplicate")
    assert duplicate.places == (("line 3", 3),) and f"?{urlencode({'data': 'odd', 'record': 3})}" in shown.links
    assert [one.rule for one in browsed(site, data="odd", record=3)[0].values.shown.broken] == ["duplicate"]
    write_lines(folder / "dataset.jsonl", record(1), record(2, prompt="a\x00b"))
    refused, html = browsed(site, data="odd", record=2)
    assert [one.rule for one in refused.values.shown.broken] == ["control_character"]
    assert "refused: control_character" in html and browsed(site, data="odd", row=1)[0].status == 400


def test_what_is_no_dataset_of_the_list_is_refused_and_nothing_is_opened(site, tmp_path, monkeypatch):
    browsed(site, data=KEY)
    for name in hostile_names(tmp_path):
        for query in ({"data": name}, {"data": KEY, "model": name}):
            with nothing_is_touched():
                page, html = browsed(site, **query)
            assert page.status == 400 and page.values.fix and "<script>" not in html, name
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "large"):
        (folder := tmp_path / "datasets" / name).mkdir(parents=True)
        os.mkfifo(folder / "dataset.jsonl") if name == "pipe" else (folder / "dataset.jsonl").touch()
        os.truncate(folder / "dataset.jsonl", 2**31) if name == "large" else None
        with nothing_is_touched(str(tmp_path / "datasets")):
            assert browsed(site, data=name)[0].status == 400


def test_a_run_is_read_with_its_own_settings_and_tokenizer(site):
    run = next(one for one in site.index.runs() if one.name == "demo_v1")
    page, html = browsed(site, data=run.id)
    committed = json.loads((run.root / "precommit.json").read_text())["dataset"]
    assert page.status == 200 and page.values.model == run.id and run.id in html
    assert page.values.shown.total == committed["traces"] + committed["heldout_traces"]
    assert browsed(site, data=run.id, row=1)[0].values.shown.total == committed["rows"]


@parametrize("template", "words")
def test_a_costly_chat_template_is_ended_and_the_next_page_is_answered(site, monkeypatch, tmp_path, template, words):
    run = Path(shutil.copytree(RUNS / "demo_v1", tmp_path / "runs" / "endless"))
    (run / "final_model" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(datasets, "MOST_SECONDS", 4.0)
    hostile = Site.of(run.parent)
    begun, one = time.monotonic(), hostile.index.runs()[0].id
    page, _ = browsed(hostile, data=KEY, model=one)
    assert page.status == 400 and time.monotonic() - begun < 10 and words in page.values.problem, page.values
    assert browsed(hostile, data=KEY, model="tiny-gemma3")[0].status == 200


def test_many_pages_at_once_show_the_same_and_little_is_kept(site):
    wanted = {number: browsed(site, data=KEY, record=number)[1] for number in range(1, 9)}
    with ThreadPoolExecutor(8) as pool:
        found = dict(pool.map(lambda number: (number, browsed(site, data=KEY, record=number)[1]), wanted))
    assert found == wanted and len(site.cache["data"].opened) <= datasets.MOST_OPENED
