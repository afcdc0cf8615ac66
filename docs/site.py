"""Hooks of the documentation site (mkdocs.yml): navigation made from docs/index.md, links out of docs/ shown as paths."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SECTIONS = {
    "tutorials": "Tutorials", "guides": "Guides", "concepts": "Concepts", "reference": "Reference", "doctor": "Doctor",
    "decisions": "Decisions",
}  # fmt: skip
"""Folder -> title of its section, in the order of the site."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+\.md)(?:#[^)]*)?\)")
OUTWARD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def navigation(index: str) -> list[Any]:
    """The pages that `index` links to, in its order, by folder."""
    linked = list(dict.fromkeys(path for _, path in LINK.findall(index) if not path.startswith("..")))
    top = [path for path in linked if "/" not in path]
    sections = {title: [path for path in linked if path.startswith(f"{name}/")] for name, title in SECTIONS.items()}
    return ["index.md", *({title: pages} for title, pages in sections.items() if pages), *top]


def without_outward_links(markdown: str, folder: Path) -> str:
    """Links to files beside docs/ as plain paths: the site has no such files."""

    def path(match: re.Match[str]) -> str:
        target = (DOCS / folder / match[2].partition("#")[0]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        inside = target.relative_to(DOCS.parent)
        return f"`{inside}`" if match[1].strip("`") in (str(inside), inside.name) else f"{match[1]} (`{inside}`)"

    return OUTWARD.sub(path, markdown)


# --- called by mkdocs ------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    config.nav = navigation((DOCS / "index.md").read_text(encoding="utf-8"))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return without_outward_links(markdown, Path(page.file.src_uri).parent)
