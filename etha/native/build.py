"""Compiles executor.c with the C compiler of the machine: for wheels, for editable installs, and by hand.

``python -m etha.native.build`` makes the library beside the source. It is loaded with ctypes, so it depends on no
version of Python and needs no headers. This file imports the standard library only, because a wheel's build runs it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_FILE = Path(__file__).with_name("executor.c")
LIBRARY = SOURCE_FILE.with_suffix(".so")
#: No contraction of a * b + c and defined overflow: all members compute the same bits, whatever their processors.
FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-fno-trapping-math",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fwrapv",
)


class BuildError(Exception):
    """The compiler failed; its words are the message."""


def source_hash(source: Path) -> str:
    """What a library says of itself, to be compared with the source beside it and the way to compile it."""
    parts = [source.read_bytes(), *(path.read_bytes() for path in included(source)), " ".join(FLAGS).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def included(source: Path) -> list[Path]:
    """The files of ours that ``source`` includes."""
    names = re.findall(rb'^#include "([^"]+)"', source.read_bytes(), re.MULTILINE)
    return [source.with_name(name.decode()) for name in names]


def is_current(library: Path, source: Path = SOURCE_FILE) -> bool:
    """Whether the file at ``library`` was compiled from this source; nothing is loaded."""
    return library.exists() and source_hash(source).encode() in library.read_bytes()


def find_compiler() -> str | None:
    """The path of ``cc``, or None."""
    return shutil.which("cc")


def build(target: Path, source: Path = SOURCE_FILE) -> bool:
    """Compile ``source`` into ``target`` unless that is current. Whether there is a library; BuildError if that fails.

    The file is replaced in one step, because processes may have the old one open.
    """
    if is_current(target, source):
        return True
    compiler = find_compiler()
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory(prefix="etha-build-") as directory:
        made = Path(directory) / target.name
        command = [compiler, *FLAGS, f"-DETHA_SOURCE={source_hash(source)}", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # an older compiler or another C library may have no clones of functions
            done = subprocess.run([*command, "-DETHA_PLAIN"], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{' '.join(command)}: {done.stderr.strip()}")
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(made, beside)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    return True


if __name__ == "__main__":
    try:
        found = build(LIBRARY)
    except (BuildError, OSError) as error:
        sys.exit(f"executor.c was not compiled, calls of groups will run in Python: {error}")
    if not found:  # no failure, because Python does its work then
        sys.stderr.write("there is no C compiler (cc), calls of groups will run in Python\n")
