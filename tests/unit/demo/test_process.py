"""What the demo has started it ends, orphans included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from etha.demo.process import adopting, children, describe, end

ORPHAN = """
import subprocess, sys
streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]], start_new_session=True, **streams)
child.stdout.readline()
print(child.pid, flush=True)
"""
SLEEP = "import time; print(flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def orphan(code: str) -> int:
    """A process whose parent has ended."""
    answer = subprocess.run([sys.executable, "-S", "-c", ORPHAN, code], capture_output=True, check=True, timeout=30)
    return int(answer.stdout)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_orphan_is_adopted_and_ended() -> None:
    with adopting() as before:
        pid = orphan(SLEEP)
        assert children() - before == {pid}
        assert end({pid}, seconds=10) == set()
        assert children() == before
    assert not alive(pid)


def test_who_ignores_sigterm_is_killed_and_told_of() -> None:
    with adopting() as before:
        pid = orphan(STUBBORN)
        started = time.monotonic()
        assert end(children() - before, seconds=0.2) == {pid}
        assert time.monotonic() - started < 5
    assert not alive(pid)


def test_ending_nobody_is_nothing() -> None:
    assert end(set(), seconds=1) == set()


def test_a_process_dies_with_its_parent() -> None:
    code = """
import os, sys, time
from etha.demo.process import die_with_parent
parent = os.getpid()
pid = os.fork()
if pid == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""
    with adopting():
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            descriptor = os.pidfd_open(pid)
            parent.kill()
            parent.wait()
        # Adopted by this process when its parent died; the kernel kills it.
        found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        os.close(descriptor)
    assert found is not None and found.si_status == signal.SIGKILL


def test_exit_statuses_in_words() -> None:
    assert describe(3) == "ended with status 3"
    assert describe(-9) == "was killed by SIGKILL"
