"""The log of an agent that runs for months."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from etha.config import MAX_LOG

LOGS = """
import logging, os, sys
from pathlib import Path
from etha.agent.logfile import RotatingLog
handler = RotatingLog()
handler.path = Path(sys.argv[1])
log = logging.getLogger("agent")
log.addHandler(handler)
for number in range(int(sys.argv[2])):
    log.warning("%06d " + 1000 * "x", number)
os.write(2, b"from C")
"""


def test_a_full_log_is_set_aside_while_the_agent_runs(tmp_path: Path) -> None:
    path, lines = tmp_path / "cpu.log", 3 * MAX_LOG // 1000
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", LOGS, str(path), str(lines)], stderr=log, check=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cpu.log", "cpu.log.1"]
    assert path.stat().st_size <= MAX_LOG + 2000 and (tmp_path / "cpu.log.1").stat().st_size <= MAX_LOG + 2000
    assert path.read_text().endswith("x\nfrom C")
    numbers = [
        int(line[:6]) for name in ("cpu.log.1", "cpu.log") for line in (tmp_path / name).read_text().split("\n")[:-1]
    ]
    assert numbers == list(range(numbers[0], lines))


def test_what_is_not_its_own_file_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "cpu.log", tmp_path / "other"
    path.write_text("of another agent")
    with other.open("ab") as log:
        subprocess.run([sys.executable, "-c", LOGS, str(path), str(2 * MAX_LOG // 1000)], stderr=log, check=True)
    assert path.read_text() == "of another agent" and other.stat().st_size > MAX_LOG
