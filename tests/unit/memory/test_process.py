"""Another process's memory, named by somebody who may say anything."""

from __future__ import annotations

import os

import numpy as np
import pytest

from etha.memory.process import MAX_SEGMENTS, ProcessMemory, start_time
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


@pytest.mark.parametrize("rows", [MAX_SEGMENTS, MAX_SEGMENTS + 1, 3 * MAX_SEGMENTS + 7])
def test_tables_of_more_rows_than_one_call_takes(rows: int) -> None:
    """Rows of 1 to 5 bytes there, of 3 here: what is left of a row goes on with the next call."""
    sizes = np.resize(np.array([1, 2, 3, 4, 5], np.uint64), rows)
    total = int(sizes.sum())
    data = np.random.default_rng(0).integers(0, 256, total, dtype=np.uint8)
    there, back = np.zeros(2 * total, np.uint8), np.zeros_like(data)
    starts = np.uint64(there.ctypes.data) + 2 * (np.cumsum(sizes) - sizes)
    remote = np.stack([starts, sizes], axis=1)
    cut = np.arange(0, total, 3, dtype=np.uint64)
    ends = np.minimum(cut + np.uint64(3), np.uint64(total))
    memory = ProcessMemory(os.getpid(), start_time(os.getpid()))
    for buffer, move in ((data, memory.write), (back, memory.read)):
        local = np.stack([np.uint64(buffer.ctypes.data) + cut, ends - cut], axis=1)
        assert move(local, remote) == total
    memory.close()
    written = np.concatenate([there[s : s + n] for s, n in zip(starts - starts[0], sizes, strict=True)])
    assert (written == data).all() and (back == data).all()
    assert there.sum() == data.sum(), "nothing between the rows"
