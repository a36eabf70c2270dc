"""The data plane of one device: compile operations to few copies and fused kernels, and queue them on a stream.

    launch = copier.compile(ops)      tables in device memory, once
    copier.enqueue(launch, stream)    a kernel for each dtype class, a copy for each long piece; returns at once
    copier.run(launch)                the same on the copier's own stream, and waits

Both ends of an operation may be device memory or pinned host memory. Other host memory goes through a pinned buffer
(device_bounce.py); only ``run`` does that, because the CPU has to work in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from etha.cuda.driver import DeviceError, Driver
from etha.cuda.kernels import Fused, Kernels
from etha.cuda.select import choose_kernels
from etha.transport.copy.device_bounce import BYTES, Bounce
from etha.transport.copy.device_memory import DeviceMemory, PinnedMemory, reaching
from etha.transport.copy.device_table import Kind, Tables, build
from etha.transport.geometry.boxes import Ints
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Tile

_ALIGN = 256
#: Smallest scratch memory of a copier, in bytes.
SCRATCH = 64 << 10
#: Queries of an event, of 7 us each, before a thread sleeps until it is reached.
_QUERIES = 8
#: Smallest memory, in bytes, for tables that are not kept.
_SMALL = 1 << 20


class Launch:
    """Compiled operations. Any copier of the device may queue them at any time, any number of times.

    The memory at both ends must stay where it is. The launch's table in device memory is freed with it, or by
    ``release``.
    """

    def __init__(
        self,
        copies: Sequence[tuple[int, int, int]],
        fused: Sequence[Fused],
        memory: DeviceMemory | None,
        bounced: Sequence[Op],
        nbytes: int,
    ) -> None:
        self.copies, self.fused, self.bounced = tuple(copies), tuple(fused), tuple(bounced)
        #: Payload in bytes, as the tiles count it.
        self.nbytes = nbytes
        self._memory = memory

    @property
    def table_nbytes(self) -> int:
        """Bytes of device memory that it holds."""
        return 0 if self._memory is None else self._memory.nbytes

    def release(self) -> None:
        """Release the table, which is freed once the device is done. Idempotent. Do not queue the launch again."""
        if self._memory is not None:
            self._memory.release()


class Copier:
    """One thread's stream on one device, and its scratch memory there. Threads must not share it.

    Every method raises CardError if the device fails. Queued work is then half done, but nothing touches memory any
    more once ``run``, ``run_ops`` or ``finish`` has returned or raised.
    """

    def __init__(self, driver: Driver, uuid: str, *, kernels: Kernels | None = None, bounce: int = BYTES) -> None:
        """``bounce``: bytes of the pinned buffer for plain host memory, which is allocated when first needed."""
        self.driver, self.uuid = driver, uuid
        with reaching(uuid):
            self._kernels = choose_kernels(driver, uuid) if kernels is None else kernels
            self.stream = driver.stream(uuid)
            self._event = driver.event(uuid)
        self._upload: PinnedMemory | None = None
        self._table: DeviceMemory | None = None
        self._scratch: DeviceMemory | None = None
        self._bounce = Bounce(self, bounce)
        #: Kinds of kernels that are loaded, and of reductions for which torch has allocated memory.
        self.rehearsed: set[Kind | tuple[object, ...]] = set()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of pinned host memory that it holds."""
        return self._bounce.nbytes + (self._upload.nbytes if self._upload is not None else 0)

    def compile(self, ops: Sequence[Op]) -> Launch:
        """Compile the operations, in any order. Waits for the upload of their table."""
        return self._compile(ops, keep=True)

    def compile_tiles(self, tiles: Sequence[Tile], tile: Ints, source: Ints, target: Ints, pair: Ints) -> Launch:
        """Compile ``tiles[tile[i]]`` from address ``source[i]`` to ``target[i]``, all within the device's reach.

        ``pair[i]`` numbers the two tensors.
        """
        nbytes = np.array([t.nbytes for t in tiles], np.int64)[tile]
        return self._uploaded(build(tiles, tile, source, target, pair), (), int(nbytes.sum()), keep=True)

    def enqueue(self, launch: Launch, stream: int) -> None:
        """Queue it. The memory must stay until ``stream`` has got so far. ValueError if plain host memory is in it."""
        if launch.bounced:
            raise ValueError(f"{len(launch.bounced)} copies of plain host memory cannot be queued: use run()")
        with reaching(self.uuid):
            self._queue(launch, stream)

    def run(self, launch: Launch) -> None:
        """Run all of it on the copier's own stream, and wait."""
        try:
            with reaching(self.uuid):
                self._queue(launch, self.stream)
            if launch.bounced:
                self._bounce.run(launch.bounced)
        finally:
            self.finish()

    def run_ops(self, ops: Sequence[Op]) -> None:
        """Compile and run operations once. Their table lies in memory that the next call reuses."""
        self.run(self._compile(ops, keep=False))

    def run_tables(self, tables: Tables) -> None:
        """Run tables that are built already, once."""
        self.run(self._uploaded(tables, (), 0, keep=False))

    def provide_bounce(self) -> None:
        """Allocate the memory that plain host memory goes through. Later runs allocate more only for large tables."""
        self._bounce.provide()
        self._table_of(_SMALL)
        self._upload_of(_SMALL)

    def queue(self, work: Callable[[], None]) -> None:
        """Call ``driver.launch`` on the copier's own stream."""
        with reaching(self.uuid):
            self.driver.launch(self.uuid, self.stream, work)

    def finish(self) -> None:
        """Wait for everything queued on the copier's own stream."""
        with reaching(self.uuid):
            self.driver.record(self._event, self.stream)
            # A thread that sleeps takes some 50 us to wake up, longer than a small copy.
            if not any(self.driver.reached(self._event) for _ in range(_QUERIES)):
                self.driver.synchronize(self._event)

    def scratch(self, nbytes: int) -> DeviceMemory:
        """At least ``nbytes`` of device memory. It is the same until more is asked for, when nothing may be queued on
        it."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            if self._scratch is not None:
                self._scratch.release()
            # At least what a rehearsal takes, because growing it there would invalidate what is compiled over it.
            self._scratch = DeviceMemory(self.driver, self.uuid, _rounded(max(nbytes, SCRATCH)))
        return self._scratch

    def close(self) -> None:
        """Free everything but the Launches; memory is freed once queued work is done. Returns at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # A device that was lost has nothing to be freed.
        with suppress(DeviceError):
            self.driver.drop_event(self._event)
        with suppress(DeviceError):
            self.driver.drop_stream(self.stream)
        self._bounce.close()
        for memory in (self._upload, self._table, self._scratch):
            if memory is not None:
                memory.release()
        self._upload = self._table = self._scratch = None

    def _queue(self, launch: Launch, stream: int) -> None:
        for target, source, nbytes in launch.copies:
            self.driver.copy(target, source, nbytes, stream)
        for fused in launch.fused:
            self._kernels.launch(self.driver, self.uuid, stream, fused)

    def _compile(self, ops: Sequence[Op], *, keep: bool) -> Launch:
        views = {id(view): view for op in ops for view in op[1:3]}
        bounced: list[Op] = []
        if not all(view.reachable for view in views.values()):
            bounced = [op for op in ops if not (op.source.reachable and op.target.reachable)]
            ops = [op for op in ops if op.source.reachable and op.target.reachable]
        distinct = {id(op.tile): op.tile for op in ops}
        tiles, numbers = list(distinct.values()), {key: i for i, key in enumerate(distinct)}
        tile = np.array([numbers[id(op.tile)] for op in ops], np.int64)
        item = np.array([(t.ends.source.itemsize, t.ends.target.itemsize) for t in tiles], np.int64).reshape(-1, 2)
        source = np.array([op.source.address for op in ops], np.int64)
        source += np.array([op.source_offset for op in ops], np.int64) * item[tile, 0]
        target = np.array([op.target.address for op in ops], np.int64)
        target += np.array([op.target_offset for op in ops], np.int64) * item[tile, 1]
        pairs: dict[tuple[int, int], int] = {}
        pair = np.array([pairs.setdefault((id(op.source), id(op.target)), len(pairs)) for op in ops], np.int64)
        nbytes = np.array([t.nbytes for t in tiles], np.int64)[tile].sum() + sum(op.tile.nbytes for op in bounced)
        return self._uploaded(build(tiles, tile, source, target, pair), bounced, int(nbytes), keep=keep)

    def _uploaded(self, tables: Tables, bounced: Sequence[Op], nbytes: int, *, keep: bool) -> Launch:
        copies = [(t, s, n) for t, s, n in tables.copies.tolist()]
        parts: list[tuple[int, Ints]] = []
        size = 0
        for table in tables.tables:
            for rows in (table.rows, table.pieces):
                parts.append((size, rows))
                size = _rounded(size + rows.nbytes)
        if not parts:
            return Launch(copies, (), None, bounced, nbytes)
        memory = self._memory_for(size, keep)
        try:
            with reaching(self.uuid):
                self._send(parts, size, memory.address)
        except BaseException:
            if keep:
                memory.release()
            raise
        fused = [
            Fused(
                source=table.dtypes[0],
                target=table.dtypes[1],
                rows=table.rows,
                table=memory.address + parts[2 * i][0],
                pieces=memory.address + parts[2 * i + 1][0],
                count=len(table.pieces),
            )
            for i, table in enumerate(tables.tables)
        ]
        return Launch(copies, fused, memory if keep else None, bounced, nbytes)

    def _memory_for(self, nbytes: int, keep: bool) -> DeviceMemory:
        return DeviceMemory(self.driver, self.uuid, nbytes) if keep else self._table_of(nbytes)

    def _table_of(self, nbytes: int) -> DeviceMemory:
        if self._table is None or self._table.nbytes < nbytes:
            if self._table is not None:
                self._table.release()
            self._table = DeviceMemory(self.driver, self.uuid, max(nbytes, _SMALL))
        return self._table

    def _upload_of(self, nbytes: int) -> PinnedMemory:
        if self._upload is None or self._upload.nbytes < nbytes:
            if self._upload is not None:
                self._upload.release()
            self._upload = PinnedMemory(self.driver, self.uuid, max(nbytes, _SMALL))
        return self._upload

    def _send(self, parts: Sequence[tuple[int, Ints]], nbytes: int, address: int) -> None:
        upload = self._upload_of(nbytes)
        for at, rows in parts:
            upload.flat[at : at + rows.nbytes].view(torch.int64).copy_(torch.from_numpy(rows.reshape(-1)))
        self.driver.copy(address, upload.address, nbytes, self.stream)
        self.driver.record(self._event, self.stream)
        self.driver.synchronize(self._event)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
