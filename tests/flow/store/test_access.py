"""A user of Redis who may do what docs/redis.md lists, and users who may not: these are told what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.errors import ConfigError, EthaError
from etha.store.keys import access
from tests.flow.sides import Sides
from tests.flow.sites import open_site, private_directory
from tests.flow.ways import Way
from tests.unit.store.server import served


def logs(directory: Path) -> list[str]:
    return [path.read_text() for path in directory.glob("*/default/cpu.log")]


@pytest.fixture
def guarded() -> Iterator[Any]:
    """A server at which ``grant(words)`` makes a user, for the URL that it returns."""
    with private_directory() as directory, served(directory):
        admin = redis.Redis(unix_socket_path=str(directory / "r.sock"))

        def grant(words: list[str]) -> str:
            admin.execute_command("ACL", *words)
            return f"unix://etha:secret@{quote(str(directory / 'r.sock'))}"

        yield grant
        admin.close()


async def test_what_is_listed_under_access_is_enough(guarded: Any) -> None:
    with open_site(Way.TCP, guarded(access("etha", "secret", "default"))) as site:
        async with Sides(site, "weights") as sides:
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
        assert not any("refuses" in text for text in logs(site.directory))


@pytest.mark.parametrize("missing", ["channels", "commands", "keys"])
async def test_a_user_who_may_not_is_told_what_is_missing(guarded: Any, missing: str) -> None:
    words = access("etha", "secret", "default")
    leave = {"channels": "&", "commands": "+hset", "keys": "~"}[missing]
    with open_site(Way.LOCAL, guarded([word for word in words if not word.startswith(leave)])) as site:
        client = site.client("trainer", 0)
        with pytest.raises(EthaError) as caught:
            await client.init_pair("weights", "trainer", "inference", 1, rank=0, timeout=30.0)
        await client.close()
    assert isinstance(caught.value, ConfigError), caught.value
    assert "docs/redis.md" in caught.value.message and "secret" not in caught.value.message
