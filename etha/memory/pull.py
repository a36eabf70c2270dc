"""A pull: a worker copies from other workers' memory into its own, while it waits for a transfer to end.

Its processors are idle then, and a byte is copied once, not twice as through an agent between two workers. A process
writes only its own memory in this way, so an abandoned pull touches nobody else's tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from etha.memory.casts import Cast
from etha.memory.process import IoVec, ProcessMemory, lie_inside, start_time
from etha.memory.reach import AccessError, FaultError, ReachError, WorkerGoneError

if TYPE_CHECKING:
    from etha.native.pull import PullLibrary

#: Most threads of one pull.
MAX_THREADS = 16

Ends = npt.NDArray[np.uint64]
#: Rows (address, bytes, step, count) of uint64: ``count`` runs of that many bytes, each ``step`` bytes behind the one
#: before. A step back is a large number, because addresses are counted modulo 2**64.
Rows = npt.NDArray[np.uint64]
#: Most runs of a table that are looked at one by one.
_MAX_RUNS = 1 << 24


def rows_of(runs: IoVec) -> Rows:
    """Runs (address, bytes) as rows: three or more of equal length at equal steps are one row."""
    n = len(runs)
    rows = np.zeros((n, 4), np.uint64)
    rows[:, :2], rows[:, 3] = runs, 1
    if n < 3:
        return rows
    step, same = runs[1:, 0] - runs[:-1, 0], runs[1:, 1] == runs[:-1, 1]
    # Steps number first[i] to last[i] - 1 are alike, and lead from run first[i] to run last[i].
    alike = same[1:] & same[:-1] & (step[1:] == step[:-1])
    first = np.flatnonzero(np.append(True, ~alike))
    last = np.append(first[1:], n - 1)
    joined = same[first] & (last - first >= 2)
    begin = (first + np.append(False, joined[:-1]))[joined]  # the row before has taken the run that they share
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, begin + 1, 1)
    np.add.at(change, last[joined] + 1, -1)
    starts = np.flatnonzero(np.cumsum(change[:n]) == 0)
    count = np.diff(np.append(starts, n))
    rows = rows[starts]
    rows[:, 2] = np.where(count > 1, np.append(step, np.uint64(0))[starts], np.uint64(0))
    rows[:, 3] = count
    return rows


def runs_of(rows: Rows) -> IoVec:
    """The runs (address, bytes) of rows."""
    count = rows[:, 3].astype(np.int64)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    runs = np.repeat(rows, count, axis=0)
    return np.stack([runs[:, 0] + runs[:, 2] * number.astype(np.uint64), runs[:, 1]], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullTable:
    """What is copied, cut into chunks of Rows; those of ``local`` are here, those of ``remote`` in another process.

    Chunk ``i`` has the rows up to number ``local_ends[i]`` and ``remote_ends[i]``, of equally many elements, from
    process number ``process[i]`` of ``processes``, each (pid, start time in clock ticks). ``casts[i]`` is its Cast:
    elements of Cast.NONE are bytes.
    """

    processes: tuple[tuple[int, int], ...]
    process: npt.NDArray[np.int32]
    local: Rows
    remote: Rows
    local_ends: Ends
    remote_ends: Ends
    casts: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        chunks = len(self.process)
        if not chunks or {len(self.local_ends), len(self.remote_ends), len(self.casts)} != {chunks}:
            raise ValueError(
                f"{chunks} chunks of processes, {len(self.local_ends)} and {len(self.remote_ends)} of rows, "
                f"{len(self.casts)} casts: a pull has at least one chunk, and as many of each"
            )
        if int(self.process.min()) < 0 or int(self.process.max()) >= len(self.processes):
            raise ValueError(f"a chunk is of process number {int(self.process.max())}, there are {len(self.processes)}")
        here, there = _sums(self.local, self.local_ends), _sums(self.remote, self.remote_ends)
        sizes = np.array([Cast(cast).sizes for cast in self.casts.tolist()], np.uint64)
        if (here % sizes[:, 1]).any() or not np.array_equal(here // sizes[:, 1] * sizes[:, 0], there):
            raise ValueError(f"the chunks have {here.sum()} bytes here and {there.sum()} there, as other elements")

    @property
    def nbytes(self) -> int:
        """Bytes that it copies; those of the narrower dtype where it casts."""
        here, there = _sums(self.local, self.local_ends), _sums(self.remote, self.remote_ends)
        return int(np.minimum(here, there).sum())

    def to_blobs(self) -> tuple[bytes, ...]:
        """The arrays, in the order of ``from_blobs``."""
        arrays = (self.process, self.local, self.remote, self.local_ends, self.remote_ends, self.casts)
        return tuple(np.ascontiguousarray(array).tobytes() for array in arrays)

    @classmethod
    def from_blobs(cls, processes: Iterable[tuple[int, int]], blobs: Iterable[bytes]) -> PullTable:
        """The table of ``to_blobs``; ValueError if it is none."""
        process, local, remote, local_ends, remote_ends, casts = blobs
        return cls(
            processes=tuple(processes),
            process=np.frombuffer(process, np.int32),
            local=np.frombuffer(local, np.uint64).reshape(-1, 4),
            remote=np.frombuffer(remote, np.uint64).reshape(-1, 4),
            local_ends=np.frombuffer(local_ends, np.uint64),
            remote_ends=np.frombuffer(remote_ends, np.uint64),
            casts=np.frombuffer(casts, np.int32),
        )

    def check_inside(self, spans: npt.NDArray[np.uint64]) -> None:
        """ReachError unless every local run lies inside one of ``spans``, which are (address, bytes).

        The kernel would write wherever a row points.
        """
        address, nbytes, step, count = self.local.T
        back = step >> np.uint64(63) == 1
        length = np.where(back, np.uint64(0) - step, step) * (count - np.uint64(1))
        whole = np.stack([np.where(back, address - length, address), length + nbytes], axis=1)
        if lie_inside(whole, spans):
            return
        # A row may go on from one tensor to the next, past what lies between.
        if int(count.sum()) > _MAX_RUNS or not lie_inside(runs_of(self.local), spans):
            raise ReachError(
                "the agent asks this worker to write outside of its registered tensors, so nothing was copied: this is "
                "a fault in Etha, please report it"
            )


def _sums(rows: Rows, ends: Ends) -> npt.NDArray[np.uint64]:
    """Bytes of each chunk. ValueError for rows that no memory could have, and for ends that do not ascend to the last
    row."""
    signed = rows.astype(np.float64)
    signed[:, 2] = rows[:, 2].astype(np.int64)
    if (rows[:, 3] == 0).any() or (np.abs(signed[:, 1:3]) * signed[:, 3:]).sum() >= 2.0**62:
        raise ValueError("the rows of a pull have no runs, or more bytes than there are addresses")
    if not len(rows) or int(ends[-1]) != len(rows) or (ends[1:] <= ends[:-1]).any() or not int(ends[0]):
        raise ValueError(f"the ends of chunks do not ascend to their {len(rows)} rows")
    begin = np.concatenate([np.zeros(1, np.uint64), ends[:-1]]).astype(np.int64)
    return np.add.reduceat(rows[:, 1] * rows[:, 3], begin)


def load_pull() -> PullLibrary | None:
    """The compiled library; None where Python has to copy."""
    from etha.native import pull  # here, because most workers and agents never pull

    return pull.load_pull()


class PullRun:
    """One run of a table on ``threads`` threads: ``start``, then ``finish`` when it is ``over`` or sooner.

    ``end_fd`` becomes readable when nothing is being copied any more. No thread of it takes the interpreter's lock,
    unless there is no compiled library.
    """

    end_fd = -1

    def __init__(self, table: PullTable, threads: int) -> None:
        from etha.native.pull import PullStruct

        self._table, self._threads = table, max(1, min(threads, MAX_THREADS))
        self._struct = PullStruct(threads=self._threads)
        self._memories: list[ProcessMemory] = []
        self._pids: npt.NDArray[np.int32] | None = None
        self._python: threading.Thread | None = None
        self._failed: Exception | None = None

    @property
    def done(self) -> int:
        """Bytes that have been copied."""
        return int(self._struct.done)

    @property
    def over(self) -> bool:
        """Whether nothing is being copied any more."""
        return bool(self._struct.running == 0)

    def stop(self) -> None:
        """End after the chunks that are being copied. Idempotent, from any thread."""
        self._struct.stop = 1

    def start(self) -> None:
        """Begin. AccessError, before anything is copied, if a process cannot be found under its number here."""
        table, struct = self._table, self._struct
        self._memories = _open(table.processes)
        self.end_fd = struct.ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pids = np.array([memory.pid for memory in self._memories], np.int32)[table.process]
        struct.local, struct.remote = table.local.ctypes.data, table.remote.ctypes.data
        struct.local_ends, struct.remote_ends = table.local_ends.ctypes.data, table.remote_ends.ctypes.data
        struct.pids, struct.casts, struct.chunks = self._pids.ctypes.data, table.casts.ctypes.data, len(table.process)
        library = load_pull()
        if library is None or not library.start(struct):
            struct.running = 1
            python = threading.Thread(target=self._copy_all, name="etha-pull", daemon=True)
            try:
                python.start()
            except RuntimeError:
                struct.running = 0
                raise
            self._python = python

    def finish(self) -> None:
        """Wait until it is over. Raises the ReachError of the first copy that failed. It must follow a ``start``, even
        one that was interrupted or has failed."""
        struct, library = self._struct, load_pull()
        if self._python is not None:
            self._python.join()
        elif library is not None:
            library.join(struct)
        try:
            if self._failed is not None:
                raise self._found(self._failed) if isinstance(self._failed, ReachError) else self._failed
            if struct.error and struct.pid == os.getpid():
                text = f"this worker's own memory at {struct.address:#x} cannot be written: was it freed, or protected?"
                fault = FaultError(text, pid=struct.pid)
                fault.address = int(struct.address)
                raise self._found(fault)
            if struct.error:
                memory = next(memory for memory in self._memories if memory.pid == struct.pid)
                raise self._found(memory.error(struct.error, struct.address))
            # A number is given again only after its process has ended, and a process that lives still has not.
            if dead := [memory.pid for memory in self._memories if not memory.alive()]:
                raise self._found(WorkerGoneError(f"worker process {dead[0]} has died", pid=dead[0]))
        finally:
            for memory in self._memories:
                memory.close()
            if self.end_fd >= 0:
                os.close(self.end_fd)
            self._memories, self.end_fd = [], -1

    def _copy_all(self) -> None:
        try:
            self._run_python(self._memories)
        except Exception as error:
            self._failed = error
        self._struct.running = 0
        os.eventfd_write(self.end_fd, 1)

    def _run_python(self, memories: list[ProcessMemory]) -> None:
        """The same without the compiled library, with the interpreter's lock between two chunks."""
        failed: list[ReachError] = []
        lock = threading.Lock()

        def work() -> None:
            while not self._struct.stop:
                with lock:
                    chunk = self._struct.next
                    self._struct.next += 1
                if chunk >= len(self._table.process):
                    return
                try:
                    moved = self._copy(memories, chunk)
                except ReachError as error:
                    failed.append(error)
                    return self.stop()
                with lock:
                    self._struct.done += moved

        others = [threading.Thread(target=work, name="etha-pull", daemon=True) for _ in range(self._threads - 1)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
        if failed:
            raise failed[0]

    def _copy(self, memories: list[ProcessMemory], chunk: int) -> int:
        table = self._table
        local, remote = (
            runs_of(rows[int(ends[chunk - 1]) if chunk else 0 : int(ends[chunk])])
            for rows, ends in ((table.local, table.local_ends), (table.remote, table.remote_ends))
        )
        memory, cast = memories[int(table.process[chunk])], Cast(int(table.casts[chunk]))
        return memory.read(local, remote) if cast is Cast.NONE else _cast(memory, cast, local, remote)

    def _found(self, error: ReachError) -> ReachError:
        error.moved = self.done
        return error


def _cast(memory: ProcessMemory, cast: Cast, local: IoVec, remote: IoVec) -> int:
    """Read elements, change their dtype and write them; returns the bytes of the narrower dtype."""
    import torch  # here, because most processes that load this file never cast

    source, target = (getattr(torch, name.lower()) for name in cast.name.split("_"))
    there, here = cast.sizes
    count = int(remote[:, 1].sum()) // there
    read = np.empty(count * there, np.uint8)
    memory.read(np.array([(read.ctypes.data, read.nbytes)], np.uint64), remote)
    made = torch.from_numpy(read).view(source).to(target).contiguous()
    own = ProcessMemory(os.getpid(), start_time(os.getpid()))
    try:  # by the kernel, because memory that was unmapped must be an error and not a signal
        own.read(local, np.array([(made.data_ptr(), count * here)], np.uint64))
    finally:
        own.close()
    return count * min(here, there)


def _open(processes: Iterable[tuple[int, int]]) -> list[ProcessMemory]:
    """The processes, held by descriptors so that no number is given again unnoticed."""
    memories: list[ProcessMemory] = []
    try:
        for pid, started in processes:
            memories.append(ProcessMemory(pid, started))
    except WorkerGoneError as error:
        for memory in memories:
            memory.close()
        # The agent knows who is dead; what it says lives and is not here has another number here.
        raise AccessError(f"from process {os.getpid()}: {error}", pid=error.pid) from None
    except BaseException:
        for memory in memories:
            memory.close()
        raise
    return memories
