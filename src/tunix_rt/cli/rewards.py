"""`tunix-rt data rewards`: whether the reward of reinforcement learning can be trusted on a dataset."""

from typing import Any

import click

from tunix_rt.cli.views import text

MAP = "OURS=THEIRS,..."


@click.command()
@click.argument("dataset", metavar="FILE...", nargs=-1, required=True)
@click.option("--format", "reading", default="auto", show_default=True, help="Format of the records; auto detects it.")
@click.option("--map", "columns", multiple=True, metavar=MAP, help="Columns under other names; case never matters.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def rewards(dataset: tuple[str, ...], reading: str, columns: tuple[str, ...], as_json: bool) -> None:
    """Try the reward on every answer in FILE: spellings of the right one, and kinds of wrong output.

    `training.method: grpo` makes the same check before its first step, and refuses a reward that fails. Exit code 3 if any kind
    fails.
    """
    from tunix_rt.cli.train import data_flags
    from tunix_rt.data.formats import detect_format, to_sample
    from tunix_rt.data.holdout import as_question
    from tunix_rt.data.readers import read_raw
    from tunix_rt.data.sources import find_datasets
    from tunix_rt.errors import InputError
    from tunix_rt.scoring.rewards import check_reward, reward_problems, strict_reward
    from tunix_rt.scoring.score import TAGS

    given = data_flags({"dataset": dataset, "columns": columns, "skip_bad": False})
    source = find_datasets(dataset, columns=given["columns"])
    format, answers, without = detect_format(source, reading), [], 0
    for raw in read_raw(source):
        pair = as_question(to_sample(source.record(raw), format, source.place(raw.file, raw.line)), TAGS.answer)
        answers += [pair[1]] if pair else []
        without += pair is None
    if not answers:
        raise InputError(f"{source.key}: no record has an answer that can be scored", fix="write answers as `#### 42`")
    classes = check_reward(strict_reward(), answers)
    if as_json:
        kinds: list[dict[str, Any]] = [
            {"name": one.name, "right": one.right, "outputs": one.outputs, "failed": one.failed} for one in classes
        ]
        text.show_json({"schema": "tunix-rt/rewards/1", "answers": len(answers), "without": without, "kinds": kinds})
    else:
        lines = [f"{source.key}: {len(answers):,} answers, {len(set(answers)):,} different"]
        lines += [f"{without:,} records have none and cannot be trained on"] if without else []
        for is_right in (True, False):
            lines.append("right answers, denied the reward:" if is_right else "wrong outputs, paid:")
            lines += [
                f"  {one.failed:>6,} of {one.outputs:>6,}  {one.name}" for one in classes if one.right == is_right
            ]
        text.show_lines(lines)
    if problems := reward_problems(classes):
        raise InputError("the reward cannot be trusted here: " + "; ".join(problems), fix="write plainer answers")
