"""examples/elastic_hsdp as a user runs it: replicas that are killed end with equal weights, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parent.parent.parent / "examples" / "elastic_hsdp" / "launch.py"
SECONDS = 240


@contextmanager
def launched(directory: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The example, whose output is a pipe; everything that it makes goes to ``directory``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH), "--seconds", str(SECONDS), *words],
        env=env | {"TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def left(directory: Path) -> dict[int, str]:
    """Processes that were started with ``directory`` as theirs, and are still there."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={directory}" in (entry / "environ").read_bytes().decode(errors="replace"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = Path("/tmp") / f"etha-example-{os.getpid()}"  # short, because sockets are in it
    path.mkdir()
    try:
        yield path
        assert not left(path) and not list(path.iterdir())
    finally:
        path.rmdir()


@pytest.mark.slow
def test_replicas_that_are_killed_end_with_equal_weights(directory: Path) -> None:
    with launched(directory, "--replicas", "2", "--ranks", "2", "--kills", "1") as example:
        out, err = example.communicate(timeout=SECONDS + 60)
    assert example.returncode == 0, out + err
    assert "\x1b" not in out, "what is no terminal gets plain lines"
    assert re.search(r"kill 1 of 1: rank \d of replica-\d, pid \d+", out)
    assert out.count("has loaded its state") >= 2, "one at the beginning, one after the kill"
    assert re.search(r"2 replicas have equal weights after step \d+; 1 were started again", out)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(directory: Path) -> None:
    with launched(directory, "--replicas", "2", "--ranks", "1", "--kills", "1000") as example:
        assert example.stdout is not None
        for line in example.stdout:
            if "is in epoch" in line:
                break
        example.send_signal(signal.SIGINT)
        _, err = example.communicate(timeout=60)
    assert example.returncode == 130 and "Traceback" not in err, err
