"""What checks a release before it is published finds what is wrong."""

from __future__ import annotations

import io
import runpy
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from etha.version import __version__

CHECK: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[1] / "release" / "check.py"))
WHEEL = "sub_etha-{}-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"


def made(directory: Path, *, wheel: str = WHEEL, version: str = __version__, lacks: str = "", more: str = "") -> Path:
    """A directory with a wheel and a source distribution of empty files."""
    names = [name for name in (*CHECK["DATA"], "LICENSE") if name != lacks]
    with zipfile.ZipFile(directory / wheel.format(version), "w") as archive:
        for name in [*names, *([more] if more else [])]:
            archive.writestr(name, "")
    with tarfile.open(directory / f"sub_etha-{version}.tar.gz", "w:gz") as archive_of_sources:
        for name in names:
            archive_of_sources.addfile(tarfile.TarInfo(f"sub_etha-{version}/{name}"), io.BytesIO())
    return directory


def test_what_is_right_may_be_published(tmp_path: Path) -> None:
    assert CHECK["faults"](made(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "9.9"}, f"is not version {__version__}"),
        ({"wheel": "sub_etha-{}-py3-none-linux_x86_64.whl"}, "an index takes manylinux wheels only"),
        ({"lacks": "etha/dashboard/page.js"}, "lacks etha/dashboard/page.js"),
        ({"more": "tests/conftest.py"}, "has tests/conftest.py"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    found = CHECK["faults"](made(tmp_path, **changes))
    assert found and all(says in one for one in found)


def test_a_tag_names_the_version_and_the_changes_have_its_section(tmp_path: Path) -> None:
    first, second = CHECK["faults"](made(tmp_path), "v9.9")
    assert first == f"the tag is v9.9, but etha/version.py says {__version__}: the tag must be v{__version__}"
    assert second == f"CHANGELOG.md has no section '## {__version__}'"
    assert "etha dashboard" in CHECK["notes"]("Unreleased")


def test_without_files_there_is_nothing_to_publish(tmp_path: Path) -> None:
    (fault,) = CHECK["faults"](tmp_path)
    assert "0 wheels and 0 source distributions" in fault
