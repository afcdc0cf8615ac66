"""Forgeries that attack the verifier: names, links, sizes, depths, control characters. None may be accepted or crash it."""

import os
from pathlib import Path

from tests.forging.catalogue import forgery
from tests.forging.folder import edited, lines_of, metrics_of, put, put_lines, put_metrics, read
from tests.forging.sealing import reseal, reseal_sums, retell
from tunix_rt.rundir import json_text

HOSTILE = "hostile"


def _sums(folder: Path) -> str:
    return (folder / "SHA256SUMS").read_text(encoding="utf-8")


@forgery("a path out of the folder in SHA256SUMS", group=HOSTILE)
def forge_path_traversal(folder: Path) -> None:
    put(folder / "SHA256SUMS", _sums(folder) + f"{'0' * 64}  ../../../etc/passwd\n")


@forgery("an absolute path in SHA256SUMS", group=HOSTILE)
def forge_absolute_path(folder: Path) -> None:
    put(folder / "SHA256SUMS", _sums(folder) + f"{'0' * 64}  /etc/passwd\n")


@forgery("a path out of the folder in run-SHA256SUMS", group=HOSTILE)
def forge_path_traversal_of_the_run(folder: Path) -> None:
    text = (folder / "run-SHA256SUMS").read_text(encoding="utf-8")
    put(folder / "run-SHA256SUMS", text + f"{'0' * 64}  final_model/../../../etc/passwd\n")
    reseal(folder)


@forgery("a path out of the folder as a checkpoint's file", group=HOSTILE)
def forge_path_traversal_of_a_checkpoint(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"][0]["files"]["../../../etc/passwd"] = {"sha256": "0" * 64, "bytes": 1}
    reseal(folder)


@forgery("a file listed twice in SHA256SUMS", group=HOSTILE)
def forge_listed_twice(folder: Path) -> None:
    put(folder / "SHA256SUMS", _sums(folder) + _sums(folder).splitlines()[0] + "\n")


@forgery("SHA256SUMS out of order", group=HOSTILE)
def forge_unsorted_sums(folder: Path) -> None:
    put(folder / "SHA256SUMS", "".join(f"{line}\n" for line in reversed(_sums(folder).splitlines())))


@forgery("SHA256SUMS with Windows line ends", group=HOSTILE)
def forge_windows_sums(folder: Path) -> None:
    put(folder / "SHA256SUMS", _sums(folder).replace("\n", "\r\n"))


@forgery("SHA256SUMS empty", group=HOSTILE)
def forge_empty_sums(folder: Path) -> None:
    put(folder / "SHA256SUMS", "")


@forgery("a file that is a link to one outside", group=HOSTILE)
def forge_link(folder: Path) -> None:
    (folder / "env_info.txt").unlink()
    (folder / "env_info.txt").symlink_to("/etc/hostname")


@forgery("a file that is a link to another of the bundle, hashed", group=HOSTILE)
def forge_inner_link(folder: Path) -> None:
    (folder / "samples.md").unlink()
    (folder / "samples.md").symlink_to("README.md")


@forgery("a folder that is a link", group=HOSTILE)
def forge_linked_folder(folder: Path) -> None:
    (folder / "checkpoints-of-mine").symlink_to("/")


@forgery("a pipe in place of a file", group=HOSTILE)
def forge_pipe(folder: Path) -> None:
    (folder / "env_info.txt").unlink()
    os.mkfifo(folder / "env_info.txt")


@forgery("a name with a newline", group=HOSTILE)
def forge_name_with_newline(folder: Path) -> None:
    put(folder / "notes\nREADME.md", "hello\n")


@forgery("a name with a terminal escape", group=HOSTILE)
def forge_name_with_escape(folder: Path) -> None:
    put(folder / "\x1b[2Jnotes.md", "hello\n")
    reseal_sums(folder)


@forgery("a name that is not UTF-8", group=HOSTILE)
def forge_name_not_utf8(folder: Path) -> None:
    (folder / os.fsdecode(b"notes-\xff.md")).write_text("hello\n")


@forgery("a file more than the run had, hashed", group=HOSTILE)
def forge_added_file(folder: Path) -> None:
    put(folder / "notes.md", "hello\n")
    reseal_sums(folder)


@forgery("a hidden file that no hash covers", group=HOSTILE)
def forge_hidden_file(folder: Path) -> None:
    put(folder / ".notes.staged", "hello\n")


@forgery("an empty folder", group=HOSTILE)
def forge_empty_folder(folder: Path) -> None:
    (folder / "results").mkdir()


@forgery("a key given twice in result.json", group=HOSTILE)
def forge_key_twice(folder: Path) -> None:
    text = (folder / "result.json").read_text(encoding="utf-8")
    put(folder / "result.json", text.replace("{", '{\n  "status": "failed",', 1))
    reseal_sums(folder)


@forgery("a key given twice in bundle.json", group=HOSTILE)
def forge_claim_twice(folder: Path) -> None:
    text = (folder / "bundle.json").read_text(encoding="utf-8")
    put(folder / "bundle.json", text.replace("{", '{\n  "final_loss": 0.0,', 1))
    reseal_sums(folder)


@forgery("bundle.json of 20 MB", group=HOSTILE)
def forge_huge_json(folder: Path) -> None:
    text = (folder / "bundle.json").read_text(encoding="utf-8")
    put(folder / "bundle.json", text.replace("{", "{" + " " * 20_000_000, 1))
    reseal_sums(folder)


@forgery("a line of metrics.jsonl of 5 MB", group=HOSTILE)
def forge_huge_line(folder: Path) -> None:
    lines = metrics_of(folder)
    lines[0]["note"] = "x" * 5_000_000
    put_metrics(folder, lines)
    reseal(folder)


@forgery("bundle.json nested 100,000 deep", group=HOSTILE)
def forge_deep_json(folder: Path) -> None:
    put(folder / "bundle.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    reseal_sums(folder)


@forgery("result.json nested 100,000 deep", group=HOSTILE)
def forge_deep_result(folder: Path) -> None:
    put(folder / "result.json", '{"a": ' * 100_000 + "1" + "}" * 100_000 + "\n")
    reseal_sums(folder)


@forgery("a number of 5,000 digits in result.json", group=HOSTILE)
def forge_long_number(folder: Path) -> None:
    text = (folder / "result.json").read_text(encoding="utf-8")
    put(folder / "result.json", text.replace('"steps_completed": ', '"steps_completed": ' + "9" * 5000, 1))
    reseal_sums(folder)


@forgery("YAML aliases that grow without end in config.yaml", group=HOSTILE)
def forge_yaml_aliases(folder: Path) -> None:
    levels = "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9))
    put(folder / "config.yaml", "a: &a [x, x]\n" + levels)
    reseal(folder)


@forgery("a Python object in config.yaml", group=HOSTILE)
def forge_yaml_object(folder: Path) -> None:
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    put(folder / "config.yaml", text + 'more: !!python/object/apply:os.system ["true"]\n')
    reseal(folder)


@forgery("terminal escapes in training_log.txt", group=HOSTILE)
def forge_escape_in_log(folder: Path) -> None:
    text = (folder / "training_log.txt").read_text(encoding="utf-8")
    put(folder / "training_log.txt", text + "2026-01-01T00:00:00Z INFO \x1b[2J\x1b[31mall is well\n")
    reseal(folder)


@forgery("a NUL in training_log.txt", group=HOSTILE)
def forge_nul_in_log(folder: Path) -> None:
    text = (folder / "training_log.txt").read_text(encoding="utf-8")
    put(folder / "training_log.txt", text + "\x00\n")
    reseal(folder)


@forgery("terminal escapes in the README", group=HOSTILE)
def forge_escape_in_readme(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    put(folder / "README.md", text + "\x1b[2J")
    reseal_sums(folder)


@forgery("terminal escapes in the name of the run", group=HOSTILE)
def forge_escape_in_name(folder: Path) -> None:
    retell(folder, "run_manifest.json", run_id="m40\x1b[2J")


@forgery("terminal escapes in the host's name of its CPU", group=HOSTILE)
def forge_escape_in_cpu(folder: Path) -> None:
    with edited(folder / "doctor.json") as told:
        told["facts"]["host"]["cpu"] = "EPYC\x1b]0;title\x07"
    reseal(folder)


@forgery("an escape in an answer's question, told of in a finding", group=HOSTILE)
def forge_escape_in_answer(folder: Path) -> None:
    path = folder / "eval" / "predictions-after.jsonl"
    lines = lines_of(path)
    lines[0]["id"] = "\x1b[2J"
    put_lines(path, lines)
    reseal(folder)


@forgery("half of a character in env_info.txt", group=HOSTILE)
def forge_not_utf8(folder: Path) -> None:
    put(folder / "env_info.txt", (folder / "env_info.txt").read_bytes() + b"\xff\xfe\n")
    reseal(folder)


@forgery("a list in place of an object in result.json", group=HOSTILE)
def forge_list(folder: Path) -> None:
    put(folder / "result.json", "[]\n")
    reseal_sums(folder)


@forgery("texts in place of numbers in metrics.jsonl", group=HOSTILE)
def forge_texts_for_numbers(folder: Path) -> None:
    lines = metrics_of(folder)
    for line in lines:
        line |= {"lr": str(line["lr"]), "tokens": str(line["tokens"])}
    put_metrics(folder, lines)
    reseal(folder)


@forgery("truth values in place of numbers in rows.jsonl", group=HOSTILE)
def forge_truths_for_numbers(folder: Path) -> None:
    rows = lines_of(folder / "rows.jsonl")
    rows[1]["row"] = True
    put_lines(folder / "rows.jsonl", rows)
    reseal(folder)


@forgery("bundle.json written with other spaces", group=HOSTILE)
def forge_respaced_claims(folder: Path) -> None:
    put(folder / "bundle.json", json_text(read(folder / "bundle.json")).replace(": ", ":  "))
    reseal_sums(folder)
