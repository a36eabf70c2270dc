"""Networks that fail: a link is cut, loses packets, takes its time. An error in time or a right result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.flow.jobs import Job
from tests.flow.networks import filters, namespaces, tun
from tests.flow.networks.distant import (
    MIXED,
    OLD,
    agent,
    die_in_transfer,
    holds,
    interrupted_in_transfer,
    is_lost,
    meet,
    prepare,
    register,
    settle,
    transfer,
)
from tests.flow.networks.filters import DEAF, LOSSY, PORTS, REFUSED, THROTTLED, arriving
from tests.flow.networks.namespaces import Hosts, hosts
from tests.flow.networks.tun import End, delayed
from tests.flow.puppets import Failure, Puppet, Stage, together
from tests.flow.sites import open_site
from tests.flow.ways import Way

pytestmark = [pytest.mark.timeout(240), *namespaces.MARKS, *filters.MARKS, *tun.MARKS]

SMALL, MEDIUM, MORE, LARGE = (14, 12), (1024, 1024), (2048, 1024), (2048, 4096)  # of int32: 4, 8 and 32 MiB
#: The shape and the options of each.
Batches = dict[str, tuple[tuple[int, int], dict[str, Any]]]
#: At which LARGE takes two seconds, so that whatever happens meets it half way.
SLOWLY = THROTTLED.format(mbytes=16)
#: The deadline of a call; nothing that goes wrong may keep it longer.
PATIENCE = 20.0
#: What a busy machine may add to a time.
SLACK = 3.0


class Company:
    """Two trainers on host one, two inference workers on host two."""

    def __init__(self, stage: Stage, net: Hosts) -> None:
        self.net, self.stage = net, stage
        self.trainers = stage.side("trainer", 2)
        self.others = stage.side("inference", 2)
        for puppets, namespace in ((self.trainers, net.one), (self.others, net.two)):
            for puppet in puppets:
                puppet.begin(settle, namespace)
        for puppet in self.all:
            puppet.ends()

    @property
    def all(self) -> list[Puppet]:
        return [*self.trainers, *self.others]

    def open(self, batches: Batches) -> int:
        """Meet and register; the epoch."""
        [epoch] = set(together(self.all, meet))
        for batch, (shape, options) in batches.items():
            together(self.all, register, batch, shape, options)
        return int(epoch)

    def begin(self, batch: str, version: int, timeout: float = PATIENCE) -> None:
        """All four call; whoever does something else does it instead."""
        together(self.all, prepare, batch, version)
        for puppet in self.all:
            puppet.begin(transfer, batch, version, timeout)

    def moving(self) -> None:
        """Wait until bytes have arrived on both ranks of the inference side."""
        for puppet in self.others:
            puppet.worker.expect("moving")

    def ends(self, batch: str, version: int) -> float:
        """All have a result, the same one, and every element is right; the longest call."""
        ended = [puppet.ends() for puppet in self.all]
        assert len({seq for seq, _ in ended}) == 1, ended
        assert [puppet.do(holds, batch, version) for puppet in self.others] == [version] * 2
        return float(max(took for _, took in ended))

    def all_lost(self) -> None:
        """Wait until every worker has heard that the epoch is over."""
        assert all(together(self.all, is_lost, PATIENCE))

    def exact(self, batch: str, version: int) -> float:
        """One transfer from its beginning to its end."""
        self.begin(batch, version)
        return self.ends(batch, version)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(tmp_path_factory.mktemp("n")) as found:
        yield found


@pytest.fixture(scope="module")
def environment(net: Hosts) -> Iterator[Callable[[str, int], dict[str, str]]]:
    with open_site(Way.TCP, net.url) as site:
        addresses = {"trainer": "10.211.1.1", "inference": "10.211.1.2"}
        yield lambda side, rank: site.env(side, rank) | {"ETHA_LISTEN": f"{addresses[side]}:0"}


@pytest.fixture
def company(net: Hosts, environment: Callable[[str, int], dict[str, str]], pair: str) -> Iterator[Company]:
    with Job(environment) as job:
        yield Company(Stage(job, pair), net)


@contextmanager
def cut(net: Hosts) -> Iterator[None]:
    """The link is down while the block runs."""
    net.cut()
    try:
        yield
    finally:
        net.mend()


def as_said(company: Company, batch: str, version: int, failures: list[Failure], atomic: bool) -> list[Any]:
    """What the targets of a transfer that failed hold, once it fits what their workers were told."""
    found = [puppet.do(holds, batch, version) for puppet in company.others]
    for held, failed in zip(found, failures[2:], strict=True):
        assert failed.data["outcome"] in ("aborted", "unknown"), failed
        assert failed.data["quiesced"], failed
        if held == MIXED:
            assert not atomic, f"an atomic target is {held}: {failed}"
            assert failed.data["torn"], f"half-written, and not told: {failed}"
        if held == version:
            assert failed.data["torn"] or failed.data["outcome"] == "unknown", failed
    assert not any(failed.data["torn"] for failed in failures[:2]), "sources are never torn"
    return found


def half_written(held: list[Any]) -> bool:
    """Whether targets of a transfer that was broken off hold both versions. Progress is that of their agent, so the
    bytes that it counts may all be the other target's."""
    return MIXED in held and set(held) <= {OLD, MIXED}


BATCHES: Batches = {"atomic": (LARGE, {"atomic": True}), "plain": (LARGE, {})}
ATOMIC: Batches = {"atomic": (MEDIUM, {"atomic": True})}


@pytest.mark.parametrize(("batch", "how"), [("atomic", "down"), ("plain", "one way")])
def test_a_link_that_is_cut_while_bytes_move(company: Company, batch: str, how: str) -> None:
    net = company.net
    batches = {batch: BATCHES[batch]}
    assert company.open(batches) == 1
    with arriving(net, SLOWLY):
        company.begin(batch, 1)
        company.moving()
        with cut(net) if how == "down" else arriving(net, DEAF, at=(net.two,)):
            at = time.monotonic()
            failures = [puppet.fails() for puppet in company.all]
            for failed in failures:
                assert (failed.kind, failed.reason) == ("PeerLostError", "died"), failed
                assert failed.at - at < PATIENCE
            held = as_said(company, batch, 1, failures, batch == "atomic")
            assert held == [OLD] * 2 if batch == "atomic" else half_written(held), held
            print(f"{batch}, {how}: noticed after {', '.join(f'{failed.at - at:.2f}' for failed in failures)} s")
            company.all_lost()
    assert company.open(batches) > 1
    company.exact(batch, 2)


def test_calls_whose_deadline_comes_before_a_cut_is_noticed(company: Company) -> None:
    batches = {"plain": BATCHES["plain"]}
    company.open(batches)
    with arriving(company.net, SLOWLY):
        company.begin("plain", 1, 2.5)
        company.moving()
        with cut(company.net):
            at = time.monotonic()
            failures = [puppet.fails() for puppet in company.all]
            for failed in failures:
                assert failed.kind in ("TransferTimeoutError", "TransferAbortedError"), failed
                assert failed.at - at < 2.5 + SLACK  # nobody waits for the word of who is cut off
                assert failed.data["outcome"] == "aborted", failed
            as_said(company, "plain", 1, failures, False)
            company.all_lost()
    assert company.open(batches) > 1
    company.exact("plain", 2)


def test_a_link_that_is_back_within_a_second(company: Company) -> None:
    assert company.open(BATCHES) == 1
    with arriving(company.net, SLOWLY):
        for version, batch in enumerate(("atomic", "plain"), 1):
            company.begin(batch, version)
            company.moving()
            with cut(company.net):
                time.sleep(1.0)  # how long the link is away: nothing is waited for
            print(f"{batch}: {company.ends(batch, version):.2f} s with a second of them away")
    assert not any(puppet.do(is_lost) for puppet in company.all)


def test_a_firewall_that_lets_links_pass_but_no_data(company: Company) -> None:
    """The links stand, so only the deadline ends this; and the pair lives on."""
    assert company.open({"plain": BATCHES["plain"]}) == 1
    ports = [int(puppet.do(agent)["address"].rpartition(":")[2]) + 1 for puppet in (company.all[0], company.all[-1])]
    with arriving(company.net, SLOWLY):
        company.begin("plain", 1, 3.0)
        company.moving()
        with arriving(company.net, PORTS.format(ports=", ".join(map(str, ports)))):
            failures = [puppet.fails() for puppet in company.all]
            assert {failed.kind for failed in failures} <= {"TransferTimeoutError", "TransferAbortedError"}, failures
            held = as_said(company, "plain", 1, failures, False)
            assert half_written(held), held
    assert not any(puppet.do(is_lost) for puppet in company.all)
    company.exact("plain", 2)


def test_a_firewall_that_begins_to_refuse_data_while_links_pass(company: Company) -> None:
    """Nobody has left: the pair stands, and no transfer says that somebody has."""
    assert company.open({"plain": BATCHES["plain"]}) == 1
    ports = [int(puppet.do(agent)["address"].rpartition(":")[2]) + 1 for puppet in (company.all[0], company.all[-1])]
    listed = ", ".join(map(str, ports))
    with arriving(company.net, SLOWLY):
        company.begin("plain", 1)
        company.moving()
        with arriving(company.net, REFUSED.format(ports=listed)) as refused:
            for version in (1, 2):  # the first loses its streams, the second finds none
                if version == 2:
                    company.begin("plain", version)
                failures = [puppet.fails() for puppet in company.all]
                assert {failed.kind for failed in failures} <= {"TransferError", "TransferAbortedError"}, failures
                for failed in failures:
                    assert failed.data["outcome"] == "aborted" and "closed" not in failed.data.values(), failed
                    assert "but the link to that agent stands: look for a firewall" in failed.text, failed
            assert refused()
        with arriving(company.net, PORTS.format(ports=listed)):
            company.begin("plain", 3)
            failures = [puppet.fails() for puppet in company.all]
            assert {failed.kind for failed in failures} <= {"TransferError", "TransferAbortedError"}, failures
            assert all("it does not answer" in failed.text for failed in failures), failures
    assert not any(puppet.do(is_lost) for puppet in company.all)
    company.exact("plain", 4)


def test_one_packet_in_twenty_is_lost(company: Company) -> None:
    """Of links, data and Redis alike; the rendezvous too."""
    batches: Batches = {
        "small": (SMALL, {"atomic": True}),
        "plain": (MEDIUM, {}),
        "checked": (MEDIUM, {"verify": "full"}),
        "large": (LARGE, {"atomic": True}),
    }
    with arriving(company.net, LOSSY.format(percent=5)) as dropped:
        began = time.monotonic()
        assert company.open(batches) == 1
        print(f"formed and {len(batches)} batches registered in {time.monotonic() - began:.2f} s")
        longest = dict.fromkeys(batches, 0.0)
        for turn in range(4):
            for number, batch in enumerate(batches):
                longest[batch] = max(longest[batch], company.exact(batch, 1 + turn * len(batches) + number))
        print("longest of 4:", ", ".join(f"{batch} {seconds:.2f} s" for batch, seconds in longest.items()))
        print(f"{dropped()} packets lost")
        assert dropped() > 20
    assert not any(puppet.do(is_lost) for puppet in company.all)


@contextmanager
def far(net: Hosts, delay: float = 0.2, *, redis: bool = False) -> Iterator[None]:
    """Host two is far from the other; and from ``redis``."""
    with ExitStack() as stack:
        stack.enter_context(delayed(End(net.one, "10.211.1.1"), End(net.two, "10.211.1.2"), delay))
        if redis:
            stack.enter_context(delayed(End(net.two, "10.211.2.2"), End(net.redis, "10.211.2.3"), delay))
        yield


def test_packets_that_take_200_ms(company: Company) -> None:
    """Redis's, too."""
    with far(company.net, redis=True):
        began = time.monotonic()
        assert company.open(ATOMIC) == 1
        print(f"formed and registered in {time.monotonic() - began:.2f} s")
        for version in range(3):
            print(f"4 MiB: {company.exact('atomic', version):.2f} s")
        # Longer than three beats without a call: the link is quiet and stands.
        assert not company.others[0].do(is_lost, 4.5)
        [link] = company.others[0].do(agent)["links"]
        assert link["round_trip"] > 0.4 and link["missed"] < 3 and link["state"] == "open"
        company.exact("atomic", 3)
    assert not any(puppet.do(is_lost) for puppet in company.all)


def test_an_interrupt_then_a_dead_worker_then_a_dead_agent_far_away(company: Company) -> None:
    batches: Batches = {"large": (MORE, {"atomic": True}), "small": (SMALL, {"atomic": True})}
    with far(company.net):
        assert company.open(batches) == 1
        together(company.all, prepare, "large", 1)
        first, *rest = company.all
        first.begin(interrupted_in_transfer, "large", 1)
        for puppet in rest:
            puppet.begin(transfer, "large", 1, PATIENCE)
        company.moving()
        at = time.monotonic()
        first.worker.kill(signal.SIGINT)
        print(f"interrupted: returned after {first.ends() - at:.2f} s")
        check_failures(rest, at, "TransferAbortedError")
        assert [puppet.do(holds, "large", 1) for puppet in company.others] == [OLD] * 2
        company.exact("small", 2)

        together(company.all, prepare, "large", 3)
        *rest, last = company.all
        last.begin(die_in_transfer, "large", 3)
        for puppet in rest:
            puppet.begin(transfer, "large", 3, PATIENCE)
        check_failures(rest, last.worker.expect("moving"), "PeerLostError")
        assert rest[-1].do(holds, "large", 3) == OLD
        company.others[1] = company.stage.puppet("inference", 1, 2)
        company.others[1].do(settle, company.net.two)
        assert company.open(batches) > 1
        company.exact("small", 4)

        pid = company.others[0].do(agent)["pid"]
        company.begin("large", 5)
        company.moving()
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        check_failures(company.trainers, at, "PeerLostError")
        assert {puppet.fails().kind for puppet in company.others} == {"AgentLostError"}
        assert [puppet.do(holds, "large", 5) for puppet in company.others] == [OLD] * 2


def check_failures(puppets: list[Puppet], at: float, kind: str) -> None:
    """All of them hear of what happened at ``at``, soon, that it was aborted, and who it was."""
    failures = [puppet.fails() for puppet in puppets]
    for failed in failures:
        assert (failed.kind, failed.data["outcome"]) == (kind, "aborted"), failed
        assert failed.reason == ("died" if kind == "PeerLostError" else None), failed
        assert failed.at - at < 1 + SLACK
    print(f"{kind} after {', '.join(f'{failed.at - at:.2f}' for failed in failures)} s")
