"""Part GSM8K's training split into rows to train on and questions to ask: python -m benchmarks.gsm8k_split TRAIN.jsonl FOLDER

A question is held out when the SHA-256 of its text, taken as a number, is divisible by 19: nobody chose it, the order of the file
does not matter, and a question that stands twice is on one side. Writes FOLDER/train.jsonl and FOLDER/heldout.jsonl, lines as
they were, and prints how many.
"""

import hashlib
import json
import sys
from pathlib import Path

ONE_IN = 19


def is_held_out(question: str) -> bool:
    return int(hashlib.sha256(question.strip().encode()).hexdigest(), 16) % ONE_IN == 0


def main() -> None:
    source, folder = map(Path, sys.argv[1:3])
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = [line for line in lines if is_held_out(json.loads(line)["question"])]
    trained = [line for line in lines if not is_held_out(json.loads(line)["question"])]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.jsonl", trained), ("heldout.jsonl", held_out)):
        (folder / name).write_text("".join(part), encoding="utf-8")
        print(f"{folder / name}: {len(part)} lines")


if __name__ == "__main__":
    main()
