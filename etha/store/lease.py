"""The agent's lease, and what happens when Redis comes back without its memory.

Every 3 s the lease of 10 s is renewed. A record that is gone, or a server that was started anew, means that
Redis may have forgotten us: then all that this agent owns is put back, and nothing that is newer there is touched.
"""

from __future__ import annotations

import asyncio
import logging

from etha.errors import ConfigError, EthaError, ProtocolError, RedisUnavailableError
from etha.store.batches import Batches
from etha.store.connect import Client
from etha.store.keys import AGENT_BEAT, HISTORY_LEASE, REGISTRATION_LEASE
from etha.store.pairs import Pairs
from etha.store.records import AgentRecord

log = logging.getLogger(__name__)

#: Seconds between two renewals of what this agent's workers hold: pairs, batches, registrations.
_RENEW_HELD = 600.0
#: Seconds until a second look at a Redis that had been away or had lost something.
_LOOK_AGAIN = 1.0


class Lease(Pairs, Batches):
    """The agent's own record, and the task that keeps it."""

    _run_id: str | None = None
    _may_ask_run_id: bool = True
    _renewed_held: float = 0.0

    async def publish_agent(self, record: AgentRecord, *, timeout: float | None = None) -> None:
        """Show this agent to the namespace from now on; its lease is renewed while the store is open."""
        self._owned.agent = record
        await self._agent("publish", record, self._limit(timeout))

    async def withdraw_agent(self, *, timeout: float | None = None) -> None:
        """Remove the record at once, so that nobody waits for the lease to end."""
        record, self._owned.agent = self._owned.agent, None
        if record is not None:
            await self._agent("withdraw", record, self._limit(timeout))

    async def agents(self, *, timeout: float | None = None) -> list[AgentRecord]:
        """The records of all live agents, by id; judged by reading them now."""
        found = await self._connection.raw_script("agents", [self.keys.agents], {}, self._limit(timeout))
        records = []
        for agent, flat in found:
            values = dict(zip(flat[::2], flat[1::2], strict=True))
            records.append(AgentRecord.from_redis(f"{self.keys.prefix}agent:{agent}", agent, values))
        return sorted(records, key=lambda record: record.id)

    async def _keep(self) -> None:
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
                away = False
            except RedisUnavailableError as error:
                if not away:
                    log.warning("the lease could not be renewed, going on trying: %s", error)
                away = True
            except EthaError as error:
                log.error("the lease could not be renewed: %s", error)
            await asyncio.sleep(max(0.0, started + until_next - loop.time()))

    async def _beat(self, timeout: float) -> bool:
        """Renew the lease; whether Redis had lost something that was put back."""
        record = self._owned.agent
        restarted = await self._restarted(timeout)
        if record is None:
            return False
        lost = not await self._agent("renew", record, timeout) or restarted or self._forgotten
        if lost:
            self._forgotten = False
            await self._restore(timeout)
        await self._renew_held(timeout)
        return lost

    async def _restarted(self, timeout: float) -> bool:
        """Is this another life of the server than at the last beat?"""
        if not self._may_ask_run_id:
            return False

        async def read(client: Client) -> str | None:
            return str((await client.info("server")).get("run_id"))

        try:
            run_id = await self._keeper.call("ask for its run id", read, timeout)
        except (ConfigError, ProtocolError) as error:
            # A user without INFO: the missing record still tells of data loss.
            self._may_ask_run_id = False
            log.debug("no INFO here: %s", error)
            return False
        before, self._run_id = self._run_id, run_id
        return before is not None and before != run_id

    async def _restore(self, timeout: float) -> None:
        """Put back the record, the memberships and the batches, in that order."""
        record = self._owned.agent
        if record is None:
            return
        log.info("putting back what Redis may have lost: %d ranks, %d batches", *self._sizes())
        # A failure in the middle leaves _run_id at its new value, so remember to come again.
        self._run_id, run_id = "restoring", self._run_id
        await self._agent("publish", record, timeout)
        for pair, side, rank in list(self._owned.memberships):
            try:
                await self._restore_pair(pair, side, rank, timeout)
            except RedisUnavailableError:
                raise
            except EthaError as error:
                log.warning("%s rank %d of pair %s is not put back: %s", side, rank, pair, error)
        for (pair, batch), fields in list(self._owned.batches.items()):
            await self._write_batch(pair, batch, fields, timeout)
        self._run_id = run_id

    def _sizes(self) -> tuple[int, int]:
        return len(self._owned.memberships), len(self._owned.batches)

    def _held(self) -> dict[str, float]:
        """Key -> lease of everything that this agent's workers hold, however long nothing of it changes."""
        keys = dict.fromkeys(self._owned.registration_keys, REGISTRATION_LEASE)
        for pair, side, _ in self._owned.memberships:
            keys |= dict.fromkeys((self.keys.pairs, self.keys.pair(pair), self.keys.side(pair, side)), HISTORY_LEASE)
        for pair, batch, _, _ in self._owned.enrolled:
            keys |= dict.fromkeys((self.keys.batches, self.keys.batch(pair, batch)), HISTORY_LEASE)
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

        await self._connection.call("renew leases", renew, timeout)
        self._renewed_held = now
