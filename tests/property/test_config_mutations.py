"""Whatever is done to a configuration file: it loads, or it is refused with exit code 2 and a name or a line. Never else."""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.contract.test_configs import FLAT
from tests.program import refused, tunix_rt
from tests.tables import tables
from tunix_rt.cli.main import cli
from tunix_rt.config.load import dump_yaml, load_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError

SEED = 20
SECONDS = 2.0

BASES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "training" / "configs").glob("*.yaml"))}
BASES["flat"] = FLAT

SETTINGS = [
    (section, name) for section, field in RunConfig.model_fields.items() for name in field.annotation.model_fields
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration file, and what a refusal must say: one of `names`, or the file with a line."""

    what: str
    content: bytes
    names: tuple[str, ...] = ()
    must_fail: bool = True


def with_setting(base: str, section: str, name: str, value: object) -> bytes:
    """The file with one setting replaced. In the flat snippet, and where a section is missing, it is added."""
    raw = yaml.safe_load(base)
    if section not in raw and "device" in raw:
        raw[name] = value
    else:
        raw.setdefault(section, {})[name] = value
    return yaml.safe_dump(raw, sort_keys=False).encode()


WRONG = {
    "a list": [1, "two"],
    "a mapping": {"a": {"b": 1}},
    "not a number": float("nan"),
    "minus infinity": float("-inf"),
    "a huge number": 10**400,
    "a word": "\u2603 perhaps",
    "a date": yaml.safe_load("2024-01-01"),
    "bytes": b"\x00\xff",
}


def wrong_values(draw: random.Random) -> Iterator[Case]:
    """Every setting, twice, with a value it cannot have."""
    free_text = {"model_name_or_path", "tokenizer_name_or_path", "revision", "dataset", "system_instruction", "evalset"}
    for section, name in SETTINGS:
        kinds = [kind for kind in WRONG if not (kind == "a word" and name in free_text)]
        for kind in ("a list", draw.choice(kinds)):
            base = draw.choice(sorted(BASES))
            content = with_setting(BASES[base], section, name, WRONG[kind])
            yield Case(what=f"{base}: {name} is {kind}", content=content, names=(name,))


def typos(draw: random.Random) -> Iterator[Case]:
    """Every setting with two letters exchanged, one left out or one too many."""
    for section, name in SETTINGS:
        place = draw.randrange(1, len(name))
        wrong = draw.choice([name[:place] + name[place + 1 :], name[:place] + "q" + name[place:], name + "s"])
        base = draw.choice(sorted(set(BASES) - {"flat"}))
        yield Case(
            what=f"{base}: {wrong} for {name}",
            content=with_setting(BASES[base], section, wrong, 1),
            names=(f"{section}.{wrong}",),
        )


LAUGHS = "a: &a [ha, ha]\n" + "\n".join(f"{c}: &{c} [*{b}, *{b}, *{b}]" for b, c in pairwise("abcdefghijklmnop"))

LINES = tables(__file__)["lines"] | {
    "billion laughs": (LAUGHS, ()),
    "ten thousand digits": ("zzz: " + "9" * 10_000, ()),
    "ten thousand hexadecimal digits": ("logging_steps: 0x" + "f" * 10_000, ("logging_steps",)),
    "two thousand digits in base sixty": ("logging_steps: 1" + ":59" * 2_000, ("logging_steps",)),
    "five hundred brackets": ("zzz: " + "[" * 500 + "]" * 500, ("zzz",)),
    "five hundred dashes": ("- " * 500, ()),
    "a hundred unknown names": ("\n".join(f"setting_{i}: {i}" for i in range(100)), ("setting_0",)),
    "a name of nine hundred letters": ("k" * 900 + ": 1", ("kkk",)),
}


def bad_lines(draw: random.Random) -> Iterator[Case]:
    """Lines that no configuration may have, after those of a good one; unit/test_config.py has more, with their line."""
    for what, (text, names) in LINES.items():
        base = draw.choice(["demo", "smoke_tiny", "submission_local"])
        yield Case(
            what=f"{base}: {what}",
            content=f"{BASES[base]}\n{text}\n".encode("utf-8", "surrogatepass"),
            names=tuple(names),
        )


def whole_files(draw: random.Random) -> Iterator[Case]:
    """The file itself: its encoding, its outermost value, its bytes."""
    for section in RunConfig.model_fields:
        for value in ("5", "[1, 2]", "text"):
            yield Case(what=f"{section} is {value}", content=f"{section}: {value}\n".encode(), names=(section,))
    text = BASES["demo"]
    yield Case(what="utf-16 with mark", content=text.encode("utf-16"))
    yield Case(what="utf-16 without mark", content=text.encode("utf-16-le"))
    yield Case(what="utf-32", content=text.encode("utf-32"))
    yield Case(what="latin-1", content=("# caf\u00e9\n" + text).encode("latin-1"))
    yield Case(what="byte order mark", content=text.encode("utf-8-sig"), must_fail=False)
    yield Case(what="windows line endings", content=text.replace("\n", "\r\n").encode(), must_fail=False)
    yield Case(what="old mac line endings", content=text.replace("\n", "\r").encode(), must_fail=False)
    yield Case(what="empty", content=b"", must_fail=False)
    yield Case(what="only a comment", content=b"# nothing\n", must_fail=False)
    yield Case(what="a list", content=b"- a\n- b\n", names=("my.yaml",))
    yield Case(what="a word", content=b"hello\n", names=("my.yaml",))
    for size in (1, 100, 5_000):
        yield Case(what=f"{size} random bytes", content=b"\x80" + draw.randbytes(size))


def damaged(draw: random.Random) -> Iterator[Case]:
    """Bytes flipped, cut, doubled and put in by chance: it may load, it may not, it must not crash."""
    for number in range(60):
        base = draw.choice(sorted(BASES))
        content = bytearray(BASES[base].encode())
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(content))
            what = draw.choice(["flip", "cut", "double", "insert", "end"])
            if what == "flip":
                content[place] ^= 1 << draw.randrange(8)
            elif what == "cut":
                del content[place : place + draw.randint(1, 12)]
            elif what == "double":
                content[place:place] = content[place : place + draw.randint(1, 40)]
            elif what == "insert":
                content[place:place] = draw.choice(
                    [b"\t", b":", b"- ", b"{", b"&a ", b"*a", b"!!x ", b"\x00", b"\n", b"'", b"%"]
                )
            else:
                del content[place:]
            content = content or bytearray(b"\n")
        yield Case(what=f"{base}: damage {number}", content=bytes(content), must_fail=False)


def make_cases() -> list[Case]:
    draw = random.Random(SEED)
    return [case for make in (wrong_values, typos, bad_lines, whole_files, damaged) for case in make(draw)]


CASES = make_cases()
A_NAME = re.compile(r"`[^`]+`|\b(model|data|training|evaluation)\.\w+")


def test_a_mutated_configuration_loads_or_is_refused_by_name_or_line(tmp_path):
    assert make_cases() == CASES and sum(case.must_fail for case in CASES) > 150
    path, copy = tmp_path / "my.yaml", tmp_path / "copy.yaml"
    assert {ascii(case.what): problem for case in CASES if (problem := _problem(case, path, copy))} == {}


def _problem(case: Case, path: Path, copy: Path) -> str:
    """Why the outcome of loading a case is wrong; empty if it is right."""
    path.write_bytes(case.content)
    began = time.process_time()
    try:
        loaded = load_config(path)
    except ConfigError as error:
        text = str(error)
        at_a_line = re.search(rf"{re.escape(str(path))}:\d+: ", text)
        named = (
            any(name in text for name in case.names) if case.must_fail else A_NAME.search(text) or f"{path}: a " in text
        )
        right = error.exit_code == 2 and error.fix and (at_a_line or named) and len(text) < 20_000
    else:
        text = f"accepted: {loaded}"
        copy.write_text(dump_yaml(loaded), encoding="utf-8")
        right = not case.must_fail and load_config(copy) == loaded
    return "" if right and time.process_time() - began < SECONDS else text


BY_THE_PROGRAM = random.Random(SEED).sample([case for case in CASES if case.must_fail], 40)


def test_the_program_refuses_a_bad_configuration_with_exit_2_and_no_traceback(tmp_path):
    path, output = tmp_path / "my.yaml", tmp_path / "run"
    for case in BY_THE_PROGRAM:
        path.write_bytes(case.content)
        ended = CliRunner().invoke(cli, ["train", str(path), "--output", str(output)])
        assert (ended.exit_code, ended.stdout) == (2, ""), case.what
        assert isinstance(ended.exception, SystemExit), "the error was not handled"
        assert_refused(case, path, ended.stderr)
        assert not output.exists(), "a run that was refused for its configuration leaves no folder"


def test_a_real_process_refuses_it_the_same_way(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_bytes(BY_THE_PROGRAM[0].content)
    assert_refused(BY_THE_PROGRAM[0], path, refused(tunix_rt("train", path, "--output", tmp_path / "run"), 2))


def assert_refused(case: Case, path: Path, text: str) -> None:
    assert "Traceback" not in text and "\n  fix: " in text and text.startswith("error: ") and f"{path}:" in text, (
        case.what
    )
    assert re.search(rf"{re.escape(str(path))}:\d+: ", text) or any(name in text for name in case.names), text
