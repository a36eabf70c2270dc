"""A rendezvous that somebody misses says who; Redis out of reach says so and keeps its password to itself."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.errors import ConfigError, PlanError, ProtocolError, RedisUnavailableError, RendezvousTimeoutError
from etha.plan import Layout, TensorSpec, build_plan, simulate
from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way
from tests.unit.store.server import served


def name() -> str:
    return f"p-{uuid.uuid4().hex[:8]}"


async def missing(
    site: Site, pair: str, *, trainer: int, inference: int, come: list[tuple[str, int]]
) -> list[RendezvousTimeoutError]:
    """What those who came are told after half a second."""
    async with Sides(site, pair, trainer=trainer, inference=inference) as sides:
        began = time.monotonic()
        found = await asyncio.gather(*(sides.init(m, timeout=0.5) for m in come), return_exceptions=True)
        assert 0.4 < time.monotonic() - began < 5
        assert all(isinstance(error, RendezvousTimeoutError) for error in found), found
        return found  # type: ignore[return-value]


async def test_init_pair_lists_who_is_missing_on_which_side(site: Site) -> None:
    pair = name()
    first, second = await missing(site, pair, trainer=4, inference=2, come=[("trainer", 1), ("inference", 1)])
    for error, who in ((first, "trainer rank 1"), (second, "inference rank 1")):
        assert error.code == "rendezvous_timeout"
        assert (
            f"'{pair}'" in error.message
            and who in error.message
            and "ended at its deadline; missing: " in error.message
        )
    # Who leaves at the same moment may be missing already when the other's error is written.
    reported = {side: set(ranks) for side, ranks in first.missing.items()}
    assert reported["trainer"] >= {0, 2, 3} and reported["inference"] >= {0}
    assert "; trainer ranks 0, 2-3" in first.message and "missing: inference rank" in first.message


async def test_init_pair_alone_names_the_side_of_which_nobody_came(site: Site) -> None:
    [error] = await missing(site, name(), trainer=2, inference=1, come=[("trainer", 0)])
    assert error.missing == {"trainer": (1,), "inference": (0,)}
    assert "missing: trainer rank 1; everybody of inference. Redis is " in error.message


async def test_an_error_says_which_redis_was_used_and_what_to_set(runtime: Path) -> None:
    async with etha.AsyncTensorBusClient(timeout=100) as client:
        await client.status()
        with pytest.raises(RendezvousTimeoutError) as caught:
            await client.init_pair("p", "a", "b", 1, rank=0, timeout=0.5)
    reported = caught.value.message
    assert f"embedded server of host {socket.gethostname()} at {runtime}/redis.sock, namespace 'default'" in reported
    assert "set ETHA_REDIS_URL" in reported and "TMPDIR" in reported and "Other pairs" not in reported


async def test_a_wrong_pair_name_is_told_by_those_that_wait(site: Site) -> None:
    one, other = f"{name()}-weights", f"{name()}-Weigths"
    async with Sides(site, one) as here, Sides(site, other) as there:
        waiting = asyncio.ensure_future(there.init(("inference", 0)))
        try:
            for _ in range(50):  # until the other's call has reached Redis
                with pytest.raises(RendezvousTimeoutError) as caught:
                    await here.init(("trainer", 0), timeout=0.3)
                if other in caught.value.message:
                    break
            assert f"pair {other!r} of inference and trainer with inference rank 0" in caught.value.message
            assert caught.value.missing == {"inference": (0,)}
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


async def test_a_wrong_pair_name_is_told_to_who_times_out_second_too(site: Site) -> None:
    one, other = f"{name()}-weights", f"{name()}-Weigths"
    async with Sides(site, one) as here, Sides(site, other) as there:
        with pytest.raises(RendezvousTimeoutError):
            await here.init(("trainer", 0), timeout=0.3)
        reported = rf"pair '{one}' of inference and trainer, which trainer rank 0 left \d+ s ago"
        for _ in range(50):  # on a busy machine Redis may answer too late for the hint
            with pytest.raises(RendezvousTimeoutError) as caught:
                await there.init(("inference", 0), timeout=0.3)
            if re.search(reported, caught.value.message):
                break
        assert re.search(reported, caught.value.message), caught.value.message


async def test_a_wrong_batch_name_is_told_by_those_that_wait(site: Site) -> None:
    async with Sides(site, name()) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        here, there = sides.clients["trainer", 0], sides.clients["inference", 0]
        waiting = asyncio.ensure_future(there.register_tensors("model", {"w": torch.zeros(2)}, pair_name=sides.pair))
        try:
            for _ in range(50):
                with pytest.raises(RendezvousTimeoutError) as caught:
                    # codespell:ignore-next-line modell
                    await here.register_tensors("modell", {"w": torch.zeros(2)}, pair_name=sides.pair, timeout=0.3)
                if "'model'" in caught.value.message:
                    break
            assert "batch 'model' of inference rank 0" in caught.value.message
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


async def test_who_gave_up_can_come_again(site: Site) -> None:
    async with Sides(site, name()) as sides:
        for _ in range(2):
            with pytest.raises(RendezvousTimeoutError):
                await sides.init(("trainer", 0), timeout=0.2)
        waiting = asyncio.ensure_future(sides.init(("trainer", 0)))
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.TaskGroup():
                waiting.cancel()
                await waiting
        await sides.meet()
        assert {p.epoch for p in sides.pairs.values()} == {1}


async def test_register_tensors_lists_who_is_missing(site: Site) -> None:
    """Those that have come go on waiting: who gives up at the same moment may be missing already."""
    async with Sides(site, name(), trainer=3, inference=2) as sides:
        await sides.meet(trainer={"device_mesh": (3,)}, inference={"device_mesh": (2,)}, placements=[Replicate()])

        async def register(member: tuple[str, int], **options: Any) -> Any:
            return await sides.clients[member].register_tensors(
                "b", {"w": torch.zeros(2)}, pair_name=sides.pair, **options
            )

        here = sides.clients["trainer", 0]
        waiting = [asyncio.ensure_future(register(m)) for m in (("trainer", 2), ("inference", 1))]
        absent = {"trainer rank 0", "trainer rank 1", "inference rank 0"}
        while not any(
            line["batch"] == "b" and set(line["waiting_for"]) == absent for line in (await here.status())["batches"]
        ):
            assert not any(call.done() for call in waiting)
        began = time.monotonic()
        with pytest.raises(RendezvousTimeoutError) as caught:
            await register(("trainer", 0), timeout=1)
        assert time.monotonic() - began > 0.9
        error = caught.value
        assert "trainer rank 0 ended at its deadline" in error.message
        assert "'b'" in error.message and sides.pair in error.message
        assert error.missing == {"trainer": (1,), "inference": (0,)}
        assert "missing: inference rank 0; trainer rank 1" in error.message
        rest = [("trainer", 0), ("trainer", 1), ("inference", 0)]
        again = await asyncio.gather(*waiting, *(register(m) for m in rest))
        assert all(handle.plan["tensors"] == 1 for handle in again), "it left nothing behind"


async def test_a_cancelled_registration_leaves_nothing_behind(site: Site) -> None:
    async with Sides(site, name()) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        here, there = sides.clients["trainer", 0], sides.clients["inference", 0]
        for turn in range(12):
            both = [
                asyncio.ensure_future(c.register_tensors("b", {"w": torch.zeros(2)}, pair_name=sides.pair, timeout=2))
                for c in (here, there)
            ]
            for _ in range(turn):
                await here.status()  # a round trip later each time: cancelled before, while and after it stands
            both[0].cancel()
            first, second = await asyncio.gather(*both, return_exceptions=True)
            for handle in (first, second):
                if isinstance(handle, RendezvousTimeoutError):
                    continue
                if not isinstance(handle, BaseException):
                    await handle.close()
            assert isinstance(first, asyncio.CancelledError) or not isinstance(first, BaseException), first
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(2)}, {}))
        results = await sides.move(handles)
        assert len({r.seq for r in results.values()}) == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def log_of(runtime: Path) -> str:
    return "".join(path.read_text() for path in runtime.rglob("*.log"))


async def test_redis_where_nobody_listens(runtime: Path) -> None:
    url = f"redis://me:secret@127.0.0.1:{free_port()}/0"
    async with etha.AsyncTensorBusClient(redis_url=url, timeout=math.inf) as client:
        with pytest.raises(RedisUnavailableError, match=r"redis://me:\*\*\*@127\.0\.0\.1") as caught:
            await client.init_pair("p", "a", "b")
        assert caught.value.code == "redis_unavailable"
        assert "refuses connections" in str(caught.value) and "within" not in str(caught.value), "at once"
        assert "secret" not in str(caught.value) + str(caught.value.remote_traceback)
    assert "secret" not in log_of(runtime)


async def test_redis_that_goes_away_and_comes_back(way: Way, tmp_path: Path) -> None:
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", "secret", "--dir", str(tmp_path)]
    with served(tmp_path, *options) as server:
        with open_site(way, redis=f"redis://:secret@127.0.0.1:{port}") as site:
            async with Sides(site, "p") as sides:
                await sides.meet(device_mesh=(1,), placements=[Replicate()])
                handles = await sides.register("b", lambda side, rank: ({"w": torch.full((2,), 1.0 + rank)}, {}))
                server.stop()
                client = sides.clients["trainer", 0]
                for call in (
                    client.init_pair("q", "trainer", "inference", timeout=1),
                    client.register_tensors("c", {"w": torch.zeros(2)}, pair_name="p", timeout=1),
                ):
                    with pytest.raises(
                        RedisUnavailableError, match=r"Redis at redis://:\*\*\*@127\.0\.0\.1:\d+ "
                    ) as caught:
                        await call
                    assert "secret" not in str(caught.value) and (
                        "'q'" in str(caught.value) or "'c'" in str(caught.value)
                    )
                status = await client.status()
                assert status["agent"]["stale"].startswith("Redis at redis://:***@127.0.0.1")
                assert [line["state"] for line in status["pairs"] if line["pair"] == "p"] == ["formed"]
                results = await sides.move(handles)
                assert [r.seq for r in results.values()] == [1, 1], "an outage of Redis leaves transfers alone"
                server.start()
                again = await sides.register("c", lambda side, rank: ({"w": torch.zeros(2)}, {}))
                assert all(h.plan["tensors"] == 1 for h in again.values())


async def test_a_deadline_without_redis_still_says_who_is_missing(way: Way, tmp_path: Path) -> None:
    """Redis went away while a rank waited: its entry cannot be taken back, and nobody waits for that."""
    port = free_port()
    with served(tmp_path, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)) as server:
        with open_site(way, redis=f"redis://127.0.0.1:{port}") as site:
            async with Sides(site, "p") as sides:
                await sides.meet(device_mesh=(1,), placements=[Replicate()])
                client = sides.clients["trainer", 0]
                waits = asyncio.ensure_future(
                    client.register_tensors("b", {"w": torch.zeros(2)}, pair_name="p", timeout=3)
                )
                while not any(b["batch"] == "b" for b in (await client.status())["batches"]):
                    pass
                server.stop()
                with pytest.raises(RendezvousTimeoutError, match="inference rank 0"):
                    await waits
                server.start()


async def test_what_somebody_else_wrote_into_redis_is_a_protocol_error(runtime: Path) -> None:
    async with etha.AsyncTensorBusClient(timeout=30) as client:
        await client.status()
        key = "etha:{default}:pair:p"
        async with redis.asyncio.Redis(unix_socket_path=str(runtime / "redis.sock")) as somebody:
            await somebody.hset(key, mapping={"sides": "hello", "state": "formed"})
        with pytest.raises(ProtocolError, match=re.escape(key)) as caught:
            await client.init_pair("p", "a", "b")
        assert caught.value.code == "protocol"


def test_a_bad_address_is_refused_by_its_name_before_anything_is_started(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (etha.AsyncTensorBusClient, etha.TensorBusClient):
        for url in ("http://me:secret@host", "me:secret@host:6379"):
            with pytest.raises(ConfigError, match=r"^redis_url=.*: use redis://, rediss:// or unix://") as caught:
                kind(redis_url=url)
            assert "secret" not in str(caught.value)
        for name, value in (
            ("ETHA_REDIS_URL", "host:6379"),
            ("ETHA_LISTEN", "host"),
            ("ETHA_ADVERTISE", "host:7000"),
            ("ETHA_STAGING", "1000000GiB"),
            ("ETHA_STAGING", "1MiB"),
        ):
            with monkeypatch.context() as patch, pytest.raises(ConfigError, match=f"^{name}="):
                patch.setenv(name, value)
                kind()
    assert not list(runtime.iterdir())
    monkeypatch.setenv("ETHA_REDIS_URL", "host:6379")
    etha.AsyncTensorBusClient(redis_url="redis://host")  # the variable is not asked


@pytest.mark.parametrize(
    ("listen", "text"),
    [
        ("192.0.2.1:0", "cannot listen on 192.0.2.1:0 .ETHA_LISTEN=192.0.2.1:0.: "),
        ("no.such.host.invalid:0", "ETHA_LISTEN=no.such.host.invalid:0: 'no.such.host.invalid' has no address here"),
        ("0.0.0.0:0", "ETHA_LISTEN=0.0.0.0:0 names no one address"),
    ],
)
async def test_what_only_an_agent_finds_names_the_variable(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, listen: str, text: str
) -> None:
    monkeypatch.setenv("ETHA_LISTEN", listen)
    async with etha.AsyncTensorBusClient(timeout=60) as client:
        with pytest.raises(ConfigError, match=text):
            await client.status()


def test_plans_that_cannot_be() -> None:
    source = {"w": TensorSpec((4,), torch.float32, Layout((2,), [Replicate()]))}
    target = {"w": TensorSpec((5,), torch.float32, Layout((1,), [Replicate()])), "v": source["w"]}
    plan = build_plan(source, target)
    for call in (plan.check, lambda: simulate(plan, {}, {})):
        with pytest.raises(PlanError) as caught:
            call()
        assert caught.value.code == "plan"
        assert {v.code for v in caught.value.violations} == {"shape_mismatch", "missing_name"}
