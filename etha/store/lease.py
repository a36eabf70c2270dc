"""The agent's lease, and how its data is restored when Redis comes back without its memory.

The lease of 10 s is renewed every 3 s. If the record is gone, or the server was restarted, Redis may have lost data.
Then everything that this agent owns is put back, without touching anything newer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from etha.errors import ConfigError, EthaError, ProtocolError, RedisUnavailableError
from etha.store.batches import BatchRecords
from etha.store.connect import Client
from etha.store.groups import GroupRecords
from etha.store.keys import AGENT_BEAT, AGENT_LEASE, HISTORY_LEASE, REGISTRATION_LEASE
from etha.store.pairs import PairRecords
from etha.store.publications import Publications
from etha.store.records import AgentRecord
from etha.store.session import StoreSession

log = logging.getLogger(__name__)

#: Seconds between two renewals of what this agent's workers hold: pairs, batches, registrations.
_RENEW_HELD = 600.0
#: Seconds until the next look at a Redis that had been away or had lost something.
_LOOK_AGAIN = 1.0
#: Seconds by which a wake-up may be late before the log says so.
_STOOD_STILL = 2.0


class AgentRecords:
    """The agents of a namespace in Redis, ``store.agents``: our own record, and the task that keeps its lease."""

    def __init__(
        self,
        session: StoreSession,
        pairs: PairRecords,
        batches: BatchRecords,
        groups: GroupRecords,
        publications: Publications,
    ) -> None:
        self._session, self._keys = session, session.keys
        self._pairs, self._batches, self._groups, self._publications = pairs, batches, groups, publications
        self._run_id: str | None = None
        self._may_ask_run_id = True
        self._renewed_held = 0.0
        #: Whether Redis answered when the lease was renewed last.
        self.up = True

    async def publish(self, record: AgentRecord, *, timeout: float | None = None) -> None:
        """Publish this agent's record in the namespace. Its lease is renewed while the store is open."""
        self._session.owned.agent = record
        await self._session.write_agent("publish", record, self._session.limit(timeout))

    async def withdraw(self, *, timeout: float | None = None) -> None:
        """Remove the record at once, so that nobody waits for the lease to end."""
        record, self._session.owned.agent = self._session.owned.agent, None
        if record is not None:
            await self._session.write_agent("withdraw", record, self._session.limit(timeout))

    async def all(self, *, timeout: float | None = None) -> list[AgentRecord]:
        """The records of all live agents, by id, read now."""
        return [record for record, _ in await self.seen(timeout=timeout)]

    async def some(self, agents: Collection[str], *, timeout: float | None = None) -> list[AgentRecord]:
        """The records of those of ``agents`` that live, by id, read now."""
        keys = {agent: self._keys.agent(agent) for agent in sorted(agents)}

        async def read(client: Client) -> list[dict[str, str]]:
            pipe = client.pipeline(transaction=False)
            for key in keys.values():
                pipe.hgetall(key)
            return list(await pipe.execute())

        found = await self._session.connection.call(
            f"read the records of {len(keys)} agents", read, self._session.limit(timeout)
        )
        return [
            AgentRecord.from_redis(key, agent, values)
            for (agent, key), values in zip(keys.items(), found, strict=True)
            if values
        ]

    async def seen(self, *, timeout: float | None = None) -> list[tuple[AgentRecord, float]]:
        """The records of all live agents, by id, and for each the seconds since it renewed its lease."""
        found = await self._session.connection.raw_script(
            "agents", [self._keys.agents], {}, self._session.limit(timeout)
        )
        records = []
        for agent, flat, left in found:
            values = dict(zip(flat[::2], flat[1::2], strict=True))
            record = AgentRecord.from_redis(f"{self._keys.prefix}agent:{agent}", agent, values)
            records.append((record, max(0.0, AGENT_LEASE - left / 1000)))
        return sorted(records, key=lambda one: one[0].id)

    async def keep(self) -> None:
        """Renew until cancelled."""
        loop = asyncio.get_running_loop()
        away = False
        while True:
            started, until_next = loop.time(), AGENT_BEAT
            try:
                restored = await self._beat(AGENT_BEAT)
                if away:
                    log.info("Redis is back")
                if away or restored:
                    until_next = min(AGENT_BEAT, _LOOK_AGAIN)
                away, self.up = False, True
            except RedisUnavailableError as error:
                if not away:
                    log.warning("Redis is away, transfers go on: %s", error)
                away, self.up = True, False
            except EthaError as error:
                self.up = False
                log.error("this agent could not say in Redis that it is alive: %s", error)
            asleep = loop.time()
            await asyncio.sleep(max(0.0, started + until_next - loop.time()))
            if (late := loop.time() - max(started + until_next, asleep)) > _STOOD_STILL:
                log.warning(
                    "this agent did not run for %.1f s: was it stopped, or had the machine no time for it? What others "
                    "sent meanwhile was heard too late",
                    late,
                )

    async def _beat(self, timeout: float) -> bool:
        """Renew the lease. Returns whether Redis had lost something that was put back."""
        record = self._session.owned.agent
        restarted = await self._restarted(timeout)
        if record is None:
            return False
        lost = not await self._session.write_agent("renew", record, timeout) or restarted or self._session.forgotten
        if lost:
            self._session.forgotten = False
            await self._restore(timeout)
        await self._renew_held(timeout)
        return lost

    async def _restarted(self, timeout: float) -> bool:
        """Whether the server has been restarted since the last beat."""
        if not self._may_ask_run_id:
            return False

        async def read(client: Client) -> str | None:
            return str((await client.info("server")).get("run_id"))

        try:
            run_id = await self._session.keeper.call("ask for its run id", read, timeout)
        except (ConfigError, ProtocolError) as error:
            # A user without INFO: the missing record still reveals data loss.
            self._may_ask_run_id = False
            log.debug("no INFO here: %s", error)
            return False
        before, self._run_id = self._run_id, run_id
        return before is not None and before != run_id

    async def _restore(self, timeout: float) -> None:
        """Put back the record, the memberships and the batches, in that order."""
        record = self._session.owned.agent
        if record is None:
            return
        if any(sizes := self._sizes()):
            log.info("putting back what Redis may have lost: %d ranks, %d batches", *sizes)
        # If this fails in the middle, the mark "restoring" makes the next beat restore again.
        self._run_id, run_id = "restoring", self._run_id
        await self._session.write_agent("publish", record, timeout)
        for pair, side, rank in list(self._session.owned.memberships):
            try:
                await self._pairs.restore(pair, side, rank, timeout)
            except RedisUnavailableError:
                raise
            except EthaError as error:
                log.warning("%s rank %d of pair %s is not put back: %s", side, rank, pair, error)
        await self._batches.restore(timeout)
        await self._batches.restore_verdicts(timeout)
        await self._groups.restore(timeout)
        await self._publications.restore(timeout)
        self._run_id = run_id

    def _sizes(self) -> tuple[int, int]:
        return len(self._session.owned.memberships), len(self._session.owned.batches)

    def _held(self) -> dict[str, float]:
        """Key -> lease of everything that this agent's workers hold, even if it never changes."""
        keys = dict.fromkeys(self._session.owned.registration_keys, REGISTRATION_LEASE)
        for pair, side, _ in self._session.owned.memberships:
            keys |= dict.fromkeys((self._keys.pairs, self._keys.pair(pair), self._keys.side(pair, side)), HISTORY_LEASE)
        for group, replica, _ in self._groups.held:
            names = (self._keys.groups, self._keys.group(group), self._keys.replica(group, replica))
            keys |= dict.fromkeys(names, HISTORY_LEASE)
        keys |= dict.fromkeys(self._publications.held_keys(), HISTORY_LEASE)
        for pair, batch, _, _ in self._session.owned.enrolled:
            keys |= dict.fromkeys((self._keys.batches, self._keys.batch(pair, batch)), HISTORY_LEASE)
        return keys

    async def _renew_held(self, timeout: float) -> None:
        now = asyncio.get_running_loop().time()
        keys = self._held()
        if not keys or now < self._renewed_held + _RENEW_HELD:
            return

        async def renew(client: Client) -> None:
            pipe = client.pipeline(transaction=False)
            for key, lease in keys.items():
                pipe.pexpire(key, int(lease * 1000))
            await pipe.execute()

        await self._session.connection.call("renew leases", renew, timeout)
        self._renewed_held = now
