"""Which library a process gets: the compiled one of this source, or Python with one line in the log."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etha import native
from etha.config import native_allowed
from etha.errors import ConfigError, GroupError
from etha.native import GroupMemory, PythonLibrary, RingLinks, open_library, structs
from etha.native.build import (
    FLAGS,
    LIBRARY,
    SOURCE_FILE,
    BuildError,
    build,
    find_compiler,
    included,
    is_current,
    source_hash,
)

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler (cc) on the path")


@needs_compiler
def test_a_library_of_this_source_is_loaded() -> None:
    build(LIBRARY)
    library = open_library(LIBRARY)
    assert library is not None and library.source == source_hash(SOURCE_FILE) and is_current(LIBRARY)


def test_a_library_of_another_source_is_refused_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "executor.so"
    old.write_bytes(b"compiled from another source")
    monkeypatch.setattr("etha.native.build.LIBRARY", old)
    native.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.load().name == native.load().name == "python"
    finally:
        native.load.cache_clear()
    assert native.why_python() == f"{old} is of another version of executor.c: run python -m etha.native.build"
    assert "another version of executor.c" in caplog.text and len(caplog.records) == 1


def test_what_does_not_load_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_library(tmp_path / "missing.so") is None and caplog.text == ""
    (tmp_path / "text.so").write_text(f"of another machine, {source_hash(SOURCE_FILE)}")
    assert open_library(tmp_path / "text.so") is None and "cannot be loaded" in caplog.text


@needs_compiler
def test_a_library_without_its_functions_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty, made = tmp_path / "empty.c", tmp_path / "empty.so"
    empty.write_text(f'const char *etha_source(void) {{ return "{source_hash(SOURCE_FILE)}"; }}')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, empty], check=True)
    assert open_library(made) is None and "undefined symbol" in caplog.text


def test_the_environment_can_ask_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETHA_NATIVE", "0")
    native.load.cache_clear()
    try:
        assert isinstance(native.load(), PythonLibrary)
    finally:
        native.load.cache_clear()
    assert native.why_python() == "ETHA_NATIVE=0 asks for it"
    assert native_allowed({}) and native_allowed({"ETHA_NATIVE": "1"})
    with pytest.raises(ConfigError, match="ETHA_NATIVE='yes' is neither 0 nor 1"):
        native_allowed({"ETHA_NATIVE": "yes"})


def test_a_machine_whose_system_calls_are_unknown_needs_the_library() -> None:
    with pytest.raises(GroupError, match="groups need the compiled library on sparc"):
        PythonLibrary("sparc")


@needs_compiler
def test_a_compiler_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "executor.c"
    broken.write_text("int main(")
    with pytest.raises(BuildError, match="error"):
        build(tmp_path / "executor.so", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["executor.c"]


def test_without_a_compiler_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not build(tmp_path / "executor.so") and list(tmp_path.iterdir()) == []


def test_a_build_by_hand_says_that_there_is_no_compiler(tmp_path: Path) -> None:
    copied = tmp_path / "build.py"
    shutil.copy(Path(structs.__file__).with_name("build.py"), copied)
    for source in (SOURCE_FILE, *included(SOURCE_FILE)):
        shutil.copy(source, tmp_path)
    done = subprocess.run([sys.executable, copied], env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0 and "no C compiler" in done.stderr


@needs_compiler
def test_structs_are_as_long_in_c_as_in_python(tmp_path: Path) -> None:
    """A field that one side lacks would shift all others."""
    names = {
        "step": structs.STEP.itemsize,
        "source": structs.SOURCE.itemsize,
        "message": structs.MESSAGE.itemsize,
        "peer_link": structs.PEER_LINK.itemsize,
        "header": structs.HEADER.size,
        "etha_group": ctypes.sizeof(structs.GroupStruct),
        "etha_run_args": ctypes.sizeof(structs.RunArguments),
        "etha_progress_args": ctypes.sizeof(structs.ProgressArguments),
        "etha_streams": ctypes.sizeof(structs.StreamsStruct),
    }
    checks = "".join(f'_Static_assert(sizeof({name}) == {size}, "{name}");' for name, size in names.items())
    program = tmp_path / "sizes.c"
    program.write_text(f'#include "{SOURCE_FILE}"\n{checks}')
    done = subprocess.run(
        ["cc", "-std=gnu11", "-DETHA_PLAIN", "-fsyntax-only", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    flags = [*FLAGS, "-DETHA_PLAIN", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fsyntax-only"]
    done = subprocess.run(["cc", *flags, SOURCE_FILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rank_outside_of_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is none of 2 members"):
        GroupMemory(rank=2, pages=[0, 0])
    with pytest.raises(ValueError, match="cannot hold messages"):
        RingLinks(GroupMemory(rank=0, pages=[0]))
