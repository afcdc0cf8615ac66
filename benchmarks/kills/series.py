"""Kill a training program again and again with SIGKILL, go on with it each time, and judge from outside what it kept.

A chain is one run that is killed three to six times and then left to end. Each kill comes at a moment drawn from a seed:
inside a save (after the staging folder appeared), at a step of `metrics.jsonl`, or at any time from the first step on.
Importing torch takes seconds, so this program imports it once and forks a process for each start, which calls the same
`main` with the same arguments; each seventh kill is of the program itself, and on a GPU, which no fork survives, all are.
"""

import json
import os
import random
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kills.process import SET_CHILD_SUBREAPER, Moment, Seen, Subject, prctl, start, watch
from benchmarks.kills.subject import DEFECTS, SAVE_STEPS, TunixRun, import_once

KINDS = ("save", "step", "save", "time", "save", "save", "step", "save", "time", "save")
PROGRAM_STARTS = 7
"""One of so many kills is of the program itself, not of a fork."""


# --- chains -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Kill:
    seed: str
    chain: int
    start: str
    """`fork`, or `program` when it was started plainly."""
    moment: str
    seconds: float
    """From the first step of the process to its death."""
    step: int
    inside_a_save: bool
    first_save: bool
    committed_before: int
    """Newest save with a name before the kill, in this chain."""
    usable_after: int
    resumed_from: int | None = None
    """What the next process went on from; None when it was killed too before it said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    kind: str
    """lost, failed, strayed, orphans, different, unverified, slow"""
    chain: int
    words: str


@dataclass(slots=True, kw_only=True)
class Series:
    """An uninterrupted run of one subject, then chains until there are enough kills."""

    subject: Subject
    folder: Path
    seed: int
    wanted: int
    kinds: tuple[str, ...] = KINDS
    programs: bool = True
    """Whether some of the kills are of the program itself."""
    limit: float = 300.0
    outcome: dict[str, Any] = field(default_factory=dict)
    """Of the uninterrupted run."""
    saves: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """What saves took, and steps of processes that ended by themselves: moments are drawn over the latest."""
    kills: list[Kill] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    chains: int = 0
    identical: int = 0
    starts: int = 0

    def measure(self) -> None:
        """The uninterrupted run: what it ends with, and how long its steps and saves take."""
        seen, said = self._start(self.folder / "whole", None)
        if seen.code != 0 or not seen.saves:
            raise RuntimeError(
                f"the uninterrupted run ended with {seen.code} and {len(seen.saves)} saves:\n{said[-3000:]}"
            )
        self.outcome = self.subject.outcome(self.folder / "whole" / "run")

    def run(self) -> None:
        while len(self.kills) < self.wanted:
            self._chain(self.folder / f"chain-{self.chains:03d}")
            self.chains += 1

    def _chain(self, place: Path) -> None:
        chance = random.Random(f"{self.seed}/chain/{self.chains}")
        first, found, committed, ended = len(self.kills), len(self.problems), 0, False
        last = min(first + chance.randint(3, 6), self.wanted)
        while not ended:
            moment = self._moment(place / "run") if len(self.kills) < last else None
            seen, said = self._start(place, moment)
            if len(self.kills) > first:
                self._note_resume(self.kills[-1], seen, self.subject.resumed_from(said))
            committed = max(committed, seen.committed)
            ended = self._note_end(place, moment, seen, said, committed)
        same = self.subject.outcome(place / "run") == self.outcome
        self.identical += same
        if not same:
            self._problem("different", "it did not end as the uninterrupted run")
        if wrong := self.subject.wrong_with(place / "run", place / "said-of-the-end.txt"):
            self._problem("unverified", wrong)
        if len(self.problems) == found:
            shutil.rmtree(place)

    def _moment(self, run: Path) -> Moment:
        """Drawn from the seed of this start: half of the kills inside a save of a run that has none come in its first."""
        seed, done, steps = f"{self.seed}/{self.starts}", self.subject.usable(run), self.subject.steps
        chance = random.Random(seed)
        kind = self.kinds[len(self.kills) % len(self.kinds)]
        if kind == "save":
            number, most = chance.choice((1, 2, 3) if done else (1, 1, 2, 3)), statistics.median(self.saves[-20:])
        elif kind == "step":
            number, most = chance.randint(min(done + 1, steps), min(done + 8, steps)), 0.0
        else:
            number, most = 1, statistics.median(self.step_seconds[-3:]) * (steps - done)
        return Moment(kind=kind, number=number, delay=chance.uniform(0, most), seed=seed)

    def _start(self, place: Path, moment: Moment | None) -> tuple[Seen, str]:
        """Begin the run in `place`, or go on with it, until it ends or is killed; what was seen, and what it said."""
        (place / "run").mkdir(parents=True, exist_ok=True)
        self.starts += 1
        said, done = place / f"said-{self.starts:03d}.txt", self.subject.usable(place / "run")
        process = start(self.subject, self.subject.arguments(place / "run"), said, forked=self._forked(moment))
        try:
            seen = watch(process, self.subject, place / "run", moment, limit=self.limit)
        finally:
            process.kill()
        self.saves += seen.saves
        if seen.code == 0 and seen.steps > done:
            self.step_seconds.append(seen.seconds / (seen.steps - done))
        return seen, said.read_text(encoding="utf-8", errors="replace")

    def _forked(self, moment: Moment | None) -> bool:
        plain = self.programs and moment is not None and len(self.kills) % PROGRAM_STARTS == PROGRAM_STARTS // 2
        return self.subject.forks and not plain

    def _note_resume(self, kill: Kill, seen: Seen, said: int | None) -> None:
        """A process that took a step and named no save to go on from has begun anew."""
        if said is None and seen.began is None:
            return
        kill.resumed_from = said or 0
        if kill.resumed_from != kill.usable_after:
            self._problem(
                "strayed", f"after {kill.seed}: from {kill.resumed_from}, though {kill.usable_after} was there"
            )

    def _note_end(self, place: Path, moment: Moment | None, seen: Seen, said: str, committed: int) -> bool:
        """Judge how a process ended; whether the chain has ended with it."""
        if seen.orphans:
            self._problem("orphans", f"left behind by start {self.starts}: {', '.join(seen.orphans)}")
        if seen.late:
            self._problem("slow", f"start {self.starts} did not end within {self.limit:.0f} s")
            return True
        if seen.code == 0:
            return True
        if not seen.killed or moment is None:
            mended = self.subject.mend(place / "run", said)
            self._problem(
                "failed", f"start {self.starts} ended with {seen.code}; {mended or 'given up'}: {said[-1500:]}"
            )
            return not mended
        usable = self.subject.usable(place / "run")
        self.kills.append(
            Kill(
                seed=moment.seed, chain=self.chains, start="fork" if self._forked(moment) else "program",
                moment=str(moment), seconds=round(seen.seconds, 4), step=seen.steps, inside_a_save=seen.inside,
                first_save=seen.inside and committed == 0, committed_before=committed, usable_after=usable,
            )
        )  # fmt: skip
        if usable < committed:
            self._problem("lost", f"{self.kills[-1].seed}: step {committed} was saved, step {usable} is left")
        return self.subject.finished(place / "run")

    def _problem(self, kind: str, words: str) -> None:
        self.problems.append(Problem(kind=kind, chain=self.chains, words=words))


def figures(series: Series) -> dict[str, Any]:
    """The series in numbers, with the table of its kills and every problem."""
    kills, count = series.kills, [problem.kind for problem in series.problems].count
    helped = {problem.chain for problem in series.problems if problem.kind == "failed"}
    again = [kill.step - kill.usable_after for kill in kills]
    return {
        "seed": series.seed, "kills": len(kills), "inside_a_save": sum(kill.inside_a_save for kill in kills),
        "in_the_first_save": sum(kill.first_save for kill in kills),
        "program_starts": sum(kill.start == "program" for kill in kills),
        "chains": series.chains, "chains_without_help": series.chains - len(helped), "chains_identical": series.identical,
        "lost": count("lost"), "resumes_failed": count("failed"), "resumes_strayed": count("strayed"),
        "orphans": count("orphans"), "steps_again_median": statistics.median(again), "steps_again_most": max(again),
        "steps": series.subject.steps, "save_milliseconds": round(1000 * statistics.median(series.saves), 1),
        **series.outcome,
        "problems": [asdict(problem) for problem in series.problems], "table": [asdict(kill) for kill in kills],
    }  # fmt: skip


# --- the program ------------------------------------------------------------------------------------------------------


def prepare_process(folder: Path) -> None:
    """This process and its children: one thread each, a cache that goes with the folder, and no orphan unseen."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "XDG_CACHE_HOME": str(folder / "cache")}
    prctl(SET_CHILD_SUBREAPER, 1)


def kill_tunix(folder: Path, *, kills: int, seed: int, defect: str = "", **device: Any) -> dict[str, Any]:
    """The figures of a series. The program itself, uninterrupted, must end with the same bits as a fork of it."""
    started = time.monotonic()
    folder.mkdir(parents=True)
    prepare_process(folder)
    subject = TunixRun(folder, defect=defect, **device)
    plain = start(subject, subject.arguments(folder / "plain"), folder / "plain.txt", forked=False)
    if subject.forks:
        import_once()
    if plain.wait() != 0:
        raise RuntimeError(f"the program ended with {plain.returncode}:\n{(folder / 'plain.txt').read_text()[-3000:]}")
    series = Series(subject=subject, folder=folder, seed=seed, wanted=kills)
    if defect:
        series.kinds, series.programs = DEFECTS[defect][1], False
    series.measure()
    series.run()
    if not defect and subject.outcome(folder / "plain") != series.outcome:
        raise RuntimeError(f"two uninterrupted runs differ: {folder / 'plain'} and {folder / 'whole' / 'run'}")
    committed, doctor = (
        json.loads((folder / "plain" / name).read_text()) for name in ("precommit.json", "doctor.json")
    )
    rows = committed["dataset"]["rows"]
    return {
        "device": doctor["choice"]["device"], "machine": f"{doctor['choice']['kind']}, {os.cpu_count()} cores",
        "versions": committed["versions"], "source_sha256": committed["source_sha256"],
        "save_steps": SAVE_STEPS, "steps_in_an_epoch": rows,
        "resumed_twice_in_an_epoch": resumed_twice(series.kills, rows), "seconds": round(time.monotonic() - started, 1),
        **figures(series),
    }  # fmt: skip


def resumed_twice(kills: list[Kill], steps_in_an_epoch: int) -> int:
    """Chains that went on from two different saves of one epoch."""
    places = {
        (kill.chain, kill.resumed_from // steps_in_an_epoch, kill.resumed_from) for kill in kills if kill.resumed_from
    }
    epochs = [place[:2] for place in places]
    return len({chain for chain, epoch in epochs if epochs.count((chain, epoch)) > 1})
