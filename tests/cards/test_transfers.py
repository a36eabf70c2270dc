"""Transfers between GPUs that are played (``played.py``): real clients and agents, real processes, real sockets.

What a real card must still show is in docs/gpu.md.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import etha
from etha.cuda import select as cuda
from etha.errors import (
    AgentLostError,
    ConfigError,
    PeerLostError,
    RegistrationError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from etha.plan import Layout, TensorSpec, build_agent_plan
from tests.fakes.cuda import GPU0, GPU1, FakeDriver
from tests.flow.jobs import WorkerFailed, tell, wait_for
from tests.flow.truth import cut, stale, whole
from tests.unit.store.server import served

from .played import UUIDS, Cards

GPU2 = "GPU-22222222-2222-4222-8222-222222222222"
Held = Mapping[str, torch.Tensor]


@pytest.fixture
def cards(request: pytest.FixtureRequest, runtime: Path) -> Iterator[Cards]:
    with Cards(runtime, getattr(request, "param", UUIDS)) as cards:
        yield cards


async def formed(a: Any, b: Any) -> None:
    """One rank a side, each of a world of one."""
    await asyncio.gather(
        a.init_pair("weights", "trainer", "inference", 1, (1,), [Replicate()], rank=0),
        b.init_pair("weights", "inference", "trainer", 1, (1,), [Replicate()], rank=0),
    )


async def moved(a: Any, b: Any, given: Held, wanted: Held, **options: Any) -> tuple[Any, Any]:
    """Handles of a batch that both have registered, after one transfer of it."""
    left, right = await asyncio.gather(
        a.register_tensors("b", given, pair_name="weights", **options),
        b.register_tensors("b", wanted, pair_name="weights", **options),
    )
    await asyncio.gather(left.transfer("send", version=1), right.transfer("recv"))
    return left, right


def mixed(cards: Cards, uuid: str, *, given: bool) -> dict[str, torch.Tensor]:
    """Contiguous, turned, cast, spaced, empty, large: as a source, or as a target that is all wrong."""
    floats = whole((96, 64)) / 3
    made = {
        "plain": floats,
        "turned": floats.t().contiguous().t() if given else floats,
        "cast": floats if given else floats.to(torch.bfloat16),
        "spaced": floats if given else torch.zeros(96, 128)[:, ::2],
        "bytes": whole((1001,), dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "large": whole((1024, 1025)),
    }
    return {name: cards.tensor(tensor if given else stale(tensor), uuid) for name, tensor in made.items()}


def same(given: Held, wanted: Held) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(tensor, given[name].to(tensor.dtype)), name


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": "full"}], ids=["plain", "atomic", "verified"])
async def test_both_sides_on_one_card(cards: Cards, options: dict[str, Any]) -> None:
    """One agent serves trainer and inference: one copy on the card, no staging."""
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted = mixed(cards, GPU0, given=True), mixed(cards, GPU0, given=False)
        left, right = await moved(a, b, given, wanted, **options)
        same(given, wanted)
        for tensor in given.values():
            tensor.mul_(2)
        sent, received = await asyncio.gather(left.transfer("send", version=2), right.transfer("recv"))
        same(given, wanted)
        assert sent.bytes == received.bytes and received.version == 2
        [worker, _] = (await a.status())["agent"]["workers"]
        assert worker["segments"] > 0


async def test_a_snapshot_is_what_the_stream_had_come_to(cards: Cards) -> None:
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given = {"w": cards.tensor(whole((64, 33)))}
        wanted = {"w": cards.tensor(stale(whole((64, 33))))}
        left, right = await moved(a, b, given, wanted)
        stream = cards.driver.current_stream(GPU0)
        cards.driver.hold(stream)
        cards.driver.launch(GPU0, stream, lambda: given["w"].fill_(5))
        taking = asyncio.ensure_future(left.transfer("send", snapshot=True))
        cards.driver.release(stream)
        future = await taking
        given["w"].fill_(6)
        await right.transfer("recv")
        await future
        assert (wanted["w"] == 5).all()


async def test_a_call_comes_after_the_work_that_its_stream_had_queued(cards: Cards) -> None:
    """The source is written, the target is read by what was queued before the calls, and nobody moved before that."""
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted = {"w": cards.tensor(whole((256, 3)))}, {"w": cards.tensor(stale(whole((256, 3))))}
        left, right = await moved(a, b, given, wanted)
        stream, seen = cards.driver.current_stream(GPU0), torch.zeros(256, 3)
        cards.driver.hold(stream)
        cards.driver.launch(GPU0, stream, lambda: given["w"].fill_(9))
        cards.driver.launch(GPU0, stream, lambda: seen.copy_(wanted["w"]))
        calls = [asyncio.ensure_future(h.transfer(v)) for h, v in ((left, "send"), (right, "recv"))]
        await a.status()  # the agent has heard of both by now
        await a.status()
        assert not any(call.done() for call in calls)
        assert torch.equal(wanted["w"], whole((256, 3)))
        cards.driver.release(stream)
        await asyncio.gather(*calls)
        assert (wanted["w"] == 9).all() and torch.equal(seen, whole((256, 3)))


async def test_a_deadline_says_that_the_callers_own_gpu_is_behind(cards: Cards) -> None:
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted = {"w": cards.tensor(whole((8,)))}, {"w": cards.tensor(stale(whole((8,))))}
        left, right = await moved(a, b, given, wanted)
        stream = cards.driver.current_stream(GPU0)
        cards.driver.hold(stream)
        with pytest.raises(TransferTimeoutError, match="queued on its GPU") as late:
            await left.transfer("send", timeout=0.3)
        assert late.value.outcome == "withdrawn"
        waiting = asyncio.ensure_future(left.transfer("send"))
        await a.status()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        cards.driver.release(stream)
        await asyncio.gather(left.transfer("send"), right.transfer("recv"))


@pytest.mark.parametrize("atomic", [False, True])
async def test_memory_that_cannot_be_exported_goes_through_memory_that_can(cards: Cards, atomic: bool) -> None:
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given = {"w": cards.tensor(whole((100, 7)), exportable=False), "v": cards.tensor(whole((4,)))}
        wanted = {
            "w": cards.tensor(stale(whole((100, 7))), exportable=False),
            "v": cards.tensor(stale(whole((4,)))),
        }
        left, right = await moved(a, b, given, wanted, atomic=atomic)
        same(given, wanted)
        given["w"].fill_(3)
        await asyncio.gather(left.transfer("send"), right.transfer("recv"))
        same(given, wanted)
        workers = (await a.status())["agent"]["workers"]
        assert all("expandable segments" in worker["memory"] for worker in workers)


async def test_sharded_to_sharded_and_partial_to_replicated(cards: Cards) -> None:
    """Two ranks a side, each with a client of its own, in every element."""
    cards.start("cuda:0")
    world, shape = whole((13, 10)), (13, 10)
    clients = {(side, rank): cards.client("cuda:0") for side in ("trainer", "inference") for rank in range(2)}
    try:
        other = {"trainer": "inference", "inference": "trainer"}
        await asyncio.gather(
            *(
                client.init_pair("weights", side, other[side], 2, (2,), [Replicate()], rank=rank)
                for (side, rank), client in clients.items()
            )
        )
        parts = [torch.full(shape, 1.5), world - 1.5]
        placements = {
            "trainer": {"s": [Shard(0)], "p": [Partial()]},
            "inference": {"s": [Shard(1)], "p": [Replicate()]},
        }
        held: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        for side, rank in clients:
            sharded = cut(world, 0 if side == "trainer" else 1, 2, rank)
            summed = parts[rank] if side == "trainer" else stale(world)
            fresh = sharded if side == "trainer" else stale(sharded)
            held[side, rank] = {"s": cards.tensor(fresh), "p": cards.tensor(summed)}
        handles = await asyncio.gather(
            *(
                clients[member].register_tensors(
                    "b",
                    held[member],
                    pair_name="weights",
                    placements=placements[member[0]],
                    shapes={"s": shape, "p": shape},
                )
                for member in clients
            )
        )
        await asyncio.gather(
            *(h.transfer("send" if m[0] == "trainer" else "recv") for m, h in zip(clients, handles, strict=True))
        )
        for rank in range(2):
            assert torch.equal(held["inference", rank]["s"], cut(world, 1, 2, rank))
            assert torch.equal(held["inference", rank]["p"], world)
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": "full"}], ids=["plain", "atomic", "verified"])
async def test_two_cards_of_one_host(cards: Cards, options: dict[str, Any]) -> None:
    """The receiving agent opens the other's workers' memory, and copies once."""
    cards.start("cuda:0")
    cards.start("cuda:1")
    async with cards.client("cuda:0") as a, cards.client("cuda:1") as b:
        await formed(a, b)
        given, wanted = mixed(cards, GPU0, given=True), mixed(cards, GPU1, given=False)
        left, right = await moved(a, b, given, wanted, **options)
        same(given, wanted)
        [batch] = (await b.status())["batches"]
        assert batch["transport"] == "host"
        given["large"].mul_(3)
        await (await asyncio.gather(left.transfer("send", snapshot=True), right.transfer("recv")))[0]
        same(given, wanted)


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("back", [False, True], ids=["to the CPU", "from the CPU"])
async def test_a_card_and_a_cpu(cards: Cards, apart: bool, back: bool) -> None:
    """Inference hosts without a GPU exist: pinned staging at the card's end, whatever the way between."""
    host = {"ETHA_HOST_ID": "other"} if apart else {}
    cards.start("cuda:0")
    cards.start("cpu", **host)
    async with cards.client("cuda:0") as a, cards.client("cpu", **host) as b:
        await formed(a, b)
        card, cpu = mixed(cards, GPU0, given=not back), {}
        for name, tensor in mixed(cards, GPU0, given=back).items():
            cpu[name] = tensor.clone()
        given, wanted = (cpu, card) if back else (card, cpu)
        sender, receiver = (b, a) if back else (a, b)
        left, right = await moved(sender, receiver, given, wanted, verify="full")
        same(given, wanted)
        given["large"].mul_(3)
        await asyncio.gather(left.transfer("send"), right.transfer("recv"))
        same(given, wanted)


@pytest.fixture
def apart(cards: Cards) -> Iterator[None]:
    """The agents of all cards are on "hosts" of their own, joined by NCCL."""
    with served(cards.runtime) as server:
        cards.start_hosts(server.url)
        yield
        broken = cards.stop("hosts")
        assert not broken, "\n".join(broken)


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": "full"}], ids=["plain", "atomic", "verified"])
async def test_two_cards_of_two_hosts(cards: Cards, apart: None, options: dict[str, Any]) -> None:
    """Over NCCL, with a communicator of the two agents whose id went through Redis."""
    async with cards.on_host(0) as a, cards.on_host(1) as b:
        await formed(a, b)
        given, wanted = mixed(cards, GPU0, given=True), mixed(cards, GPU1, given=False)
        left, right = await moved(a, b, given, wanted, **options)
        same(given, wanted)
        [batch] = (await b.status())["batches"]
        assert batch["transport"] == "nccl"
        given["large"].mul_(3)
        await (await asyncio.gather(left.transfer("send", snapshot=True), right.transfer("recv")))[0]
        same(given, wanted)


@pytest.mark.parametrize("cards", [(GPU0, GPU1, GPU2)], indirect=True)
async def test_an_agent_with_nothing_to_send_joins_all_the_same(cards: Cards, apart: None) -> None:
    """Its shard is empty; the others' communicator has it as a member, and so has the next one."""
    async with cards.on_host(0) as a, cards.on_host(1) as b, cards.on_host(2) as c:
        await asyncio.gather(
            a.init_pair("weights", "trainer", "inference", 2, (2,), [Shard(0)], rank=0),
            b.init_pair("weights", "trainer", "inference", 2, (2,), [Shard(0)], rank=1),
            c.init_pair("weights", "inference", "trainer", 1, (1,), [Replicate()], rank=0),
        )
        full, shapes = whole((1, 64)), {"w": (1, 64)}
        wanted = cards.tensor(stale(full), GPU2)
        given = (cards.tensor(full, GPU0), cards.tensor(torch.zeros(0, 64), GPU1), wanted)
        handles = await asyncio.gather(
            *(
                client.register_tensors("b", {"w": tensor}, pair_name="weights", shapes=shapes)
                for client, tensor in zip((a, b, c), given, strict=True)
            )
        )
        for _ in range(2):
            await asyncio.gather(*(h.transfer(v) for h, v in zip(handles, ("send", "send", "recv"), strict=True)))
            assert torch.equal(wanted, full)
        assert (await c.status())["batches"][0]["transport"] == "nccl"


@pytest.mark.parametrize("cards", [(GPU0, GPU1, GPU2)], indirect=True)
async def test_cards_of_one_host_do_not_carry_over_nccl(cards: Cards) -> None:
    """One of two cards of a host takes in all. Over streams the other one would carry half of it; NCCL brings it to the
    card that holds it."""
    full, little = whole((1024, 1025)), whole((2, 4))
    source = {name: TensorSpec(t.shape, t.dtype, Layout((1,), [Shard(0)])) for name, t in (("w", full), ("x", little))}
    target = {"w": source["w"], "x": TensorSpec(little.shape, little.dtype, Layout((2,), [Shard(0)]))}
    plan = build_agent_plan(
        source, target,
        source_agents=["a"], target_agents=["b", "c"], source_hosts=["s"], target_hosts=["t", "t"],
    )  # fmt: skip
    assert plan.carries
    with served(cards.runtime) as server:
        cards.start_hosts(server.url, ["s", "t", "t"])
        async with cards.on_host(0) as a, cards.on_host(1) as b, cards.on_host(2) as c:
            await asyncio.gather(
                a.init_pair("weights", "trainer", "inference", 1, (1,), [Shard(0)], rank=0),
                b.init_pair("weights", "inference", "trainer", 2, (2,), [Shard(0)], rank=0),
                c.init_pair("weights", "inference", "trainer", 2, (2,), [Shard(0)], rank=1),
            )
            given = {"w": cards.tensor(full, GPU0), "x": cards.tensor(little, GPU0)}
            wanted = {"w": cards.tensor(stale(full), GPU1), "x": cards.tensor(stale(little[:1]), GPU1)}
            other = {"x": cards.tensor(stale(little[:1]), GPU2)}
            runs = {"w": [[(0, 1024)], [(0, 1025)]]}
            handles = await asyncio.gather(
                a.register_tensors("b", given, pair_name="weights"),
                b.register_tensors(
                    "b", wanted, pair_name="weights", regions=runs, shapes={"w": (1024, 1025), "x": (2, 4)}
                ),
                c.register_tensors("b", other, pair_name="weights", shapes={"x": (2, 4)}),
            )
            [_, got, rest] = await asyncio.gather(
                *(h.transfer(v) for h, v in zip(handles, ("send", "recv", "recv"), strict=True))
            )
            assert torch.equal(wanted["w"], full)
            assert torch.equal(torch.cat([wanted["x"].cpu(), other["x"].cpu()]), little)
            assert got.peers == rest.peers == (("trainer", 0),)
            assert (await b.status())["batches"][0]["transport"] == "nccl"
        broken = cards.stop("hosts")
        assert not broken, "\n".join(broken)


@pytest.mark.parametrize("which", ["another", "its own"])
async def test_closing_a_batch_ends_its_own_held_calls_only(cards: Cards, which: str) -> None:
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        handles = {}
        for name in ("x", "y"):
            handles[name] = await asyncio.gather(
                a.register_tensors(name, {"w": cards.tensor(whole((8,)))}, pair_name="weights"),
                b.register_tensors(name, {"w": cards.tensor(stale(whole((8,))))}, pair_name="weights"),
            )
        stream = cards.driver.current_stream(GPU0)
        cards.driver.hold(stream)
        call = asyncio.ensure_future(handles["x"][0].transfer("send", timeout=math.inf))
        await a.status()
        await handles["y" if which == "another" else "x"][0].close()
        if which == "another":
            cards.driver.release(stream)
            await asyncio.gather(call, handles["x"][1].transfer("recv"))
        else:
            with pytest.raises(PeerLostError) as reported:
                await call
            assert reported.value.outcome == "withdrawn"
            cards.driver.release(stream)


async def test_after_a_failed_transfer_another_communicator_carries_the_next(cards: Cards, apart: None) -> None:
    """The first agent makes the id, and tells the other over their link."""
    async with cards.on_host(0) as a, cards.on_host(1) as b:
        await formed(a, b)
        shape = (4096, 4096)
        given, wanted = {"w": cards.tensor(whole(shape), GPU0)}, {"w": cards.tensor(stale(whole(shape)), GPU1)}
        left, right = await moved(a, b, given, wanted)
        for _ in range(2):
            calls = [asyncio.ensure_future(left.transfer("send")), asyncio.ensure_future(right.transfer("recv"))]
            while (await a.status())["agent"]["running"] == 0:
                assert not calls[0].done(), "too fast to be cancelled: make the tensor larger"
            calls[0].cancel()
            cancelled, received = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(cancelled, asyncio.CancelledError) and isinstance(received, TransferAbortedError)
            given["w"].add_(1)
            await asyncio.gather(left.transfer("send"), right.transfer("recv"))
            same(given, wanted)


async def test_tensors_of_another_device_are_refused_by_name(cards: Cards) -> None:
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        with pytest.raises(RegistrationError, match=r"'w'.*serves cuda-GPU-0000"):
            await asyncio.gather(
                a.register_tensors("b", {"w": torch.zeros(4)}, pair_name="weights"),
                b.register_tensors("b", {"w": cards.tensor(torch.zeros(4))}, pair_name="weights"),
            )


async def test_a_device_that_is_not_there(cards: Cards) -> None:
    with pytest.raises(ConfigError, match="'cuda:7' is not among the 2 GPUs"):
        etha.AsyncTensorBusClient(device="cuda:7")


async def test_a_worker_killed_in_the_middle(cards: Cards) -> None:
    """Its agent outlives it, the other side is told, and a relaunch goes on; what it had shown is closed."""
    cards.start("cuda:0")
    async with cards.client("cuda:0") as b:
        wanted = {"w": cards.tensor(stale(whole((512, 512))))}
        for turn in range(2):
            worker = cards.worker(trainer)
            await b.init_pair("weights", "inference", "trainer", 1, (1,), [Replicate()], rank=0)
            handle = await b.register_tensors("b", wanted, pair_name="weights")
            await handle.transfer("recv")
            assert torch.equal(wanted["w"], whole((512, 512), version=1))
            receiving = asyncio.ensure_future(handle.transfer("recv"))
            await asyncio.to_thread(worker.expect, "held")
            await b.status()
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(PeerLostError):
                await receiving
            wanted["w"].fill_(turn)
            with pytest.raises(WorkerFailed):
                await asyncio.to_thread(worker.result)


def trainer(uuids: tuple[str, ...]) -> None:
    """Sends once; then its stream is held, and its second call waits until it is killed."""
    fake = FakeDriver(uuids)
    cuda.install_driver(fake)
    with etha.TensorBusClient(device="cuda:0", autostart=False, timeout=20) as client:
        client.init_pair("weights", "trainer", "inference", 1, (1,), [Replicate()], rank=0)
        tensor = fake.empty(uuids[0], (512, 512))
        tensor.copy_(whole((512, 512), version=1))
        handle = client.register_tensors("b", {"w": tensor}, pair_name="weights")
        handle.transfer("send")
        stream = fake.current_stream(uuids[0])
        fake.hold(stream)
        fake.launch(uuids[0], stream, lambda: tensor.fill_(0))
        handle.transfer("send", blocking=False)
        client.status()
        tell("held")
        wait_for("nothing")


async def test_an_agent_that_is_killed(cards: Cards) -> None:
    """Its workers are told, and another agent serves after init_pair and register_tensors."""
    pid = cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        given, wanted = {"w": cards.tensor(whole((300, 5)))}, {"w": cards.tensor(stale(whole((300, 5))))}
        await formed(a, b)
        _, right = await moved(a, b, given, wanted, atomic=True)
        receiving = asyncio.ensure_future(right.transfer("recv"))
        await b.status()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(AgentLostError):
            await receiving
        cards.forget("cuda:0")
        cards.start("cuda:0")
        given["w"].mul_(2)
        await formed(a, b)
        await moved(a, b, given, wanted, atomic=True)
        same(given, wanted)


async def test_a_lost_context_ends_the_agent_and_says_so(cards: Cards) -> None:
    """Only a new process gets another; who waits is told at once, and the next agent serves."""
    cards.start("cuda:0", fail="synchronize")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        given, wanted = {"w": cards.tensor(whole((300, 5)))}, {"w": cards.tensor(stale(whole((300, 5))))}
        await formed(a, b)
        with pytest.raises((TransferError, AgentLostError), match=r"cudaErrorIllegalAddress|agent"):
            await moved(a, b, given, wanted)
        assert await asyncio.to_thread(cards.ended, "cuda:0") == 75
        cards.start("cuda:0")
        await formed(a, b)
        await moved(a, b, given, wanted)
        same(given, wanted)


async def test_memory_of_closed_batches_is_unmapped(cards: Cards) -> None:
    """An agent holds what open registrations use; what was closed may be freed, and shown again."""
    cards.start("cuda:0")
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        kept = cards.tensor(whole((700, 1000)))
        held = []
        for turn in range(4):
            given = {"w": cards.tensor(whole((600, 1000), turn)), "kept": kept}
            wanted = {name: cards.tensor(stale(tensor)) for name, tensor in given.items()}
            left, right = await moved(a, b, given, wanted, atomic=True)
            same(given, wanted)
            held.append([worker["segments"] for worker in (await a.status())["agent"]["workers"]])
            await left.close()
            await right.close()
        assert held[1:] == held[:1] * 3
