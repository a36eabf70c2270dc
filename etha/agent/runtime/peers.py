"""This agent's links to others and its data port: meetings per epoch, who reads whose host, tokens.

form(epoch, links)          open links --> Meet / Met with each --> the epoch is formed on all of them
link(what, agents)          open more links, to those that this agent exchanges data with
tell(agent, scope, ...)     over the link to it, or through a hub of its epoch
said(...)                   everything else that other agents say goes to the batch that it is about
on_agent_lost(agent, ...)   a link is lost, or a hub says so: streams, tokens and meetings with it end
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from etha.addresses import Advertised, format_address, is_loopback, parse_address
from etha.agent.protocol.epoch_links import EpochLinks
from etha.agent.runtime.device import GpuDevice
from etha.config import DIFFERENCES, STAGING
from etha.errors import AgentUnavailableError, ConfigError, EthaError, PeerLostError, ProtocolError, first_of, with_note
from etha.memory.process import Beacon, allow_reading
from etha.memory.reach import ReachError
from etha.peer.hub import Hub
from etha.peer.introductions import MAX_TOKENS, AskTokens, GiveTokens, LostPeer, Meet, Met, Relay
from etha.peer.keys import Keys
from etha.peer.messages import Question, VerdictAnswer
from etha.peer.tokens import TOKEN_BYTES, Tokens
from etha.peer.wire import MAX_TOGETHER, Control, Said, Scope, decode, encode
from etha.store.records import AgentRecord
from etha.store.registry import Store
from etha.transport.copy.host import Claim, claim, prove
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.listener import DataAddress
from etha.transport.tcp.tls import Identity

log = logging.getLogger(__name__)

#: Seconds for two agents of a formed pair to link and meet, and for tokens to come.
MEET_TIMEOUT = 10.0
TOKEN_TIMEOUT = 5.0
#: Seconds between the first two tries to link an agent that cannot be linked.
_FIRST_PAUSE = 0.5
#: Of more agents than these the records of all are read, in one request.
_FEW = 64
#: Seconds, about, between the first two tries to link a hub to which all come at once.
_CROWDED = 0.1
#: Most epochs that are remembered, and most in which others may be ahead of this agent.
_MAX_EPOCHS = 1000
#: Most epochs that are over and for which this agent still passes messages on: how their last transfers ended.
_MAX_OVER = 64

Epoch = tuple[str, int]  # (pair, number)


@dataclass(slots=True)
class _Meeting:
    """An epoch that forms here. ``missing`` have not said Met yet, ``owed`` have not been told Met."""

    missing: set[str]
    owed: set[str]
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PeerLinks:
    """Entered while the agent lives.

    Other messages go to ``said(agent, scope, message)``. ``on_agent_lost(agent, text, epoch)`` is called when a link is
    lost (``epoch`` None: the agent is lost in every epoch), and when a hub of an epoch has lost an agent of it.
    """

    def __init__(
        self,
        *,
        me: str,
        host: str,
        store: Store,
        listen: str | None,
        advertise: str | None = None,
        encrypt: bool = False,
        said: Callable[[str, Scope, Said], None],
        on_agent_lost: Callable[[str, str, Epoch | None], None],
        staging: int = STAGING,
        differences: str = DIFFERENCES[0],
        card: GpuDevice | None = None,
        log_note: str = "",
    ) -> None:
        #: Where this agent logs, for messages to everybody.
        self.log_note = log_note
        self.card, self.mappings = card, None if card is None else card.mappings
        self.me, self.host, self._store, self.staging = me, host, store, staging
        self._differences = differences
        self._advertised = None if advertise is None else Advertised.parse(advertise)
        self._listen, self._said, self._on_agent_lost = listen, said, on_agent_lost
        self._identity = Identity.fresh() if encrypt else None
        #: Certificate fingerprints of the data ports of the agents that were met.
        self._certificates: dict[str, bytes] = {}
        self._keys = Keys.fresh()
        self._tokens = Tokens()
        self._records: dict[str, AgentRecord] = {}
        self._known: dict[str, str] = {}
        self._meetings: dict[Epoch, _Meeting] = {}
        self._met: OrderedDict[Epoch, frozenset[str]] = OrderedDict()
        self._early: OrderedDict[Epoch, dict[str, Meet]] = OrderedDict()
        #: The epochs that form or are formed here, and the last ones that are over.
        self._epochs: dict[Epoch, EpochLinks] = {}
        self._over: OrderedDict[Epoch, EpochLinks] = OrderedDict()
        self._asked: dict[int, tuple[str, asyncio.Future[Sequence[bytes]]]] = {}
        self._requests = 0
        #: Agents to which there is no link since it was lost or could not be opened: when (loop time), and why.
        self._troubles: dict[str, tuple[float, str]] = {}
        #: Agents of this host whose processes this agent has proven to read, and those that read ours.
        self.reads: set[str] = set()
        self.read_by: set[str] = set()

    async def __aenter__(self) -> Self:
        allow_reading()
        self._beacon = Beacon()
        self._claim = claim(self._beacon)
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self.hub = await stack.enter_async_context(
                Hub(
                    self._listen,
                    self._keys,
                    known=self._known.get,
                    refresh=self._refresh,
                    on_message=self._heard,
                    on_agent_lost=self._on_link_lost,
                    advertised=self._advertised is not None,
                )
            )
            self.plane = DataPlane(
                self.hub.data,
                token_bytes=TOKEN_BYTES,
                admit=self._admit,
                staging=self.staging,
                memory=None if self.card is None else self.card.memory,
                identity=self._identity,
                differences=self._differences,
            )
            stack.push_async_callback(self.plane.close)
            # NCCL traffic cannot be encrypted, so an agent that encrypts has no NCCL and uses streams instead.
            self.nccl = None if self.card is None or self.encrypts else self.card.nccl_plane(self.me, self.plane.budget)
            if self.nccl is not None:
                stack.push_async_callback(self.nccl.close)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            door = group.create_task(self.plane.run(), name="data port")
            stack.callback(door.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, future in self._asked.values():
            future.cancel()
        # The body's error is raised as it is, not in the task group's ExceptionGroup.
        await self._stack.aclose()

    @property
    def address(self) -> str:
        """HOST:PORT of the links, as published."""
        return self.hub.address if self._advertised is None else self._advertised.address

    @property
    def encrypts(self) -> bool:
        """Whether data connections are encrypted. Then no unencrypted one is opened or accepted."""
        return self._identity is not None

    @property
    def certificate(self) -> bytes:
        """SHA-256 of the certificate that the data port shows; b"" if it encrypts nothing."""
        return b"" if self._identity is None else self._identity.fingerprint

    @property
    def published(self) -> dict[str, str]:
        """The addresses of this agent's record: for other hosts, and for this one."""
        data = self.hub.data_address if self._advertised is None else self._advertised.data_address
        return {"address": self.address, "data_address": data, "bound": self.hub.address}

    @property
    def reached_at(self) -> str:
        """Where other agents reach this one, for people."""
        published = self.published
        listens = "" if published["bound"] == published["address"] else f" (it listens at {published['bound']})"
        return f"links at {published['address']}, data at {published['data_address']}{listens}"

    @property
    def public_key(self) -> str:
        """CURVE public key, as published."""
        return self._keys.public

    def record(self, agent: str) -> AgentRecord | None:
        """What Redis said of an agent when it was last asked."""
        return self._records.get(agent)

    def records(self) -> list[AgentRecord]:
        """What Redis said of all other agents when it was last asked."""
        return [record for agent, record in self._records.items() if agent != self.me]

    def log_of(self, agent: str) -> str:
        """Where another agent logs, for the end of a message; "" if it is not known."""
        record = self._records.get(agent)
        return "" if record is None else record.log_note

    def log_of_named(self, text: str) -> str:
        """Where the agent logs that ``text`` names, else this one."""
        found = (record.log_note for agent, record in self._records.items() if agent != self.me and agent in text)
        return next(filter(None, found), self.log_note)

    def trouble(self, agent: str) -> str:
        """Why there is no link to an agent, if it was lost or could not be opened; else ""."""
        at, why = self._troubles.get(agent, (0.0, ""))
        return f"{self._loop.time() - at:.0f} s ago: {why}" if why else ""

    # ---- forming an epoch ---------------------------------------------------------------------

    async def form(self, key: Epoch, links: EpochLinks) -> None:
        """Return once every agent near this one is linked, knows this epoch, and knows whether it reads this host.

        AgentUnavailableError names who could not be linked, and why.
        """
        pair, epoch = key
        others = sorted(links.near)
        self._over.pop(key, None)
        self._epochs[key] = links
        meeting = self._meetings[key] = _Meeting(set(others), set(others))
        try:
            await self._look_up(others)
            async with asyncio.timeout(MEET_TIMEOUT):
                await self._open_all(f"pair {pair!r}", others, crowded=links.hubs)
                scope, mine = Scope(pair=pair, epoch=epoch), self._claim
                for agent in others:
                    meet = Meet(
                        pid=mine.pid,
                        started=mine.started,
                        address=mine.address,
                        token=mine.token,
                        certificate=self.certificate,
                    )
                    self.hub.send(agent, scope, meet)
                for agent, early in self._early.pop(key, {}).items():
                    self._meet(agent, scope, early)
                self._settle(meeting)
                await meeting.over
        except TimeoutError:
            who = sorted(meeting.missing | meeting.owed)
            text = (
                f"pair {pair!r} epoch {epoch}: agents {', '.join(who)} did not meet this one within {MEET_TIMEOUT:g} s"
            )
            notes = ", ".join(dict.fromkeys(filter(None, map(self.log_of, who))))
            raise AgentUnavailableError(with_note(text, notes)) from None
        finally:
            del self._meetings[key]
        for agent in links.far:  # what was wrong with a link before is nothing that this epoch needs
            self._troubles.pop(agent, None)
        self._met[key] = frozenset(others)
        while len(self._met) > _MAX_EPOCHS:
            self._met.popitem(last=False)

    def forget(self, pair: str, epoch: int) -> None:
        """An epoch is over. A pair that everybody has left counts its epochs anew, so a Meet of the same number is not
        taken for a repetition: it is kept until this agent forms that epoch, too."""
        self._met.pop((pair, epoch), None)
        if (links := self._epochs.pop((pair, epoch), None)) is not None and links.hubs:
            self._over[pair, epoch] = links
            while len(self._over) > _MAX_OVER:
                self._over.popitem(last=False)

    async def link(self, what: str, agents: Collection[str]) -> None:
        """Return once each of these agents is linked. AgentUnavailableError names who cannot be, and why; that agent is
        lost then, for ``on_agent_lost``, too."""
        others = [agent for agent in sorted(agents) if not self.hub.linked(agent)]
        if others:
            await self._look_up(others)
        ends = await asyncio.gather(*(self._open(what, agent) for agent in others), return_exceptions=True)
        failed = [(agent, end) for agent, end in zip(others, ends, strict=True) if end is not None]
        for agent, error in failed:
            if isinstance(error, EthaError):
                self._on_link_lost(agent, error.message)
        if failed:
            raise failed[0][1]

    async def prove(self, what: str, agents: Collection[str], seconds: float) -> bool:
        """Try until each of ``agents`` is linked, for ``seconds`` at most; returns whether all are.

        Returns at once if one of another host listens on its loopback only, because that proves nothing.
        """
        others, pause = sorted(set(agents) - {self.me}), _FIRST_PAUSE
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._refresh()
                    known = [self._records[agent] for agent in others if agent in self._records]
                    hosts = [parse_address(one.address)[0] for one in known if one.address and one.host != self.host]
                    if any(map(is_loopback, hosts)):
                        return False
                    try:
                        await self._open_all(what, [record.id for record in known])
                        return True
                    except AgentUnavailableError as error:
                        log.info("tried again: %s", error.message)
                    await asyncio.sleep(pause)  # between two tries; nothing announces a way that is open again
                    pause = min(MEET_TIMEOUT, 2 * pause)
        except TimeoutError:
            return False

    async def _open_all(self, what: str, agents: Sequence[str], crowded: Collection[str] = ()) -> None:
        """Open a link to each of ``agents``; to those that are ``crowded``, because all come to them at once, until the
        caller's timeout."""
        try:
            async with asyncio.TaskGroup() as group:
                for agent in agents:
                    group.create_task((self._open_at_last if agent in crowded else self._open)(what, agent))
        except* EthaError as errors:
            raise first_of(errors) from None

    async def _open_at_last(self, what: str, agent: str) -> None:
        pause = _CROWDED
        while True:
            try:
                return await self._open(what, agent)
            except AgentUnavailableError as error:
                if agent not in self._records:
                    raise
                log.debug("tried again: %s", error.message)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # not all at once again
            pause = min(1.0, 2 * pause)

    async def _open(self, what: str, agent: str) -> None:
        record = self._records.get(agent)
        if record is None or not record.address:
            text = f"{what}: agent {agent} has no address in Redis: has it ended?"
            raise AgentUnavailableError(with_note(text, self.log_of(agent)))
        try:
            await self.hub.open(agent, self._reached(record)[0], record.public_key, MEET_TIMEOUT)
        except AgentUnavailableError as error:
            self._troubles[agent] = (self._loop.time(), error.message)
            text = with_note(f"{what}: {error.message}", record.log_note)
            raise AgentUnavailableError(text) from None
        self._troubles.pop(agent, None)

    def _meet(self, agent: str, scope: Scope, message: Meet) -> None:
        meeting = self._meetings.get((scope.pair, scope.epoch))
        if bool(message.certificate) is not self.encrypts:
            with_it, without = (self.me, agent) if self.encrypts else (agent, self.me)
            error = ConfigError(
                f"pair {scope.pair!r}: agent {with_it} encrypts data connections, agent {without} does not, and "
                f"neither gives way: set ETHA_ENCRYPT=1 on both sides, or on none"
            )
            log.warning("%s", error.message)
            if meeting is not None and not meeting.over.done():
                meeting.over.set_exception(error)
            return
        self._certificates[agent] = message.certificate
        reads = self._reads(agent, message)
        (self.reads.add if reads else self.reads.discard)(agent)
        try:
            self.hub.send(agent, scope, Met(reads=reads))
        except PeerLostError:
            return  # on_agent_lost ends the meeting
        if meeting is not None:
            meeting.owed.discard(agent)
            self._settle(meeting)

    def _reads(self, agent: str, message: Meet) -> bool:
        record = self._records.get(agent)
        if record is None or record.host != self.host:
            return False
        try:
            prove(Claim(pid=message.pid, started=message.started, address=message.address, token=message.token))
        except ReachError as error:
            log.info("agent %s of this host is out of reach, its bytes will be sent: %s", agent, error)
            return False
        return True

    def _settle(self, meeting: _Meeting) -> None:
        if not meeting.missing and not meeting.owed and not meeting.over.done():
            meeting.over.set_result(None)

    async def _look_up(self, agents: Collection[str]) -> None:
        """Read the records of these agents: of all, if they are many. Who waits at the gate for that is admitted."""
        if len(agents) > _FEW:
            await self._refresh()
        else:
            found = {record.id: record for record in await self._store.agents.some(agents, timeout=MEET_TIMEOUT)}
            for agent in agents:
                known = self._records.pop(agent, None)
                if known is not None:
                    self._known.pop(known.public_key, None)
            self._records |= found
            self._known |= {record.public_key: record.id for record in found.values() if record.public_key}
        self.hub.admit_known()

    async def _refresh(self) -> None:
        records = await self._store.agents.all(timeout=MEET_TIMEOUT)
        self._records = {record.id: record for record in records}
        self._troubles = {agent: why for agent, why in self._troubles.items() if agent in self._records}
        self._known.clear()
        self._known |= {record.public_key: record.id for record in records if record.public_key}

    # ---- data connections ---------------------------------------------------------------------

    def data_address(self, agent: str, scope: Scope) -> DataAddress:
        """How to reach the data port of a linked agent. ProtocolError for an agent without a record."""
        record = self._records.get(agent)
        if record is None:
            raise ProtocolError(f"agent {agent} has no address in Redis")
        host, port = parse_address(self._reached(record)[1], most=65535)

        fingerprint = self._certificates.get(agent) or bytes.fromhex(record.certificate) or None
        if (fingerprint is not None) is not self.encrypts:
            raise ProtocolError(f"agent {agent} has not told what its data port shows")

        async def tokens(count: int) -> Sequence[bytes]:
            return await self._ask(agent, scope, count)

        return DataAddress(host=host, port=port, tokens=tokens, fingerprint=fingerprint)

    def _reached(self, record: AgentRecord) -> tuple[str, str]:
        """The addresses of another agent's links and data, as seen from here. Port maps apply only between hosts."""
        if record.host == self.host and record.bound:
            host, port = parse_address(record.bound)
            return record.bound, format_address(host, port + 1)
        if record.data_address:
            return record.address, record.data_address
        host, port = parse_address(record.address)
        return record.address, format_address(host, port + 1)

    async def _ask(self, agent: str, scope: Scope, count: int) -> Sequence[bytes]:
        self._requests += 1
        request, answer = self._requests, self._loop.create_future()
        self._asked[request] = (agent, answer)
        try:
            self._send(agent, scope, AskTokens(request=request, count=count))
            async with asyncio.timeout(TOKEN_TIMEOUT):
                tokens: Sequence[bytes] = await answer
                return tokens
        except TimeoutError:
            text = with_note(f"agent {agent} gave no tokens in {TOKEN_TIMEOUT:g} s", self.log_of(agent))
            raise PeerLostError(text, reason="died") from None
        finally:
            del self._asked[request]

    def _admit(self, token: bytes) -> str | None:
        purpose = self._tokens.redeem(token, self._loop.time())
        return None if purpose is None else purpose.agent

    # ---- what the hub tells -------------------------------------------------------------------

    def _heard(self, agent: str, scope: Scope, message: Said) -> None:
        key = (scope.pair, scope.epoch)
        match message:
            case Meet() if key in self._meetings or agent in self._met.get(key, ()):
                self._meet(agent, scope, message)
            case Meet():  # it has heard of this epoch before this agent
                self._early.setdefault(key, {})[agent] = message
                while len(self._early) > _MAX_EPOCHS:
                    self._early.popitem(last=False)
            case Met(reads=reads):
                (self.read_by.add if reads else self.read_by.discard)(agent)
                if (meeting := self._meetings.get(key)) is not None:
                    meeting.missing.discard(agent)
                    self._settle(meeting)
            case AskTokens(request=request, count=count):
                now, count = self._loop.time(), max(0, min(count, MAX_TOKENS))
                tokens = tuple(self._tokens.issue(agent, "data", now) for _ in range(count))
                self.tell(agent, scope, GiveTokens(request=request, tokens=tokens))
            case GiveTokens(request=request, tokens=given):
                asked = self._asked.get(request)
                if asked is not None and asked[0] == agent and not asked[1].done():
                    asked[1].set_result(given)
            case Relay():
                self._relay(agent, scope, message)
            case LostPeer():
                links = self._epochs.get(key)
                if links is not None and links.accepts(agent, message.agent):
                    self._on_agent_lost(message.agent, f"agent {agent} has lost it: {message.text}", key)
            case _:
                self._said(agent, scope, message)

    # ---- who is told, and how -----------------------------------------------------------------

    def tell(self, agent: str, scope: Scope, *messages: Said) -> None:
        """Send to an agent of an epoch that both are in, in order. ``on_agent_lost`` reports a lost link, not this.

        Several messages travel in one piece if there is a link, which costs both ends little more than one.
        """
        try:
            self._send(agent, scope, *messages)
        except PeerLostError as error:
            log.debug("%s", error)

    def far(self, epoch: Epoch) -> frozenset[str]:
        """The agents of an epoch to which this one needs no link, unless they exchange data."""
        links = self._epochs.get(epoch)
        return frozenset() if links is None else links.far

    def reach(self, agent: str) -> Epoch | None:
        """An epoch through whose hubs an agent without a link is told; None if there is none."""
        return next((epoch for epoch, links in self._epochs.items() if links.is_far(agent)), None)

    def _send(self, agent: str, scope: Scope, *messages: Said) -> None:
        """Over the link to ``agent``, or else through a hub. PeerLostError: there is neither.

        Through the first hub that is linked; but through all of them where survivors ask each other how a transfer
        ended, because the first may stand still, which nobody knows yet. Twice heard is once heard there.
        """
        epoch = (scope.pair, scope.epoch)
        links = self._epochs.get(epoch) or self._over.get(epoch)
        if links is None or not links.is_far(agent) or self.hub.linked(agent):
            for first in range(0, len(messages), MAX_TOGETHER):
                self.hub.send(agent, scope, *messages[first : first + MAX_TOGETHER])
            return
        for message in messages:
            self._send_far(links, agent, scope, message)

    def _send_far(self, links: EpochLinks, agent: str, scope: Scope, message: Said) -> None:
        about = Scope(pair=scope.pair, epoch=scope.epoch)
        relay = Relay(origin=self.me, to=agent, message=encode(scope, message))
        sent = False
        for hub in filter(self.hub.linked, links.hubs):
            if not sent or isinstance(message, Question | VerdictAnswer):
                with suppress(PeerLostError):  # its link ends by this
                    self.hub.send(hub, about, relay)
                    sent = True
        if not sent:
            raise PeerLostError(f"{type(message).__name__} not sent to agent {agent}: no hub is linked", reason="died")

    def _relay(self, sender: str, scope: Scope, relay: Relay) -> None:
        """Pass on what an agent says to another, or take what is said to this one."""
        epoch = (scope.pair, scope.epoch)
        links = self._epochs.get(epoch) or self._over.get(epoch)
        if links is not None and relay.to == self.me and links.accepts(sender, relay.origin):
            try:
                inner = decode(relay.message)
            except ProtocolError as error:
                log.warning("dropped from agent %s through agent %s: %s", relay.origin, sender, error)
                return
            inside = inner.scope is not None and (inner.scope.pair, inner.scope.epoch) == epoch
            # What concerns the link itself, or who is lost, is believed on the link only.
            if inside and not isinstance(inner.message, Control | Meet | Met | Relay | LostPeer):
                assert inner.scope is not None
                return self._heard(relay.origin, inner.scope, inner.message)
        elif links is not None and links.relays(sender, relay.origin, relay.to):
            with suppress(PeerLostError):  # everybody is told of that loss
                self.hub.send(relay.to, scope, relay)
            return
        log.debug("agent %s relays what is not for this agent to take or pass on", sender)

    def _on_link_lost(self, agent: str, text: str) -> None:
        text = with_note(text, self.log_of(agent))
        error = PeerLostError(f"agent {agent} is gone: {text}", reason="died")
        self._troubles[agent] = (self._loop.time(), f"its link was lost: {text}")
        self.plane.drop(agent)
        self._tokens.revoke(agent)
        self.reads.discard(agent)
        self.read_by.discard(agent)
        for meeting in self._meetings.values():
            if agent in meeting.missing | meeting.owed and not meeting.over.done():
                meeting.over.set_exception(AgentUnavailableError(error.message))
        for other, answer in self._asked.values():
            if other == agent and not answer.done():
                answer.set_exception(error)
        others_by_epoch = {
            epoch: links.agents - {self.me, agent}
            for epoch, links in self._epochs.items()
            if self.me in links.hubs and agent in links.agents
        }
        self._on_agent_lost(agent, text, None)
        for (pair, number), others in others_by_epoch.items():
            for other in sorted(others):
                self.tell(other, Scope(pair=pair, epoch=number), LostPeer(agent=agent, text=text[:4000]))
