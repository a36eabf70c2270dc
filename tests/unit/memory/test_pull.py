"""Copies out of other processes: exact for any tables, compiled and in Python; stopped, refused, or failed midway."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etha.memory import pull
from etha.memory.casts import Cast
from etha.memory.process import ProcessMemory, start_time
from etha.memory.pull import PullRun, PullTable, rows_of, runs_of
from etha.memory.reach import AccessError, FaultError, ReachError, WorkerGoneError
from etha.native.pull import PullStruct, load_pull
from tests.processes import CONTEXT, preload

preload("numpy")

NBYTES = 8 << 20


def _known(first: bytes) -> npt.NDArray[np.uint8]:
    memory = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)
    memory[: len(first)] = np.frombuffer(first, np.uint8)
    return memory


def _hold(pipe: Connection, first: bytes) -> None:
    memory = _known(first)
    pipe.send((os.getpid(), memory.ctypes.data))
    pipe.recv()


class Other:
    """Another process, whose memory holds known bytes, of which the first may be given."""

    def __init__(self, first: bytes = b"") -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_hold, args=(theirs, first), daemon=True)
        self._process.start()
        self.pid, self.address = self._pipe.recv()
        self.started = start_time(self.pid)
        self.bytes = _known(first)

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
    return made_of([(one.pid, one.started) for one in others], process, (local, local_ends), (remote, remote_ends))


Runs = tuple[list[tuple[int, int]], list[int]]


def made_of(
    processes: list[tuple[int, int]], process: list[int], local: Runs, remote: Runs, cast: Cast = Cast.NONE
) -> PullTable:
    """A table of runs (address, bytes), each with the ends of its chunks."""
    rows, ends = [], []
    for runs, stops in (local, remote):
        parts = [rows_of(np.array(runs[i:j], np.uint64)) for i, j in itertools.pairwise([0, *stops])]
        rows.append(np.concatenate(parts))
        ends.append(np.cumsum([len(part) for part in parts]).astype(np.uint64))
    return PullTable(
        processes=tuple(processes), process=np.array(process, np.int32), local=rows[0], remote=rows[1],
        local_ends=ends[0], remote_ends=ends[1], casts=np.full(len(process), cast, np.int32),
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 63), st.integers(1, 3), st.integers(-40, 40), st.integers(1, 5)), max_size=12
    )
)
def test_rows_are_the_runs_of_which_they_were_made(parts: list[tuple[int, int, int, int]]) -> None:
    runs = [((at + i * step) % (1 << 64), nbytes) for at, nbytes, step, count in parts for i in range(count)]
    table = np.array(runs, np.uint64).reshape(-1, 2)
    rows = rows_of(table)
    assert np.array_equal(runs_of(rows), table)
    assert len(rows) <= sum(1 if count > 3 else count for *_, count in parts)


def test_a_matrix_is_one_row() -> None:
    for step in (4096, -4096):
        runs = np.array([((1 << 40) + i * step, 2048) for i in range(1000)], np.uint64)
        assert rows_of(runs).tolist() == [[1 << 40, 2048, step % (1 << 64), 1000]]


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


@pytest.mark.parametrize("seed", range(6))
def test_runs_with_any_gaps_between_them_arrive_without_the_gaps(way: str, other: Other, seed: int) -> None:
    """Rows of one step and others, forwards and back, over gaps that are read with the runs and gaps that are not."""
    random_ = random.Random(seed)
    target, truth = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    local, remote, local_ends, remote_ends, at = [], [], [], [], 0
    for _ in range(30):
        for _ in range(random_.randrange(1, 4)):
            nbytes, count = random_.choice([1, 7, 512, 2000]), random_.choice([1, 2, 3, 700])
            gap = random_.choice([0, 1, 2048, 4096, 4097, 6000])
            count = min(count, NBYTES // (nbytes + gap) - 1)
            there = random_.randrange(NBYTES - count * (nbytes + gap))
            order = range(count) if random_.random() < 0.7 else range(count - 1, -1, -1)
            for i in order:
                source = there + i * (nbytes + gap)
                remote.append((other.address + source, nbytes))
                truth[at : at + nbytes] = other.bytes[source : source + nbytes]
                local.append((target.ctypes.data + at, nbytes))
                at += nbytes + random_.choice([0, 0, 3]) * (nbytes < 2000)
        local_ends.append(len(local))
        remote_ends.append(len(remote))
        if at > NBYTES - 3 * 700 * 2003:
            break
    whose, chunks = [(other.pid, other.started)], [0] * len(local_ends)
    made = made_of(whose, chunks, (local, local_ends), (remote, remote_ends))
    made = PullTable.from_blobs(made.processes, made.to_blobs())
    assert len(made.remote) < len(remote) or len(remote) < 100
    run = PullRun(made, threads=2)
    carry_out(run)
    assert run.done == made.nbytes == sum(nbytes for _, nbytes in local)
    assert np.array_equal(target, truth)


def _hold_a_hole(pipe: Connection) -> None:
    """Pages of the bytes 1, 2 and so on; nobody may read the second and the fourth."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 5 * page)
    memory.write(b"".join(bytes([i + 1]) * page for i in range(5)))
    address = ctypes.addressof((ctypes.c_char * (5 * page)).from_buffer(memory))
    for hidden in (1, 3):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + hidden * page), ctypes.c_size_t(page), 0) == 0
    pipe.send((os.getpid(), address))
    pipe.recv()


def test_a_gap_that_cannot_be_read_is_no_fault_and_a_run_is(way: str) -> None:
    page, (pipe, theirs) = mmap.PAGESIZE, CONTEXT.Pipe()
    process = CONTEXT.Process(target=_hold_a_hole, args=(theirs,), daemon=True)
    process.start()
    try:
        pid, address = pipe.recv()
        whose, target = [(pid, start_time(pid))], np.zeros(5 * page, np.uint8)
        local = [(target.ctypes.data, 5 * page)]
        runs = [(address + i * page + (page - 100 if i == 0 else 0), 100) for i in (0, 2, 4)]
        made = made_of(whose, [0], ([(local[0][0], 300)], [1]), (runs, [3]))
        run = PullRun(made, threads=1)
        carry_out(run)
        assert run.done == 300
        assert target[:301].tolist() == [1] * 100 + [3] * 100 + [5] * 100 + [0]

        runs[2:] = [(address + 3 * page - 50, 100)]
        run = PullRun(made_of(whose, [0], ([(local[0][0], 300)], [1]), (runs, [3])), threads=1)
        with pytest.raises(FaultError, match=f"no memory at {address + 3 * page:#x}") as caught:
            carry_out(run)
        assert caught.value.pid == pid
    finally:
        process.kill()
        process.join()


CASTS = [cast for cast in Cast if cast is not Cast.NONE]


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.name)
def test_a_cast_is_that_of_torch_for_every_kind_of_number(way: str, cast: Cast) -> None:
    """All bit patterns of 16 bits, or floats of all magnitudes, in rows that are cut differently at both ends."""
    source, target = (getattr(torch, name.lower()) for name in cast.name.split("_"))
    there, here = cast.sizes
    if there == 2:
        first = np.arange(1 << 16, dtype=np.uint16).tobytes()
    else:
        special = [0x7F800000, 0xFF800000, 0x7FC00000, 0x80000000, 1, 0x807FFFFF, 0x3F808000, 0x3F818000, 0x477FEFFF]
        first = np.array(special, np.uint32).tobytes()
    random_, other = random.Random(cast), Other(first)
    try:
        values = torch.from_numpy(other.bytes).view(source)
        expected = values.to(target)
        held = torch.full((values.numel(),), -7.0, dtype=target)
        rows, begin, address = [], 0, held.data_ptr()
        while begin < values.numel() - 70_000:  # in chunks of two rows there and three here
            count = random_.randrange(6, 70_000)
            rows.append((begin, count))
            begin += count + random_.randrange(0, 3)
        local, remote, local_ends, remote_ends = [], [], [], []
        for first, count in rows:
            cuts = sorted(random_.sample(range(1, count), 3))
            for start, stop in itertools.pairwise([0, *cuts[:2], count]):
                local.append((address + (first + start) * here, (stop - start) * here))
            for start, stop in itertools.pairwise([0, cuts[2], count]):
                remote.append((other.address + (first + start) * there, (stop - start) * there))
            local_ends.append(len(local))
            remote_ends.append(len(remote))
        whose, chunks = [(other.pid, other.started)], [0] * len(rows)
        made = made_of(whose, chunks, (local, local_ends), (remote, remote_ends), cast)
        made = PullTable.from_blobs(made.processes, made.to_blobs())
        run = PullRun(made, threads=2)
        carry_out(run)
        assert run.done == made.nbytes == 2 * sum(count for _, count in rows)
        taken = torch.zeros(values.numel(), dtype=torch.bool)
        for first, count in rows:
            taken[first : first + count] = True
        assert torch.equal(held[taken].isnan(), expected[taken].isnan())
        number = taken & ~expected.isnan()
        width = torch.int16 if here == 2 else torch.int32
        assert torch.equal(held[number].view(width), expected[number].view(width))
        assert bool((held[~taken] == -7).all())
    finally:
        other.end()


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


@pytest.mark.parametrize("cast", [Cast.NONE, Cast.BFLOAT16_FLOAT32, Cast.FLOAT32_BFLOAT16], ids=lambda cast: cast.name)
def test_memory_here_that_cannot_be_written_is_named_and_not_the_senders(other: Other, cast: Cast) -> None:
    if load_pull() is None:
        pytest.skip("no C compiler (cc) on the path")
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 2 * page) as target:
        address = ctypes.addressof((ctypes.c_char * (2 * page)).from_buffer(target))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), mmap.PROT_READ) == 0
        there, here = cast.sizes
        remote = [(other.address, 2 * page // here * there)]
        made = made_of([(other.pid, other.started)], [0], ([(address, 2 * page)], [1]), (remote, [1]), cast)
        with pytest.raises(
            FaultError, match=f"this worker's own memory at {address + page:#x} cannot be written"
        ) as caught:
            carry_out(PullRun(made, threads=1))
        assert (caught.value.pid, caught.value.address) == (os.getpid(), address + page)
        gc.collect()


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
    for row in (
        (begin, (1 << 64) - 8, 0, 1),
        (begin + 900, 100, 50, 3),
        (begin + 100, 100, (1 << 64) - 60, 3),  # its last run begins before the tensor
        (begin, 1, 0, 1 << 40),
        (begin, 1, 1 << 20, 1 << 30),
    ):
        object.__setattr__(huge, "local", np.array([row], np.uint64))
        with (
            pytest.raises(ReachError, match="outside of its registered tensors") if row[3] != 1 << 40 else nullcontext()
        ):
            huge.check_inside(np.array(inside, np.uint64))
    for row in ((begin, 100, 450, 3), (begin + 900, 100, (1 << 64) - 450, 3), (begin, 500, 1995, 2)):
        object.__setattr__(huge, "local", np.array([row], np.uint64))
        huge.check_inside(np.array(inside, np.uint64))


@pytest.mark.parametrize("part", range(6))
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
