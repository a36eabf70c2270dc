"""Copies out of other processes: exact for any tables, compiled and in Python; stopped, refused, or failed midway."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from etha.memory import pull
from etha.memory.process import ProcessMemory, start_time
from etha.memory.pull import PullRun, PullTable
from etha.memory.reach import AccessError, FaultError, ReachError, WorkerGoneError
from etha.native.pull import PullStruct, load_pull
from tests.processes import CONTEXT, preload

preload("numpy")

NBYTES = 8 << 20


def _hold(pipe: Connection) -> None:
    memory = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)
    pipe.send((os.getpid(), memory.ctypes.data))
    pipe.recv()


class Other:
    """Another process, whose memory holds known bytes."""

    def __init__(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_hold, args=(theirs,), daemon=True)
        self._process.start()
        self.pid, self.address = self._pipe.recv()
        self.started = start_time(self.pid)
        self.bytes = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.end()


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation copies."""
    if request.param == "python":
        monkeypatch.setattr(pull, "load_pull", lambda: None)
    elif load_pull() is None:
        pytest.skip("no C compiler (cc) on the path")
    return str(request.param)


def table(others: list[Other], target: np.ndarray, rows: list[tuple[int, int, int, int, int]]) -> PullTable:
    """Rows (chunk, process, here, there, bytes): each is cut once more at one end, so that the two tables differ."""
    local: list[tuple[int, int]] = []
    remote: list[tuple[int, int]] = []
    process, local_ends, remote_ends = [], [], []
    for number in sorted({row[0] for row in rows}):
        mine = [row for row in rows if row[0] == number]
        for i, (_, which, here, there, nbytes) in enumerate(mine):
            begin, source = target.ctypes.data + here, others[which].address + there
            cut = nbytes // 3
            for table, at, parted in ((local, begin, i % 2 == 0), (remote, source, i % 2 == 1)):
                table += [(at, cut), (at + cut, nbytes - cut)] if parted and cut else [(at, nbytes)]
        process.append(mine[0][1])
        local_ends.append(len(local))
        remote_ends.append(len(remote))
    return PullTable(
        processes=tuple((one.pid, one.started) for one in others),
        process=np.array(process, np.int32),
        local=np.array(local, np.uint64),
        remote=np.array(remote, np.uint64),
        local_ends=np.array(local_ends, np.uint64),
        remote_ends=np.array(remote_ends, np.uint64),
    )


def carry_out(run: PullRun) -> None:
    try:
        run.start()
    finally:
        run.finish()


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_of_any_table_arrives_and_nothing_else_changes(way: str, seed: int) -> None:
    random_ = random.Random(seed)
    others = [Other(), Other()]
    try:
        target, truth = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
        rows, at = [], 0
        longest = (300, 5_000, 700_000)[seed % 3]
        for _ in range(3000):
            at += random_.randrange(0, 50)
            nbytes = random_.randrange(1, longest)
            there = random_.randrange(0, NBYTES - nbytes)
            if at + nbytes > NBYTES:
                break
            chunk = len(rows) // (1400 if seed % 2 else 9)  # more rows than one system call takes
            rows.append((chunk, chunk % 2, at, there, nbytes))
            truth[at : at + nbytes] = others[chunk % 2].bytes[there : there + nbytes]
            at += nbytes
        made = PullTable.from_blobs(*(lambda t: (t.processes, t.to_blobs()))(table(others, target, rows)))
        run = PullRun(made, threads=1 + seed % 3)
        carry_out(run)
        assert run.done == made.nbytes == sum(row[4] for row in rows)
        assert np.array_equal(target, truth)
    finally:
        for one in others:
            one.end()


def test_a_pull_that_was_stopped_copies_nothing(way: str, other: Other) -> None:
    target = np.zeros(NBYTES, np.uint8)
    run = PullRun(table([other], target, [(0, 0, 0, 0, NBYTES)]), threads=2)
    run.stop()
    carry_out(run)
    assert run.done == 0 and not target.any()


def test_a_stop_ends_it_between_two_chunks(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "load_pull", lambda: None)
    target, size = np.zeros(NBYTES, np.uint8), 64 << 10
    made = table([other], target, [(i, 0, i * size, i * size, size) for i in range(NBYTES // size)])
    run, copied, go = PullRun(made, threads=1), threading.Event(), threading.Event()
    copy = run._copy

    def held(memories: list[ProcessMemory], chunk: int) -> int:
        moved = copy(memories, chunk)
        if chunk == 2:
            copied.set()
            go.wait()
        return moved

    monkeypatch.setattr(run, "_copy", held)
    running = threading.Thread(target=carry_out, args=(run,))
    running.start()
    copied.wait()
    run.stop()
    go.set()
    running.join()
    assert run.done == 3 * size
    assert np.array_equal(target[: 3 * size], other.bytes[: 3 * size]) and not target[3 * size :].any()


def test_a_process_that_has_another_number_here_is_not_reached(way: str, other: Other) -> None:
    target = np.zeros(NBYTES, np.uint8)
    made = table([other], target, [(0, 0, 0, 0, 100)])
    for processes in (((other.pid, other.started + 1),), ((0, 1),)):
        wrong = PullTable.from_blobs(processes, made.to_blobs())
        with pytest.raises(AccessError, match=str(os.getpid())):
            carry_out(PullRun(wrong, threads=1))
    assert not target.any()


def test_memory_that_was_freed_is_named(way: str, other: Other) -> None:
    target = np.zeros(NBYTES, np.uint8)
    made = table([other], target, [(0, 0, 0, 0, 4096)])
    remote = made.remote.copy()
    remote[:, 0] = np.uint64(4096)
    wrong = PullTable.from_blobs(made.processes, (*made.to_blobs()[:2], remote.tobytes(), *made.to_blobs()[3:]))
    with pytest.raises(FaultError, match="no memory at 0x1000") as caught:
        carry_out(PullRun(wrong, threads=2))
    assert (caught.value.pid, caught.value.address, caught.value.moved) == (other.pid, 4096, 0)


def test_a_process_that_dies_meanwhile_is_no_success(way: str, other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number could be somebody else's before the last copy."""
    opened = pull._open

    def late(processes: object) -> list[ProcessMemory]:
        found = opened(processes)  # type: ignore[arg-type]
        other.end()
        return found

    monkeypatch.setattr(pull, "_open", late)
    with pytest.raises(WorkerGoneError, match=str(other.pid)):
        carry_out(PullRun(table([other], np.zeros(NBYTES, np.uint8), [(0, 0, 0, 0, 100)]), threads=1))


def test_a_table_may_only_write_into_registered_tensors(other: Other) -> None:
    target = np.zeros(NBYTES, np.uint8)
    made, begin = table([other], target, [(0, 0, 100, 0, 900), (1, 0, 2000, 0, 500)]), target.ctypes.data
    inside = [
        (begin, 600),
        (begin + 600, 400),
        (begin + 1990, 520),
    ]  # a row may reach from one tensor into its neighbour
    made.check_inside(np.array(inside, np.uint64))
    made.check_inside(np.array(inside[::-1], np.uint64))
    for wrong in ([], inside[1:], inside[:2], [(begin, 599), *inside[1:]], [*inside[:2], (begin + 2001, 520)]):
        with pytest.raises(ReachError, match="outside of its registered tensors"):
            made.check_inside(np.array(wrong, np.uint64).reshape(-1, 2))
    huge = PullTable.from_blobs(made.processes, made.to_blobs())
    object.__setattr__(huge, "local", np.array([[begin, (1 << 64) - 8]], np.uint64))
    with pytest.raises(ReachError):
        huge.check_inside(np.array(inside, np.uint64))


@pytest.mark.parametrize("part", range(5))
def test_a_malformed_table_is_refused(other: Other, part: int) -> None:
    made = table([other], np.zeros(NBYTES, np.uint8), [(0, 0, 0, 0, 64), (1, 0, 64, 64, 64)])
    blobs = list(made.to_blobs())
    for wrong in (b"", blobs[part][:-16], blobs[part] + b"\1" * 16, b"\xff" * len(blobs[part])):
        with pytest.raises(ValueError):
            PullTable.from_blobs(made.processes, [*blobs[:part], wrong, *blobs[part + 1 :]])


def test_the_struct_is_the_one_of_the_library() -> None:
    library = load_pull()
    if library is None:
        pytest.skip("no C compiler (cc) on the path")
    assert ctypes.sizeof(PullStruct) == library.struct_bytes
