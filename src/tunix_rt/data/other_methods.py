"""Records for other methods than supervised training on text, refused by name: preference pairs, KTO, tools, images."""

from tunix_rt.data.readers import BadRecord
from tunix_rt.data.records import KINDS, NO_TOOLS, Fields

_KEEP_TRUE = (
    "python -c \"import json, sys; [print(json.dumps({k: v for k, v in row.items() if k != 'label'})) "
    "for row in map(json.loads, open(0, encoding='utf-8-sig')) if row['label'] is True]\" < FILE > GOOD.jsonl"
)


def refuse_other_methods(record: Fields, where: str) -> None:
    """Refuse records for other methods than supervised training on text, by name."""
    has = {name for name in KINDS if record.get(name) not in (None, "", [], {})}
    if {"chosen", "rejected"} <= has:
        own = "completion" if record.get("prompt") else "messages" if type(record["chosen"]) is list else "text"
        raise BadRecord(
            where, "chosen and rejected: a preference pair (DPO), which supervised training cannot use", rule="unsupported",
            fix=f"to train on the chosen answers alone: --map {own}=chosen",
        )  # fmt: skip
    label = record.get("label")
    if not record.get("text") and (label in (0, 1) or str(label).strip().lower() in ("true", "false", "0", "1")):
        raise BadRecord(
            where, f"label: {label!r}: feedback on an answer (KTO); those that are false must not be trained as good",
            rule="unsupported", fix=f"keep the records whose label is true, without the column: {_KEEP_TRUE}",
        )  # fmt: skip
    if tools := sorted(has & {"tools", "functions"}):
        raise BadRecord(where, f"{tools[0]}: {NO_TOOLS}", rule="unsupported", fix=f"remove the column {tools[0]}")
    if media := sorted(has & {"image", "images", "audio", "video"}):
        problem = f"{media[0]}: only text is trained"
        raise BadRecord(
            where, problem, rule="unsupported", fix=f"remove the column {media[0]} to train on the text alone"
        )
