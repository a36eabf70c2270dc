"""Publications: which versions there are, who holds them, and which holder feeds whom.

Every change is one Lua script. They share ``publication.lua``, which also gives free places to waiting subscribers, so
a subscriber that waits is woken only when there is something for it. Wake-ups: ``keys.publication_side`` for what
concerns one side (a claim was granted, readers have ended, all ranks have put, a subscriber has committed),
``keys.publication`` for a new version.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict
from typing import Any

from etha.config import MAX_WORLD
from etha.errors import ConfigError, EthaError, RedisUnavailableError
from etha.store.connect import Client, ScriptRefused
from etha.store.keys import REGISTRATION_LEASE
from etha.store.process import alive
from etha.store.publication_records import (
    WHOLE,
    ClaimAnswer,
    ClaimRequest,
    HeldVersion,
    HolderState,
    PublicationRank,
    PublicationSide,
    PutSlot,
    SourceClaim,
    TensorTable,
    WaitingRank,
    label_text,
    whole,
)
from etha.store.publication_view import PublicationView, read_holder, read_table
from etha.store.reading import FieldReader
from etha.store.records import RankHolder
from etha.store.session import StoreSession

log = logging.getLogger(__name__)

#: The keys of a publication beside its hash, its sides and its tables.
PARTS = (
    "sides",
    "holders",
    "free",
    "offers",
    "held",
    "received",
    "queue",
    "wanted",
    "asks",
    "claims",
    "leases",
    "versions",
    "feeds",
    "sets",
)
#: What a rank that enters always says.
_ENTRANCE = ("publication", "side", "role", "rank", "world", "zone", "slots", "places", "passes", "serial")
#: Most characters of an error that is kept.
MAX_ERROR = 500


class Publications:
    """The publications of a namespace in Redis: ``store.publications``.

    publisher's rank:    enter -> (prepare, write the slot, announce)* -> leave
    subscriber's rank:   enter -> (claim until granted, hop with renew, release)* -> leave
    """

    def __init__(self, session: StoreSession) -> None:
        self._session, self._keys = session, session.keys
        #: Put back after Redis has lost it: ranks of this agent's workers, as they entered, by (publication, side,
        #: rank). ``entrance.serial`` is that of their launch.
        self.held: dict[tuple[str, str, int], tuple[PublicationRank, RankHolder]] = {}
        #: Put back with them, by (publication, SIDE/SERIAL): what buffers hold, and how many puts were announced.
        self.versions: dict[tuple[str, str], tuple[HeldVersion, ...]] = {}
        self.puts: dict[tuple[str, str], int] = {}
        #: The holders, as (publication, SIDE/SERIAL), of which this agent has ranks or memory.
        self.standing: set[tuple[str, str]] = set()

    # ---- sides --------------------------------------------------------------------------------------

    async def meet(self, publication: str, side: str, rank: int, entry: WaitingRank, *, timeout: float) -> None:
        """Write what a rank has registered, for the other ranks of its side, and wake them.

        A side enters with the table of its tensors, which only all ranks together know: a rank may hold no part of a
        tensor, and may not know a global shape.
        """
        key = self._keys.publication_ranks(publication, side)
        text = json.dumps(asdict(entry), separators=(",", ":"))

        async def write(client: Client) -> None:
            pipe = client.pipeline(transaction=True)
            pipe.hset(key, str(rank), text)
            pipe.pexpire(key, int(REGISTRATION_LEASE * 1000))
            pipe.publish(key, "rank")
            await pipe.execute()

        await self._session.connection.call(f"write {key}", write, timeout)

    async def part(self, publication: str, side: str, rank: int, *, timeout: float | None = None) -> None:
        """Take a rank out of those that wait: its side has entered, or it waits no more."""
        key = self._keys.publication_ranks(publication, side)
        await self._session.connection.call(
            f"write {key}", lambda client: client.hdel(key, str(rank)), self._session.limit(timeout)
        )

    async def waiting(self, publication: str, side: str, *, timeout: float | None = None) -> dict[int, WaitingRank]:
        """The ranks of a side that wait to enter."""
        key = self._keys.publication_ranks(publication, side)
        values: dict[str, str] = await self._session.connection.call(
            f"read {key}", lambda client: client.hgetall(key), self._session.limit(timeout)
        )
        found = {}
        for name, text in values.items():
            read = FieldReader(key, {name: text}).json_object(name)
            number = FieldReader(key, {name: name}).integer(name, most=MAX_WORLD - 1)
            found[number] = WaitingRank(
                world=read.integer("world", least=1, most=MAX_WORLD),
                launch=read.text("launch", most=500),
                manifest=read.name("manifest"),
                pid=read.integer("pid"),
                token=read.text("token", most=100),
                company=read.text("company", most=100),
            )
        return found

    async def enter(
        self, entrance: PublicationRank, member: RankHolder, *, timeout: float | None = None
    ) -> PublicationSide:
        """Take a rank of a side. Does not wait for the others: watch the side's key until the answer is ``complete``.

        The same call once more changes nothing. A new launch of a side ends the one before. ConfigError: the rank is
        held by a process that lives, ranks disagree, another side publishes, or a subscriber's tensors do not fit the
        description. GroupLostError: this launch is over, because a rank of it has died or it was launched again.
        """
        key = self._keys.publication(entrance.publication)
        request = {
            **{name: getattr(entrance, name) for name in _ENTRANCE},
            "digest": entrance.tensors.digest,
            "member": member.holder(),
            "dead": {},
            "tensors": {},
            "sets": {},
            "run": entrance.run or "",
            "takeover": entrance.takeover,
        }
        request |= {name: value for name in ("launch", "copies") if (value := getattr(entrance, name)) is not None}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._session.limit(timeout)
        while True:
            try:
                done = await self._session.connection.script(
                    "publication_enter", [key], request, deadline - loop.time()
                )
                break
            except ScriptRefused as refusal:
                if refusal.code == "unpublished":
                    if (record := self._session.owned.agent) is None:
                        raise ConfigError(f"agent {member.agent} enters a publication while it leaves") from None
                    await self._session.write_agent("publish", record, deadline - loop.time())
                    self._session.forgotten = True
                elif refusal.code == "unknown_table":  # most ranks of most sides have one that is known
                    request["tensors"] = entrance.tensors.to_redis()
                    request["sets"] = dict(entrance.tensors.sets)
                elif dead := self._dead(refusal.held, member.host):
                    request["dead"].update(dead)
                else:
                    raise refusal.as_error() from None
        return PublicationSide.read(key, done)

    def _dead(self, held: list[dict[str, Any]], host: str) -> dict[str, bool]:
        """The holders of ranks on this host that have ended, as the script names processes."""
        found = {}
        for holder in held:
            read = FieldReader(self._keys.prefix + "publication", holder)
            pid, start = whole(read, "pid"), whole(read, "start")
            if read.text("host") == host and not alive(pid, start):
                found[f"{host}/{pid}/{start}"] = True
        return found

    async def leave(
        self, publication: str, side: str, rank: int, member: RankHolder, reason: str, *, timeout: float | None = None
    ) -> bool:
        """End the launch of a side, because ``member``, which holds ``rank``, has closed it ("closed") or "died".

        A subscriber's claims and buffers are forgotten. A publisher's slots stay as an orphan until somebody else
        serves the newest version. Returns whether ``member`` held the rank.
        """
        request = {"side": side, "rank": rank, "member": member.holder(), "reason": reason}
        return bool(await self._script("publication_leave", publication, request, timeout))

    # ---- the publisher --------------------------------------------------------------------------------

    async def prepare(
        self, publication: str, side: str, serial: int, rank: int, put: int, *, timeout: float | None = None
    ) -> PutSlot:
        """Which slot a rank may write for put number ``put`` (from 1 in each launch). All ranks get the same slot.

        The version that the slot held is forgotten first. Not ``ready``: watch the side's key and ask again.
        """
        request = {"act": "prepare", "side": side, "serial": serial, "rank": rank, "put": put}
        answer = await self._script("publication_put", publication, request, timeout)
        return PutSlot.read(self._keys.publication(publication), answer)

    async def abandon(
        self, publication: str, side: str, serial: int, rank: int, put: int, *, timeout: float | None = None
    ) -> None:
        """Give put number ``put`` up, of which nothing was written: the slot holds the version that it held.

        Of several ranks nothing happens, because the others may go on with the put.
        """
        request = {"act": "abandon", "side": side, "serial": serial, "rank": rank, "put": put}
        await self._script("publication_put", publication, request, timeout)

    async def announce(
        self,
        publication: str,
        side: str,
        serial: int,
        rank: int,
        put: int,
        slot: PutSlot,
        version: int | str | None,
        *,
        timeout: float | None = None,
    ) -> int:
        """A rank has set its part aside in ``slot``. Returns the version's seq once all ranks have, 0 before.

        Then the version is the newest, and waiting subscribers have been given their claims. Watch the side's key for
        it, and ask again. ConfigError: labels differ.
        """
        request = {"act": "announce", "side": side, "serial": serial, "rank": rank, "put": put, "slot": slot.slot}
        request |= {"seq": slot.seq, "version": label_text(version)}
        return int(await self._script("publication_put", publication, request, timeout))

    async def receivers(self, publication: str, seq: int, *, timeout: float | None = None) -> tuple[str, ...]:
        """Names of the subscribers that have received version ``seq`` or a newer one, in order; also of those that have
        left since."""
        key = self._keys.publication_part(publication, "received")
        found = await self._session.connection.call(
            f"read {key}", lambda client: client.zrangebyscore(key, seq, "+inf"), self._session.limit(timeout)
        )
        return tuple(sorted(map(str, found)))

    async def holding_names(self, publication: str, seq: int, *, timeout: float | None = None) -> tuple[str, ...]:
        """Names of the subscribers that hold version ``seq`` or a newer one, in order."""
        key = self._keys.publication_part(publication, "held")
        found = await self._session.connection.call(
            f"read {key}", lambda client: client.zrangebyscore(key, seq, "+inf"), self._session.limit(timeout)
        )
        return tuple(sorted({str(holder).rpartition("/")[0] for holder in found}))

    async def superseded(self, publication: str, side: str, serial: int, *, timeout: float | None = None) -> bool:
        """Whether another launch has published since this one of ``side`` has entered."""
        key, own = self._keys.publication(publication), self._keys.publication_side(publication, side)

        async def read(client: Client) -> bool:
            pipe = client.pipeline(transaction=True)
            pipe.hget(key, "publisher")
            pipe.hget(own, "serial")
            publisher, current = await pipe.execute()
            return publisher not in (None, "", side) or current not in (None, str(serial))

        return await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))

    # ---- subscribers ------------------------------------------------------------------------------------

    async def claim(self, request: ClaimRequest, *, timeout: float | None = None) -> ClaimAnswer:
        """Ask for a version, or take a place in the queue. The same question again gets the same answer.

        Ranks that ask in one call get the same answer; the lowest ``newer_than`` counts. A claim of an earlier call
        ends. What the subscriber's own buffer holds is forgotten when the claim is granted, because the hop overwrites
        it; until nobody reads that buffer any more, the subscriber waits. ConfigError: no holder has the pinned
        version, or none has it any more. RegistrationError: no holder of a newer version can feed it, and its tensors
        are not those that are published now. GroupLostError: this launch of the subscriber is over.
        """
        fields = {**asdict(request), "act": "claim", "version": label_text(request.version)}
        answer = await self._script("claim", request.publication, fields, timeout)
        read = FieldReader(self._keys.publication(request.publication), answer)
        given = answer.get("claim")
        if "differs" in answer:
            return ClaimAnswer(claim=None, over=False, last=0, wait=0.0, seq=0, held=0, differs=read.text("differs"))
        return ClaimAnswer(
            claim=SourceClaim.read(read.key, request.publication, given) if isinstance(given, dict) else None,
            over=answer.get("over") is True,
            last=whole(read, "last"),
            wait=whole(read, "wait") / 1000,
            seq=whole(read, "seq"),
            held=whole(read, "held"),
            unfit=read.text("unfit", default=""),
        )

    async def withdraw(
        self, publication: str, subscriber: str, serial: int, call: int, *, timeout: float | None = None
    ) -> None:
        """Take back a question, and release its claim if it was granted meanwhile."""
        request = {"act": "withdraw", "subscriber": subscriber, "serial": serial, "call": call}
        await self._script("claim", publication, request, timeout)

    async def renew(self, claim: SourceClaim, *, timeout: float | None = None) -> bool:
        """Renew a claim's lease of CLAIM_LEASE seconds. False if it has lapsed: the hop may go on, and counts if it
        commits."""
        request = {"act": "renew", "number": claim.number}
        return bool(await self._script("publication_release", claim.publication, request, timeout))

    async def release(
        self,
        claim: SourceClaim,
        *,
        committed: bool,
        held: HeldVersion | None = None,
        error: str = "",
        overwritten: bool = False,
        seconds: float = 0.0,
        timeout: float | None = None,
    ) -> bool:
        """A hop has ended. Committed: the subscriber holds the version, and serves it if it has places.

        ``held``: of a hop that failed, what the subscriber's buffer still holds whole. ``overwritten``: a put ended it,
        so that the next claim is protected. Returns whether the claim had not lapsed.
        """
        request = {
            **{name: getattr(claim, name) for name in ("number", "call", "subscriber", "serial", "seq", "description")},
            "act": "release",
            "source": claim.holder,
            "version": label_text(claim.version),
            "committed": committed,
            "held": [] if held is None else [_held(held)],
            "error": error[:MAX_ERROR],
            "overwritten": overwritten,
            "seconds": seconds,
        }
        return bool(await self._script("publication_release", claim.publication, request, timeout))

    async def forget(self, publication: str, holder: str, why: str = "", *, timeout: float | None = None) -> None:
        """The buffers of holder SIDE/SERIAL are lost or spoilt: nobody reads them any more.

        ``why``: they are spoilt, because the side itself has changed its version; for people, as its last error.
        """
        request = {"act": "forget", "holder": holder, "text": why}
        await self._script("publication_release", publication, request, timeout)

    # ---- what there is ------------------------------------------------------------------------------------

    async def description(self, publication: str, *, timeout: float | None = None) -> TensorTable | None:
        """The tensors of the newest version, or of the publisher that has entered last. None if there is none."""
        key = self._keys.publication(publication)

        async def read(client: Client) -> TensorTable | None:
            digest = await client.hget(key, "description")
            if not digest:
                return None
            at = self._keys.publication_table(publication, str(digest))
            fields = await client.hgetall(at)
            if not fields:
                return None
            digests = sorted({text.rpartition(" ")[2] for text in fields.values()} - {WHOLE})
            texts = await client.hmget(self._keys.publication_part(publication, "sets"), digests) if digests else []
            sets = {digest: text for digest, text in zip(digests, texts, strict=True) if text is not None}
            return read_table(at, fields, sets)

        return await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))

    async def holder(self, publication: str, holder: str, *, timeout: float | None = None) -> HolderState | None:
        """One holder, None if it is not there any more: then its agents may free its buffers."""
        key = self._keys.publication_part(publication, "holders")
        text = await self._session.connection.call(
            f"read {key}", lambda client: client.hget(key, holder), self._session.limit(timeout)
        )
        return None if text is None else read_holder(key, holder, text)

    async def newest(self, publication: str, *, timeout: float | None = None) -> int:
        """``seq`` of the newest version; 0 before the first."""
        key = self._keys.publication(publication)
        found = await self._session.connection.call(
            f"read {key}", lambda client: client.hget(key, "seq"), self._session.limit(timeout)
        )
        return FieldReader(key, {"seq": found}).integer("seq", default=0)

    async def claims(self, publication: str, holder: str, *, timeout: float | None = None) -> dict[int, SourceClaim]:
        """The running hops that read from ``holder`` (SIDE/SERIAL), by number."""
        key = self._keys.publication_part(publication, "claims")
        fields: dict[str, str] = await self._session.connection.call(
            f"read {key}", lambda client: client.hgetall(key), self._session.limit(timeout)
        )
        found = [
            SourceClaim.read(key, publication, FieldReader(key, {name: text}).json_object(name).values)
            for name, text in fields.items()
        ]
        return {one.number: one for one in found if one.holder == holder}

    async def view(self, publication: str, *, timeout: float | None = None) -> PublicationView | None:
        """A publication with its sides, holders, claims and queue. None if nobody has entered it."""
        key = self._keys.publication(publication)

        async def read(client: Client) -> PublicationView | None:
            pipe = client.pipeline(transaction=True)
            pipe.hgetall(key)
            for part in ("holders", "claims", "asks", "versions"):
                pipe.hgetall(self._keys.publication_part(publication, part))
            pipe.zrange(self._keys.publication_part(publication, "queue"), 0, -1)
            pipe.smembers(self._keys.publication_part(publication, "sides"))
            pipe.time()
            values, holders, claims, asks, versions, queue, sides, clock = await pipe.execute()
            if not values:
                return None
            names = sorted(sides)
            pipe = client.pipeline(transaction=False)
            for side in names:
                pipe.hgetall(self._keys.publication_side(publication, side))
            fields = dict(zip(names, await pipe.execute(), strict=True)) if names else {}
            now = int(clock[0]) * 1000 + int(clock[1]) // 1000
            parts = {"holders": holders, "claims": claims, "asks": asks, "versions": versions}
            return PublicationView.read(key, publication, values, parts, queue, fields, now)

        found = await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))
        return None if found is None else await self._silenced(found, timeout)

    async def _silenced(self, view: PublicationView, timeout: float | None) -> PublicationView:
        """The view, with the sides marked whose agents do not answer."""
        agents = sorted(view.agents())

        async def read(client: Client) -> set[str]:
            pipe = client.pipeline(transaction=False)
            for agent in agents:
                pipe.exists(self._keys.agent(agent))
            there = await pipe.execute() if agents else []
            return {agent for agent, found in zip(agents, there, strict=True) if not found}

        silent = await self._session.connection.call("read agents", read, self._session.limit(timeout))
        return view.silenced(silent)

    async def views(self, *, timeout: float | None = None) -> list[PublicationView]:
        """All publications of the namespace."""
        found = [await self.view(name, timeout=timeout) for name in await self.names(timeout=timeout)]
        return [one for one in found if one is not None]

    async def names(self, *, timeout: float | None = None) -> list[str]:
        """Names of the namespace's publications."""
        key = self._keys.publications
        found = await self._session.connection.call(
            f"read {key}", lambda client: client.smembers(key), self._session.limit(timeout)
        )
        return sorted(found)

    async def restore(self, timeout: float) -> None:
        """Put back what this agent's workers hold, after Redis has lost it."""
        # First all ranks, because a buffer belongs to a side.
        for (publication, side, rank), (entrance, member) in list(self.held.items()):
            try:
                await self.enter(entrance, member, timeout=timeout)
            except RedisUnavailableError:
                raise
            except EthaError as error:
                log.warning("rank %d of %s of publication %s is not put back: %s", rank, side, publication, error)
        for publication, holder in [*self.versions, *(key for key in self.puts if key not in self.versions)]:
            try:
                await self.hold(publication, holder, timeout=timeout)
            except RedisUnavailableError:
                raise
            except EthaError as error:
                log.warning("versions of %s of publication %s are not put back: %s", holder, publication, error)
        for publication in await self.names(timeout=timeout):
            try:
                await self._take_out(publication, timeout)
            except RedisUnavailableError:
                raise
            except EthaError as error:
                log.warning("publication %s may list sides that this agent has no more: %s", publication, error)

    async def hold(self, publication: str, holder: str, *, timeout: float | None = None) -> None:
        """Say what the buffers of a holder hold, and how many of its puts were announced."""
        side, _, serial = holder.partition("/")
        request = {
            "act": "hold",
            "side": side,
            "serial": int(serial),
            "held": [_held(one) for one in self.versions.get((publication, holder), ())],
            "puts": self.puts.get((publication, holder), 0),
        }
        await self._script("publication_put", publication, request, timeout)

    async def _take_out(self, publication: str, timeout: float) -> None:
        """Take out the sides and holders of this agent that have ended: a Redis that was restored from a backup lists
        them, and subscribers would wait for them."""
        view, record = await self.view(publication, timeout=timeout), self._session.owned.agent
        if view is None or record is None:
            return
        sides = {one.name: one.ranks for one in view.subscribers} | {view.publisher: view.publisher_ranks}
        for side, ranks in sides.items():
            for rank, member in ranks.items():
                mine = self.held.get((publication, side, rank))
                if member.agent == record.id and (mine is None or not mine[1].is_same(member)):
                    await self.leave(publication, side, rank, member, "died", timeout=timeout)
        for holder in view.holders:
            if record.id in holder.agents and (publication, holder.name) not in self.standing:
                await self.forget(publication, holder.name, timeout=timeout)
                for claim in (await self.claims(publication, holder.name, timeout=timeout)).values():
                    text = f"{holder.side} has left"
                    await self.release(claim, committed=False, error=text, timeout=timeout)

    def held_keys(self) -> list[str]:
        """The keys that what this agent's workers hold needs, even if nothing changes."""
        found = [self._keys.publications] if self.held else []
        for publication, side in sorted({key[:2] for key in self.held}):
            found += [self._keys.publication(publication), self._keys.publication_side(publication, side)]
            found += [self._keys.publication_part(publication, part) for part in PARTS]
        for (publication, _, _), (entrance, _) in self.held.items():
            found.append(self._keys.publication_table(publication, entrance.tensors.digest))
        return found

    async def _script(self, name: str, publication: str, request: dict[str, Any], timeout: float | None) -> Any:
        """Run a script. If Redis has lost the side that it is about, put back first what this agent has of it."""
        keys, limit = [self._keys.publication(publication)], self._session.limit(timeout)
        request = {**request, "publication": publication}
        try:
            return await self._session.connection.script(name, keys, request, limit)
        except ScriptRefused as refusal:
            if refusal.code != "forgotten":
                raise refusal.as_error() from None
            side = str(request.get("subscriber", request.get("side")))
            if not await self._put_back(publication, side, int(request["serial"]), limit):
                raise refusal.as_error() from None
        return await self._session.script(name, keys, request, limit)

    async def _put_back(self, publication: str, side: str, serial: int, timeout: float) -> bool:
        """Put back the ranks of a side that this agent's workers hold, and what its buffers hold. Returns whether there
        are any."""
        mine = [
            (entrance, member)
            for (name, _, _), (entrance, member) in list(self.held.items())
            if (name, entrance.side, entrance.serial) == (publication, side, serial)
        ]
        for entrance, member in mine:
            await self.enter(entrance, member, timeout=timeout)
        holder = f"{side}/{serial}"
        if mine and ((publication, holder) in self.versions or (publication, holder) in self.puts):
            await self.hold(publication, holder, timeout=timeout)
        return bool(mine)


def _held(held: HeldVersion) -> dict[str, Any]:
    return {**asdict(held), "version": label_text(held.version)}
