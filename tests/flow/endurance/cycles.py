"""Register, transfer, close, thousands of times, and relaunches of either side: what does everybody hold in the end?

    cycle:   register (atomic | snapshot | etha.empty, then dropped | plain) -> transfer -> compare -> close -> drop
    launch:  one side leaves and comes again with new clients and tensors; the other forms the pair again and goes on

Memory is counted as the kernel counts it: resident memory, mappings, descriptors of each process, and the bytes of all
memfds that these processes have open or mapped, which is the host's shared memory as far as it is theirs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.tensor import Shard

import etha
from tests.flow.endurance.footprint import Footprint
from tests.flow.endurance.soak import THREADS, together_long
from tests.flow.jobs import Job
from tests.flow.puppets import Puppet, Stage, together
from tests.flow.sites import Site

KINDS = ("plain", "atomic", "snapshot", "empty")
SIDES = ("trainer", "inference")
#: Elements of float32: 4 KiB beside the large one.
SMALL = 1024


def enter(me: SimpleNamespace, staged: bool) -> None:
    """``init_pair``, with a new client where there is none. ``staged``: as where agents cannot reach private memory."""
    if getattr(me, "client", None) is None:
        me.client = etha.TensorBusClient(timeout=60)
    me.bond = me.client.init_pair(me.pair, me.side, me.remote, me.world, (me.world,), rank=me.rank)
    if staged:
        me.client._aio._connection.reaches = False


def _tensors(me: SimpleNamespace, kind: str, large: int, version: int) -> dict[str, torch.Tensor]:
    make = etha.empty if kind == "empty" else torch.empty
    value = version if me.side == "trainer" else -1
    return {name: make((n,)).fill_(value) for name, n in (("large", large), ("small", SMALL))}


def cycle(me: SimpleNamespace, batch: str, kind: str, large: int, version: int, close: bool = True) -> None:
    """One batch of its own from registration to end; not closed, it stays until its pair is lost."""
    tensors = _tensors(me, kind, large, version)
    handle = me.client.register_tensors(
        batch,
        tensors,
        pair_name=me.pair,
        placements={name: [Shard(0)] for name in tensors},
        atomic=kind == "atomic",
        direction="send" if me.side == "trainer" else "recv",
    )
    if me.side == "inference":
        handle.transfer("recv")
        # Without a temporary as large as the tensor, whose memory a process may or may not keep for the next one.
        assert all(float(t.min()) == float(t.max()) == version for t in tensors.values()), f"{kind} {version}"
    elif kind == "snapshot":
        future = handle.transfer("send", snapshot=True)
        tensors["large"].fill_(-2)
        future.result(60)
    else:
        handle.transfer("send")
    if close:
        handle.close()


def cycles(me: SimpleNamespace, first: int, count: int, large: int) -> None:
    """As many cycles, of one kind after the other; every eighth has a large tensor of ``large`` elements."""
    for number in range(first, first + count):
        kind = KINDS[number % len(KINDS)]
        cycle(me, f"cycle_{number}", kind, large if number % 8 < len(KINDS) else SMALL, number)


def live_on(me: SimpleNamespace, number: int, large: int) -> None:
    """A batch of every kind in this launch of the other side, none of them closed."""
    for kind in KINDS:
        cycle(me, f"launch_{kind}", kind, large, number, close=False)


def leave(me: SimpleNamespace) -> None:
    me.client.close()
    me.client = me.bond = None


def lose(me: SimpleNamespace) -> None:
    assert me.bond.lost.wait(30), "pair.lost has not been told"


def settle(me: SimpleNamespace) -> int:
    """What was asked of the agent before this is done; its pid."""
    pid: int = me.client.status()["agent"]["pid"]
    return pid


def shared_bytes(pids: list[int]) -> int:
    """Bytes of all memfds that these processes have open or mapped, each counted once."""
    sizes: dict[str, int] = {}
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(entry.readlink()).startswith("/memfd:etha"):
                    info = entry.stat()
                    sizes[str(info.st_ino)] = info.st_size
            except FileNotFoundError:  # closed while we looked
                continue
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, _, offset, _, inode, *name = line.split()
            if name and name[0].startswith("/memfd:etha"):
                first, last = (int(x, 16) for x in span.split("-"))
                sizes[inode] = max(sizes.get(inode, 0), int(offset, 16) + last - first)
    return sum(sizes.values())


@dataclass
class Holding:
    """What a process held when it was first measured and when it was last."""

    name: str
    first: Footprint
    last: Footprint


@dataclass
class Cycles:
    """One rank a side. ``large``: elements of the large tensors."""

    site: Site
    job: Job
    pair: str
    large: int
    staged: bool = False
    held: dict[int, Holding] = field(default_factory=dict)
    shared: list[int] = field(default_factory=list)
    done: int = 0
    relaunches: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """Both sides meet."""
        self.stage = Stage(self.job, self.pair)
        self.puppets = {side: self.stage.puppet(side, 0, 1) for side in SIDES}
        together(self.all(), enter, self.staged)

    def all(self) -> list[Puppet]:
        return list(self.puppets.values())

    def run(self, count: int) -> None:
        """So many cycles; then everybody is measured."""
        together_long(self.all(), cycles, self.done, count, self.large)
        self.done += count
        self.measure()

    def relaunch(self, side: str, *, process: bool) -> None:
        """``side`` comes again, by a new ``process`` or a new client, while its old batches are open on the other."""
        other = next(one for one in SIDES if one != side)
        together(self.all(), live_on, sum(self.relaunches.values()), self.large)
        self.puppets[side].do(leave)
        if process:
            self.puppets[side].leave()
            self.job.workers.remove(self.puppets[side].worker)
            self.puppets[side].worker.end()
            self.held.pop(self.puppets[side].pid, None)
            self.puppets[side] = self.stage.puppet(side, 0, 1)
        self.puppets[other].do(lose)
        together(self.all(), enter, self.staged)
        self.relaunches[side] += 1

    def measure(self) -> None:
        agents = set(together(self.all(), settle))
        named = {puppet.pid: side for side, puppet in self.puppets.items()} | dict.fromkeys(agents, "agent")
        for pid, name in named.items():
            now = Footprint.of(pid)
            self.held.setdefault(pid, Holding(name, now, now)).last = now
        self.shared.append(shared_bytes(list(named)))

    def grown(self, tolerance: float, *, memory: bool = True) -> list[str]:
        """What differs by more than that share from what it was at the first measure."""
        found = []
        for holding in self.held.values():
            # An agent's pools of threads and of connections to Redis fill up when calls happen to meet.
            pools = {"sockets": 8, "threads": THREADS} if holding.name == "agent" else {}
            for name, before in holding.first.all().items():
                after = holding.last.all()[name]
                measured = name != "private" and (memory or name != "rss")
                if measured and after - before > tolerance * before + pools.get(name, 0):
                    found.append(f"{holding.name} {name}: {before} -> {after}")
        if self.shared[-1] - self.shared[0] > tolerance * self.shared[0]:
            found.append(f"shared memory: {self.shared[0]} -> {self.shared[-1]}")
        return found

    def report(self) -> str:
        """A line a process: each measure at first and at the end."""
        lines = [f"{self.done} cycles, relaunches {dict(self.relaunches)}, large tensors of {4 * self.large} B"]
        for holding in self.held.values():
            last = holding.last.all()
            cells = (f"{name} {before} -> {last[name]}" for name, before in holding.first.all().items())
            lines.append(f"{holding.name:<10} " + ", ".join(cells))
        lines.append(f"shared memory of all {self.shared[0]} -> {self.shared[-1]} B")
        return "\n".join(lines)
