"""The pages about data that code and measurements decide: formats, rules, and the figures of `benchmarks/data.py`."""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from docs.data_examples import EXPLANATIONS, FORMAT_EXAMPLES
from docs.markdown import WRITTEN, table
from tunix_rt.assets import shipped_folder
from tunix_rt.cli.views.data import marks_of, text_lines
from tunix_rt.data import file_kinds, readers, sources, text
from tunix_rt.data import validation as rules
from tunix_rt.data.containers import BATCH_ROWS, MAX_DOCUMENT_BYTES
from tunix_rt.data.formats import FORMATS, to_sample
from tunix_rt.data.packing import make_rows
from tunix_rt.data.preview import view_of
from tunix_rt.data.render import Style, render
from tunix_rt.data.template import PLAIN, choose_template
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.errors import TunixError

COLUMNS = 100
SHIPPED_MODEL = "tiny-gemma3"
GSM8K = Path("benchmarks/results/data_gsm8k.json")
SCALE = Path("benchmarks/results/data_scale.json")
COMMAND = "python -m benchmarks.data"


# --- formats ---------------------------------------------------------------------------------------------------------


def formats_page() -> str:
    parts = [
        "# Data formats",
        WRITTEN,
        "A dataset is one file of records, or several. All its records are of one format. `data.format: auto` takes the "
        "one format that fits the keys of the first readable record of every file. Where none fits, or two do, the file is "
        "refused with the way out: `--format NAME` for `tunix-rt data import`, `--set data.format=NAME` elsewhere.",
        table(("format", "a record has"), [(f"[{name}](#{name})", shape.needs) for name, shape in FORMATS.items()]),
        "Columns may have other names: `--map question=Problem,answer=Solution`, or in a file `data.columns: {question: "
        "Problem, answer: Solution}`. The case of a column never matters.",
        "Reading is strict. A blank text, a key given twice, an unknown role, a key of a message that would be lost: each "
        "ends with exit code 3. All bad records are counted by rule, and the first "
        f"{rules.LISTED} are listed with file, line and field. `--skip-bad` (`data.skip_bad: true`) leaves them out; their "
        "number is logged and recorded in `precommit.json`. A column that the format does not read is left out, and `data "
        "import` counts it under `not used`; a trace may have no such key.",
        "Refused by name, because supervised training on text cannot use them: preference pairs (`chosen`, `rejected`), KTO "
        "labels (`label` of true or false), tool calls, images, and messages of `weight` 0. A message of role `developer` is "
        "read as `system`.",
        "Below each example is its rendering with `data.chat_template: plain` and the tokenizer of "
        f"`{SHIPPED_MODEL}`. `tunix-rt data show` prints the same for your own data, token by token.",
    ]
    for name in FORMATS:
        parts += _format_section(name)
    parts += [*_containers(), *_sources()]
    return "\n\n".join(parts) + "\n"


def _format_section(name: str) -> list[str]:
    description, record = FORMAT_EXAMPLES[name]
    return [
        f"## {name}",
        description,
        f"```json\n{json.dumps(record, ensure_ascii=False)}\n```",
        f"```text\n{rendered_plain(name)}\n```",
    ]


def rendered_plain(name: str) -> str:
    """The example of a format as `data import` would show it: what is masked, what is trained."""
    tokenizer = _shipped_tokenizer()
    style = Style(template=choose_template(PLAIN, tokenizer))
    sample = to_sample(dict(FORMAT_EXAMPLES[name].record), name, "the example")
    example = render(sample, tokenizer, style)
    [row] = make_rows([example], max_length=len(example.ids), packing=False)
    lines = text_lines(view_of(row, tokenizer), width=COLUMNS, marks=marks_of("utf-8"))
    return "\n".join(line.plain.rstrip() for line in lines)


@functools.cache
def _shipped_tokenizer() -> Tokenizer:
    folder = shipped_folder("models") / SHIPPED_MODEL
    return load_tokenizer(folder, json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])


def _containers() -> list[str]:
    line, document = (f"{limit:,} bytes" for limit in (readers.MAX_LINE_BYTES, MAX_DOCUMENT_BYTES))
    rows = [
        ("JSONL", "one object per line", f"a line up to {line}; blank lines at the end only"),
        (
            "JSON",
            "a list of objects, or an object with exactly one list of objects",
            f"up to {document}: it is held whole",
        ),
        (
            "Parquet",
            f"rows, {BATCH_ROWS} at a time; a null is a column left out",
            "needs the extra `parquet`",
        ),
        (
            "CSV, TSV",
            "a header and rows; delimiter (comma, semicolon, tab, pipe) and encoding (UTF-8, UTF-16, Windows-1252, Latin-1) "
            "are detected",
            f"up to {document}; rows without a text are left out",
        ),
        ("text", "a file that ends in `.txt`: one text per block of lines", f"up to {document}"),
        ("gzip", "any of them inside", f"Parquet inside: up to {document}"),
    ]
    not_read = ", ".join(dict.fromkeys(what for what, _ in file_kinds.NOT_READ.values()))
    return [
        "## Files",
        "The container is recognized by content; only a text, and a table of one column, by name. JSON is UTF-8, with or without "
        "a byte order mark.",
        table(("container", "read", "limits"), rows),
        f"Refused, with the advice to convert: a file that is {not_read}.",
    ]


def _sources() -> list[str]:
    endings = ", ".join(f"`{ending}`" for ending in sources.ENDINGS)
    rows = [
        ("a file", "`my/data.jsonl`", "that file"),
        ("a key", "`my-data`", "`datasets/my-data/dataset.jsonl`, below the working directory or shipped; "
         "it must match its `manifest.json`"),
        ("a folder", "`my/folder`", f"all files in it, or one level below, that end in {endings} (also with `.gz`), in "
         "name order; more than one split, the same name twice or a missing shard is refused"),
        ("a pattern", "`my/train-*`", "the files it matches, in name order; splits are your choice"),
        ("a hub dataset", "`owner/name`, `owner/name:main/train`, `owner/name@COMMIT:data/train-*`",
         "a split, folder, file or pattern of the hub; fetched unless it is in the hub's cache"),
    ]  # fmt: skip
    return [
        "## Names",
        "What `data.dataset`, `data.validation`, `--data` and the verbs of `tunix-rt data` take. The first that exists is taken, "
        "in this order. Several names (`--data a.jsonl --data more/`, a list in `data.dataset`) are read one after the other; "
        "with weights (`data.dataset: {a.jsonl: 3, b.jsonl: 1}`) they are "
        "[mixed](../guides/bring-your-own-data.md#datasets-with-weights).",
        table(("what", "for example", "means"), rows),
    ]


# --- rules -----------------------------------------------------------------------------------------------------------


def rules_page() -> str:
    refusing, warning = (
        [rule for rule in rules.RULES.values() if rule.refuses is refuses] for refuses in (True, False)
    )
    parts = [
        "# Data rules",
        WRITTEN,
        f"Validation has {len(rules.RULES)} rules. `tunix-rt data check` checks all of them, and so does every run before a "
        "weight is loaded. A finding has a count, the first file and line, and what is wrong there. The reasons: "
        "[0011](../decisions/0011-data-validation.md).",
        f"{len(refusing)} rules refuse: the run ends with exit code 3: {_linked(refusing)}.",
        f"{len(warning)} warn: the finding is logged and the run continues: {_linked(warning)}.",
        "The `overlap` rules need an eval set. `beyond_positions` and `outside_vocabulary` read the model's `config.json`.",
    ]
    for rule in rules.RULES.values():
        because, example = EXPLANATIONS[rule.name]
        parts += [
            f"## {rule.name}",
            f"Finds {rule.finds}. {'Refuses' if rule.refuses else 'Warns'}.",
            f"- Why: {because}.\n- For example: {example}.\n- Way out: {rule.fix}.",
        ]
    return "\n\n".join([*parts, *_numbers()]) + "\n"


def _linked(listed: Iterable[rules.Rule]) -> str:
    return ", ".join(f"[{rule.name}](#{rule.name})" for rule in listed)


def _numbers() -> list[str]:
    rows = [
        ("consecutive words that make an overlap", f"{text.OVERLAP_WORDS}"),
        ("words of an n-gram, for near-duplicates", f"{text.RUN_WORDS}"),
        ("estimated fraction of n-grams that near-duplicates share", f"{100 * text.THRESHOLD:.0f} %"),
        ("records compared for near-duplicates; of more, a sample of that size", f"{text.CAPACITY:,}"),
    ]
    return [
        "## Numbers",
        "Texts are compared by their words, in lower case and without punctuation. Numbers and symbols count: `3 + 4` and "
        "`3 - 4` are different questions.",
        table(("what", "value"), rows),
    ]


# --- figures ---------------------------------------------------------------------------------------------------------


def measured_block(root: Path) -> str:
    """What `benchmarks/data.py` has recorded; a note for what it has not yet."""
    return "\n\n".join([_recorded(root / GSM8K, _gsm8k), _recorded(root / SCALE, _scale)])


def _recorded(path: Path, shown: Any) -> str:
    what = path.stem.removeprefix("data_")
    if not path.is_file():
        return f"The figures of `{what}` are not recorded yet. `{COMMAND} {what}` records them."
    try:
        return str(shown(json.loads(path.read_text(encoding="utf-8"))))
    except (KeyError, TypeError) as error:
        raise TunixError(f"{path.name} lacks or misspells {error}", fix=f"record it again: {COMMAND} {what}") from error


def _gsm8k(recorded: Mapping[str, Any]) -> str:
    first, second = recorded["first"], recorded["second"]
    said = first["said"]
    rows = [
        ("examples", f"{said['examples']:,}"),
        ("tokens", f"{said['tokens']:,}, {_percent(said['trained_tokens'] / said['tokens'])} of them trained"),
        (f"rows of {said['max_length']:,} tokens", f"{said['rows']:,}, {_percent(said['fill'])} full (without the last)"),
        ("first start", f"{first['seconds']:.1f} s, of which {said['seconds']:.1f} s for tokenization"),
        ("tokenization", f"{said['tokens'] / said['seconds']:,.0f} tokens/s"),
        ("second start", f"{second['seconds']:.1f} s"),
        ("peak memory of all processes", f"{_mib(first)} MiB; at the second start {_mib(second)} MiB"),
    ]  # fmt: skip
    return (
        "**GSM8K**, training split, Gemma 3's tokenizer and its own chat template:\n\n"
        + table(("what", "measured"), rows)
        + f"\n\n`tunix-rt data check` on {recorded['machine']}; raw output in `{GSM8K}`."
    )


def _scale(recorded: Mapping[str, Any]) -> str:
    columns = (
        "file", "examples", "tokens", "first start", "tokens/s", "processes", "peak", "second start", "peak",
    )  # fmt: skip
    rows = [
        (
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{row['first']['said']['examples']:,}",
            f"{row['first']['said']['tokens']:,}",
            f"{row['first']['seconds']:,.0f} s",
            f"{row['first']['said']['tokens'] / row['first']['said']['seconds']:,.0f}",
            f"{row['first']['processes']}",
            f"{_mib(row['first'])} MiB",
            f"{row['second']['seconds']:,.1f} s",
            f"{_mib(row['second'])} MiB",
        )
        for row in recorded["rows"]
    ]
    return (
        "**Files of growing size**, prompts and completions of words drawn by chance, GPT-2's tokenizer:\n\n"
        + table(columns, rows)
        + f"\n\n`tunix-rt data check` on {recorded['machine']}; raw output in `{SCALE}`."
    )


def _mib(run: Mapping[str, Any]) -> str:
    return f"{run['peak_bytes'] / 2**20:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
