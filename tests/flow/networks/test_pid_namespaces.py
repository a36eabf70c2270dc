"""Containers that share a runtime directory: sibling PID namespaces, in which nobody sees the other's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.jobs import wait_gone

ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable]
#: Prints the error that a client meets.
CLIENT = """
import etha
try:
    with etha.TensorBusClient(autostart=False, timeout=60) as client:
        print("reached", client.status()["agent"]["pid"])
except etha.EthaError as error:
    print(error.code, error.message)
"""
pytestmark = [
    pytest.mark.needs("unshare"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes PID namespaces"),
]


def test_a_client_in_a_sibling_namespace_is_told_what_to_share(runtime: Path) -> None:
    read, write = os.pipe()
    command = [*ALONE, "-m", "etha.agent", "--ready-fd", str(write)]
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL) as agent:
        try:
            os.close(write)
            with os.fdopen(read) as reported:
                assert reported.readline() == "ready\n"
            done = subprocess.run([*ALONE, "-c", CLIENT], capture_output=True, text=True, timeout=100)
            assert done.stdout.startswith("config this process runs in a PID namespace"), done.stdout + done.stderr
            assert "docker run --pid=host" in done.stdout and "ETHA_RUNTIME_DIR" in done.stdout
            watched = subprocess.run(
                [*ALONE, "-c", "from etha.cli import main; main()", "status"],
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert watched.returncode == 0 and "cpu" in watched.stdout, watched.stdout + watched.stderr
        finally:
            agent.kill()
    wait_gone(agent.pid)
