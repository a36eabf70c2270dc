"""Links between hubs on one loop: who is heard, in what order, and how both ends learn of a loss."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import resource
import socket
import time
from collections.abc import AsyncIterator

import pytest

from etha import limits
from etha.errors import AgentUnavailableError, ConfigError, PeerLostError, ProtocolError
from etha.peer import sessions
from etha.peer.keys import Keys
from etha.peer.messages import Commit, Done, Go
from etha.peer.ports import Ports
from etha.peer.wire import MAX_TOGETHER
from tests.unit.peer.agents import SCOPE, Agent, Namespace, agent, until


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@pytest.fixture
async def pair(namespace: Namespace) -> AsyncIterator[tuple[Agent, Agent]]:
    # Beats so slow that on a busy machine no link is taken for dead.
    async with agent("a", namespace, beat=5) as a, agent("b", namespace, beat=5) as b:
        yield a, b


async def test_a_message_arrives_with_whom_it_is_from_and_what_it_is_about(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    a.send(b, Done(seq=7))
    assert await b.heard(1) == [("a", SCOPE, Done(seq=7))]
    b.send(a, Commit(seq=7))
    assert await a.heard(1) == [("b", SCOPE, Commit(seq=7))]


async def test_order_is_kept_and_nothing_is_lost(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    for seq in range(5000):
        a.send(b, Done(seq=seq))
    assert [event[2].seq for event in await b.heard(5000)] == list(range(5000))


async def test_messages_that_are_sent_together_arrive_one_by_one_and_in_order(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    a.hub.send("b", SCOPE, *(Done(seq=seq) for seq in range(MAX_TOGETHER)))
    a.send(b, Done(seq=99))
    assert await b.heard(MAX_TOGETHER + 1) == [("a", SCOPE, Done(seq=seq)) for seq in (*range(MAX_TOGETHER), 99)]
    assert a.hub.peers()[0].sent >= MAX_TOGETHER + 1


async def test_more_messages_than_may_travel_together_break_the_link(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    a.hub.send("b", SCOPE, *(Done(seq=seq) for seq in range(MAX_TOGETHER + 1)))
    await until(lambda: not a.is_open("b"))
    assert not [event for event in b.events if isinstance(event[-1], Done)]


async def test_what_comes_before_the_own_link_is_open_is_held(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await a.open(b)
    for seq in range(3):
        a.send(b, Done(seq=seq))
    await until(lambda: b.hub._sessions._sessions["a"].received == 3)
    assert b.events == []
    await b.open(a)
    assert [event[2].seq for event in b.events] == [0, 1, 2]


async def test_who_talks_on_and_on_before_the_other_opens_is_dropped(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_HELD", 3)
    a, b = pair
    await a.open(b)
    for seq in range(5):
        a.send(b, Done(seq=seq))
    ((kind, who, text),) = await a.heard(1)
    assert (kind, who) == ("gone", "b") and "opens no link" in text


async def test_opening_twice_at_once_is_one_link(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(*(a.open(b) for _ in range(5)), *(b.open(a) for _ in range(5)))
    await a.open(b)
    assert [(p.agent, p.state) for p in a.hub.peers()] == [("b", "open")]


async def test_an_opener_that_gives_up_leaves_the_others_waiting(namespace: Namespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with agent("a", namespace) as a:
            key = Keys.fresh().public
            first = asyncio.ensure_future(a.hub.open("b", address, key, 0.05))
            second = asyncio.ensure_future(a.hub.open("b", address, key, 0.5))
            with pytest.raises(AgentUnavailableError, match=r"within 0\.05 s"):
                await first
            assert not second.done() and [p.state for p in a.hub.peers()] == ["opening"]
            with pytest.raises(AgentUnavailableError, match=r"within 0\.5 s"):
                await second
            await asyncio.sleep(0)
            assert a.hub.peers() == () and a.events == []


async def test_nobody_listens(namespace: Namespace) -> None:
    ports = Ports.bind()
    ports.close()
    async with agent("a", namespace) as a:
        for _ in range(2):
            with pytest.raises(AgentUnavailableError, match=r"nothing listens there.*ETHA_LISTEN"):
                await a.hub.open("b", ports.address, Keys.fresh().public, 5)
        assert a.events == []


async def test_sending_without_a_link_is_an_error_and_so_is_what_cannot_travel(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    with pytest.raises(PeerLostError, match="no open link to agent b"):
        a.send(b, Done(seq=1))
    await a.open(b)
    with pytest.raises(ProtocolError, match="go cannot be encoded"):
        a.send(b, Go(seq=1 << 80, side="s", version=None, attempts=()))
    assert a.is_open("b")


async def test_leaving_is_told_after_everything_that_was_said(namespace: Namespace) -> None:
    async with agent("a", namespace) as a:
        async with agent("b", namespace) as b:
            await asyncio.gather(a.open(b), b.open(a))
            for seq in range(100):
                b.send(a, Done(seq=seq))
        events = await a.heard(101)
        assert [event[2].seq for event in events[:100]] == list(range(100))
        assert events[100] == ("gone", "b", "the other agent left")
        assert b.events == [] and a.hub.peers() == ()


async def test_a_dropped_link_is_gone_for_the_other_and_can_be_opened_again(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    a.hub.drop("b")
    a.hub.drop("b")
    assert await b.heard(1) == [("gone", "a", "the other agent dropped the link")]
    assert a.events == [] and a.hub.peers() == b.hub.peers() == ()
    await asyncio.gather(a.open(b), b.open(a))
    a.send(b, Done(seq=1))
    b.send(a, Done(seq=2))
    assert (await a.heard(1), (await b.heard(2))[1]) == ([("b", SCOPE, Done(seq=2))], ("a", SCOPE, Done(seq=1)))


async def test_a_loss_is_a_loss_for_both(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    a.hub._links["b"].end("a cable was cut")
    assert await a.heard(1) == [("gone", "b", "a cable was cut")]
    ((kind, who, text),) = await b.heard(1)
    assert (kind, who) == ("gone", "a") and "a cable was cut" in text


async def test_nothing_is_heard_after_a_loss_until_both_have_opened_again(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    b.hub._links["a"].end("it missed its beats")
    b.hub._lost(b.hub._links["a"], "it missed its beats")
    a.send(b, Commit(seq=1))  # it has not heard yet that it is given up
    await a.heard(1)
    assert [event[0] for event in b.events] == ["gone"]
    await a.open(b)
    a.send(b, Commit(seq=2))
    await b.open(a)
    assert (await b.heard(2))[1] == ("a", SCOPE, Commit(seq=2))


async def test_who_lost_us_and_came_back_before_we_knew_is_lost_here_too(namespace: Namespace) -> None:
    # No beat of b's meets the lost link first: that would tell b, too, in other words.
    async with agent("a", namespace, beat=60) as a, agent("b", namespace, beat=60) as b:
        await asyncio.gather(a.open(b), b.open(a))
        # As if a's goodbye to b had been lost on the way.
        a.hub._sessions._sessions.clear()
        a.hub._sessions._paired.clear()
        a.hub._links["b"].end("a cable was cut")
        await a.open(b)
        a.send(b, Done(seq=1))
        assert await b.heard(1) == [("gone", "a", "it lost its link and opened another")]
        await b.open(a)
        assert (await b.heard(2))[1] == ("a", SCOPE, Done(seq=1))


async def test_a_loss_that_one_hears_of_late_is_not_answered_with_another_one(namespace: Namespace) -> None:
    """Else each new link would end the other's, one after the other for ever."""
    async with agent("a", namespace, beat=60) as a, agent("b", namespace, beat=60) as b:
        await a.open(b)
        # As if the network was cut, so that b hears nothing of it, and opens its link to what is over.
        a.hub._links["b"].end("a cable was cut")
        await a.heard(1)
        await b.open(a)
        await a.open(b)
        await b.heard(1)
        await b.open(a)
        for one, other in ((a, b), (b, a)):
            one.send(other, Done(seq=1))
            assert (await other.heard(2))[1] == (one.name, SCOPE, Done(seq=1))
        assert a.is_open("b") and b.is_open("a")
        assert [len(one.events) for one in (a, b)] == [2, 2], "each has lost the other once"


async def test_another_life_of_an_agent_ends_the_links_with_the_former(namespace: Namespace) -> None:
    async with agent("a", namespace) as a:
        async with agent("b", namespace) as former, agent("b", namespace) as b:
            await asyncio.gather(a.open(former), former.open(a))
            await asyncio.gather(a.open(b), b.open(a))
            assert a.events == [("gone", "b", "it came back with another address or key")]
            await former.heard(1)
            b.send(a, Done(seq=1))
            assert (await a.heard(2))[1] == ("b", SCOPE, Done(seq=1))


async def test_a_failing_handler_loses_no_other_message(
    pair: tuple[Agent, Agent], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair

    def fail_once(agent: str, scope: object, message: Done) -> None:
        if message.seq == 0:
            raise ZeroDivisionError("one over nothing")
        b.note(message.seq)

    monkeypatch.setattr(b.hub._sessions, "_on_message", fail_once)
    await a.open(b)
    for seq in range(3):
        a.send(b, Done(seq=seq))
    await b.open(a)
    assert await b.heard(2) == [(1,), (2,)]
    assert "could not be handled" in caplog.text


async def test_beats_keep_a_silent_link_and_are_measured(namespace: Namespace) -> None:
    async with agent("a", namespace) as a, agent("b", namespace) as b:
        await a.open(b)
        await until(lambda: a.hub._links["b"]._beats >= 6)
        (peer,) = a.hub.peers()
        assert peer.state == "open" and peer.missed <= 1 and peer.silent < 1.0
        assert peer.round_trip is not None and 0 < peer.round_trip < 1.0
        assert a.events == [] and b.hub.peers() == ()


async def test_who_was_stopped_itself_does_not_take_the_others_for_dead(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    link = a.hub._links["b"]
    link.heard -= 100.0
    a.hub._tick()
    assert a.is_open("b")


async def test_ports_are_two_in_a_row_and_stay_taken(namespace: Namespace) -> None:
    async with agent("a", namespace) as a:
        host, port = a.hub.address.split(":")
        assert host == "127.0.0.1" and a.hub.data_address == f"{host}:{int(port) + 1}"
        assert a.hub.data.getsockname() == (host, int(port) + 1)
        for taken in (a.hub.address, a.hub.data_address, f"{host}:{int(port) - 1}"):
            with pytest.raises(ConfigError, match="cannot listen"):
                Ports.bind(taken).close()
        socket.create_connection((host, int(port) + 1)).close()
    async with agent("a", namespace, listen=f"{host}:{port}") as again:
        assert again.hub.address == f"{host}:{port}"


@pytest.mark.parametrize(
    "address", ["7000", "host:", "host:x", "host:65535", "::1:7000", "[::1:7000", ":7000", "a b:1"]
)
async def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Ports.bind(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_an_address_that_is_all_addresses_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="give the one"):
        Ports.bind(address)


async def test_the_error_of_the_body_leaves_as_it_is(namespace: Namespace) -> None:
    with pytest.raises(KeyError):
        async with agent("a", namespace):
            raise KeyError("mine")


async def test_a_hub_leaves_nothing_open(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    from tests.unit.bus.echo import open_descriptors

    caplog.set_level(logging.DEBUG)
    before = open_descriptors()
    for _ in range(3):
        async with agent("a", namespace) as a, agent("b", namespace) as b:
            await asyncio.gather(a.open(b), b.open(a))
            a.hub.drop("b")
            await b.heard(1)
            await a.open(b)
    assert len(open_descriptors()) == len(before)


async def test_ipv6(namespace: Namespace) -> None:
    try:
        Ports.bind("[::1]:0").close()
    except ConfigError:
        pytest.skip("this host has no IPv6")
    async with agent("a", namespace, listen="[::1]:0") as a, agent("b", namespace) as b:
        assert a.hub.address.startswith("[::1]:")
        await asyncio.gather(a.open(b), b.open(a))
        a.send(b, Done(seq=1))
        b.send(a, Done(seq=2))
        assert (await a.heard(1), await b.heard(1)) == ([("b", SCOPE, Done(seq=2))], [("a", SCOPE, Done(seq=1))])


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_lost_and_opened_what_is_heard_is_whole_and_in_order(namespace: Namespace, seed: int) -> None:
    """Between an open and the next loss a run of messages is heard from its start, without a gap."""
    draw = random.Random(seed)
    async with agent("a", namespace) as a, agent("b", namespace) as b, agent("c", namespace) as c:
        agents, sent = (a, b, c), {}
        for _ in range(150):
            one, other = draw.sample(agents, 2)
            match draw.randrange(8):
                case 0:
                    one.hub.drop(other.name)
                    one.note("gone", other.name, "dropped")
                case 1 if one.is_open(other.name):
                    one.hub._links[other.name].end("cut")
                case 2 | 3:
                    with contextlib.suppress(AgentUnavailableError):  # the other may drop it meanwhile
                        await one.open(other)
                case _ if one.is_open(other.name):
                    link = one.hub._links[other.name]
                    sent[link] = sent.get(link, 0) + 1
                    # Each link counts from 1, so that a gap shows.
                    one.send(other, Done(seq=sent[link]))
            await asyncio.sleep(0.002 * draw.randrange(3))
        # In the end all find together again.
        for one, other in itertools.permutations(agents, 2):
            one.hub.drop(other.name)
            one.note("gone", other.name, "dropped")

        def linked() -> bool:
            return all(one.is_open(other.name) for one, other in itertools.permutations(agents, 2))

        async with asyncio.timeout(10):
            while not linked():
                with contextlib.suppress(AgentUnavailableError):
                    await asyncio.gather(*(one.open(other) for one, other in itertools.permutations(agents, 2)))
        for one, other in itertools.permutations(agents, 2):
            one.send(other, Commit(seq=0))
        for one, other in itertools.permutations(agents, 2):
            await until(lambda one=one, other=other: (other.name, SCOPE, Commit(seq=0)) in one.events)  # type: ignore[misc]
            last = 0
            for event in one.events:
                if event[:2] == ("gone", other.name):
                    last = 0
                elif event[0] == other.name and isinstance(event[2], Done):
                    assert event[2].seq == last + 1
                    last = event[2].seq


async def test_two_that_leave_at_once_do_not_wait_for_each_other(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    await asyncio.gather(a.open(b), b.open(a))
    started = time.monotonic()
    await asyncio.gather(a.hub.close(), b.hub.close())
    assert time.monotonic() - started < 0.5 and a.events == b.events == []
    with pytest.raises(AgentUnavailableError, match="this agent is leaving"):
        await a.open(b)


async def test_an_agent_without_descriptors_says_so_and_not_that_others_are_gone() -> None:
    namespace = Namespace()
    async with agent("a", namespace) as a, agent("b", namespace) as b:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits.descriptors_open() + 17, hard))
            with pytest.raises(AgentUnavailableError, match="file descriptors are in use"):
                await a.open(b)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await a.open(b)
