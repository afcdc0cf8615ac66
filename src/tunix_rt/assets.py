"""Where the things that ship with tunix-rt lie: in a clone at the root, in an installed wheel inside the package.

And where those are kept that it makes for later runs.
"""

import os
import re
from pathlib import Path

_PACKAGED = Path(__file__).parent / "packaged"
_COMMIT = _PACKAGED / "commit.txt"
"""Written by `git archive` (COMMIT)."""
_CLONE = Path(__file__).parents[2]

# Kind of thing -> its place in a clone. In a wheel it is packaged/<kind> (pyproject.toml, force-include).
_IN_A_CLONE = {"configs": "training/configs", "datasets": "datasets", "evalsets": "evalsets", "models": "models"}


def shipped_folder(kind: str) -> Path:
    """Where the things of this kind lie that came with tunix-rt."""
    return _PACKAGED / kind if _PACKAGED.is_dir() else _CLONE / _IN_A_CLONE[kind]


def wheel_commit() -> str | None:
    """The commit that an installed wheel of `scripts/release` was built from."""
    text = _COMMIT.read_text(encoding="utf-8").strip() if _COMMIT.is_file() else ""
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def search_path(kind: str) -> list[Path]:
    """Folders in which things of this kind are looked for: the working directory first, then what was shipped."""
    here, shipped = Path.cwd() / _IN_A_CLONE[kind], shipped_folder(kind)
    return [here] if here == shipped else [here, shipped]


def find(kind: str, name: str) -> Path | None:
    """The first existing `name` on the search path of `kind`, or None."""
    return next((folder / name for folder in search_path(kind) if os.path.exists(folder / name)), None)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/tunix-rt`, or below `~/.cache`. Whatever lies there can be made again."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root).absolute() / "tunix-rt"
