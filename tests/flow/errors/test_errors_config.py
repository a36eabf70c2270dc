"""ConfigError, LayoutError and agent errors: what is wrong in a call is refused, and told in its own words."""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.errors import AgentUnavailableError, ConfigError, LayoutError, RegistrationError
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sides import Sides
from tests.flow.sites import Site

pytestmark = pytest.mark.usefixtures("served")


def name() -> str:
    """A pair of this test alone."""
    return f"p-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 101, "ü", "a/b", None])
async def test_names_have_one_alphabet(bad: str) -> None:
    async with etha.AsyncTensorBusClient() as client:
        for arguments in ((bad, "a", "b"), ("p", bad, "b"), ("p", "a", bad)):
            with pytest.raises(ConfigError, match=r"name .* is not allowed: use 1 to 100 of") as caught:
                await client.init_pair(*arguments)
            assert caught.value.code == "config"
        with pytest.raises(ConfigError, match=r"batch name .* is not allowed"):
            await client.register_tensors(bad, {})
        if bad:
            with pytest.raises(ConfigError, match=r"namespace name .* is not allowed"):
                etha.AsyncTensorBusClient(namespace=bad)


async def test_arguments_that_contradict_each_other() -> None:
    async with etha.AsyncTensorBusClient() as client:
        with pytest.raises(ConfigError, match="both 'a': a pair joins two sides"):
            await client.init_pair("p", "a", "a")
        with pytest.raises(ConfigError, match=r"rank 2 is not inside a side of 2 ranks \(0 to 1\)"):
            await client.init_pair("p", "a", "b", 2, rank=2)
        with pytest.raises(ConfigError, match=r"rank -1 is not inside"):
            await client.init_pair("p", "a", "b", 2, rank=-1)
        with pytest.raises(ConfigError, match=r"expected_world_size='2' is not an int"):
            await client.init_pair("p", "a", "b", "2")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"placements=.* needs device_mesh="):
            await client.init_pair("p", "a", "b", placements=[Shard(0)])
        for timeout in (-1, math.nan, "3", True):
            with pytest.raises(ConfigError, match=r"timeout=.* must be seconds"):
                await client.init_pair("p", "a", "b", timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="call init_pair first"):
            await client.register_tensors("b", {}, pair_name="p")
        with pytest.raises(RegistrationError, match="batch 'b' is not registered in this client"):
            await client.transfer("b", "send")
        with pytest.raises(RegistrationError, match="batch 'b' is not registered in this client"):
            await client.wait_offer("b")
    with pytest.raises(ConfigError, match=r"timeout=-1 must be seconds, 0 or more \(math.inf: no deadline\)"):
        etha.TensorBusClient(timeout=-1)
    with pytest.raises(ConfigError, match="device='gpu7'"):
        etha.TensorBusClient(device="gpu7")


async def test_arguments_of_a_registration_and_a_transfer(served: Site) -> None:
    async with Sides(served, name()) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        client = sides.clients["trainer", 0]
        tensors = {"w": torch.zeros(2)}
        for options, text in (
            ({"direction": "up"}, "direction='up' must be"),
            ({"bucket_size": 0}, "bucket_size=0 must be"),
            ({"pair_name": None}, "needs pair_name="),
            ({"pair_name": "other"}, r"pairs \['other'\] are not formed in this client"),
        ):
            with pytest.raises(ConfigError, match=text):
                await client.register_tensors("b", tensors, **{"pair_name": sides.pair, **options})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"tensor name '' must be a text of 1 to 500 bytes"):
            await client.register_tensors("b", {"": torch.zeros(2)}, pair_name=sides.pair)
        with pytest.raises(ConfigError, match=r"must be a text of 1 to 500 bytes"):
            await client.register_tensors("b", {"ü" * 251: torch.zeros(2)}, pair_name=sides.pair)
        with pytest.raises(ConfigError, match=r"tensors\[0\] is not a \(tensor, pair_name\) tuple"):
            await client.register_tensors("b", [torch.zeros(2)])  # type: ignore[list-item]
        handles = await sides.register(
            "b", lambda side, rank: (tensors if side == "trainer" else {"w": torch.ones(2)}, {})
        )
        handle = handles["trainer", 0]
        with pytest.raises(ConfigError, match="transfer_type='push' must be 'send' or 'recv'"):
            await handle.transfer("push")
        with pytest.raises(ConfigError, match=r"version=1.5 must be an int or a str"):
            await handle.transfer("send", version=1.5)
        with pytest.raises(ConfigError, match=r"on_commit= needs transfer_type='recv' and a batch .* atomic=True"):
            await handle.transfer("send", on_commit=lambda: None)
        with pytest.raises(ConfigError, match="timeout=-2 must be seconds"):
            await handle.transfer("send", timeout=-2)


@pytest.mark.parametrize("call", ["init_pair", "register_tensors", "transfer", "wait_offer", "status"])
async def test_infinite_timeouts_are_legal_everywhere(site: Site, call: str) -> None:
    async with Sides(site, name(), timeout=math.inf) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()], timeout=math.inf)
        handles = await sides.register(
            "b", lambda side, rank: ({"w": torch.full((3,), float(rank))}, {"timeout": math.inf})
        )
        send, recv = handles["trainer", 0], handles["inference", 0]
        sending = asyncio.ensure_future(send.transfer("send", timeout=math.inf))
        assert (await recv.wait_offer(timeout=math.inf)).bytes == 12
        assert (await recv.transfer("recv", timeout=math.inf)).seq == (await sending).seq == 1
        assert (await sides.clients["trainer", 0].status(timeout=math.inf))["pairs"]


async def test_the_blocking_client_in_a_running_loop_names_the_async_one() -> None:
    client = etha.TensorBusClient()
    for call in (
        lambda: client.init_pair("p", "a", "b"),
        lambda: client.register_tensors("b", {}, pair_name="p"),
        lambda: client.wait_offer("b"),
        lambda: client.status(),
    ):
        with pytest.raises(ConfigError, match="running event loop: use AsyncTensorBusClient and await its calls"):
            call()
    client.close()


async def test_a_closed_client_says_so(served: Site) -> None:
    async with Sides(served, name()) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(1)}, {}))
        client = sides.clients["trainer", 0]
        await client.close()
        await client.close()
        for call in (
            client.init_pair("p", "a", "b"),
            client.register_tensors("c", {}, pair_name=sides.pair),
            client.transfer("b", "send"),
            client.wait_offer("b"),
            client.status(),
            handles["trainer", 0].transfer("send"),
        ):
            with pytest.raises(ConfigError, match="this client is closed: create another"):
                await call
        await handles["trainer", 0].close()


def test_the_blocking_client_closed() -> None:
    client = etha.TensorBusClient()
    assert client.status()["agent"]["device"] == "cpu"
    client.close()
    client.close()
    with pytest.raises(ConfigError, match="this client is closed: create another"):
        client.status()


def test_a_client_belongs_to_one_loop() -> None:
    client = etha.AsyncTensorBusClient()

    async def use() -> None:
        await client.status()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(use())
        with pytest.raises(ConfigError, match="belongs to another event loop: create one client per loop"):
            second.run(use())
        first.run(client.close())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_after_a_fork_the_child_is_told_to_make_its_own() -> None:
    with etha.TensorBusClient() as client:
        client.status()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = b""
            try:
                client.status(timeout=5)
            except ConfigError as error:
                said = str(error).encode()
            client.close()
            os.write(write, said)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read().decode()
        assert os.waitpid(child, 0)[1] == 0
        assert f"this client belongs to process {os.getpid()}, from which process {child} was forked" in said
        assert "create a client in the child" in said
        assert client.status()["agent"]["workers"], "the parent's client lives on"


async def test_a_socket_path_that_cannot_be_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    monkeypatch.setenv("ETHA_RUNTIME_DIR", str(deep))
    async with etha.AsyncTensorBusClient() as client:
        with pytest.raises(ConfigError, match=r"at most 107 fit: shorten ETHA_RUNTIME_DIR"):
            await client.status()
    async with etha.AsyncTensorBusClient(agent="tcp://somewhere:1") as client:
        with pytest.raises(ConfigError, match=r"agent address 'tcp://somewhere:1' must look like ipc:///"):
            await client.status()


async def test_no_agent_and_none_may_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ETHA_RUNTIME_DIR", str(tmp_path))
    async with etha.AsyncTensorBusClient(autostart=False) as client:
        with pytest.raises(AgentUnavailableError, match=r"cpu\.sock") as caught:
            await client.init_pair("p", "a", "b")
        assert caught.value.code == "agent_unavailable"
        assert "etha agent" in caught.value.message
    async with etha.AsyncTensorBusClient(agent=f"ipc://{tmp_path}/none.sock") as client:
        with pytest.raises(AgentUnavailableError, match=r"none\.sock"):
            await client.status()


async def test_an_agent_of_another_redis_or_namespace_names_both(served: Site) -> None:
    async with etha.AsyncTensorBusClient() as client:
        await client.status()
    async with etha.AsyncTensorBusClient(redis_url="redis://me:secret@elsewhere:6379/0") as client:
        with pytest.raises(ConfigError) as caught:
            await client.init_pair("p", "a", "b")
        assert "the embedded server of this host" in caught.value.message
        assert "redis://me:***@elsewhere:6379/0" in caught.value.message
        assert "secret" not in caught.value.message
    async with etha.AsyncTensorBusClient(
        agent=f"ipc://{served.at('a')['ETHA_RUNTIME_DIR']}/default/cpu.sock", namespace="other"
    ) as client:
        with pytest.raises(ConfigError, match="serves namespace 'default', not 'other'"):
            await client.status()


def stay(pair: str) -> None:
    with etha.TensorBusClient() as client:
        client.status()
        tell("asking")
        client.init_pair(pair, "trainer", "inference", 2, rank=0)
        tell("formed", os.getpid())
        wait_for("leave")


async def test_a_rank_whose_holder_lives_and_sizes_that_disagree(guests: Job, site: Site, pair: str) -> None:
    async with Sides(site, pair, trainer=2) as sides:
        client = sides.clients["trainer", 0]
        other = guests.start(stay, pair, at=("trainer", 0))
        await asyncio.to_thread(other.expect, "asking")
        while not any(p["pair"] == pair and p["sides"] for p in (await client.status())["pairs"]):
            pass
        with pytest.raises(ConfigError, match=rf"world_size of side trainer on pair {pair}: rank 2 says 3"):
            await client.init_pair(pair, "trainer", "inference", 3, rank=2, timeout=5)
        mine = asyncio.gather(sides.init(("trainer", 1)), sides.init(("inference", 0)))
        formed = await mine
        pid = await asyncio.to_thread(other.expect, "formed")
        with pytest.raises(ConfigError, match=f"is held by pid {pid} on host") as caught:
            await client.init_pair(pair, "trainer", "inference", 2, rank=0)
        assert pair in caught.value.message and "give each worker its own rank" in caught.value.message
        with pytest.raises(ConfigError, match=rf"pair {pair} links inference and trainer, not trainer and somebody"):
            await client.init_pair(pair, "trainer", "somebody", 2, rank=0)
        with pytest.raises(ConfigError, match=rf"this client is trainer rank 1 of pair '{pair}' already"):
            await sides.clients["trainer", 1].init_pair(pair, "trainer", "inference", 2, rank=0)
        assert await sides.init(("trainer", 1)) is formed[0], "the same call at the current epoch is a no-op"
        assert not formed[0].lost.is_set()
        other.go("leave")
        other.result()


async def test_a_plain_tensor_needs_a_layout(served: Site) -> None:
    async with Sides(served, name()) as sides:
        await sides.meet()
        client = sides.clients["trainer", 0]
        with pytest.raises(
            LayoutError, match=r"tensor 'w' is a plain tensor and has no layout: give placements="
        ) as caught:
            await client.register_tensors("b", {"w": torch.zeros(2)}, pair_name=sides.pair)
        assert caught.value.code == "layout" and sides.pair in caught.value.message


async def test_malformed_layouts(served: Site) -> None:
    async with Sides(served, name(), trainer=2) as sides:
        client = sides.clients["trainer", 0]
        for mesh, placements, text in (
            ((2,), [Shard(0), Shard(1)], "2 placements"),
            ((3,), [Shard(0)], r"outside the side's 2"),
            (torch.tensor([0, 0]), [Shard(0)], "rank"),
            ((0,), [Shard(0)], "mesh"),
            (torch.tensor([5]), [Shard(0)], r"mesh names ranks \[5\] outside the side's 2"),
        ):
            with pytest.raises(LayoutError, match=text) as caught:
                await client.init_pair(sides.pair, "trainer", "inference", 2, mesh, placements, rank=0)
            assert f"pair '{sides.pair}'" in caught.value.message
        await sides.meet(trainer={"device_mesh": (2,)})
        with pytest.raises(LayoutError, match=r"'w'"):
            await client.register_tensors(
                "b", {"w": torch.zeros(2)}, pair_name=sides.pair, placements={"w": [Shard(0), Shard(0)]}
            )


@pytest.mark.parametrize("idle", ["-3", "nan", "soon"])
async def test_an_agent_that_would_leave_at_once_is_not_started(monkeypatch: pytest.MonkeyPatch, idle: str) -> None:
    monkeypatch.setenv("ETHA_IDLE", idle)
    with pytest.raises(ConfigError, match=f"ETHA_IDLE='{idle}'"):
        etha.AsyncTensorBusClient()
