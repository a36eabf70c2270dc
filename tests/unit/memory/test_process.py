"""Another process's memory, named by somebody who may say anything."""

from __future__ import annotations

import os

import pytest

from etha.memory.process import ProcessMemory, start_time
from etha.memory.reach import WorkerGoneError
from etha.transport.copy.host import Claim, prove


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, 1 << 62])
def test_a_number_that_is_no_process_is_said_to_be_none(pid: int) -> None:
    with pytest.raises(WorkerGoneError, match=f"no process {pid}"):
        ProcessMemory(pid, 1)
    with pytest.raises(WorkerGoneError):
        prove(Claim(pid=pid, started=1, address=1 << 62, token=b"x"))


@pytest.mark.parametrize("error", [ProcessLookupError, FileNotFoundError])
def test_a_process_that_is_just_ending_is_gone(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    def ending(pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", ending)
    with pytest.raises(WorkerGoneError, match="process 77 is gone"):
        ProcessMemory(77, 1)


def test_a_process_is_told_by_its_start() -> None:
    with pytest.raises(WorkerGoneError, match="another one"):
        ProcessMemory(os.getpid(), start_time(os.getpid()) + 1)
    memory = ProcessMemory(os.getpid(), start_time(os.getpid()))
    assert memory.alive()
    memory.close()
    assert not memory.alive()
