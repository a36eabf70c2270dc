"""Options of all tests, and the marker ``needs``: programs of the system that a test runs.

A test that needs a program which is not on the path is skipped with the reason. ``--needing nft,ip`` runs only the
tests that need one of these: CI runs all tests on a bare machine, installs packages, and then runs what it skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import shutil
import signal
import zlib
from pathlib import Path

import pytest

from tests import seconds

if importlib.util.find_spec("hypothesis"):  # the environments of `make gpu` and `make test-vllm` have none
    from tests import examples

    examples.register()

# A shell's background job begins with Ctrl-C ignored, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Debian's package of each program that a test may need.
PACKAGES = {
    "chromium": "chromium",
    "ip": "iproute2",
    "nft": "nftables",
    "node": "nodejs",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-server": "redis-server",
    "unshare": "util-linux",
}


#: Below this folder `make check` takes every test that is not marked slow; elsewhere only what is marked fast.
UNIT = Path(__file__).parent / "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--ways``: see tests/flow/ways.py."""
    parser.addoption(
        "--ways",
        default="local,tcp,host,three",
        help="how the sides of flow tests lie: local (one agent), tcp (two hosts), host (two agents of one host), "
        "three (three hosts, for the tests that ask for it)",
    )
    parser.addoption("--needing", default="", help="only tests that need one of these programs, separated by commas")
    parser.addoption(
        "--seconds", action="store_true", help="bounds in seconds hold to the letter: see tests/seconds.py"
    )
    parser.addoption("--half", type=int, choices=(0, 1), help="one half of the tests, always the same for one number")
    parser.addoption("--cold", action="store_true", help="agents are not forked but load torch anew, as a user's do")


def compile_library() -> None:
    """The library of groups beside its source, if it is of another source now. Without it they run in Python."""
    builder = runpy.run_path(str(Path(__file__).parents[1] / "etha" / "native" / "build.py"))
    with contextlib.suppress(builder["BuildError"], OSError):  # tests/unit/native says what is wrong
        builder["build"](builder["LIBRARY"])


def pytest_configure(config: pytest.Config) -> None:
    seconds.exact = config.getoption("seconds")
    if not hasattr(config, "workerinput"):
        compile_library()
    config.addinivalue_line(
        "markers",
        "ways(*names, each=False, reason=None): run in these ways only; without it in local, tcp and host. All but the "
        "first are marked more, unless each=True",
    )
    config.addinivalue_line("markers", "needs(*programs): skipped where one of these programs is not on the path")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow by its folder, skip what lacks a program; ``--needing`` deselects what needs none of those, and
    ``--half`` the other half."""
    for item in items:
        if not (item.path.is_relative_to(UNIT) or item.path.parent == UNIT.parent or item.get_closest_marker("fast")):
            item.add_marker(pytest.mark.slow)
    wanted = set(filter(None, config.getoption("needing").split(",")))
    if unknown := wanted - PACKAGES.keys():
        raise pytest.UsageError(f"--needing: no test needs {', '.join(sorted(unknown))}")
    half, out = config.getoption("half"), []
    for item in items:
        programs = [program for mark in item.iter_markers("needs") for program in mark.args]
        if lacking := [program for program in programs if shutil.which(program) is None]:
            text = " and ".join(f"{program} (Debian: {PACKAGES[program]})" for program in lacking)
            item.add_marker(pytest.mark.skip(reason=f"needs {text}"))
        other = half is not None and zlib.crc32(item.nodeid.encode()) % 2 != half
        if other or (wanted and not wanted & set(programs)):
            out.append(item)
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
