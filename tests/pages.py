"""A page as a browser takes it, for tests: its text, the cells of its tables, its links, and how it is nested."""

from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Read(HTMLParser):
    """Elements are closed in order, and ids are unique. Pictures have no text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags = "", Counter[str]()
        self.articles: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.tokens: list[tuple[str, str, bool]] = []
        """Of the data page: text, title, and whether it is trained."""
        self._open: list[str] = []
        self._ids: set[str] = set()
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert given.get("id") not in self._ids
        self._ids |= {given["id"]} if "id" in given else set()
        self.tags[f"{tag}.{given['class']}" if "class" in given else tag] += 1
        self.links += [given["href"]] if tag == "a" else []
        if tag == "article":
            self.articles.append("")
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "bdi":
            self.tokens.append(("", given["title"], "u" in self._open))
        if tag == "br":
            self.handle_data("\n")
        self._open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data
        inside = set(self._open)
        if "article" in inside:
            self.articles[-1] += data
        if inside & {"td", "th"} and "svg" not in inside:
            self.rows[-1][-1] += data
        if "bdi" in inside:
            self.tokens[-1] = (self.tokens[-1][0] + data, *self.tokens[-1][1:])
