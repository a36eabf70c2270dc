"""A Redis Cluster: the node that the URL names sends agents to the one that holds their namespace."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from redis.crc import key_slot
from torch.distributed.tensor import Replicate, Shard

from etha.store.connect import with_host
from etha.store.embedded import find_shipped
from etha.store.keys import RedisKeys
from tests.flow.sides import Sides
from tests.flow.sites import open_site, private_directory
from tests.flow.ways import Way

HALF = 8192


def free_port() -> int:
    """Nobody listens there now; below those that the kernel gives to who names none.

    Where the search begins depends on the process, because tests in other processes look for ports at the same time.
    """
    begin = os.getpid() * 97 % 9000
    for port in (21_000 + (begin + number) % 9000 for number in range(9000)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


@contextmanager
def node(directory: Path, port: int, bus: int) -> Iterator[Any]:
    """One node of a cluster that has no slots yet."""
    directory.mkdir()
    command = [find_shipped(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--cluster-enabled", "yes"]
    command += ["--cluster-port", str(bus), "--logfile", "", "--cluster-require-full-coverage", "no"]
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready to accept connections" in line.lower():
                break
        else:
            pytest.skip("this server's binary has no cluster mode")
        client = redis.Redis(port=port, decode_responses=True)
        yield client
        client.close()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def nodes() -> Iterator[tuple[int, int]]:
    """Ports of two nodes; the slots are halved between them."""
    with private_directory() as directory, ExitStack() as stack:
        ports, clients = [], []
        for number in range(2):
            port = free_port()
            ports.append(port)
            with socket.socket() as held:
                held.bind(("127.0.0.1", port))
                bus = free_port()
            clients.append((stack.enter_context(node(directory / str(number), port, bus)), port, bus))
        (one, _, _), (two, port, bus) = clients
        one.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, HALF - 1)
        two.execute_command("CLUSTER", "ADDSLOTSRANGE", HALF, 2 * HALF - 1)
        one.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 1)
        two.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 2)
        one.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        for client in (one, two):
            while "cluster_slots_assigned:16384" not in str(client.execute_command("CLUSTER", "INFO")).replace(
                "': '", ":"
            ):
                client.execute_command("WAIT", 0, 50)
        yield ports[0], ports[1]


async def test_agents_follow_a_cluster_to_the_node_of_their_namespace(nodes: tuple[int, int]) -> None:
    url = f"redis://127.0.0.1:{nodes[0]}"
    namespace = next(n for n in map("cluster-{}".format, range(100)) if key_slot(RedisKeys(n).server.encode()) >= HALF)
    with open_site(Way.TCP, url) as site:
        sides = Sides(site, "weights")
        sides.clients = {m: site.client(*m, timeout=30.0, namespace=namespace) for m in sides.members}
        async with sides:
            await sides.meet(
                trainer={"device_mesh": (1,), "placements": [Shard(0)]},
                inference={"device_mesh": (1,), "placements": [Replicate()]},
            )
            source, target = torch.arange(512.0).reshape(64, 8), torch.zeros(64, 8)
            handles = await sides.register(
                "b", lambda side, rank: ({"w": source if side == "trainer" else target}, {"shapes": {"w": (64, 8)}})
            )
            for result in (await sides.move(handles, timeout=20.0)).values():
                assert not isinstance(result, BaseException), result
            assert torch.equal(source, target)
        with redis.Redis(port=nodes[1]) as second:
            assert await asyncio.to_thread(second.keys, f"etha:{{{namespace}}}:*"), "it is the second node's"


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("redis://u:p@a:1/0", "b", "redis://u:p@b:7/0"),
        ("rediss://a:1?x=y", "", "rediss://a:7?x=y"),
        ("redis://a", "::1", "redis://[::1]:7"),
    ],
)
def test_a_node_is_reached_with_the_users_own_credentials_and_options(url: str, host: str, expected: str) -> None:
    assert with_host(url, host, 7) == expected
