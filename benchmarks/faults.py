"""Faults in the folder of a run, one after the other: python -m benchmarks.faults SERIES --into FOLDER

`syscalls` lets one system call on a file of the run fail (strace, Linux), `damage` damages one file before a resume, `live`
does so while the run goes on, `power` drops what was not synced at a commit. Each case is one line of FOLDER/SERIES.jsonl; a
series that is started again goes on after the last line. A case has a problem where a run ends with exit code 0 and other
weights, losses or evidence than the undisturbed one, loses a saved step, ends with a code that does not name the disk, prints
a traceback or hangs, or cannot be resumed to the same end once the fault is over.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.kills.process import Fork
from benchmarks.kills.subject import import_once
from tests.integrity import list_problems
from tests.program import ROOT
from tunix_rt.runs.folder import RunDir

SECONDS = 90.0
"""A run takes one or two."""
CALLS = {
    "openat": 28, "write": 27, "fsync": 22, "rename": 20, "read": 10, "newfstatat": 6, "mkdir": 6, "getdents64": 5, "chmod": 4,
    "mmap": 3, "unlinkat": 2, "rmdir": 2, "flock": 1, "sendfile": 1, "ftruncate": 1, "unlink": 1,
}  # fmt: skip
"""How many of the cases are of each call."""
LATEST = {"openat": 100, "write": 40, "fsync": 40, "rename": 16, "read": 60, "newfstatat": 80, "mmap": 2, "mkdir": 3}
"""The last call of each that may fail; a thread counts its own."""
KINDS = ("flip", "cut", "empty", "delete", "folder", "link", "fifo")
CLEAN = {1, 2, 8}
"""Exit codes of a refusal to go on with a damaged folder."""


class Case:
    """The undisturbed runs that every case is compared with and begins from."""

    def __init__(self, place: Path) -> None:
        self.place = place
        rows = (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text().splitlines(keepends=True)[:40]
        place.mkdir(parents=True, exist_ok=True)
        (place / "rows.jsonl").write_text("".join(rows))
        settings = (
            "training.save_steps=2", "training.eval_steps=3", "data.max_length=128", "data.on_overflow=drop",
            "training.per_device_train_batch_size=1", "evaluation.max_new_tokens=4",
        )  # fmt: skip
        self.words = ["train", "smoke_tiny", "--device", "cpu", "--data", str(place / "rows.jsonl"), "--max-steps", "6"]
        self.words += [word for setting in settings for word in ("--set", setting)]
        self.whole, self.stopped = RunDir(place / "whole"), RunDir(place / "stopped")
        if not self.whole.result.exists():
            assert self.train(self.whole)[0] == 0, (place / "said").read_text()
        if not self.stopped.result.exists():
            assert self.train(self.stopped, "--stop-after", "5")[0] == 7

    def train(
        self, run: RunDir, *more: str, before: Callable[[], None] = lambda: None, outside: Any = None
    ) -> tuple[int, str]:
        """Exit code and output of the program in a fork; a code of -9 is a hang. `outside` sees the stopped process first."""

        def main() -> None:
            import tunix_rt.export.export as export
            from tunix_rt.cli.main import cli

            export.check_round_trip = lambda *given, **named: None
            if outside is not None:
                os.kill(os.getpid(), signal.SIGSTOP)
            before()
            resume = ["--resume"] if run.precommit.exists() else []
            cli.main(args=[*self.words, "--output", str(run.root), *resume, *more], prog_name="tunix-rt")

        said = self.place / "said"
        process = Fork(main, said)
        if outside is not None:
            outside(process.pid)
        ends = time.monotonic() + SECONDS
        while process.poll() is None:
            if time.monotonic() > ends:
                process.kill()
            time.sleep(0.01)
        return process.returncode or 0, said.read_text(errors="replace")

    def copy(self, name: str, *, killed: bool) -> RunDir:
        shutil.rmtree(self.place / name, ignore_errors=True)
        run = RunDir(shutil.copytree(self.stopped.root, self.place / name))
        for ending in (run.result, run.hashes) if killed else ():
            ending.unlink()
        return run

    def differs(self, run: RunDir, *, least: int = 4) -> str:
        """How a run that ended with 0 is not the undisturbed one."""
        weights = [(one.final_model / "model.safetensors").read_bytes() for one in (run, self.whole)]
        steps = [[json.loads(line) for line in one.metrics.read_bytes().splitlines()] for one in (run, self.whole)]
        chosen = [[[one[key] for key in ("loss_hex", "grad_norm", "lr", "batch")] for one in lines] for lines in steps]
        if weights[0] != weights[1] or chosen[0] != chosen[1]:
            return "other weights or losses"
        if (resumed := json.loads(run.result.read_text())["resumed_from"]) < least:
            return f"resumed from step {resumed}"
        return "; ".join(list_problems(run.root))[:300]


def content(run: RunDir) -> dict[str, bytes]:
    paths = (path for path in run.root.rglob("*") if path.name != ".lock" and path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in paths}


def judge(code: int, said: str, allowed: set[int]) -> str:
    if code < 0:
        return "hang"
    if "Traceback" in said:
        return "traceback"
    if code and code not in allowed:
        return f"code {code}"
    return "" if not code or ("error: " in said and "  fix: " in said) else "no error and fix"


def last_error(said: str) -> str:
    return " | ".join(line for line in said.splitlines() if line.startswith(("error: ", "  fix: ")))[:300]


# --- system calls -----------------------------------------------------------------------------------------------------


def syscalls(case: Case) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(itertools.chain(*([name] * count for name, count in CALLS.items()))):
        chance = random.Random(f"syscall/{number}")
        fresh = chance.random() < 0.4
        error = chance.choice(["ENOMEM", "EIO", "ENODEV"] if call == "mmap" else ["EIO", "ENOSPC", "EACCES"])
        when = chance.randint(1, LATEST.get(call, 4))
        yield {"case": number, "call": call, "fresh": fresh, "when": when, "error": error}


def run_syscalls(case: Case, about: dict[str, Any]) -> dict[str, Any]:
    run = case.copy("run", killed=True)
    if about["fresh"]:
        shutil.rmtree(run.root)
    names = {str(path.relative_to(case.whole.root)) for path in case.whole.root.rglob("*")} | {"", ".lock"}
    names |= {f"checkpoints/{kind}step-00000{step}{more}" for step in range(1, 7) for kind in ("", ".staged-", ".")
              for more in ("", ".staged", "/model.safetensors", "/optimizer.safetensors", "/state.json", "/.state.json.staged",
                           "/MANIFEST.json", "/.MANIFEST.json.staged")}  # fmt: skip
    names |= {f"{path.parent}/.{path.name}.staged".removeprefix("./") for path in map(Path, names) if path.suffix}
    names |= {f".staged-final_model/{path.name}" for path in case.whole.final_model.iterdir()} | {".staged-final_model"}
    trace = case.place / "trace"
    inject = f"inject={about['call']}:error={about['error']}:when={about['when']}"

    def attach(pid: int) -> None:
        os.waitpid(pid, os.WUNTRACED)
        told = ["strace", "-f", "-q", "-o", str(trace), "-e", f"trace={about['call']}", "-e", inject, "-p", str(pid)]
        told += [word for name in sorted(names) for word in ("-P", str(run.root / name))]
        tracer = subprocess.Popen(told, stderr=subprocess.DEVNULL)
        status = Path(f"/proc/{pid}/status")
        while tracer.poll() is None and "TracerPid:\t0" in status.read_text():
            time.sleep(0.005)
        os.kill(pid, signal.SIGCONT)

    trace.unlink(missing_ok=True)
    code, said = case.train(run, outside=attach)
    hit = trace.exists() and "INJECTED" in trace.read_text(errors="replace")
    problem, error = judge(code, said, {8}), last_error(said)
    least = 0 if about["fresh"] else 4
    if not problem and code:
        code_after, said = case.train(run)
        problem = judge(code_after, said, set()) or case.differs(run, least=least)
    elif not problem:
        problem = case.differs(run, least=least)
    return {"hit": hit, "code": code, "problem": problem, "error": error}


# --- damage -------------------------------------------------------------------------------------------------------------


def targets(case: Case) -> list[str]:
    """Files and folders of a stopped run."""
    below = sorted(str(path.relative_to(case.stopped.root)) for path in case.stopped.root.rglob("*"))
    return [name for name in below if name != ".lock"]


def damage(case: Case) -> Iterator[dict[str, Any]]:
    """Every file and folder of a killed run in every way, and of one that stopped in each third."""
    number = 0
    for killed, name, kind in itertools.product((True, False), targets(case), KINDS):
        is_file = (case.stopped.root / name).is_file()
        ended = name in ("result.json", "SHA256SUMS")
        if (ended and killed) or (kind in ("flip", "cut", "folder") and not is_file):
            continue
        number += 1
        if killed or ended or number % 3 == 0:
            yield {"case": number, "killed": killed, "file": name, "kind": kind}


def do_damage(path: Path, kind: str, number: int, aside: Path) -> None:
    """After `aside` has the original."""
    if kind == "link":
        path.rename(aside)
        path.symlink_to(aside)
        return
    shutil.copytree(path, aside) if path.is_dir() else shutil.copyfile(path, aside)
    whole = path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    chance = random.Random(number)
    if kind == "flip":
        at = chance.randrange(max(1, len(whole)))
        path.write_bytes(whole[:at] + bytes([(whole[at] if whole else 0) ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
    elif kind == "cut":
        path.write_bytes(whole[: chance.randrange(max(1, len(whole)))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)


def run_damage(case: Case, about: dict[str, Any]) -> dict[str, Any]:
    run, aside = case.copy("run", killed=about["killed"]), case.place / "aside"
    shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
    path = run.root / about["file"]
    do_damage(path, about["kind"], about["case"], aside)
    before = content(run)
    code, said = case.train(run)
    problem, error = judge(code, said, CLEAN), last_error(said)
    if not problem and code:
        if content(run) != before:
            problem = "refused, but not untouched"
        else:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            aside.rename(path)
            again, said = case.train(run)
            problem = judge(again, said, set()) or case.differs(run)
    elif not problem:
        problem = case.differs(run)
    return {"code": code, "problem": problem, "error": error}


# --- in a live run, and without power -----------------------------------------------------------------------------------

LIVE = (
    "metrics.jsonl", "precommit.json", "config.yaml", "eval/heldout.jsonl", "eval/before.json", "eval/predictions-before.jsonl",
    "processes.json", "checkpoints.json", "rows.jsonl", "doctor.json", "plan.json", "training_log.txt", ".lock",
    "checkpoints/step-000002", "checkpoints",
)  # fmt: skip


def live(case: Case) -> Iterator[dict[str, Any]]:
    pairs = itertools.product(LIVE, ("delete", "empty", "odd"))
    yield from ({"case": number, "file": name, "kind": kind} for number, (name, kind) in enumerate(pairs)
                if kind == "delete" or "." in name.rpartition("/")[2][1:])  # fmt: skip


def run_live(case: Case, about: dict[str, Any]) -> dict[str, Any]:
    """Never exit code 0 with evidence that fails; otherwise as it was, or an error."""
    shutil.rmtree(case.place / "run", ignore_errors=True)
    run = RunDir(case.place / "run")
    path = run.root / about["file"]

    def before() -> None:
        from tunix_rt.train import loop

        show = loop._show_step

        def meddle(context: Any, step: Any, pace: Any) -> None:
            if step.step == 4:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                if about["kind"] != "delete":
                    path.write_text("" if about["kind"] == "empty" else '{"checkpoints": [5]}\n')
            show(context, step, pace)

        loop._show_step = meddle

    code, said = case.train(run, before=before)
    problem = judge(code, said, {1, 6, 8})
    if not problem and not code:
        problem = case.differs(run, least=0)
    return {"code": code, "problem": problem, "error": last_error(said)}


def power(case: Case) -> Iterator[dict[str, Any]]:
    yield from ({"case": number, "step": step, "resumed": resumed}
                for number, (step, resumed) in enumerate(itertools.product((2, 3, 4, 5, 6, "result"), (False, True)))
                if not resumed or step in (6, "result"))  # fmt: skip


def run_power(case: Case, about: dict[str, Any]) -> dict[str, Any]:
    """At the commit every file has what its last fsync had; a file without one is empty."""
    run = case.copy("run", killed=True)
    if not about["resumed"]:
        shutil.rmtree(run.root)

    def before() -> None:
        synced = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
        fsync, rename = os.fsync, Path.rename

        def fsynced(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                synced[path] = path.read_bytes()
            fsync(descriptor)

        def cut(path: Path) -> None:
            for one in (run.metrics, run.heldout, run.samples_along, run.log):
                if one.exists():
                    one.write_bytes(synced.get(one, b""))
            os._exit(99)

        def renamed(path: Path, target: Path) -> Path:
            moved = rename(path, target)
            if target.name == f"step-{about['step']:06d}" if about["step"] != "result" else False:
                cut(target)
            return moved

        def replaced(path: Path, target: Path) -> Path:
            os.replace(path, target)
            if about["step"] == "result" and Path(target).name == "result.json":
                cut(Path(target))
            return Path(target)

        os.fsync, Path.rename, Path.replace = fsynced, renamed, replaced  # type: ignore[method-assign, assignment]

    more = ("--stop-after", "5") if about["step"] == 5 and not about["resumed"] else ()
    code, said = case.train(run, *more, before=before)
    if code != 99:
        return {"code": code, "problem": "the power was not cut", "error": said[-300:]}
    if about["step"] == "result":
        return {"code": code, "problem": "; ".join(list_problems(run.root))[:300], "error": ""}
    code, said = case.train(run)
    least = about["step"] if isinstance(about["step"], int) else 0
    problem = judge(code, said, set()) or case.differs(run, least=least)
    return {"code": code, "problem": problem, "error": last_error(said)}


SERIES = {
    "syscalls": (syscalls, run_syscalls), "damage": (damage, run_damage), "live": (live, run_live), "power": (power, run_power),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", choices=SERIES)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="one of so many cases")
    options = parser.parse_args()
    import_once()
    case = Case(options.into.absolute() / options.series)
    lines = options.into / f"{options.series}.jsonl"
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    seen = {one["case"] for one in done}
    cases, run = SERIES[options.series]
    with lines.open("a") as file:
        for about in cases(case):
            if about["case"] not in seen and about["case"] % options.every == 0:
                done.append(about | run(case, about))
                file.write(json.dumps(done[-1]) + "\n")
                file.flush()
    bad = [one for one in done if one["problem"]]
    codes = dict(sorted(Counter(one["code"] for one in done).items()))
    hits = {"hit": sum(one["hit"] for one in done)} if options.series == "syscalls" else {}
    print(json.dumps({"series": options.series, "cases": len(done), **hits, "codes": codes, "problems": len(bad)}))
    for one in bad:
        print(json.dumps(one), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
