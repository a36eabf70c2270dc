"""Two "hosts" on one card: agents with host ids of their own exchange by NCCL, as cards of two machines would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.flow.sites import stop_all
from tests.unit.store.server import served

from . import ON_A_CARD, acts
from .company import Company
from .test_lives import again, begun, registered, whole
from .test_questions import ONE_CARD
from .world import World

pytestmark = ON_A_CARD
PLACES = {"trainer": "a", "inference": "b"}


@contextmanager
def hosts(directory: Path) -> Iterator[Company]:
    """Trainers on host a, inference on host b; each agent its own NCCL_HOSTID, for NCCL refuses one card twice."""
    with served(directory) as server:
        places = {
            name: {
                "ETHA_RUNTIME_DIR": str(directory / name),
                "ETHA_HOST_ID": f"host-{name}",
                "ETHA_REDIS_URL": server.url,
                "NCCL_HOSTID": f"host-{name}",
            }
            for name in ("a", "b")
        }
        try:
            with World(directory, played=False, env=ONE_CARD, places=places) as world:
                company = Company(world, places=PLACES)
                yield company
                company.end()
        finally:
            stop_all(str(directory))  # agents take back what they have written: before their Redis ends


@pytest.fixture
def company(directory: Path) -> Iterator[Company]:
    with hosts(directory) as company:
        yield company


def transports(company: Company, batch: str) -> set[str]:
    return {line["transport"] for s in company.all(acts.status) for line in s["batches"] if line["batch"] == batch}


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": "full"}], ids=["plain", "atomic", "verified"])
def test_every_kind_arrives(company: Company, options: dict[str, Any]) -> None:
    """By NCCL, but for a batch that is both verified and reduced, which goes over streams."""
    way = "tcp" if "verify" in options else "nccl"
    for source in ("trainer", "inference"):
        company.all(acts.register, source, 24, source, options)
        for version in (1, 2, 3):
            company.all(acts.move, source, version)
        assert transports(company, source) == {way}
        company.all(acts.leave_batch, source)


def test_a_batch_that_is_verified_goes_by_nccl(company: Company) -> None:
    company.all(acts.register_one, 16, {"verify": "full"})
    for version in (1, 2, 3):
        company.all(acts.move_one, version)
    assert transports(company, "one") == {"nccl"}


def test_a_snapshot_arrives_by_nccl(company: Company) -> None:
    company.all(acts.register, "s", 24, "trainer", {})
    for version in (1, 2):
        company.all(acts.move, "s", version, True)


@pytest.mark.parametrize("side", ["trainer", "inference"])
def test_a_worker_is_killed_while_nccl_moves(company: Company, side: str) -> None:
    registered(company)
    begun(company)
    company.puppets[side, 0].kill()
    left = {member: puppet for member, puppet in company.puppets.items() if member != (side, 0)}
    print(f"\n{side} rank 0 is killed: { {member: puppet.fails().kind for member, puppet in left.items()} }")
    whole([puppet for member, puppet in left.items() if member[0] == "inference"])
    company.replace(side, 0)
    again(company, 2)
    assert transports(company, "one") == {"nccl"}


@pytest.mark.parametrize("place", ["a", "b"])
def test_an_agent_is_killed_while_nccl_moves(company: Company, place: str) -> None:
    registered(company)
    [pid] = {company.puppets[side, 0].do(acts.status)["agent"]["pid"] for side, at in PLACES.items() if at == place}
    begun(company)
    company.world.kill_agent(pid, place)
    print(f"\nthe agent of {place} is killed: { {m: p.fails().kind for m, p in company.puppets.items()} }")
    again(company, 2)
    assert transports(company, "one") == {"nccl"}
