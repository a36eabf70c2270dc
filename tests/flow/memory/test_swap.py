"""``atomic="swap"``: what was received changes places with the tensor, and nobody sees anything but one version."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.bus.messages import ExchangeSegments
from etha.client import registration, transfer
from etha.client.memory.base import StagedTensors
from etha.groups.host.places import OwnPlaces
from etha.memory import pages
from etha.memory.handles import describe
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, started_in
from tests.flow.ways import Way
from tests.processes import send_signal

EVERY_WAY = pytest.mark.ways("tcp", "local", "host", "three")
ONE_AGENT = pytest.mark.ways("local")
#: 2 MiB of float32 on each rank: two in rows at the source, two in columns at the target.
ROWS, COLUMNS = 1024, 1024
LARGE = ROWS * COLUMNS * 4 // 2


def tensors(side: str) -> dict[str, torch.Tensor]:
    """Of this rank: what is swapped ("w", "turned", "cast"), and what is copied for each reason."""
    rows, columns = (ROWS // 2, COLUMNS) if side == "trainer" else (ROWS, COLUMNS // 2)
    part = etha.empty((2 * LARGE // 4,))
    return {
        "w": etha.empty((rows, columns)),
        "turned": etha.empty((columns, rows)).t(),
        "cast": etha.empty((rows, columns), torch.bfloat16 if side == "trainer" else torch.float32),
        "small": etha.empty((300,)),
        "plain": torch.zeros(rows, columns),
        "part": part[: LARGE // 4].view(rows, columns),
        "none": etha.empty((0, 3)),
    }


SWAPPED = ("w", "turned", "cast")


def layouts(side: str) -> dict[str, Any]:
    split, whole = [Shard(0 if side == "trainer" else 1)], [Replicate()]
    return {name: whole if name in ("small", "none") else split for name in tensors(side)}


def value_of(held: dict[str, torch.Tensor]) -> int:
    """The one value that all elements hold."""
    found = {float(x) for tensor in held.values() for x in tensor.unique()}
    assert len(found) == 1, f"a mixture of {sorted(found)}"
    return int(found.pop())


def fill(held: dict[str, torch.Tensor], value: int) -> None:
    for tensor in held.values():
        tensor.fill_(value)


class Swap:
    """Both sides, the receiving one with ``atomic="swap"``; ``held`` by member."""

    def __init__(self, site: Site, pair: str, *, ranks: int = 1, made: Any = None, **options: Any) -> None:
        self.site = site
        self.sides = Sides(site, pair, trainer=ranks, inference=ranks)
        self.options = options
        self.held = {(side, rank): (made or tensors)(side) for side, rank in self.sides.members}
        self.addresses = {member: [t.data_ptr() for t in held.values()] for member, held in self.held.items()}
        self.handles: dict[Member, Any] = {}
        self.receivers = [member for member in self.sides.members if member[0] == "inference"]
        self.ranks = ranks

    async def __aenter__(self) -> Swap:
        await self.sides.__aenter__()
        await self.sides.meet(device_mesh=(self.ranks,), placements=[Replicate()])
        await self.register()
        return self

    async def register(self) -> None:
        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            own = {"direction": "send"} if side == "trainer" else {"direction": "recv", "atomic": "swap"}
            placements = {name: layout for name, layout in layouts(side).items() if name in self.held[side, rank]}
            return self.held[side, rank], {"placements": placements, **own, **self.options}

        self.handles = await self.sides.register("b", given)
        errors = [answer for answer in self.handles.values() if isinstance(answer, BaseException)]
        assert not errors, errors

    async def __aexit__(self, *exc: object) -> None:
        await self.sides.__aexit__(*exc)

    async def move(self, value: int, **options: Any) -> set[int]:
        """Send ``value``; what each receiver says it has swapped. All of its elements are checked."""
        for member, held in self.held.items():
            if member[0] == "trainer":
                fill(held, value)
        moved = await self.sides.move(self.handles, trainer={"version": value}, inference=options)
        failed = [found for found in moved.values() if not isinstance(found, etha.TransferResult)]
        assert not failed, failed
        assert {value_of(self.held[member]) for member in self.receivers} == {value}
        for member, held in self.held.items():
            assert self.addresses[member] == [t.data_ptr() for t in held.values()]
        return {moved[member].swapped for member in self.receivers}

    def swapped(self) -> int:
        """Bytes of a receiver's tensors that can be swapped."""
        held = self.held["inference", 0]
        return sum(held[name].nbytes for name in SWAPPED if name in held)

    def agent(self) -> int:
        """The process of the one agent."""
        (pid,) = [pid for pid, name in started_in(str(self.site.directory)).items() if "agent" in name]
        return pid


def large(side: str) -> dict[str, torch.Tensor]:
    """One tensor that is swapped."""
    return {"w": etha.empty((ROWS // 2, COLUMNS))}


def several(side: str) -> dict[str, torch.Tensor]:
    """Four that are swapped."""
    return {name: etha.empty((ROWS // 2, COLUMNS)) for name in "abcd"}


@EVERY_WAY
async def test_every_element_of_every_version(way: Way, site: Site, pair: str) -> None:
    """Another agent of the host may copy from what was swapped, if the other direction is moved: so it is not."""
    async with Swap(site, pair, ranks=2) as swap:
        for value in range(1, 6):
            assert await swap.move(value) == {0 if way is Way.HOST else swap.swapped()}


@EVERY_WAY
async def test_with_random_values_and_sums(way: Way, site: Site, pair: str) -> None:
    """Not one value for all, so that a byte in a wrong place is seen; sums of both ends are compared, too."""
    async with Swap(site, pair, made=large, verify="full") as swap:
        for seed in range(4):
            sent, got = swap.held["trainer", 0]["w"], swap.held["inference", 0]["w"]
            sent.copy_(torch.rand(sent.shape, generator=torch.Generator().manual_seed(seed)))
            moved = await swap.sides.move(swap.handles)
            assert torch.equal(sent, got)
            assert moved["inference", 0].swapped == (0 if way is Way.HOST else LARGE)


@EVERY_WAY
async def test_what_was_swapped_is_sent_from(way: Way, site: Site, pair: str) -> None:
    """After an odd and an even number of swaps, as itself, as a snapshot, and in a batch of a later client."""
    async with Swap(site, pair, made=large, direction=None) as swap:
        mine, other = swap.held["inference", 0]["w"], swap.held["trainer", 0]["w"]
        for value in (1, 2, 3):
            assert await swap.move(value) == {0 if way is Way.HOST else LARGE}
            mine.add_(100)
            await swap.sides.move(swap.handles, source="inference")
            assert value_of({"w": other}) == value + 100
            future = asyncio.gather(*(swap.handles["trainer", 0].transfer("recv") for _ in range(1)))
            sending = await swap.handles["inference", 0].transfer("send", snapshot=True)
            mine.fill_(-1)
            await future
            await sending
            assert value_of({"w": other}) == value + 100
        later = Sides(site, f"{pair}-later", trainer=1, inference=1)
        async with later:
            await later.meet(device_mesh=(1,), placements=[Replicate()])
            mine.fill_(55)
            target = torch.zeros_like(other)
            given = {"trainer": target, "inference": mine}
            handles = await later.register("again", lambda side, rank: ({"w": given[side]}, {}))
            await later.move(handles, source="inference")
            assert value_of({"w": target}) == 55


@ONE_AGENT
async def test_a_tensor_of_two_open_batches_is_copied(site: Site, pair: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same client, and of another one; what the second batch sends is what the tensor holds."""
    async with Swap(site, pair, made=large) as swap, Sides(site, f"{pair}-2") as others:
        assert await swap.move(1) == {LARGE}
        await others.meet(device_mesh=(1,), placements=[Replicate()])
        mine, seen = swap.held["inference", 0]["w"], torch.zeros(ROWS // 2, COLUMNS)
        given = {"inference": mine, "trainer": seen}
        handles = await others.register("second", lambda side, rank: ({"w": given[side]}, {}))
        for value in (2, 3):
            assert await swap.move(value) == {0}
            await others.move(handles, source="inference")
            assert value_of({"w": seen}) == value
        assert "another open batch" in caplog.text and caplog.text.count("not swapped") == 1
        for handle in handles.values():
            await handle.close()
        assert await swap.move(4) == {LARGE}
        handles = await others.register("third", lambda side, rank: ({"w": given[side]}, {}))
        await others.move(handles, source="inference")
        assert value_of({"w": seen}) == 4


@ONE_AGENT
@pytest.mark.parametrize("same", [True, False], ids=["same client", "another"])
async def test_a_version_comes_while_a_tensor_is_registered(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """After it was found out where the tensor lies, and before the agent hears of that (a large one is staged then)."""
    real = registration.stage
    async with Swap(site, pair, made=large) as swap, Sides(site, f"{pair}-2") as others:
        if same:
            await others.clients["inference", 0].close()
            others.clients["inference", 0] = swap.sides.clients["inference", 0]
        assert await swap.move(1) == {LARGE}
        await others.meet(device_mesh=(1,), placements=[Replicate()])
        mine, seen = swap.held["inference", 0]["w"], list[set[int]]()

        async def stage(home: Any, tensors: list[torch.Tensor], chosen: list[bool]) -> StagedTensors:
            if not seen and tensors[0].data_ptr() == mine.data_ptr():
                seen.append(set())
                seen[0] = await swap.move(2)
            return await real(home, tensors, chosen)

        monkeypatch.setattr(registration, "stage", stage)
        target = torch.zeros_like(mine)
        given = {"inference": mine, "trainer": target}
        handles = await others.register("second", lambda side, rank: ({"w": given[side]}, {}))
        await others.move(handles, source="inference")
        assert value_of({"w": target}) == 2
        assert seen == [{0}]


@ONE_AGENT
@pytest.mark.parametrize("atomic", [True, False], ids=["shadow", "tensor"])
async def test_a_tensor_from_which_a_subscriber_serves_is_copied(site: Site, pair: str, atomic: bool) -> None:
    """Its agent keeps the memory from which it sends. With ``atomic`` that is the shadow, and the tensor is free."""
    name = f"{pair}-policy"
    options: dict[str, Any] = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,)}
    options["placements"] = {"w": [Replicate()]}
    async with (
        Swap(site, pair, made=large) as swap,
        site.client("trainer", 0) as trainer,
        site.client("inference", 0) as replica,
    ):
        mine = swap.held["inference", 0]["w"]
        publication = await trainer.publish(name, {"w": torch.zeros_like(mine)}, **options)
        subscription = await replica.subscribe(name, {"w": mine}, subscriber="r", atomic=atomic, **options)
        assert await swap.move(1) == {LARGE if atomic else 0}
        await subscription.close()
        await publication.close()
        assert await swap.move(2) == {LARGE}


@ONE_AGENT
async def test_a_tensor_that_a_group_reads_where_it_lies_is_copied(site: Site, pair: str) -> None:
    async with Swap(site, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
        places = OwnPlaces()
        before = places.find([swap.held["inference", 0]["w"]])
        assert before is not None
        assert await swap.move(2) == {0}
        assert places.find([swap.held["inference", 0]["w"]]) == before
        places.close()
        assert await swap.move(3) == {LARGE}


@ONE_AGENT
async def test_a_forked_child_sees_each_version(site: Site, pair: str) -> None:
    async with Swap(site, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
        mine = swap.held["inference", 0]["w"]
        asked, ask = os.pipe()
        answered, answer = os.pipe()
        child = os.fork()
        if child == 0:
            while os.read(asked, 1) == b"?":
                os.write(answer, bytes([int(mine[0, 0]), int(mine[-1, -1])]))
            os._exit(0)
        try:
            for value in (2, 3):
                assert await swap.move(value) == {0}
                os.write(ask, b"?")
                assert os.read(answered, 2) == bytes([value, value])
        finally:
            os.write(ask, b".")
            await asyncio.to_thread(os.waitpid, child, 0)
            for fd in (asked, ask, answered, answer):
                os.close(fd)
        await asyncio.gather(*(handle.close() for handle in swap.handles.values()))
        swap.held["inference", 0] = large("inference")
        swap.addresses["inference", 0] = [swap.held["inference", 0]["w"].data_ptr()]
        await swap.register()
        assert await swap.move(4) == {LARGE}  # memory that the child has not seen


@ONE_AGENT
async def test_a_thread_reads_during_the_swap(site: Site, pair: str) -> None:
    """Each element is the old version's or the new one's, at any moment."""
    async with Swap(site, pair, made=large) as swap:
        mine = swap.held["inference", 0]["w"]
        found: set[float] = set()
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                found.update(mine.unique().tolist())

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for value in range(1, 21):
                assert await swap.move(value) == {LARGE}
        finally:
            over.set()
            thread.join()
        assert found <= set(map(float, range(21)))


@ONE_AGENT
async def test_locked_memory_is_copied(site: Site, pair: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    async with Swap(site, pair, made=several) as swap:
        held = swap.held["inference", 0]["b"]
        assert libc.mlock(held.data_ptr() + 8192, 4096) == 0
        assert await swap.move(1) == {3 * LARGE}
        assert libc.munlock(held.data_ptr() + 8192, 4096) == 0
        assert await swap.move(2) == {4 * LARGE}


@ONE_AGENT
@pytest.mark.parametrize("fails", [0, 1, 2, 3])
async def test_the_kernel_refuses_at_one_of_four(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Those before it are swapped, the others copied; from then on all are copied."""
    async with Swap(site, pair, made=several) as swap:
        assert await swap.move(1) == {4 * LARGE}
        victim = list(swap.held["inference", 0].values())[fails].data_ptr()
        real: Callable[..., None] = pages._move

        def move(address: int, nbytes: int, to: int) -> None:
            if address == victim:
                raise OSError(12, "Cannot allocate memory")
            real(address, nbytes, to)

        monkeypatch.setattr(pages, "_move", move)
        assert await swap.move(2) == {fails * LARGE}
        monkeypatch.undo()
        for value in (3, 4):
            assert await swap.move(value) == {0}


@ONE_AGENT
async def test_the_agent_cannot_exchange(site: Site, pair: str, caplog: pytest.LogCaptureFixture) -> None:
    """It has no address space left: this worker takes its exchange back and copies, now and from then on."""
    async with Swap(site, pair, made=several) as swap:
        assert await swap.move(1) == {4 * LARGE}
        agent = swap.agent()
        before = resource.prlimit(agent, resource.RLIMIT_AS)
        resource.prlimit(agent, resource.RLIMIT_AS, (address_space(agent), before[1]))
        try:
            assert await swap.move(2) == {0}
        finally:
            resource.prlimit(agent, resource.RLIMIT_AS, before)
        assert "the agent does not exchange its mappings: " in caplog.text
        for value in (3, 4):
            assert await swap.move(value) == {0}


@ONE_AGENT
async def test_after_its_agent_has_died_a_tensor_is_swapped_again(site: Site, pair: str) -> None:
    """The batch that ended with the agent uses its memory no more, though its handle lives."""
    async with Swap(site, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
        before = dict(swap.handles)
        os.kill(swap.agent(), signal.SIGKILL)
        ended = await swap.sides.move(swap.handles)
        assert all(isinstance(error, etha.AgentLostError) for error in ended.values()), ended
        await swap.sides.meet(device_mesh=(1,), placements=[Replicate()])
        await swap.register()
        for value in (2, 3):
            assert await swap.move(value) == {LARGE}
        del before


@ONE_AGENT
async def test_neither_the_agent_nor_this_worker_gets_further(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The version has arrived, but the agent maps other pages than the worker shows. So the worker leaves the batch,
    before something is written where nobody looks, and can register again."""
    async with Swap(site, pair, made=several) as swap:
        agent = swap.agent()
        before = resource.prlimit(agent, resource.RLIMIT_AS)
        real: Callable[..., None] = pages._move
        steps = 0

        def move(*where: int) -> None:
            nonlocal steps
            steps += 1
            if steps > 4 * 4:  # all that it takes to exchange four tensors
                raise OSError(12, "Cannot allocate memory")
            real(*where)

        monkeypatch.setattr(pages, "_move", move)
        resource.prlimit(agent, resource.RLIMIT_AS, (address_space(agent), before[1]))
        try:
            assert await swap.move(1) == {4 * LARGE}
        finally:
            resource.prlimit(agent, resource.RLIMIT_AS, before)
        monkeypatch.undo()
        assert steps == 4 * 4 + 1 and "its pages stay exchanged" in caplog.text
        moved = await swap.sides.move(swap.handles, trainer={"version": 2})
        assert all(isinstance(found, etha.EthaError) for found in moved.values()), moved
        assert value_of(swap.held["inference", 0]) == 1
        await swap.register()
        for value in (3, 4):
            assert await swap.move(value) == {4 * LARGE}


@ONE_AGENT
async def test_a_sender_that_leaves_at_once(site: Site, pair: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its batch is over when the receiver tells the agent: the receiver holds the new version, and all go on."""
    async with Swap(site, pair, made=large) as swap:
        sending = swap.handles["trainer", 0]

        async def send_and_leave() -> None:
            fill(swap.held["trainer", 0], 1)
            await sending.transfer("send")
            await sending.close()

        for _ in range(5):
            _, result = await asyncio.gather(send_and_leave(), swap.handles["inference", 0].transfer("recv"))
            assert result.swapped == LARGE and value_of(swap.held["inference", 0]) == 1
            await asyncio.gather(*(handle.close() for handle in swap.handles.values()))
            await swap.register()
            sending = swap.handles["trainer", 0]
            assert await swap.move(2) == {LARGE}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def address_space(pid: int) -> int:
    """Bytes that a process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096


class Intercepted:
    """What happens in this process just before a receiver tells the agent."""

    def __init__(self, swap: Swap, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        connection = swap.sides.clients["inference", 0]._connection
        assert connection is not None
        real = connection.link.request

        async def request(message: Any, **options: Any) -> Any:
            if isinstance(message, ExchangeSegments):
                act()
            return await real(message, **options)

        monkeypatch.setattr(connection.link, "request", request)


@ONE_AGENT
async def test_the_agent_is_killed_before_it_hears(rough: Site, pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Swap(rough, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
        agent = swap.agent()
        Intercepted(swap, monkeypatch, lambda: os.kill(agent, signal.SIGKILL))
        fill(swap.held["trainer", 0], 2)
        moved = await swap.sides.move(swap.handles)
        assert moved["inference", 0].swapped == LARGE and value_of(swap.held["inference", 0]) == 2
    monkeypatch.undo()
    async with Sides(rough, f"{pair}-2") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        target = torch.zeros(ROWS // 2, COLUMNS)
        given = {"inference": swap.held["inference", 0]["w"], "trainer": target}
        handles = await sides.register("b", lambda side, rank: ({"w": given[side]}, {}))
        await sides.move(handles, source="inference")
        assert value_of({"w": target}) == 2


@ONE_AGENT
async def test_the_agent_is_stopped_before_it_hears(rough: Site, pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns, and the batch is over, because nobody knows what the agent maps."""
    monkeypatch.setattr(transfer, "_CONFIRM", 0.2)
    monkeypatch.setattr(transfer, "_GRACE", 0.2)
    async with Swap(rough, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
        agent = swap.agent()
        Intercepted(swap, monkeypatch, lambda: send_signal(agent, signal.SIGSTOP))
        fill(swap.held["trainer", 0], 2)
        sending = asyncio.ensure_future(swap.handles["trainer", 0].transfer("send"))
        try:
            result = await swap.handles["inference", 0].transfer("recv")
        finally:
            os.kill(agent, signal.SIGCONT)
        await sending
        assert result.swapped == LARGE and value_of(swap.held["inference", 0]) == 2
        with pytest.raises(etha.PeerLostError, match="has not confirmed that it has exchanged pages"):
            await swap.handles["inference", 0].transfer("recv")
        with pytest.raises(etha.PeerLostError, match="has not confirmed that it has exchanged pages"):
            await swap.handles["trainer", 0].transfer("send")
        monkeypatch.undo()
        await swap.register()
        for value in (3, 4):
            assert await swap.move(value) == {LARGE}


@ONE_AGENT
async def test_a_call_that_is_cancelled_then_has_the_new_version(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Swap(site, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
        fill(swap.held["trainer", 0], 2)
        receiving = asyncio.ensure_future(swap.handles["inference", 0].transfer("recv"))
        Intercepted(swap, monkeypatch, receiving.cancel)
        await swap.handles["trainer", 0].transfer("send")
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert value_of(swap.held["inference", 0]) == 2
        monkeypatch.undo()
        assert await swap.move(3) == {LARGE}


@ONE_AGENT
async def test_on_commit_comes_first_and_autograd_hears(site: Site, pair: str) -> None:
    async with Swap(site, pair, made=large) as swap:
        mine = swap.held["inference", 0]["w"]
        seen: list[float] = []
        for value in (1, 2):
            version = mine._version
            assert await swap.move(value, on_commit=lambda: seen.append(float(mine[3, 3]))) == {LARGE}
            assert mine._version > version
        assert seen == [0, 1]


@ONE_AGENT
async def test_memory_that_is_replaced_in_on_commit(site: Site, pair: str) -> None:
    """As torch.multiprocessing does to a tensor that it gets. The new version comes there, by a copy. The others are
    swapped, and the next call says what has happened."""
    async with Swap(site, pair, made=several) as swap:
        assert await swap.move(1) == {4 * LARGE}
        held = swap.held["inference", 0]
        fill(swap.held["trainer", 0], 2)
        moved = await swap.sides.move(swap.handles, inference={"on_commit": held["b"].share_memory_})
        result = moved["inference", 0]
        assert value_of(held) == 2 and result.swapped == 3 * LARGE, result
        with pytest.raises(etha.RegistrationError, match="'b'"):
            await swap.handles["inference", 0].transfer("recv")
        await asyncio.gather(*(handle.close() for handle in swap.handles.values()))
        swap.addresses["inference", 0] = [tensor.data_ptr() for tensor in held.values()]
        await swap.register()
        for value in (3, 4):
            assert await swap.move(value) == {3 * LARGE}


@ONE_AGENT
async def test_no_signal_comes_between_two_steps(site: Site, pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers of signals, which may raise, run on the main thread only."""
    where: set[bool] = set()
    real = pages._move

    def move(*args: Any, **options: Any) -> None:
        where.add(threading.current_thread() is threading.main_thread())
        real(*args, **options)

    monkeypatch.setattr(pages, "_move", move)
    async with Swap(site, pair, made=large) as swap:
        assert await swap.move(1) == {LARGE}
    assert where == {False}


@ONE_AGENT
async def test_tied_names_are_one_tensor(site: Site, pair: str) -> None:
    def tied(side: str) -> dict[str, torch.Tensor]:
        one = etha.empty((ROWS // 2, COLUMNS))
        return {"w": one, "head": one}

    async with Swap(site, pair, made=tied, placements={name: [Replicate()] for name in ("w", "head")}) as swap:
        for value in (1, 2, 3):
            assert await swap.move(value) == {LARGE}


@ONE_AGENT
async def test_a_shared_module_is_swapped(site: Site, pair: str) -> None:
    """Its large parameters; the small ones lie together, and are copied."""

    def module(side: str) -> dict[str, torch.Tensor]:
        made = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 512))
        return {name: parameter.data for name, parameter in etha.share_module(made).named_parameters()}

    names = list(module("trainer"))
    async with Swap(site, pair, made=module, placements={name: [Replicate()] for name in names}) as swap:
        for value in (1, 2, 3):
            assert await swap.move(value) == {2 * 512 * 1024 * 4}


@ONE_AGENT
async def test_who_receives_hears_once_what_is_copied_and_why(
    site: Site, pair: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not who only sends, though both sides give the same options; and not for tensors below 1 MiB."""
    async with Swap(site, pair, ranks=2, direction=None, atomic="swap") as swap:
        for value in (1, 2):
            assert await swap.move(value) == {swap.swapped()}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(text for text in warnings if "swapped" in text) == [
        *["batch 'b': tensor 'part' is copied at commit, not swapped: it is a part of a tensor of etha.empty"] * 2,
        *["batch 'b': tensor 'plain' is copied at commit, not swapped: it is not in memory of etha.empty"] * 2,
    ]


@ONE_AGENT
async def test_only_what_is_copied_is_copied(site: Site, pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = StagedTensors.push

    def push(self: StagedTensors, targets: Any) -> None:
        copied.append(self.nbytes)
        real(self, targets)

    monkeypatch.setattr(StagedTensors, "push", push)
    async with Swap(site, pair, ranks=2) as swap:
        assert await swap.move(1) == {swap.swapped()}
        held = swap.held["inference", 0]
        rest = sum(tensor.nbytes for name, tensor in held.items() if name not in SWAPPED)
        assert copied == [rest, rest]
    copied.clear()
    async with Swap(site, f"{pair}-2", made=large) as swap:
        assert await swap.move(1) == {LARGE} and not copied


@ONE_AGENT
async def test_memory_goes_back(site: Site, pair: str) -> None:
    """A closed batch keeps neither of the two segments, here and in the agent."""

    def mapped(pid: int | str) -> int:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:etha")

    async with Swap(site, pair, made=large) as swap:
        kept = mapped("self"), mapped(swap.agent())
        for value in (1, 2, 3):
            assert await swap.move(value) == {LARGE}
        assert (mapped("self"), mapped(swap.agent())) == kept
        one = describe(swap.held["inference", 0]["w"]).segment
        await asyncio.gather(*(handle.close() for handle in swap.handles.values()))
        swap.handles.clear()
        assert mapped("self") == kept[0] - 1 and mapped(swap.agent()) == kept[1] - 3
        assert describe(swap.held["inference", 0]["w"]).segment == one and value_of(swap.held["inference", 0]) == 3
