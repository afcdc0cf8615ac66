"""The result of validation for people and as JSON: figures and findings of a dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_rt.cli.views import text

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.data.prepare import Inspected
    from tunix_rt.data.tokenizer import Tokenizer


def figures(seen: "Inspected", config: "RunConfig") -> dict[str, Any]:
    """Lengths, and the fill of the rows: tokens over `max_length`, mean of all rows but the last."""
    import numpy as np

    from tunix_rt.data.prepare import fill_of, pack_rows, row_lengths

    limit = config.data.max_length
    lengths = seen.store.examples.entries["length"]
    lengths = lengths[lengths > 0]
    fits = (seen.lengths > 0) & (seen.lengths <= limit)
    facts: dict[str, Any] = {"max_length": limit, "dropped": seen.dropped, "truncated": seen.truncated}
    if len(lengths):
        median, p95 = np.quantile(lengths, (0.5, 0.95), method="higher").tolist()
        facts["lengths"] = {"median": int(median), "p95": int(p95), "max": int(lengths.max())}
    if fits.any():
        packing = pack_rows(seen.lengths, fits, limit, packing=config.data.packing)
        of_row = row_lengths(seen.lengths, packing)
        facts |= {"rows": len(of_row), "fill": fill_of(of_row, limit), "left_out": int((~fits).sum())}
    return facts


def findings(seen: "Inspected") -> list[dict[str, Any]]:
    from tunix_rt.data.validation import RULES

    return [
        {
            "rule": finding.rule,
            "refuses": finding.refuses,
            "count": finding.count,
            "first": finding.first,
            "seen": finding.seen,
            "places": finding.places,
            "finds": RULES[finding.rule].finds,
            "fix": RULES[finding.rule].fix,
        }
        for finding in seen.findings
    ]


def check_json(seen: "Inspected", config: "RunConfig", tokenizer: "Tokenizer", figures: dict[str, Any]) -> Any:
    from tunix_rt.data.validation import RULES
    from tunix_rt.storage import to_plain

    return to_plain({
        "schema": "tunix-rt/data-check/1",
        "dataset": {"key": seen.dataset.key, "sha256": seen.dataset.sha256, "format": seen.format, "files": seen.dataset.files},
        "model": config.model.model_name_or_path,
        "tokenizer": {"folder": tokenizer.folder, "sha256": tokenizer.sha256},
        "template": seen.style.template.name,
        "style_sha256": seen.style.sha256,
        **seen.store.summary,
        **figures,
        "seconds": seen.store.seconds,
        "from_cache": seen.store.seconds == 0,
        "rules": len(RULES),
        "findings": findings(seen),
        "refused": any(finding.refuses for finding in seen.findings),
    })  # fmt: skip


# --- for people ------------------------------------------------------------------------------------------------------

Facts = list[tuple[str, str | None]]


def check_facts(seen: "Inspected", config: "RunConfig", whose: str, figures: dict[str, Any]) -> Facts:
    files = [f"{near(str(file.path))} ({file.bytes:,} bytes{', gzip' * file.gzip})" for file in seen.dataset.files[:5]]
    more = len(seen.dataset.files) - len(files)
    store = seen.store
    speed = "from the cache"
    if store.seconds:
        speed = f"{store.tokens / store.seconds:,.0f} tokens/s, {text.duration(store.seconds)}"
    return [
        ("dataset", f"{seen.dataset.key}, sha256 {seen.dataset.sha256[:12]}"),
        ("files", "\n".join(files + [f"and {more:,} more"] * (more > 0))),
        ("format", seen.format),
        *token_facts(seen, whose),
        ("length", describe_lengths(figures)),
        ("packing", _describe_rows(figures, packing=config.data.packing)),
        ("root", store.merkle_root),
        ("time", speed),
    ]


def token_facts(seen: "Inspected", whose: str) -> Facts:
    store = seen.store
    share = text.percent(store.trained_tokens / store.tokens) if store.tokens else "none"
    return [
        ("rendered", f"with {describe_template(seen.style.template.name)}, {whose}"),
        ("examples", f"{len(store.examples):,}"),
        ("tokens", f"{store.tokens:,}, of which {store.trained_tokens:,} are trained ({share})"),
    ]


def describe_lengths(figures: dict[str, Any]) -> str | None:
    if "lengths" not in figures:
        return None
    lengths, limit = figures["lengths"], figures["max_length"]
    line = f"median {lengths['median']:,}, p95 {lengths['p95']:,}, longest {lengths['max']:,}; max_length {limit:,}"
    return "; ".join([line, *(f"{figures[what]:,} {what}" for what in ("dropped", "truncated") if figures[what])])


def _describe_rows(figures: dict[str, Any], *, packing: bool) -> str | None:
    if "rows" not in figures:
        return None
    rows, limit = figures["rows"], figures["max_length"]
    line = f"{rows:,} row{'s' * (rows > 1)} of {limit:,} tokens, {text.percent(figures['fill'])} full"
    line += " (without the last)" if rows > 1 else ""
    line += "" if packing else "; data.packing is off: one example per row"
    return line + (f"; {figures['left_out']:,} examples are in none" if figures["left_out"] else "")


def show_findings(seen: "Inspected") -> None:
    """The finding of each broken rule, the number of others, and the verdict."""
    from tunix_rt.data.validation import RULES

    rows = [
        (
            f"{found['rule']}\n{'refuses' if found['refuses'] else 'warns'}",
            f"{found['count']:,}",
            near(found["first"]),
            f"{found['finds']}: {near(found['seen'])}\nfix: {found['fix']}",
        )
        for found in findings(seen)
    ]
    if rows:
        text.show_table(("rule", "count", "first", "finding"), rows, numbers=("count",))
    refusing = [finding.rule for finding in seen.findings if finding.refuses]
    warnings = len(seen.findings) - len(refusing)
    verdict = f"refused: {', '.join(refusing)}" if refusing else "ready to train on"
    verdict += f"; {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    text.show_lines([f"{len(RULES) - len(rows)} of {len(RULES)} rules have no findings", verdict])


def describe_template(name: str) -> str:
    return "the tokenizer's own chat template" if name == "tokenizer" else f"template {name}"


def near(place: str) -> str:
    """`place` relative to the working folder, if it is below it."""
    return place.replace(f"{Path.cwd()}/", "")
