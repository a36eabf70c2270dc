"""Checks what is about to be published: one wheel and one source distribution, their version, and what lies in them.

python release/check.py dist [TAG]: with a tag also that it names this version, and that CHANGELOG.md has its section.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Files that are no Python, and without which something fails only when it is used.
DATA = (
    "etha/py.typed",
    "etha/demo/shakespeare.txt",
    "etha/store/join.lua",
    "etha/native/executor.c",
    "etha/native/executor.so",
    *(f"etha/dashboard/{name}" for name in ("page.html", "page.js", "page.css", "icon.svg")),
)
#: Folders of the repository that users of the package do not get.
NOT_IN_WHEEL = ("tests/", "bench/", "docs/", "deploy/", "release/", "site/")


def version() -> str:
    """The version, from the one place where it is set."""
    text = (ROOT / "etha" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def faults(directory: Path, tag: str = "") -> list[str]:
    """What is wrong; nothing if it may be published."""
    here, found = version(), []
    wheels, sources = sorted(directory.glob("*.whl")), sorted(directory.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [f"{directory} has {len(wheels)} wheels and {len(sources)} source distributions, expected one of each"]
    names = {f"sub_etha-{here}"}
    for path in (*wheels, *sources):
        if "-".join(path.name.removesuffix(".tar.gz").split("-")[:2]) not in names:
            found.append(f"{path.name} is not version {here}, which etha/version.py says")
    if not re.search(r"-manylinux_\d+_\d+_\w+\.whl$|\.manylinux\w+\.whl$", wheels[0].name):
        found.append(f"{wheels[0].name}: an index takes manylinux wheels only")
    inside = zipfile.ZipFile(wheels[0]).namelist()
    found += [f"{wheels[0].name} lacks {name}" for name in DATA if name not in inside]
    found += [f"{wheels[0].name} has {name}" for name in inside if name.startswith(NOT_IN_WHEEL)]
    with tarfile.open(sources[0]) as archive:
        there = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    found += [f"{sources[0].name} lacks {name}" for name in (*DATA[:4], "LICENSE") if name not in there]
    if tag:
        if tag != f"v{here}":
            found.append(f"the tag is {tag}, but etha/version.py says {here}: the tag must be v{here}")
        if not notes(here):
            found.append(f"CHANGELOG.md has no section '## {here}'")
    return found


def notes(of: str) -> str:
    """The section of CHANGELOG.md about a version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(of)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def main(words: list[str]) -> int:
    if words == ["notes"]:
        print(notes(version()))
        return 0
    found = faults(Path(words[0]), *words[1:])
    sizes = [f"{path.name} {path.stat().st_size / 1e6:.2f} MB" for path in sorted(Path(words[0]).iterdir())]
    print("\n".join(found or sizes))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
