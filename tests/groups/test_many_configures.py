"""A group that is configured again and again holds no more than after the first times: 50 in the suite, 1,000 in
`make soak-groups`."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.flow.endurance.footprint import Footprint
from tests.groups.team import Member, team

KINDS = ["ProcessGroupEtha", "ProcessGroupGloo", "ProcessGroupBabyGloo"]
#: Configures before the first count, at least, and a fifth of all: a process into which all of the tests are imported
#: grows by 2 to 3 MiB at first, and by no more in 4,000 configures.
WARM = 20
#: What RSS and private memory may grow by afterwards, in KiB: allocators keep some memory, but a thousand configures
#: that each leave one page are 4,000.
SLACK = 3_000
#: Gloo in this process keeps some 5 KiB of each group: 1.4 KiB are torch's own, seen with its groups alone.
SLACK_OF_GLOO = 8_000
#: Seconds in which what ends in the background has ended.
SETTLED = 30.0


def children(pid: int) -> Counter[str]:
    """Processes under ``pid``, by state; a zombie is Z."""
    states: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or process that has just ended
            for child in (task / "children").read_text(encoding="ascii").split():
                states[Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]] += 1
                states += children(int(child))
    return states


def held() -> dict[str, Any]:
    """What this process holds that can be counted."""
    pid = int(Path("/proc/self").readlink().name)
    found: dict[str, Any] = Footprint.of(pid).all()
    found["children"] = sum(children(pid).values())
    found["zombies"] = children(pid)["Z"]
    return found


def configures(member: Member, kind: str, times: int) -> dict[str, tuple[int, int]]:
    """What is held after the first configures, and after all of them."""
    from etha import groups

    group = getattr(groups, kind)(timeout=60)
    before: dict[str, Any] = {}
    for turn in range(times):
        group.configure(f"{member.address}/{turn}", f"r{member.rank}", member.rank, member.size, turn)
        tensor = torch.ones(100_000)
        group.allreduce([tensor]).wait()
        assert (tensor == member.size).all()
        if turn % 10 == 9:  # one that has failed before it is configured again
            group.abort()
        if turn == max(WARM, times // 5):
            group.shutdown()
            before = settled(None)
    group.shutdown()
    after = settled(before)
    return {name: (before[name], after[name]) for name in before}


def settled(wanted: dict[str, Any] | None) -> dict[str, Any]:
    """What is held once nothing ends any more, or as soon as it is what is wanted."""
    until = time.monotonic() + SETTLED
    found, since = held(), time.monotonic()
    while time.monotonic() < until:
        now = held()
        if counted(now) != counted(found):
            found, since = now, time.monotonic()
        if counted(now) == (counted(wanted) if wanted else counted(found)) and time.monotonic() > since + 0.5:
            return now
    return found


def counted(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in ("rss", "private")}


def check(kind: str, times: int) -> None:
    with team(2, configures, kind, times) as running:
        results = running.results(timeout=60 + times)
    for rank, found in results.items():
        print(f"\n{kind}, rank {rank}, {times} configures: {found}")
        for name, (before, after) in found.items():
            slack = 0
            if name in ("rss", "private"):
                slack = SLACK_OF_GLOO if kind == "ProcessGroupGloo" else SLACK
            assert after <= before + slack, f"rank {rank}: {name} was {before} and is {after}"


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_configures_leave_nothing(kind: str) -> None:
    check(kind, 50)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_configures_leave_nothing(kind: str) -> None:
    check(kind, 1000)
