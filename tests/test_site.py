"""What checks the built site of the docs (``make docs``) finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[1] / "site" / "check.py"


def check(site: Path, body: str) -> tuple[int, str]:
    """Check a site of two pages, one of which has ``body``."""
    (site / "page.html").write_text(f'<p id="here">{body}</p>')
    (site / "folder").mkdir(exist_ok=True)
    (site / "folder" / "index.html").write_text('<a href="../page.html#here">back</a>')
    done = subprocess.run([sys.executable, CHECK, site], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_links_that_lead_somewhere_are_counted(tmp_path: Path) -> None:
    body = '<a href="folder/">a</a> <a href="#here">b</a> <a href="https://example.com/x">c</a>'
    assert check(tmp_path, body) == (0, "3 links lead somewhere, 1 lead to other sites and were not followed\n")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('<a href="none.html">x</a>', "page.html: none.html is not there"),
        ('<a href="#there">x</a>', "page.html: #there has no such anchor"),
        ('<img src="none.png">', "page.html: none.png is not there"),
        ('<script src="https://example.com/x.js"></script>', "page.html: <script> loads https://example.com/x.js"),
    ],
)
def test_what_leads_nowhere_or_is_loaded_from_elsewhere_is_an_error(tmp_path: Path, body: str, says: str) -> None:
    assert check(tmp_path, body) == (1, f"{says}\n")
