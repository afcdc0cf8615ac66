"""Every refusal of tunix-rt, with its exit code.

    TunixError            1   anything that fits nowhere else
    ├── ConfigError       2   a setting is wrong, unknown, or not honoured by this engine
    ├── InputError        3   data, model or tokenizer is wrong or not to be had
    │   ├── BadRecord     3   one record of a data file; the others can be read
    │   ├── NotFound      3   a run or a page that is not there
    │   └── PromptTooLong 3   a prompt that leaves no position free
    ├── HardwareError     4   the requested device is not available, or another one would be used
    ├── DoesNotFitError   5   the predicted memory is above what the device has
    ├── EvidenceError     6   a run folder or bundle does not verify
    ├── Preempted         7   stopped by a signal or its time budget; the work up to the last committed step is kept
    └── StorageError      8   the disk is full, read-only or failing

An error has two parts: what is wrong, with names and numbers, and the way out. They are printed in one place, `cli/main.py`.
"""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str, before: str = "") -> str:
    """A fix for a misspelt word: the nearest of the `known` ones, with `before` in front of it, or what to do `otherwise`."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean `{before}{close[0]}`?" if close else otherwise


class TunixError(Exception):
    """What is wrong (`problem`) and the way out (`fix`)."""

    exit_code = 1

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\n  fix: {self.fix}"


class ConfigError(TunixError):
    exit_code = 2


class InputError(TunixError):
    exit_code = 3


class NotFound(InputError):
    """A run or a page that is not there."""


class PromptTooLong(InputError):
    """A prompt that leaves no position free."""


class HardwareError(TunixError):
    """`cause` is the doctor's code for it (docs/doctor/), empty where no check has one."""

    exit_code = 4

    def __init__(self, problem: str, *, fix: str, cause: str = "") -> None:
        super().__init__(problem, fix=fix)
        self.cause = cause


class DoesNotFitError(TunixError):
    exit_code = 5


class EvidenceError(TunixError):
    exit_code = 6


class Preempted(TunixError):
    exit_code = 7


class StorageError(TunixError):
    exit_code = 8
