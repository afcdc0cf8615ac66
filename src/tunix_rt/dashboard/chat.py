"""The model of one run and its base model in a child process: one question at a time, never beside a run that trains.

As a program (`python -m tunix_rt.dashboard.chat RUN`) it is that child: questions come in, answers go out, each a line of JSON.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError, TunixError

LONGEST_QUESTION = 8 * 1024
MAX_NEW_TOKENS = 512
MAX_SECONDS = 60.0
"""Of one generation; there are two for a question."""
LOAD_SECONDS = 300.0
MOST_LINE = 2**20


class Chat:
    """Starts the child with the first question, and ends it with the server."""

    def __init__(self, run: Path, is_busy: Callable[[], bool]) -> None:
        self._run, self._is_busy = run, is_busy
        self._child: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()

    def ask(self, question: str) -> dict[str, Any]:
        """The answers of the base model and of the trained one. An InputError where none can be given now."""
        question = question.strip()
        if not question or len(question.encode("utf-8", "replace")) > LONGEST_QUESTION:
            raise InputError("no question, or one of more than 8 KB", fix="ask one question")
        if self._is_busy():
            raise InputError("a run is training, and needs the device", fix="ask when it has ended")
        if not self._asking.acquire(blocking=False):
            raise InputError("another question is being answered", fix="wait for its answer")
        try:
            return self._answered(question)
        finally:
            self._asking.release()

    def _answered(self, question: str) -> dict[str, Any]:
        starting = self._child is None or self._child.poll() is not None
        if starting:
            self.close()
            words = [sys.executable, "-m", "tunix_rt.dashboard.chat", str(self._run)]
            self._child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"question": question}).encode() + b"\n")
            self._child.stdin.flush()
            line = _line_of(self._child, 2 * MAX_SECONDS + LOAD_SECONDS * starting)
            answered: dict[str, Any] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            self.close()
            raise InputError(
                "the model did not answer in time, or ended", fix="ask again: it is loaded anew"
            ) from error
        if "problem" in answered:
            raise InputError(answered["problem"], fix=answered["fix"])
        return answered

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()  # closes the pipes too


def _line_of(child: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """The next line, of a bounded length, within so many seconds."""
    assert child.stdout is not None
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = child.stdout.read1(65536) if ready else b""  # type: ignore[attr-defined]
        if not piece or len(line) > MOST_LINE:
            raise TimeoutError
        line += piece
    return line


# --- the child --------------------------------------------------------------------------------------------------------


def answer_questions(run: str) -> None:
    """Load both models, then answer line by line until the input ends."""
    models: list[Any] = []
    for line in sys.stdin:
        value: dict[str, Any]
        try:
            models = models or _load(run)
            value = {"answers": [_answer(model, json.loads(line)["question"]) for model in models]}
        except TunixError as error:
            value = {"problem": error.problem, "fix": error.fix}
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


def _load(run: str) -> list[Any]:
    """The base model, if the run can still find it, and the trained one."""
    from tunix_rt.config.load import load_config
    from tunix_rt.inference import inference_device, load_resolved, model_spec, resolve_spec
    from tunix_rt.runs.folder import RunDir

    choice, dtype = inference_device("auto", None)
    trained = resolve_spec(model_spec(run), choice, dtype)
    base = load_config(RunDir(Path(run)).config).model
    before = resolve_spec(
        model_spec(base.model_name_or_path or ""), choice, dtype, weights=base.weights, like=trained, beside=True
    )
    return [load_resolved(before), load_resolved(trained)]


def _answer(model: Any, question: str) -> dict[str, Any]:
    from tunix_rt.data.records import Turn
    from tunix_rt.evaluate.generate import decoding_of
    from tunix_rt.scoring.score import Tags, read_answer

    decoding = decoding_of(
        model.style, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, top_p=1.0, seed=0, max_seconds=MAX_SECONDS
    )
    output, answer = model.generate(model.prompt((Turn(role="user", text=question),)), decoding)
    tagged = read_answer(output, Tags(reasoning=model.style.reasoning_tag, answer=model.style.answer_tag))
    return {
        "model": model.name, "text": output, "reasoning": tagged.reasoning if tagged else None,
        "answer": tagged.answer if tagged else None, "tokens": len(answer.ids), "ended": answer.ended,
    }  # fmt: skip


if __name__ == "__main__":
    answer_questions(sys.argv[1])
