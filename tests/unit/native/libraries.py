"""Which libraries there are to test. The one beside the source is taken if it is of this source, else one is built."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from etha.native import NativeLibrary, PythonLibrary, open_library
from etha.native.build import LIBRARY, build, find_compiler

NAMES = ("compiled", "python")


@cache
def get(name: str) -> NativeLibrary | None:
    """The library of that name; None without a compiler."""
    if name == "python":
        return PythonLibrary()
    found = open_library(LIBRARY)
    if found is None and find_compiler() is not None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "executor.so"
            build(path)
            found = open_library(path)  # stays mapped when the file is removed
    return found
