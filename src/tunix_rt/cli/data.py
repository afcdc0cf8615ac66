"""`tunix-rt data`: import a dataset, validate it, inspect what is trained."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tunix_rt.cli.main import Group
from tunix_rt.cli.rewards import rewards
from tunix_rt.cli.train import FLAGS, MAP, data_flags
from tunix_rt.cli.views import data as validation
from tunix_rt.cli.views import text

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.data.importer import Imported
    from tunix_rt.data.prepare import Inspected, ModelFacts
    from tunix_rt.data.preview import RowView, TokenView
    from tunix_rt.data.render import Style
    from tunix_rt.data.sources import Dataset
    from tunix_rt.data.tokenizer import Tokenizer

SHIPPED_MODEL = "tiny-gemma3"
SAMPLES = 3
SET = "SECTION.KEY=VALUE"
FOLDER = Path("datasets")

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=Group)
def data() -> None:
    """Import a dataset, check it, and see what of it is trained."""


data.add_command(rewards)


def _settings(command: Command) -> Command:
    """The options for the model and the settings that a dataset is inspected with."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print everything as JSON."),
        click.option("--set", "overrides", multiple=True, metavar=SET, help="Any setting; may be repeated."),
        click.option(
            "--model", help=f"Hub id, local folder, or a shipped model. Default: that of --config, or {SHIPPED_MODEL}."
        ),
        click.option("--config", help="A YAML file, or the name of a shipped one."),
        click.option("--skip-bad", is_flag=True, help="Leave out records that validation refuses, and count them."),
        click.option(
            "--map", "columns", multiple=True, metavar=MAP, help="Columns under other names; case never matters."
        ),
    ):
        command = option(command)
    return command


@data.command("import")
@click.argument("dataset", metavar="FILE...", nargs=-1, required=True)
@click.option("--as", "key", required=True, metavar="KEY", help="Name of the dataset; it is written to datasets/KEY.")
@click.option("--format", "reading", default="auto", show_default=True, help="Format of the records; auto detects it.")
@click.option("--replace", is_flag=True, help="Replace the dataset of that name.")
@_settings
def import_(key: str, reading: str, replace: bool, as_json: bool, **options: Any) -> None:
    """Import FILE (JSONL, JSON, CSV, TSV, text or Parquet, also in gzip; a folder; a cached hub dataset) as datasets/KEY.

    Prints how it was read, tokenizes it, and shows a few examples. A record that cannot be read is refused; findings of
    validation are printed.
    """
    from tunix_rt.data.importer import import_dataset
    from tunix_rt.data.prepare import inspect
    from tunix_rt.data.render import style_of
    from tunix_rt.data.sources import find_datasets
    from tunix_rt.storage import read_json, to_plain, write_json

    look = _look(options, **{"data.format": reading})
    data = look.config.data
    style_of(data, look.tokenizer)  # an unusable template is refused before anything is written
    with _watching() as progress:
        source = find_datasets(data.names, columns=data.columns, limit=data.max_examples)
        imported = import_dataset(
            source, key=key, format=reading, replace=replace, skip_bad=data.skip_bad, folder=FOLDER
        )
        if not as_json:
            text.show_facts(_import_facts(imported))
        home = {"dataset": str(imported.dataset.parent), "format": imported.written_as, "columns": None}
        config = look.config.model_copy(update={"data": look.config.data.model_copy(update=home)})
        seen = inspect(config, look.tokenizer, look.model, progress)
    tokenised = {
        "model": config.model.model_name_or_path,
        "tokenizer_sha256": look.tokenizer.sha256,
        "template": seen.style.template.name,
        "style_sha256": seen.style.sha256,
        **seen.store.summary,
    }
    manifest = read_json(imported.manifest) | {"tokenised": tokenised}
    write_json(imported.manifest, manifest)
    if as_json:
        facts = {"schema": "tunix-rt/data-import/1", "folder": imported.dataset.parent, "manifest": manifest}
        text.show_json(to_plain(facts | {"findings": validation.findings(seen)}))
        return
    length = validation.describe_lengths(validation.figures(seen, config))
    text.show_facts([*validation.token_facts(seen, look.whose), ("length", length)])
    text.show_lines([""])
    _show_samples(seen, look.tokenizer)
    text.show_lines(_after_import(seen, imported, look, options))


@data.command()
@click.argument("name")
@click.option("--data", "--dataset", "dataset", help="Training data that must not contain these questions.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def evalset(name: str, dataset: str | None, as_json: bool) -> None:
    """Check the eval set NAME: every question has an answer that can be scored, none occurs twice. Exit 3 when not."""
    from tunix_rt.errors import InputError
    from tunix_rt.evaluate.evalsets import validate_evalset
    from tunix_rt.models.secrets import refuse_address
    from tunix_rt.storage import to_plain

    refuse_address("NAME", name)
    found = validate_evalset(name, dataset=dataset)
    if as_json:
        text.show_json({"schema": "tunix-rt/evalset-check/1", "good": found.good, **to_plain(found)})
    else:
        kinds = (("section", found.sections), ("category", found.categories), ("difficulty", found.difficulties))
        counts = [(kind, ", ".join(f"{one} {count:,}" for one, count in of.items())) for kind, of in kinds]
        text.show_facts([("eval set", found.key), ("questions", f"{found.items:,}"), *counts])
        text.show_lines([*(finding.describe() for finding in found.findings), found.verdict(dataset)])
    if not found.good:
        wrong = [finding for finding in found.findings if finding.refuses]
        raise InputError(f"{name}: {wrong[0].describe()}", fix=f"correct the {len(wrong)} kind(s) of error above")


@data.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def list_(as_json: bool) -> None:
    """List the datasets and eval sets that have a name here: shipped ones, and those imported below this folder."""
    from tunix_rt.data.readers import read_lines
    from tunix_rt.data.sources import named

    rows = [
        {"kind": kind[:-1], "name": name, "rows": sum(1 for _ in read_lines(path)), "path": str(path)}
        for kind in ("datasets", "evalsets")
        for name, path in named(kind).items()
    ]
    if as_json:
        text.show_json({"schema": "tunix-rt/data-list/1", "sets": rows})
    else:
        text.show_table([*rows[0]], [tuple(map(str, row.values())) for row in rows], numbers=("rows",))


@data.command()
@click.argument("dataset", metavar="[KEY...]", nargs=-1)
@_settings
def check(as_json: bool, **options: Any) -> None:
    """Validate dataset KEY against every rule. Exit 3 when one refuses it, as a run would.

    KEY is a dataset, a file, a folder, or a dataset of the hub, which is fetched. Default: that of --config.
    """
    from tunix_rt.data.prepare import inspect
    from tunix_rt.data.validation import refuse

    look = _look(options)
    with _watching() as progress:
        seen = inspect(look.config, look.tokenizer, look.model, progress)
    figures = validation.figures(seen, look.config)
    if as_json:
        text.show_json(validation.check_json(seen, look.config, look.tokenizer, figures))
    else:
        text.show_facts(validation.check_facts(seen, look.config, look.whose, figures))
        validation.show_findings(seen)
    refuse(seen.findings)


@data.command()
@click.argument("dataset", metavar="[KEY...]", nargs=-1)
@click.option("--row", type=click.IntRange(min=1), metavar="N", help="The N-th record of the dataset. Default: 1.")
@click.option("--packed", type=click.IntRange(min=1), metavar="N", help="The N-th training row, as it is packed.")
@_settings
def show(row: int | None, packed: int | None, as_json: bool, **options: Any) -> None:
    """Show one row of dataset KEY token by token: its text, its ids, and what is trained."""
    from tunix_rt.cli.views import data as tokens

    if row is not None and packed is not None:
        raise click.UsageError("give --row or --packed, not both")
    look = _look(options)
    shown = _packed(packed, look) if packed is not None else _record(row or 1, look)
    view = shown.view
    if as_json:
        text.show_json(shown.facts | {"tokens": [_token_facts(token) for token in view.tokens]})
        return
    count = len(view.tokens)
    header = [
        shown.header[0],
        f"{count:,} tokens: {view.trained:,} trained ({text.percent(view.trained / count)}), {count - view.trained:,} masked",
        f"{validation.describe_template(shown.facts['template'])}, {look.whose}",
        *shown.header[1:],
    ]
    tokens.show_row(view, header=header, places=shown.places)


@contextmanager
def _watching() -> Iterator[Any]:
    """Progress on the terminal; an interrupt stops at the next step, with exit code 7 and no partial result."""
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.progress import phase
    from tunix_rt.train.preemption import Preemption, stoppable

    with Preemption(fix="run it again").listening() as stop, watching() as progress, phase("read the data"):
        yield stoppable(progress, stop)


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The settings that a dataset is inspected with, the tokenizer of their model, and a description of it."""

    config: "RunConfig"
    tokenizer: "Tokenizer"
    model: "ModelFacts"
    whose: str


def _look(options: Mapping[str, Any], **settings: str) -> Look:
    """Settings as in a run; the default model is the shipped one. Needs no weights."""
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.config.load import find_config, load_config
    from tunix_rt.errors import ConfigError
    from tunix_rt.models.secrets import refuse_addresses
    from tunix_rt.train.context import find_tokenizer

    path = find_config(options["config"]) if options["config"] else None
    named = data_flags(options)
    flags: dict[str, Any] = settings | {"model.model_name_or_path": options["model"]}
    flags |= {FLAGS[name]: value for name, value in named.items()}
    config = load_config(path, overrides=options["overrides"], flags=flags)
    if not config.data.names:
        raise ConfigError("no dataset is named", fix="give KEY, or name one in --config: data.dataset")
    hint = ""
    if not config.model.model_name_or_path:
        flags["model.model_name_or_path"] = SHIPPED_MODEL
        config = load_config(path, overrides=options["overrides"], flags=flags)
        hint = " (the shipped model: choose yours with --model or --config)"
    refuse_addresses(config.model_dump())  # one may contain a password, which would reach the terminal
    whose = f"tokenizer of {config.model.tokenizer_name_or_path or config.model.model_name_or_path}{hint}"
    with watching():
        tokenizer, model = find_tokenizer(config)
    return Look(config=config, tokenizer=tokenizer, model=model, whose=whose)


# --- import ----------------------------------------------------------------------------------------------------------


def _import_facts(imported: "Imported") -> validation.Facts:
    unused = ", ".join(f"{name} ({count:,} of {imported.rows:,} records)" for name, count in imported.unused.items())
    files = len(imported.source.files)
    several = f", {files:,} files" if files > 1 else ""
    worded = [("answers", f"{imported.worded:,} of {imported.rows:,} with words after the number, kept as they are")]
    return [
        ("read", f"{validation.near(imported.source.key)}: {imported.container}{several}"),
        ("format", " written as ".join(dict.fromkeys((imported.format, imported.written_as)))),
        ("records", f"{imported.rows:,}"),
        ("not used", unused or "none: every column is read"),
        *(worded if imported.worded else []),
        ("skipped", ", ".join(f"{rule} {count:,}" for rule, count in imported.skipped.items()) or None),
        ("path", str(imported.dataset)),
        ("sha256", imported.sha256),
    ]


def _show_samples(seen: "Inspected", tokenizer: "Tokenizer") -> None:
    """The first few examples as text. One that cannot be tokenized is skipped; validation reports it."""
    from tunix_rt.cli.views import data as tokens
    from tunix_rt.data.packing import make_rows
    from tunix_rt.data.preview import view_of

    entries = seen.store.examples.entries
    for which in entries["length"].nonzero()[0][:SAMPLES].tolist():
        example = seen.store.examples[which]
        view = view_of(make_rows([example], max_length=len(example.ids), packing=False)[0], tokenizer)
        place = validation.near(seen.dataset.place(int(entries[which]["file"]), int(entries[which]["line"])))
        tokens.show_sample(view, title=f"{place}: {len(view.tokens):,} tokens, {view.trained:,} trained")


def _after_import(seen: "Inspected", imported: "Imported", look: Look, given: Mapping[str, Any]) -> list[str]:
    """A line with the findings of validation, and the next command."""
    key = imported.key
    options = "".join(f" --set {shlex.quote(override)}" for override in given["overrides"])
    options = f" --model {shlex.quote(given['model'])}{options}" if given["model"] else options
    options += " --skip-bad" * bool(seen.skipped)
    config = shlex.quote(given["config"]) if given["config"] else ""
    check = f"tunix-rt data check {key}" + (f" --config {config}" if config else "") + options
    refusing, warning = (
        ", ".join(f"{finding.rule} ({finding.count:,})" for finding in seen.findings if finding.refuses is refuses)
        for refuses in (True, False)
    )
    findings = [f"would refuse it: {refusing}"] * bool(refusing) + [f"warnings: {warning}"] * bool(warning)
    verdict = f"validation: {'; '.join(findings) or 'no findings'}"
    if refusing:
        return [verdict, f"next: {check}"]
    if not config and not given["model"]:
        options = f" --model {look.config.model.model_name_or_path}{options}"
    tag = f"<{look.config.data.answer_tag}>"
    answered = any(sample.answer is not None or tag in "".join(sample.texts) for sample in imported.samples)
    if not answered and look.config.evaluation.enabled and not look.config.evaluation.evalset:
        options += " --set evaluation.enabled=false"  # there are no answers to compare with
    return [
        f"{verdict}  ({check})",
        f"next: tunix-rt train{f' {config}' if config else ''}{options} --data {key} --output runs/{key}",
    ]


# --- one row ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    view: "RowView"
    header: list[str]
    places: list[str]
    """Of each example in the row."""
    facts: dict[str, Any]
    """Fields of the JSON besides the tokens."""


def _record(number: int, look: Look) -> Shown:
    """A record as a run tokenizes it; only this one is tokenized."""
    from tunix_rt.data.prepare import recipe_of
    from tunix_rt.data.preview import as_in_a_run, read_record, view_of
    from tunix_rt.data.validation import RULES

    recipe = recipe_of(look.config, look.tokenizer, look.model)
    dataset = recipe.dataset
    found = read_record(recipe, number)
    row, too_long = as_in_a_run(found, look.config.data)
    header = [f"{dataset.key}, record {number:,} ({recipe.format}): {validation.near(found.place)}"]
    header += [too_long] * bool(too_long)
    header += [f"{'refused' if RULES[rule].refuses else 'warning'}: {rule}: {seen}" for rule, seen in found.broken]
    view = view_of(row, look.tokenizer)
    facts = {
        **_row_facts(look, dataset, recipe.format, recipe.style, view),
        "row": number,
        "place": found.place,
        "record_tokens": len(found.row.ids),
        "breaks": [{"rule": rule, "seen": seen} for rule, seen in found.broken],
    }
    return Shown(view=view, header=header, places=[found.place], facts=facts)


def _packed(number: int, look: Look) -> Shown:
    """A training row. There are rows only when no rule refuses the data."""
    from tunix_rt.data.packing import Rows
    from tunix_rt.data.prepare import prepare
    from tunix_rt.data.preview import view_of
    from tunix_rt.errors import InputError

    config = look.config.model_copy(update={"evaluation": look.config.evaluation.model_copy(update={"enabled": False})})
    with _watching() as progress:
        prepared = prepare(config, look.tokenizer, look.model, progress)
    rows, dataset = prepared.rows, prepared.dataset
    assert isinstance(rows, Rows) and prepared.store is not None
    entries = prepared.store.examples.entries
    if number > len(rows):
        problem = f"there is no packed row {number:,}: {dataset.key} has {len(rows):,}"
        raise InputError(problem, fix=f"give a number from 1 to {len(rows)}")
    inside = [entries[at] for at in rows.examples_of(number - 1)]
    places = [dataset.place(int(entry["file"]), int(entry["line"])) for entry in inside]
    view = view_of(rows[number - 1], look.tokenizer)
    header = [
        f"{dataset.key}, packed row {number:,} of {len(rows):,}: {len(inside):,} example{'s' * (len(inside) > 1)}, "
        f"{len(view.tokens):,} of {config.data.max_length:,} tokens"
    ]
    facts = _row_facts(look, dataset, prepared.format, prepared.style, view)
    facts |= {"packed": number, "rows": len(rows), "places": places}
    return Shown(view=view, header=header, places=[validation.near(place) for place in places], facts=facts)


def _row_facts(look: Look, dataset: "Dataset", format: str, style: "Style", view: "RowView") -> dict[str, Any]:
    return {
        "schema": "tunix-rt/data-row/1",
        "dataset": {"key": dataset.key, "sha256": dataset.sha256, "format": format},
        "model": look.config.model.model_name_or_path,
        "tokenizer": {"folder": str(look.tokenizer.folder), "sha256": look.tokenizer.sha256},
        "template": style.template.name,
        "style_sha256": style.sha256,
        "max_length": look.config.data.max_length,
        "trained_tokens": view.trained,
        "lengths": list(view.lengths),
    }


def _token_facts(token: "TokenView") -> dict[str, Any]:
    return {name: getattr(token, name) for name in ("position", "id", "text", "control", "trained", "example")}
