"""What can go wrong in a transfer, from user code: each error by class, code, outcome and words."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
import time
import uuid
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.errors import (
    AgentLostError,
    PeerLostError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
)
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.ways import Way
from tests.processes import send_signal

BIG = 1 << 24


def name() -> str:
    return f"p-{uuid.uuid4().hex[:8]}"


async def simple(sides: Sides, size: int = 4, **options: Any) -> dict[Member, Any]:
    """One replicated tensor ``w``: ones on the trainer, zeros on the inference side."""
    await sides.meet(device_mesh=(1,), placements=[Replicate()])
    return await sides.register(
        "b", lambda side, rank: ({"w": (torch.ones if side == "trainer" else torch.zeros)(size)}, options)
    )


def tensor_of(handle: Any) -> torch.Tensor:
    found: torch.Tensor = handle._registration.locals[0]
    return found


async def test_both_sides_sending_fails_at_once(site: Site) -> None:
    async with Sides(site, name(), timeout=math.inf) as sides:
        handles = await simple(sides)
        found = await asyncio.gather(*(h.transfer("send") for h in handles.values()), return_exceptions=True)
        for error in found:
            assert type(error) is TransferError and error.code == "transfer" and error.outcome == "withdrawn"
            assert "both sides send, inference and trainer" in error.message
            assert "'b'" in error.message and sides.pair in error.message and "'recv'" in error.message
        assert [r.seq for r in (await sides.move(handles)).values()] == [1, 1]


async def test_version_on_recv_is_refused(site: Site) -> None:
    async with Sides(site, name()) as sides:
        handles = await simple(sides)
        with pytest.raises(TransferError, match="version= is a label that the sender sets; recv learns it") as caught:
            await handles["inference", 0].transfer("recv", version=3)
        assert caught.value.outcome == "withdrawn"


async def test_senders_that_disagree_on_the_version(site: Site) -> None:
    async with Sides(site, name(), trainer=2) as sides:
        await sides.meet(trainer={"device_mesh": (2,)}, inference={"device_mesh": (1,)}, placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(4)}, {}))
        senders = [handles["trainer", rank].transfer("send", version=rank) for rank in (0, 1)]
        for error in await asyncio.gather(*senders, return_exceptions=True):
            assert isinstance(error, TransferError) and "different versions, 0, 1" in error.message


async def test_ranks_of_a_side_that_end_at_the_same_deadline_do_not_blame_each_other(site: Site) -> None:
    async with Sides(site, name(), trainer=2, inference=1) as sides:
        await sides.meet(trainer={"device_mesh": (2,)}, inference={"device_mesh": (1,)}, placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(4)}, {}))
        for _ in range(2):
            senders = [handles["trainer", rank].transfer("send", timeout=0.3) for rank in (0, 1)]
            for error in await asyncio.gather(*senders, return_exceptions=True):
                assert isinstance(error, TransferTimeoutError)
                assert error.message.endswith("not ready: inference rank 0"), error.message
                assert error.culprits == (("inference", 0),)
        with pytest.raises(TransferTimeoutError, match=r"not ready: inference rank 0; trainer rank 1$"):
            async with asyncio.timeout(10):
                while True:  # the other one has given up long before
                    await handles["trainer", 0].transfer("send", timeout=0.6)


async def test_a_deadline_before_go_says_who_was_not_ready_and_consumes_nothing(site: Site, way: Way) -> None:
    # Of another agent it is known whether all its workers are ready, not which of them are.
    one_agent = way == "local"
    async with Sides(site, name(), trainer=2, inference=2) as sides:
        await sides.meet(device_mesh=(2,), placements=[Shard(0)])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.full((2,), float(rank))}, {}))
        first = handles["inference", 0]
        began = time.monotonic()
        with pytest.raises(TransferTimeoutError) as caught:
            await first.transfer("recv", timeout=0.3)
        assert 0.25 < time.monotonic() - began < 2
        assert caught.value.code == "transfer_timeout" and caught.value.outcome == "withdrawn"
        assert not caught.value.torn and caught.value.quiesced
        assert caught.value.message.endswith("not ready: inference rank 1; trainer ranks 0-1")
        for part in ("'b'", sides.pair, "recv of inference rank 0", "its deadline passed"):
            assert part in caught.value.message
        waiting = [asyncio.ensure_future(handles["inference", 1].transfer("recv"))]
        with pytest.raises(TransferTimeoutError, match=r"not ready: trainer ranks 0-1$"):
            await first.transfer("recv", timeout=0.3)
        waiting.append(asyncio.ensure_future(handles["trainer", 0].transfer("send")))
        who = "rank 0" if one_agent else "ranks 0-1"
        with pytest.raises(TransferTimeoutError, match=rf"not ready: inference {who}$"):
            await handles["trainer", 1].transfer("send", timeout=0.3)
        results = await asyncio.gather(*waiting, first.transfer("recv"), handles["trainer", 1].transfer("send"))
        assert [r.seq for r in results] == [1] * 4, "what timed out consumed nothing"
        waiting = [asyncio.ensure_future(first.transfer("recv"))]
        who = r"trainer rank 1 \(inference rank 0 wait to recv, too\)$" if one_agent else "trainer rank 1"
        with pytest.raises(TransferTimeoutError, match=who):
            await handles["trainer", 0].transfer("recv", timeout=0.3)
        waiting[0].cancel()
        with pytest.raises(TransferTimeoutError, match=r"wait_offer on batch 'b' .*trainer is not waiting to send"):
            await first.wait_offer(timeout=0.1)
        with pytest.raises(TransferTimeoutError):
            await first.transfer("recv", timeout=0)


async def test_a_registered_tensor_that_moved_is_named(site: Site) -> None:
    async with Sides(site, name()) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        module = torch.nn.Linear(2, 2)
        module.requires_grad_(False)
        mine: dict[str, Any] = dict(module.named_parameters())
        other = {name: torch.zeros_like(p) for name, p in mine.items()}
        handles = await sides.register("b", lambda side, rank: ((mine if side == "trainer" else other), {}))
        await sides.move(handles)
        before = module.bias.data
        for change in (
            lambda: setattr(module.bias, "data", torch.zeros(2)),
            lambda: module.bias.data.resize_(1),
            lambda: module.double(),
        ):
            change()
            with pytest.raises(RegistrationError, match="'bias'") as caught:
                await handles["trainer", 0].transfer("send")
            assert "batch 'b'" in caught.value.message and "register them again" in caught.value.message
        module.float()
        module.weight.data, module.bias.data = mine["weight"].data, before
        with pytest.raises(RegistrationError, match="'weight'"):
            await handles["trainer", 0].transfer("send")


async def test_a_closed_batch_and_a_closed_peer(site: Site) -> None:
    async with Sides(site, name()) as sides:
        handles = await simple(sides)
        waiting = asyncio.ensure_future(handles["inference", 0].transfer("recv"))
        await sides.clients["inference", 0].status()
        await handles["trainer", 0].close()
        with pytest.raises(RegistrationError, match="batch 'b' is closed: register it again"):
            await handles["trainer", 0].transfer("send")
        for call in (waiting, handles["inference", 0].transfer("recv")):
            with pytest.raises(PeerLostError) as caught:
                await call
            assert caught.value.code == "peer_lost" and caught.value.reason == "closed"
            assert caught.value.outcome == "withdrawn" and not caught.value.torn
            for part in ("'b'", "trainer rank 0 has closed", "call register_tensors again"):
                assert part in caught.value.message
        await sides.clients["trainer", 0].close()
        pair = sides.pairs["inference", 0]
        assert await pair.lost == "closed" and "trainer rank 0" in pair.lost.text
        for call in (
            handles["inference", 0].transfer("recv"),
            handles["inference", 0].wait_offer(),
            sides.clients["inference", 0].register_tensors("c", {"w": torch.zeros(4)}, pair_name=sides.pair),
        ):
            with pytest.raises(PeerLostError, match="call init_pair and register_tensors again") as caught:
                await call
            assert caught.value.reason == "closed"


def trainer(pair: str, size: int, rounds: int) -> None:
    with etha.TensorBusClient() as client:
        for _ in range(rounds):
            client.init_pair(pair, "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
            handle = client.register_tensors("b", {"w": torch.ones(size)}, pair_name=pair)
            tell("registered")
            wait_for("send")
            handle.transfer("send")


async def test_a_peer_that_dies_while_others_wait_and_while_bytes_move(guests: Job, site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        client = sides.clients["inference", 0]
        target = torch.zeros(BIG)
        for moving in (False, True):
            worker = guests.start(trainer, pair, BIG, 1, at=("trainer", 0))
            await sides.init(("inference", 0), device_mesh=(1,), placements=[Replicate()])
            handle = await client.register_tensors("b", {"w": target}, pair_name=pair)
            waiting = asyncio.ensure_future(handle.transfer("recv"))
            await asyncio.to_thread(worker.expect, "registered")
            if moving:
                worker.go("send")
                while not waiting.done() and (await client.status())["agent"]["running"] == 0:
                    pass
            worker.kill()
            began = time.monotonic()
            try:
                result = await waiting
            except PeerLostError as error:
                assert time.monotonic() - began < 2
                assert (error.reason == "died" and f"pid {worker.pid}" in error.message) or "died" in error.message
                assert "trainer rank 0" in error.message and pair in error.message
                assert moving or error.outcome == "withdrawn"
                with pytest.raises(PeerLostError) as caught:
                    await handle.transfer("recv")
                assert caught.value.reason == "died"
            else:
                assert moving and result.seq == 1, "it died too late to spoil anything"
            await handle.close()


async def test_a_torn_target_is_not_sent_from_until_received_in_full(site: Site) -> None:
    async with Sides(site, name()) as sides:
        handles = await simple(sides, size=BIG)
        send, recv = handles["trainer", 0], handles["inference", 0]
        assert (await sides.move(handles))["trainer", 0].seq == 1  # the first one lays out the program
        torn = await tear(send, recv)
        if not torn:
            pytest.skip("this machine moves 64 MiB before anybody can cancel it")
        with pytest.raises(TransferError, match="receive it in full before it is sent") as caught:
            await recv.transfer("send")
        assert caught.value.outcome == "withdrawn" and "batch 'b'" in caught.value.message
        await sides.move(handles)
        back = await sides.move(handles, source="inference")
        assert all(not isinstance(r, Exception) for r in back.values()), back


async def tear(send: Any, recv: Any) -> bool:
    """Abort transfers half-way, until one has torn its target."""
    for attempt in range(40):
        receiving = asyncio.ensure_future(recv.transfer("recv"))
        sending = asyncio.ensure_future(send.transfer("send", timeout=0.002 + 0.001 * (attempt % 20)))
        ended = await asyncio.gather(sending, receiving, return_exceptions=True)
        assert isinstance(ended[0], Exception) == isinstance(ended[1], Exception) or ended[0].outcome == "withdrawn", (
            ended
        )
        if getattr(ended[1], "torn", False):
            assert ended[1].outcome == "aborted" and ended[1].code == "transfer_aborted"
            assert not ended[0].torn and "its deadline passed" in ended[1].message
            return True
        if isinstance(ended[0], TransferTimeoutError) and not isinstance(ended[1], Exception):
            raise AssertionError(ended)
    return False


async def test_the_agent_dies(rough: Site) -> None:
    async with Sides(rough, name()) as sides:
        handles = await simple(sides)
        await sides.move(handles)
        client = sides.clients["inference", 0]
        pid = (await client.status())["agent"]["pid"]
        waiting = asyncio.ensure_future(handles["inference", 0].transfer("recv", timeout=math.inf))
        offer = asyncio.ensure_future(handles["inference", 0].wait_offer(timeout=math.inf))
        await client.status()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(AgentLostError, match=r"died.*; call init_pair and register_tensors again$") as caught:
            await waiting
        assert caught.value.code == "agent_lost" and caught.value.quiesced and caught.value.outcome == "unknown"
        phases = caught.value.phases
        assert phases is not None and phases.copy_in > 0 and phases.total == phases.copy_in, (
            "the agent measured the rest"
        )
        assert pickle.loads(pickle.dumps(caught.value)).phases == phases
        with pytest.raises(AgentLostError, match="call init_pair and register_tensors again"):
            await offer
        assert "agent" in caught.value.message and str(pid) in caught.value.message
        for pair in sides.pairs.values():
            assert await pair.lost == "died"
            assert pair.errored is not None and "call init_pair and register_tensors again" in pair.errored.message
        for call in (
            handles["inference", 0].transfer("recv"),
            handles["inference", 0].wait_offer(),
            client.register_tensors("c", {"w": torch.zeros(4)}, pair_name=sides.pair),
        ):
            with pytest.raises(AgentLostError, match="call init_pair and register_tensors again") as caught:
                await call
            assert caught.value.phases is None, "no agent was asked"
        await sides.meet(device_mesh=(1,), placements=[Replicate()], timeout=60)
        again = await sides.register("b", lambda side, rank: ({"w": torch.ones(4)}, {}))
        assert [r.seq for r in (await sides.move(again)).values()] == [2, 2], "numbers go on"


async def test_a_frozen_agent_says_unknown_and_whether_it_may_still_write(rough: Site) -> None:
    async with Sides(rough, name()) as sides:
        handles = await simple(sides)
        await sides.move(handles)
        client = sides.clients["inference", 0]
        pid = (await client.status())["agent"]["pid"]
        send_signal(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(TransferTimeoutError, match="did not answer by the deadline") as caught:
                await handles["inference", 0].transfer("recv", timeout=0.2)
            assert time.monotonic() - began < 3
            assert caught.value.outcome == "unknown" and caught.value.torn and caught.value.quiesced
            assert "'b'" in caught.value.message
        finally:
            os.kill(pid, signal.SIGCONT)
        again = await sides.move(handles)
        assert all(not isinstance(r, Exception) for r in again.values()), again


async def test_status_says_how_many_bytes_the_last_transfer_moved(site: Site) -> None:
    """Two ranks of one side hold what one of the other does, so the directions differ."""
    async with Sides(site, name(), trainer=2, inference=1) as sides:
        await sides.meet(trainer={"device_mesh": (2,)}, inference={"device_mesh": (1,)}, placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(4)}, {}))

        async def shown() -> list[int]:
            status = await sides.clients["inference", 0].status()
            return [one["bytes"] for one in status["batches"]]

        assert await shown() == [32]
        for source, nbytes in (("trainer", 16), ("inference", 32)):
            calls = [handle.transfer("send" if side == source else "recv") for (side, _), handle in handles.items()]
            assert max(result.bytes for result in await asyncio.gather(*calls)) == nbytes
            assert await shown() == [nbytes]
