"""FakeNccl: NCCL among the agents of one process, over the streams of their FakeDrivers, stricter than the real one.

What the real one forbids, or leaves undefined, raises Broken and is kept for ``check()``. What a correct program has to
cope with (a rank that never comes, a peer that died, an error that shows up later) is played: nobody is told of a dead
peer, its ranks just hang. A kernel of a group blocks its stream until all of its messages have gone.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from etha.cuda.nccl import ID_BYTES, IN_PROGRESS, OK, NcclError
from tests.fakes.cuda import Broken, FakeDriver

#: Operations of one group above which this NCCL gives up.
MOST = 256


@dataclass(eq=False)
class _Op:
    address: int
    nbytes: int
    active: bool = False
    departed: bool = False


@dataclass(eq=False)
class _Group:
    ops: list[_Op]
    stream: int
    peers: set[int]
    #: Peers with which there has to be a connection first; they make it in a group of their own.
    waits: set[int]
    queued: int = 0


@dataclass(eq=False)
class _Rank:
    clique: _Clique
    rank: int
    nccl: FakeNccl
    aborted: bool = False
    freed: bool = False
    finalized: bool = False
    error: str = ""
    reported: bool = False
    polls: int = 0
    queued: _Group | None = None
    connected: set[int] = field(default_factory=set)
    offered: set[int] = field(default_factory=set)
    open: list[_Group] = field(default_factory=list)


@dataclass(eq=False)
class _Clique:
    nranks: int
    maker: FakeNccl
    ranks: dict[int, _Rank] = field(default_factory=dict)
    #: By (sender, receiver), in the order in which they were issued.
    sends: dict[tuple[int, int], list[_Op]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[tuple[int, int], list[_Op]] = field(default_factory=lambda: defaultdict(list))
    met: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.nranks


class World:
    """The network between the fakes of one test."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failures: list[str] = []
        self.cliques: dict[bytes, _Clique] = {}
        self.makers: dict[bytes, FakeNccl] = {}
        self.members: dict[str, FakeNccl] = {}
        self.closed = False
        self.numbers = itertools.count(0x1000)
        #: Groups whose kernels have begun, and bytes that went.
        self.groups = self.moved = 0
        #: How often ``state`` says that a group is not queued yet, once it could be.
        self.hesitation = 1

    def join(self, name: str, driver: FakeDriver) -> FakeNccl:
        """The NCCL of one agent."""
        self.members[name] = made = FakeNccl(self, name, driver)
        return made

    def kill(self, name: str) -> None:
        """Its process is gone: what it has queued stands still, and nobody is told."""
        with self.changed:
            self.members[name].dead = True

    def fail(self, name: str, text: str) -> None:
        """All its communicators have an error from now on, and what is queued stands still."""
        with self.changed:
            for clique in self.cliques.values():
                for rank in clique.ranks.values():
                    if rank.nccl.name == name:
                        rank.error = text
            self.changed.notify_all()

    def broken(self, text: str) -> Broken:
        self.failures.append(text)
        return Broken(text)

    def close(self) -> None:
        """Let kernels that hang return, so that streams can end."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def check(self) -> None:
        """The end of a test: AssertionError for broken contracts and for what was not given back."""
        found = list(self.failures)
        for clique in self.cliques.values():
            for rank in clique.ranks.values():
                if not rank.freed and not rank.nccl.dead:
                    found.append(f"rank {rank.rank} of {clique.nranks} ({rank.nccl.name}) was not destroyed or aborted")
            ends = [r.aborted for r in clique.ranks.values()]
            for table in (clique.sends, clique.receives):
                for pair, ops in table.items():
                    if not any(ends) and not all(op.departed for op in ops):
                        found.append(f"messages of {pair} never went")
        self.close()
        assert not found, "\n".join(found)


class FakeNccl:
    """An ``etha.cuda.nccl.Nccl`` of one agent."""

    def __init__(self, world: World, name: str, driver: FakeDriver) -> None:
        self.world, self.name, self.driver = world, name, driver
        self.dead = False
        self.aborts = 0
        self._inside = threading.Lock()
        self._thread: int | None = None
        self._ranks: dict[int, _Rank] = {}
        self._group: list[tuple[bool, int, int, int, int, int]] | None = None

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        if not self._inside.acquire(blocking=False):
            raise self.world.broken(f"{self.name}: {what} while another thread is inside NCCL")
        try:
            if self._thread not in (None, threading.get_ident()):
                raise self.world.broken(f"{self.name}: {what} from a second thread")
            self._thread = threading.get_ident()
            yield
        finally:
            self._inside.release()

    def _rank(self, comm: int, what: str) -> _Rank:
        rank = self._ranks.get(comm)
        if rank is None:
            raise self.world.broken(f"{self.name}: {what} of a communicator that never was")
        if rank.freed:
            raise self.world.broken(f"{self.name}: {what} of a communicator that is freed")
        return rank

    def version(self) -> str:
        return "0.0.0"

    def unique_id(self) -> bytes:
        with self._call("unique_id"):
            made = os.urandom(ID_BYTES)
            self.world.makers[made] = self
            return made

    def init(self, ordinal: int, nranks: int, rank: int, unique_id: bytes) -> int:
        with self._call("init"), self.world.changed:
            if ordinal not in {device.ordinal for device in self.driver.devices()}:
                raise NcclError(f"no device {ordinal}")
            maker = self.world.makers.get(unique_id)
            if maker is None:
                raise self.world.broken(f"{self.name}: nobody made this id")
            clique = self.world.cliques.setdefault(unique_id, _Clique(nranks, maker))
            if clique.nranks != nranks or rank in clique.ranks or not 0 <= rank < nranks or clique.complete:
                raise self.world.broken(f"{self.name}: rank {rank} of {nranks}: the id is used already, or otherwise")
            handle = next(self.world.numbers)
            clique.ranks[rank] = self._ranks[handle] = _Rank(clique, rank, self)
            return handle

    def state(self, comm: int) -> str:
        with self._call("state"), self.world.changed:
            rank = self._rank(comm, "state")
            rank.reported = rank.reported or bool(rank.error)
            return rank.error or (OK if self._settle(rank) else IN_PROGRESS)

    def _settle(self, rank: _Rank) -> bool:
        clique = rank.clique
        if not clique.complete or (clique.maker.dead and not rank.connected):
            return False
        if rank.finalized and not all(r.finalized for r in clique.ranks.values()):
            return False
        if rank.finalized and rank.open:
            return False
        group = rank.queued
        if group is not None:
            # Both ends of a new connection make it in their groups; nothing of either is queued before.
            if any(rank.rank not in clique.ranks[p].offered or clique.ranks[p].nccl.dead for p in group.waits):
                return False
            if rank.polls > 0:
                rank.polls -= 1
                return False
            if group.queued != self._device_calls():
                raise self.world.broken(f"{self.name}: something was queued on the device before the group was")
            rank.connected |= group.waits
            rank.queued = None
            rank.open.append(group)
            uuid = self.driver.devices()[0].uuid
            self.driver.launch(uuid, group.stream, lambda: self._kernel(rank, group))
        return True

    def _device_calls(self) -> int:
        return sum(self.driver.calls[name] for name in ("record", "wait", "launch", "copy"))

    def _usable(self, comm: int, what: str) -> _Rank:
        rank = self._rank(comm, what)
        if rank.reported:
            raise self.world.broken(f"{self.name}: {what} after {rank.error}")
        if rank.error:
            raise NcclError(f"{what}: {rank.error}")
        if rank.finalized:
            raise self.world.broken(f"{self.name}: {what} after finalize")
        if not rank.clique.complete or rank.queued is not None:
            raise self.world.broken(f"{self.name}: {what} while the communicator is in progress")
        return rank

    def group_start(self) -> None:
        with self._call("group_start"):
            if self._group is not None:
                raise self.world.broken(f"{self.name}: a group in a group")
            self._group = []

    def send(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._collect(True, comm, address, nbytes, peer, stream)

    def receive(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._collect(False, comm, address, nbytes, peer, stream)

    def _collect(self, sends: bool, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        with self._call("send" if sends else "receive"), self.world.changed:
            rank = self._usable(comm, "send" if sends else "receive")
            if self._group is None:
                raise self.world.broken(f"{self.name}: a message outside of a group blocks its stream")
            if not 0 <= peer < rank.clique.nranks or peer == rank.rank or nbytes <= 0:
                raise self.world.broken(f"{self.name}: {nbytes} bytes with rank {peer}")
            self.driver.tensor(self.driver.devices()[0].uuid, address, nbytes)  # is it there?
            self._group.append((sends, comm, address, nbytes, peer, stream))

    def group_end(self, comm: int) -> None:
        with self._call("group_end"), self.world.changed:
            found, self._group = self._group, None
            rank = self._usable(comm, "group_end")
            if not found or {op[1] for op in found} != {comm} or len({op[5] for op in found}) != 1:
                raise self.world.broken(f"{self.name}: a group of nothing, or of several communicators or streams")
            if len(found) > MOST:
                raise self.world.broken(f"{self.name}: a group of {len(found)} operations")
            ops = []
            for sends, _, address, nbytes, peer, _ in found:
                op = _Op(address, nbytes)
                pair = (rank.rank, peer) if sends else (peer, rank.rank)
                (rank.clique.sends if sends else rank.clique.receives)[pair].append(op)
                ops.append(op)
            peers = {op[4] for op in found}
            rank.offered |= peers
            rank.polls = self.world.hesitation
            rank.queued = _Group(ops, found[0][5], peers, peers - rank.connected, self._device_calls())
            self.world.changed.notify_all()

    def _kernel(self, rank: _Rank, group: _Group) -> None:
        """Runs on the stream's thread: blocks it until all messages have gone."""
        world, clique = self.world, rank.clique
        with world.changed:
            world.groups += 1
            for op in group.ops:
                op.active = True
            world.changed.notify_all()
            while not all(op.departed for op in group.ops):
                if rank.aborted or world.closed:
                    rank.open.remove(group)
                    return
                if not self.dead and not rank.error:
                    for peer in group.peers:
                        if not clique.ranks[peer].nccl.dead:
                            self._meet(clique, (rank.rank, peer))
                            self._meet(clique, (peer, rank.rank))
                if not all(op.departed for op in group.ops):
                    world.changed.wait()
            rank.open.remove(group)

    def _meet(self, clique: _Clique, pair: tuple[int, int]) -> None:
        sends, receives = clique.sends[pair], clique.receives[pair]
        if any(clique.ranks[end].aborted or clique.ranks[end].error for end in pair):
            return
        while (n := clique.met[pair]) < min(len(sends), len(receives)) and sends[n].active and receives[n].active:
            sent, got = sends[n], receives[n]
            if sent.nbytes != got.nbytes:
                self.world.broken(f"message {n} of {pair}: {sent.nbytes} bytes sent, {got.nbytes} received")
                return
            ctypes.memmove(got.address, sent.address, got.nbytes)
            self.world.moved += got.nbytes
            sent.departed = got.departed = True
            clique.met[pair] += 1
            self.world.changed.notify_all()

    def abort(self, comm: int) -> None:
        with self._call("abort"), self.world.changed:
            rank = self._rank(comm, "abort")
            rank.aborted = rank.freed = True
            rank.queued = None
            self._group = None
            self.aborts += 1
            self.world.changed.notify_all()

    def finalize(self, comm: int) -> None:
        with self._call("finalize"), self.world.changed:
            self._usable(comm, "finalize").finalized = True

    def destroy(self, comm: int) -> None:
        with self._call("destroy"), self.world.changed:
            rank = self._rank(comm, "destroy")
            if not rank.finalized or not self._settle(rank):
                raise self.world.broken(f"{self.name}: destroy before finalize is done")
            rank.freed = True
