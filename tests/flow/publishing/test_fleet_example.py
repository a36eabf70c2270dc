"""examples/fleet as a user runs it: whoever is killed comes back to the newest version, and nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "examples" / "fleet" / "launch.py"
SECONDS = 240


def left(directory: Path) -> list[str]:
    """Commands of processes that were started with ``directory`` as theirs, and are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={directory}" in (entry / "environ").read_bytes().decode(errors="replace"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_fleet_whose_ranks_are_killed_has_the_last_version() -> None:
    directory = Path("/tmp") / f"etha-fleet-{os.getpid()}"  # short, because sockets are in it
    directory.mkdir()
    try:
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
        words = ("--replicas", "2", "--ranks", "2", "--kills", "2", "--seconds", str(SECONDS))
        done = subprocess.run(
            [sys.executable, str(LAUNCH), *words],
            env=env | {"TMPDIR": str(directory)},
            capture_output=True,
            text=True,
            timeout=SECONDS + 60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "\x1b" not in done.stdout, "what is no terminal gets plain lines"
        assert re.search(r"kill 2 of 2: rank 0 of trainer, pid \d+", done.stdout)
        assert re.search(r"2 replicas have version \d+; 2 times a side was started again", done.stdout)
        assert not left(directory) and not list(directory.iterdir())
    finally:
        directory.rmdir()
