"""Workers and agents that are killed, beside transfers and in them: who is left has one version, the next is exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.puppets import Puppet

from . import STAGES, acts
from .company import Company
from .world import World

ATOMIC = {"atomic": True}
#: Transfers back to back until somebody is killed.
TURNS = 5


def scale(played: bool) -> int:
    """A tensor of 1 MiB, or of 1 GiB."""
    return 8 if played else 256


@pytest.fixture(params=STAGES)
def company(request: pytest.FixtureRequest, directory: Path) -> Iterator[Company]:
    with World(directory, played=request.param) as world:
        company = Company(world)
        yield company
        company.end()


def registered(company: Company) -> None:
    company.all(acts.register_one, scale(company.world.played), ATOMIC)


def begun(company: Company) -> None:
    """All move version after version, and have done so TURNS times."""
    company.spoilt = True
    for puppet in company.puppets.values():
        puppet.begin(acts.keep_moving, 1)
    for _ in range(TURNS):
        for puppet in company.puppets.values():
            puppet.worker.expect("moved")


def again(company: Company, epoch: int) -> None:
    """The next epoch is formed and its transfers are exact."""
    assert set(company.all(acts.enter)) == {epoch}
    registered(company)
    for version in (901, 902):
        company.all(acts.move_one, version)


def whole(inference: list[Puppet]) -> None:
    """Every survivor's target holds one version, all of them the same."""
    values = [puppet.do(acts.held) for puppet in inference]
    assert all(len(found) == 1 for found in values) and len({found[0] for found in values}) == 1, values


@pytest.mark.parametrize("side", ["trainer", "inference"])
def test_a_worker_is_killed_between_transfers(company: Company, side: str) -> None:
    registered(company)
    company.all(acts.move_one, 1)
    before = {report["agent"]["pid"] for report in company.all(acts.status)}
    dead = company.puppets[side, 1]
    dead.kill()
    for member, puppet in company.puppets.items():
        if puppet is not dead:
            assert puppet.begin(acts.move_one, 2).fails().kind == "PeerLostError", member
    company.replace(side, 1)
    again(company, 2)
    after = {report["agent"]["pid"] for report in company.all(acts.status)}
    print(f"\na worker's memory was open when it was killed: the agent {'lives on' if after == before else 'is new'}")


@pytest.mark.parametrize("side", ["trainer", "inference"])
def test_a_worker_is_killed_while_transfers_run(company: Company, side: str) -> None:
    registered(company)
    for epoch in (2, 3):
        before = {report["agent"]["pid"] for report in company.all(acts.status)}
        begun(company)
        company.puppets[side, 0].kill()
        left = {member: puppet for member, puppet in company.puppets.items() if member != (side, 0)}
        kinds = {member: puppet.fails().kind for member, puppet in left.items()}
        whole([puppet for member, puppet in left.items() if member[0] == "inference"])
        company.replace(side, 0)
        again(company, epoch)
        after = {report["agent"]["pid"] for report in company.all(acts.status)}
        print(f"\nkilled while transfers ran: {kinds}; the agent {'lives on' if after == before else 'is new'}")


def test_the_agent_is_killed_between_transfers(company: Company) -> None:
    registered(company)
    company.all(acts.move_one, 1)
    [pid] = {report["agent"]["pid"] for report in company.all(acts.status)}
    company.world.kill_agent(pid)
    again(company, company.puppets["trainer", 0].do(acts.epoch) + 1)


def test_the_agent_is_killed_while_transfers_run(company: Company) -> None:
    registered(company)
    [pid] = {report["agent"]["pid"] for report in company.all(acts.status)}
    begun(company)
    company.world.kill_agent(pid)
    kinds = {puppet.fails().kind for puppet in company.puppets.values()}
    assert kinds <= {"AgentLostError", "PeerLostError"}, kinds
    again(company, company.puppets["trainer", 0].do(acts.epoch) + 1)


@pytest.mark.parametrize("played", STAGES)
@pytest.mark.parametrize("side", ["trainer", "inference"])
def test_a_worker_dies_in_the_middle_of_a_slow_transfer(directory: Path, played: bool, side: str) -> None:
    """From the card to the host's memory. A played card stops half way; a real one is slow enough to be told of."""
    with World(directory, played=played) as world:
        company = Company(world, workers=1, inference="cpu")
        company.all(acts.register_one, 128 if played else 512, {})  # 256 MiB, or 4 GiB
        dying = company.puppets.pop((side, 0))
        [other] = company.puppets.values()
        world.stop_copies(after=128 << 20)
        other.begin(acts.move_one_watching, 1)
        dying.begin(acts.die_half_way)
        dying.worker.expect("half way")
        other.worker.expect("lost")
        world.go_on()
        assert other.fails().kind in ("PeerLostError", "TransferAbortedError")
        company.replace(side, 0)
        again(company, 2)
        company.end()
