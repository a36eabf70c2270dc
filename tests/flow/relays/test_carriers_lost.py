"""A carrier dies or stands still in the middle: all calls end with the right error, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import (
    AgentLostError,
    EthaError,
    PeerLostError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from etha.memory import shared
from etha.plan import CARRY
from etha.transport.wire.flows import CHUNK
from tests.flow.endurance.footprint import Footprint
from tests.flow.networks.test_advertise import Mapped, two_ports
from tests.flow.nursery import MESH
from tests.flow.relays.test_carrying import BF16, F32, MESHES, WAY, Case, carried, opened, planned, wanted
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, open_site
from tests.processes import send_signal
from tests.seconds import within

pytestmark = pytest.mark.timeout(240)


def more(*values: Any) -> Any:
    """Further variants, of `make test-more`."""
    return pytest.param(*values, marks=pytest.mark.more)


#: Seconds within which all have heard of a dead agent, and of one that misses three beats; five share this machine.
SOON, LATER = 2.0, 6.0
#: Seconds of a deadline that passes before an agent that stands still has missed three beats.
BEFORE = 2.5
CASES: dict[str, dict[str, Case]] = {
    # Ranks 0 and 1 hold two columns each, and rank 2 one.
    "a holder": {"columns": ((1 << 20, 5), F32, F32, Shard(0), Shard(1))},
    # All on rank 0, for which ranks 1 and 2 carry a third each.
    "no holder": {
        "columns": ((1 << 20, 5), F32, BF16, Shard(1), {0: [[(0, 1 << 20)], [(0, 5)]]}),
        "small": ((7, 8), F32, F32, Shard(0), Shard(1)),
    },
}
#: Bytes for staging by which two equal transfers may differ: chunks that streams needed at once. A ring is larger.
SPARE = 4 * CHUNK
#: Beside tests of ``test_carrying``.
HOLDER = more("a holder")
CARRIER = 2
VICTIM = ("inference", CARRIER)


class Valve:
    """The data port of a carrier's agent, as other hosts reach it: lets so many bytes in and holds the rest back."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._left = 0
        self._held, self._open = asyncio.Event(), asyncio.Event()
        self._open.set()

    def close_after(self, nbytes: int) -> None:
        """So many bytes from now on."""
        self._left = nbytes
        self._held.clear()
        self._open.clear()

    async def until_closed(self) -> None:
        """Return once they have come in."""
        await self._held.wait()

    def open(self) -> None:
        """Let in all that waits, and all that follows."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return writer.close()
        await asyncio.gather(self._pass_on(reader, inner_writer, True), self._pass_on(inner_reader, writer, False))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, inwards: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                if inwards and not self._open.is_set():
                    self._left -= len(data)
                    if self._left <= 0:
                        self._held.set()
                        await self._open.wait()
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()


@asynccontextmanager
async def valved(place: str = WAY.place(*VICTIM)) -> AsyncIterator[tuple[Site, Valve]]:
    """A site at one of whose places the data port of the agent is behind a valve."""
    with open_site(WAY) as plain:  # type: ignore[arg-type]
        site = Mapped(plain.way, plain.directory, plain.redis)
        port = two_ports()
        valve = Valve(port + 1)
        async with await asyncio.start_server(valve.serve, "127.0.0.1", 0) as server:
            data = server.sockets[0].getsockname()[1]
            mapped = {"ETHA_LISTEN": f"127.0.0.1:{port}", "ETHA_ADVERTISE": f"127.0.0.1:{port},{data}"}
            site.overrides = defaultdict(dict, {place: mapped})
            yield site, valve
            valve.open()


class Interrupted:
    """A transfer of all ranks. ``half`` returns once the carrier has half of what it carries, and cannot go on."""

    def __init__(self, valve: Valve, handles: dict[Member, Any], nbytes: int, **timeouts: float) -> None:
        self._valve = valve
        valve.close_after(nbytes)
        self.began = self.at = time.monotonic()
        #: When each call has ended.
        self.ended: dict[Member, float] = {}
        self.calls = {
            member: asyncio.ensure_future(self._one(member, handle, **timeouts)) for member, handle in handles.items()
        }

    async def _one(self, member: Member, handle: Any, **timeouts: float) -> Any:
        try:
            return await handle.transfer("send" if member[0] == "trainer" else "recv", **timeouts)
        except EthaError as error:
            return error
        finally:
            self.ended[member] = time.monotonic()

    async def half(self) -> None:
        await self._valve.until_closed()
        self.at = time.monotonic()
        assert not self.ended

    async def others(self, victim: Member = VICTIM) -> dict[Member, Any]:
        """How the calls of all but the victim's worker have ended."""
        return {member: await call for member, call in self.calls.items() if member != victim}

    def seconds(self, member: Member) -> float:
        """From the act to the end of a call."""
        return self.ended[member] - self.at


async def begun(sides: Sides, cases: dict[str, Case], victim: Member = VICTIM, **options: Any) -> Any:
    """Batch "b", in which the victim carries and which has moved once.

    (handles, tensors, bytes to half of what it carries, its agent's pid).
    """
    await sides.meet(**MESHES, timeout=60)
    handles, held = await opened(sides, cases, **options)
    reports = [(await client.status())["agent"] for client in sides.clients.values()]
    plan = planned(cases, [one["id"] for one in reports], [one["host_id"] for one in reports])
    through = carried(plan)[victim[1]]
    assert through > 1 << 20
    rows = plan.for_rank("target", victim[1])
    own = int(rows.nbytes[(rows.target == victim[1]) & (rows.kind != CARRY)].sum())
    await moved(sides, cases, handles, held)
    return handles, held, own + through // 2, dict(zip(sides.clients, reports, strict=True))[victim]["pid"]


async def moved(sides: Sides, cases: dict[str, Case], handles: Any, held: dict[Member, dict[str, torch.Tensor]]) -> int:
    """One transfer, every element compared; its seq. The targets are stale afterwards."""
    results = await sides.move(handles)
    assert not [found for found in results.values() if isinstance(found, Exception)], results
    for (side, rank), mine in held.items():
        for name, tensor in mine.items() if side == "inference" else ():
            right = wanted(cases[name], rank)
            assert right is not None and torch.equal(tensor, right), (name, rank)
            tensor.fill_(77)
    [seq] = {result.seq for result in results.values()}
    return int(seq)


def old(held: dict[Member, dict[str, torch.Tensor]]) -> bool:
    """Whether all targets hold what ``moved`` has left there."""
    return all(bool((t == 77).all()) for (side, _), mine in held.items() if side == "inference" for t in mine.values())


async def books(sides: Sides) -> dict[str, int]:
    """Bytes of staging memory that are in use, by agent."""
    found = {}
    for client in sides.clients.values():
        agent = (await client.status())["agent"]
        found[agent["id"]] = agent["staging"]["used"]
    return found


def check_lost(error: Any, seconds: float, most: float, rank: int = CARRIER) -> None:
    """The error of a call of somebody else than the victim's worker."""
    assert isinstance(error, PeerLostError), error
    assert (error.reason, error.outcome) == ("died", "aborted"), error
    assert re.search(rf"inference ranks? {rank}", error.message), error.message
    assert seconds < within(most), (seconds, error)


@pytest.mark.parametrize("kind", [HOLDER, "no holder"])
async def test_a_carrier_that_is_killed_again_and_again_leaves_nothing(pair: str, kind: str) -> None:
    """Neither with this process nor with the agents that live on, which are those of the source and of the holder."""
    cases = CASES[kind]
    async with valved() as (site, valve), Sides(site, pair, trainer=2, inference=4, timeout=30) as sides:
        holds: list[dict[int, Footprint]] = []
        booked: list[dict[str, int]] = []
        for _ in range(4):
            handles, held, nbytes, pid = await begun(sides, cases, atomic=True)
            gc.collect()
            agents = [(await client.status())["agent"]["pid"] for client in sides.clients.values()]
            holds.append({process: Footprint.of(process) for process in {os.getpid(), *agents}})
            booked.append(await books(sides))
            transfer = Interrupted(valve, handles, nbytes)
            await transfer.half()
            os.kill(pid, signal.SIGKILL)
            for member, error in (await transfer.others()).items():
                check_lost(error, transfer.seconds(member), SOON)
            valve.open()
            error = await transfer.calls[VICTIM]
            assert isinstance(error, AgentLostError) and error.outcome == "unknown", error
            assert old(held), "an atomic target holds the old version"
            for formed in sides.pairs.values():
                assert await formed.lost == "died"
            del handles, held, transfer, error, formed
        gc.collect()
        assert not shared.segments(), "shadows go with the pair"
        lasting = holds[1].keys() & holds[-1].keys()
        assert os.getpid() in lasting and len(lasting) == 5, "this process and all agents but the victim's"
        for process in lasting:
            before, after = holds[1][process], holds[-1][process]
            assert (after.memfds, after.mapped) == (before.memfds, before.mapped), (process, before, after)
            for what in ("fds", "sockets", "threads"):  # connections to Redis and threads of pools come and go
                assert after.all()[what] <= before.all()[what] + 3, (process, what, before, after)
        for agent in booked[1].keys() & booked[-1].keys():
            assert booked[-1][agent] <= booked[1][agent] + SPARE, (agent, booked)


@pytest.mark.parametrize(
    ("kind", "atomic"),
    [("a holder", True), ("no holder", False), more("a holder", False), more("no holder", True)],
)
async def test_a_carrier_that_stands_still_until_the_deadline(pair: str, kind: str, atomic: bool) -> None:
    """All others end at the deadline. The pair stands, what the carrier had in its ring is never written, and the next
    transfer is exact."""
    cases = CASES[kind]
    async with valved() as (site, valve), Sides(site, pair, trainer=2, inference=4, timeout=30) as sides:
        handles, held, nbytes, pid = await begun(sides, cases, atomic=atomic)
        booked = await books(sides)
        try:
            transfer = Interrupted(valve, handles, nbytes, timeout=BEFORE)
            await transfer.half()
            send_signal(pid, signal.SIGSTOP)
            for member, error in (await transfer.others()).items():
                assert isinstance(error, TransferTimeoutError | TransferAbortedError), (member, error)
                assert error.outcome == "aborted" and error.quiesced, (member, error)
                assert not (atomic and error.torn), (member, error)
                assert BEFORE - 0.5 < transfer.ended[member] - transfer.began < within(BEFORE + 1), member
            assert old(held) or not atomic
            returned = [
                tensor
                for member, mine in held.items()
                if member[0] != "trainer" and member != VICTIM
                for tensor in mine.values()
            ]
            for tensor in returned:
                tensor.fill_(55)
            valve.open()
        finally:
            os.kill(pid, signal.SIGCONT)
        error = await transfer.calls[VICTIM]
        assert isinstance(error, TransferError) and error.outcome in ("aborted", "unknown"), error
        await sides.ask_all()
        assert all(bool((tensor == 55).all()) for tensor in returned), "nothing is written once a call has returned"
        for formed in sides.pairs.values():
            assert not formed.lost.is_set()
        assert await moved(sides, cases, handles, held) == 3
        for agent, used in (await books(sides)).items():
            assert used <= booked[agent] + SPARE, (agent, used, booked)


@pytest.mark.parametrize("kind", [HOLDER, "no holder"])
async def test_a_carrier_that_stands_still_for_good(pair: str, kind: str) -> None:
    """The others hear of three missed beats, and its own worker's call ends at its deadline."""
    cases = CASES[kind]
    async with valved() as (site, valve), Sides(site, pair, trainer=2, inference=4, timeout=30) as sides:
        handles, held, nbytes, pid = await begun(sides, cases, atomic=True)
        deadline = LATER + 2
        try:
            transfer = Interrupted(valve, handles, nbytes, timeout=deadline)
            await transfer.half()
            send_signal(pid, signal.SIGSTOP)
            for member, error in (await transfer.others()).items():
                check_lost(error, transfer.seconds(member), LATER)
            assert old(held), "an atomic target holds the old version"
            error = await transfer.calls[VICTIM]
            assert isinstance(error, TransferTimeoutError) and error.outcome == "unknown", error
            assert transfer.ended[VICTIM] - transfer.began < within(deadline + 2)
            assert old(held)
        finally:
            send_signal(pid, signal.SIGKILL)
        valve.open()
        for formed in sides.pairs.values():
            assert await formed.lost == "died"
        handles, held, _, _ = await begun(sides, cases, atomic=True)
        assert await moved(sides, cases, handles, held) == 4


# ---- more agents than are all linked ------------------------------------------------------------

#: All on rank 1, for which ranks 0 and 2 carry a third each; and a row, which rank 0 of the trainer sends to all.
MIDDLE: dict[str, Case] = {
    "columns": ((1 << 20, 5), F32, BF16, Shard(1), {1: [[(0, 1 << 20)], [(0, 5)]]}),
    "small": ((1, 8), F32, F32, Shard(0), Shard(1)),
}


def apart(side: str, rank: int) -> str:
    """The trainer has two hosts, too."""
    return "st"[rank] if side == "trainer" else WAY.place(side, rank)


async def linked(sides: Sides) -> dict[Member, set[Member]]:
    """Whose agents are linked with whose."""
    found = {member: (await client.status())["agent"] for member, client in sides.clients.items()}
    names = {one["id"]: member for member, one in found.items()}
    return {member: {names[link["agent"]] for link in one["links"]} for member, one in found.items()}


@pytest.mark.parametrize(
    ("rank", "how"),
    [(0, signal.SIGKILL), (2, signal.SIGSTOP), more(0, signal.SIGSTOP), more(2, signal.SIGKILL)],
)
async def test_a_carrier_is_lost_where_links_go_through_hubs(
    pair: str, rank: int, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody hears of it, also who has no link to it, and the next epoch is exact.

    The agents of ranks 0 are the hubs.
    """
    monkeypatch.setenv(MESH, "1")
    victim, far = ("inference", rank), ("inference", 3)
    async with (
        valved(WAY.place(*victim)) as (site, valve),
        Sides(site, pair, trainer=2, inference=4, timeout=30, where=apart) as sides,
    ):
        handles, held, nbytes, pid = await begun(sides, MIDDLE, victim, atomic=True)
        hubs = {("trainer", 0), ("inference", 0)}
        links = await linked(sides)
        assert links[far] == hubs, "nothing flows between it and a carrier"
        assert links["trainer", 1] == hubs | {("inference", 1), ("inference", 2)}, "to the holder, and to a carrier"
        transfer = Interrupted(valve, handles, nbytes, timeout=60)
        await transfer.half()
        send_signal(pid, how)
        for member, error in (await transfer.others(victim)).items():
            check_lost(error, transfer.seconds(member), SOON if how == signal.SIGKILL else LATER, rank)
        assert old(held), "an atomic target holds the old version"
        if how == signal.SIGSTOP:
            send_signal(pid, signal.SIGKILL)
        valve.open()
        assert isinstance(await transfer.calls[victim], AgentLostError)
        for formed in sides.pairs.values():
            assert await formed.lost == "died"
        handles, held, _, _ = await begun(sides, MIDDLE, victim, atomic=True)
        assert await moved(sides, MIDDLE, handles, held) == 4
