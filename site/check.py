"""Checks the built site: every link and picture leads to a file that is there, and to an anchor that it has.

MkDocs checks links of Markdown; this reads the HTML, so also what is generated and what the theme adds. Links to other
sites are counted and not followed, so that a build needs no network. But nothing may be loaded from there.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Elements of which a browser loads what they name.
LOADED = {"script", "img", "link", "iframe", "source"}


class Reader(HTMLParser):
    """The ids of a page, and what it names: (element, address)."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = set[str]()
        self.named = list[tuple[str, str]]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.named.append((tag, value))


@cache
def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def main(site: Path) -> int:
    wrong, links, others = [], 0, 0
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # it is served for any address, so its links begin at the root
            continue
        for tag, address in read(page).named:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                others += 1
                if tag in LOADED:
                    wrong.append(f"{page.relative_to(site)}: <{tag}> loads {address}")
                continue
            links += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{page.relative_to(site)}: {address} is not there")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).ids:
                wrong.append(f"{page.relative_to(site)}: {address} has no such anchor")
    print("\n".join(wrong) or f"{links} links lead somewhere, {others} lead to other sites and were not followed")
    return 1 if wrong or not links else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
