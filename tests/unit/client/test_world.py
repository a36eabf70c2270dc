"""Where a worker stands: arguments, then torch.distributed, then the launcher; and its deadlines."""

from __future__ import annotations

import math

import pytest

from etha.client.arguments.checks import check_timeout
from etha.client.arguments.world import RankInfo
from etha.client.tasks import Deadline
from etha.config import LaunchEnv
from etha.errors import ConfigError

NOWHERE = LaunchEnv(rank=None, world_size=None, launch_id=None)
LAUNCHED = LaunchEnv(rank=2, world_size=4, launch_id="run.0")


def place(env: LaunchEnv, **arguments: int | None) -> RankInfo:
    return RankInfo.of(**{"world_size": None, "rank": None, "ranks": None, **arguments}, env=env)  # type: ignore[arg-type]


def test_what_the_launcher_says_unless_told_otherwise() -> None:
    assert (place(NOWHERE).rank, place(NOWHERE).world_size) == (0, 1)
    found = place(LAUNCHED)
    assert (found.rank, found.world_size, found.launch) == (2, 4, "run.0")
    assert place(LAUNCHED, rank=0).rank == 0, "rank 0 is a rank"
    assert place(LAUNCHED, world_size=3).world_size == 3


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (2, 2), (2, -1), (True, 0), (2, "0"), (1.0, 0)])
def test_places_that_do_not_exist(world_size: object, rank: object) -> None:
    with pytest.raises(ConfigError, match=r"is not (an int|inside a side)|a side has at least 1 rank"):
        place(NOWHERE, world_size=world_size, rank=rank)  # type: ignore[arg-type]


async def test_deadlines() -> None:
    assert Deadline(math.inf).left == math.inf
    assert 9 < Deadline(10).left <= 10 and Deadline(0).left == 0
    for bad in (-1, math.nan, "1", True, None, -math.inf):
        with pytest.raises(ConfigError, match=r"must be seconds, 0 or more \(math.inf: no deadline\)"):
            check_timeout(bad, "timeout")  # type: ignore[arg-type]
