"""What the parts of the store share: connections, key names, wake-ups, and what this agent owns.

What an agent owns must be put back if Redis has lost it: its record, its ranks' memberships, its batches.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etha.store.connect import RedisConnection, ScriptRefused
from etha.store.keys import AGENT_LEASE, RedisKeys
from etha.store.records import AgentRecord, PairView, RankHolder
from etha.store.watch import Watches

#: Most closed batches of which this agent still remembers the seq.
MAX_CLOSED = 1000


#: A value of a batch's hash, before it is text.
BatchField = int | float | str | None


@dataclass(slots=True, kw_only=True)
class HeldRank:
    """One rank that a worker of this agent holds, as last seen. ``view`` is None before the pair has formed."""

    request: dict[str, Any]
    member: RankHolder
    view: PairView | None = None


@dataclass(slots=True)
class Owned:
    """What this agent puts back after Redis has lost it."""

    agent: AgentRecord | None = None
    memberships: dict[tuple[str, str, int], HeldRank] = field(default_factory=dict)
    #: Fields of ``BatchView`` as they were set, because most are never written again, and turning them into text takes
    #: as long as a short copy.
    batches: OrderedDict[tuple[str, str], dict[str, BatchField]] = field(default_factory=OrderedDict)
    enrolled: dict[tuple[str, str, str, int], int] = field(default_factory=dict)
    registration_keys: set[str] = field(default_factory=set)
    #: (pair, batch, generation) -> (agent, verdict, number of agents), while a rank of ours is enrolled in it.
    verdicts: dict[tuple[str, str, int], tuple[str, str, int]] = field(default_factory=dict)

    def see(self, view: PairView) -> None:
        """Remember what a read of a pair says about our ranks."""
        for side, members in view.sides.items():
            for rank, member in members.members.items():
                mine = self.memberships.get((view.name, side, rank))
                if mine is not None and member.is_same(mine.member) and member.epoch >= mine.member.epoch:
                    mine.member = member
                    if member.epoch == view.epoch:
                        mine.view = view

    def remember_batch(self, pair: str, batch: str, fields: Mapping[str, BatchField]) -> None:
        self.batches.setdefault((pair, batch), {}).update(fields)
        self.batches.move_to_end((pair, batch))

    def forget_verdicts(self, pair: str, batch: str) -> None:
        """Drop the verdicts of a batch's registrations in which no rank of ours is enrolled any more."""
        for key in [key for key in self.verdicts if key[:2] == (pair, batch)]:
            if not any(of[:2] == key[:2] and generation == key[2] for of, generation in self.enrolled.items()):
                del self.verdicts[key]

    def forget_batches(self) -> None:
        """Drop the oldest batches in which no rank of ours is enrolled, beyond ``MAX_CLOSED``."""
        if len(self.batches) <= MAX_CLOSED:
            return
        open_now = {(pair, batch) for pair, batch, _, _ in self.enrolled}
        idle = [key for key in self.batches if key not in open_now]
        for key in idle[: len(self.batches) - MAX_CLOSED]:
            del self.batches[key]


class StoreSession:
    """Shared by the store's parts. ``identity`` is the id of the Redis that has this agent's record."""

    identity: str = ""
    #: Redis has shown that it lost our data; the next beat puts it back.
    forgotten: bool = False

    def __init__(
        self,
        connection: RedisConnection,
        keeper: RedisConnection,
        reporter: RedisConnection,
        keys: RedisKeys,
        watches: Watches,
        timeout: float,
    ) -> None:
        self.keys = keys
        self.timeout = timeout
        self.connection = connection
        # The lease has its own connection, because it must not wait behind a thousand calls.
        self.keeper = keeper
        # So have reports for people, because a rendezvous must not wait behind them.
        self.reporter = reporter
        self.watches = watches
        self.owned = Owned()
        # Putting back a membership must not overtake its leaving.
        self.changing = asyncio.Lock()

    def limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    async def script(
        self,
        name: str,
        keys: list[str],
        request: dict[str, Any],
        timeout: float | None,
        over: RedisConnection | None = None,
    ) -> Any:
        """Run a script with retries. A refusal is raised as Etha's error."""
        try:
            return await (over or self.connection).script(name, keys, request, self.limit(timeout))
        except ScriptRefused as refusal:
            raise refusal.as_error() from None

    async def write_agent(self, act: str, record: AgentRecord, timeout: float) -> bool:
        """Publish, renew or withdraw this agent's record. Returns whether it was there."""
        keys = [self.keys.agent(record.id), self.keys.agents, self.keys.server]
        request = {
            "act": act,
            "id": record.id,
            "name": record.shown_host,
            "record": record.to_redis(),
            "lease": int(AGENT_LEASE * 1000),
            "server": self.identity,
        }
        done = await self.keeper.script("agent", keys, request, timeout)
        if "server" in done:
            self.identity = str(done["server"])
        return bool(done["here"])

    async def prune(self, key: str, name: str, timeout: float | None) -> None:
        """Remove a name from an index because its hash is gone. Whoever writes that hash adds it again."""
        await self.connection.call(f"prune {key}", lambda client: client.srem(key, name), self.limit(timeout))
