"""docs/redis.md is true: every key and field that a real run leaves in Redis is in it, with its type and lease."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import torch
from torch.distributed.tensor import Replicate

from etha import BatchHandle, RegistrationError, TensorBusClient, groups
from etha.config import Settings
from etha.store.embedded import embedded_url
from etha.store.keys import CLOSED_LEASE, TABLE, KeyKind

SECONDS = 60.0
#: How long a test may have taken since a key was kept.
SLACK = 120.0


@pytest.fixture
def sides(runtime: Path) -> Iterator[tuple[TensorBusClient, TensorBusClient]]:
    """Both sides of pair ``weights``, by two clients of this process."""
    with ExitStack() as stack:
        one = stack.enter_context(TensorBusClient(timeout=SECONDS))
        two = stack.enter_context(TensorBusClient(timeout=SECONDS))
        both(
            lambda: one.init_pair("weights", "a", "b", device_mesh=(1,), placements=[Replicate()], rank=0),
            lambda: two.init_pair("weights", "b", "a", device_mesh=(1,), placements=[Replicate()], rank=0),
        )
        yield one, two


def both(*calls: Callable[[], object]) -> list[object]:
    """Results (or errors) of blocking calls that wait for each other."""
    results: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except RegistrationError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def kind_of(key: str) -> KeyKind:
    """The row of the table that ``key`` belongs to; the longest pattern wins."""
    found = [kind for kind in TABLE if re.fullmatch(re.sub(r"[A-Z]+", r"[^:]+", kind.pattern), key)]
    assert found, f"{key} is not in the table"
    return max(found, key=lambda kind: len(re.sub(r"[A-Z]+", "", kind.pattern)))


def documented(kind: KeyKind, field: str) -> bool:
    """Whether ``field`` is in the table; upper-case parts of its names are variables."""
    patterns = [re.sub(r"SIDE|RANK|ID|NAME|KEY", r".+", re.escape(name)) for name in kind.fields if name != "..."]
    return any(re.fullmatch(pattern, field) for pattern in patterns)


def register(client: TensorBusClient, batch: str, tensor: torch.Tensor) -> Callable[[], BatchHandle]:
    return lambda: client.register_tensors(batch, {"w": tensor}, pair_name="weights")


@pytest.fixture
def members(sides: tuple[TensorBusClient, TensorBusClient]) -> Iterator[groups.Members]:
    """The only replica of a group, in its first step."""
    found = groups.Members("dp", replica="replica-0", timeout=SECONDS)
    assert found.begin().size == 1
    yield found
    found.leave()


@pytest.mark.usefixtures("members")
def test_the_key_table_tells_what_a_run_leaves(sides: tuple[TensorBusClient, TensorBusClient]) -> None:
    one, two = sides
    store = redis.Redis.from_url(embedded_url(Settings.from_env()), decode_responses=True)
    prefix = "etha:{default}:"
    handles = both(register(one, "step", torch.ones(8)), register(two, "step", torch.zeros(8)))
    assert all(isinstance(handle, BatchHandle) for handle in handles)
    both(lambda: handles[0].transfer("send", version="v1"), lambda: handles[1].transfer("recv"))  # type: ignore[attr-defined]
    refused = both(register(one, "bad", torch.ones(8)), register(two, "bad", torch.zeros(9)))
    assert all(isinstance(error, RegistrationError) for error in refused)
    closed_batch = both(register(one, "gone", torch.ones(8)), register(two, "gone", torch.zeros(8)))
    both(*(handle.close for handle in closed_batch))  # type: ignore[attr-defined]
    two.status()
    states = {}
    for key in sorted(store.scan_iter(f"{prefix}*")):
        kind, bare = kind_of(key.removeprefix(prefix)), key.removeprefix(prefix)
        assert store.type(key) == kind.type, key
        closed = kind.pattern == "batch:PAIR:BATCH" and store.hget(key, "state") == "closed"
        lease = CLOSED_LEASE if closed else kind.lease
        assert lease - min(SLACK, lease) < store.ttl(key) <= lease, (key, store.ttl(key))
        if kind.type == "hash":
            fields = store.hgetall(key)
            assert [field for field in fields if not documented(kind, field)] == [], key
            if kind.pattern == "batch:PAIR:BATCH":
                states[bare] = fields["state"]
    assert states == {
        "batch:weights:step": "registered",
        "batch:weights:bad": "closed",
        "batch:weights:gone": "closed",
    }
    kinds = {kind_of(key.removeprefix(prefix)).pattern for key in store.scan_iter(f"{prefix}*")}
    # Publications have their own test: tests/flow/store/test_store_publications.py.
    others = {kind.pattern for kind in TABLE if not kind.pattern.startswith("publication")}
    assert kinds == others, "the run leaves every kind of key that there is"
