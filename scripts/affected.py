"""Test files that a change can break, one per line, from the static import graph.

    python scripts/affected.py [BASE]    # BASE: a git revision, HEAD unless given; uncommitted and new files count

A test file is affected if it changed, if its table changed (`test_x.json` of `test_x.py`), if it imports a changed module
directly or through others, or if it contains the name of a changed file that is no module. Imports inside functions count, and
so do modules named in strings: `-m docs.generate`, the target of a `monkeypatch.setattr`,
`import_module(f"tunix_rt.engines.{name}.loop")`. A test that starts the program depends on the verbs that it spells. What
configures all tests affects all tests.
"""

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
ROOTS = {"src/tunix_rt": "tunix_rt", "tests": "tests", "benchmarks": "benchmarks", "docs": "docs", "recipes": "recipes"}
"""Folders of modules, and the packages they are imported as."""
PROGRAM = "src/tunix_rt/cli/main.py"
EVERYTHING = ("pyproject.toml", "constraints*.txt", "scripts/setup", "scripts/test", "*conftest.py", ".ci/*")
DOTTED = re.compile(r"\b(?:tunix_rt|tests|benchmarks|docs|recipes)(?:\.[\w*]+)*")


def module_name(path: str) -> str | None:
    """Dotted name of a Python file, None outside of `ROOTS`."""
    for folder, package in ROOTS.items():
        if path.startswith(f"{folder}/") and path.endswith(".py"):
            parts = PurePosixPath(path.removeprefix(f"{folder}/").removesuffix(".py")).parts
            return ".".join((package, *(part for part in parts if part != "__init__")))
    return None


def affected(root: Path, changed: Iterable[str]) -> list[str]:
    """Test files under `root` that a change of the files `changed` can break, as paths relative to `root`."""
    changed = set(changed)
    files = {path.relative_to(root).as_posix() for folder in ROOTS for path in (root / folder).rglob("*.py")}
    tests = {path for path in files if PurePosixPath(path).match("tests/*/test_*.py")}
    if any(fnmatch.fnmatch(path, pattern) for path in changed for pattern in EVERYTHING):
        return sorted(tests)
    # With the changed files, since a deleted module has importers too.
    names = {name: path for path in files | changed if (name := module_name(path))}
    trees = {path: ast.parse((root / path).read_text(encoding="utf-8")) for path in files}
    importers: dict[str, set[str]] = {path: set() for path in names.values()}
    for path, tree in trees.items():
        for name in imported(tree, str(module_name(path)), is_package=path.endswith("__init__.py")):
            for target in resolved(name, names):
                importers[target].add(path)
    words = {path: {PurePosixPath(path).stem, *re.split(r"[^\w.-]+", " ".join(strings(trees[path])))} for path in tests}
    starting = tests & reached_from([PROGRAM], importers)
    for verb, module in verbs_of(trees.get(PROGRAM)).items():
        importers.setdefault(f"src/tunix_rt/cli/{module}.py", set()).update(
            path for path in starting if verb in words[path]
        )
    reached = reached_from(changed, importers)
    mentioned = {path for path in tests for other in changed if mentions(words[path], other)}
    return sorted(tests & reached | mentioned)


def reached_from(paths: Iterable[str], importers: dict[str, set[str]]) -> set[str]:
    """Files that import one of these, directly or through others."""
    reached, ahead = set(), [path for path in paths if path in importers]
    while ahead:
        path = ahead.pop()
        if path not in reached:
            reached.add(path)
            ahead += importers[path]
    return reached


def verbs_of(program: ast.Module | None) -> dict[str, str]:
    """Each verb of the program with the module that has it."""
    for node in program.body if program else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERBS":
            return {verb: module for verb, (module, _) in ast.literal_eval(node.value).items()}
    return {}


def imported(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[str]:
    """Dotted names that a module imports or spells in a string; `*` stands for what is only known at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            parts = [getattr(part, "value", None) for part in (node.args if isinstance(node, ast.Call) else node.elts)]
            yield from (f"{name}.__main__" for flag, name in pairwise(parts) if flag == "-m")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: None if is_package and node.level == 1 else -node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.JoinedStr):
            yield from DOTTED.findall("".join(_pattern(part, module) for part in node.values))
    for text in strings(tree):
        yield from DOTTED.findall(text)


def _pattern(part: ast.expr, module: str) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return module if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "__name__" else "*"


def strings(tree: ast.Module) -> Iterator[str]:
    """String constants that are not docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def resolved(name: str, names: dict[str, str]) -> Iterator[str]:
    """Files that an import of `name` executes: the module or the one that contains the name, and the packages above it."""
    if name in ("tunix_rt.cli.*", "tunix_rt.__main__"):
        return  # by verbs
    parts = name.split(".")
    yield from (names[above] for end in range(1, len(parts) + 1) if (above := ".".join(parts[:end])) in names)
    if "*" in name:  # and what is found in a module: `tunix_rt.runs.*.write_text`
        patterns = (name, name.rpartition(".")[0])
        yield from (path for module, path in names.items() if any(fnmatch.fnmatchcase(module, one) for one in patterns))


def mentions(words: set[str], path: str) -> bool:
    """Whether a test spells the name of a file that is no module of the package, or of a folder it is in."""
    if module_name(path) and not path.startswith("benchmarks/"):
        return False
    *folders, name = PurePosixPath(path).parts
    return bool(words & {name, PurePosixPath(name).stem, *folders} - {"src", "tests", "__init__"})


def changed_files(base: str) -> list[str]:
    """Files that differ from the git revision `base`, with those that git does not know yet."""
    git = ["git", "-C", str(ROOT), "-c", "core.quotePath=false"]
    commands = (["diff", "--name-only", "--no-renames", base], ["ls-files", "--others", "--exclude-standard"])
    found = (subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout for words in commands)
    return [line for text in found for line in text.splitlines()]


if __name__ == "__main__":
    print("\n".join(affected(ROOT, changed_files(*sys.argv[1:] or ["HEAD"]))))
