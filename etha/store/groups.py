"""Elastic groups: which replicas there are, which epoch they are in, and what the members of an epoch write there.

Every change of membership is one Lua script (``enter``, ``depart``), which also forms the next epoch as soon as the
rule of etha/groups/membership.py allows it. Scripts answer how long time alone must pass until they would decide
otherwise, so whoever waits asks again then, or after the wake-up of the group's key.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from etha.config import MAX_WORLD, check_name
from etha.errors import ConfigError, EthaError, RedisUnavailableError
from etha.store.connect import Client, ScriptRefused
from etha.store.group_view import GroupView
from etha.store.keys import REGISTRATION_LEASE
from etha.store.process import alive
from etha.store.reading import FieldReader
from etha.store.records import GroupState, RankHolder, Seating
from etha.store.session import StoreSession

log = logging.getLogger(__name__)

#: Most bytes of a value that members of an epoch exchange.
MAX_VALUE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """One rank of a replica, and how far it is.

    ``epoch`` is the last one it was admitted to, ``last`` the last one whose state it has. ``launch``: one life of the
    replica, None if it has no name yet. ``least``: the fewest replicas of an epoch. ``timeout`` and ``grace``: seconds
    that an epoch waits for a member whose agent answers, and for others. ``asked`` is a token of the call.
    """

    group: str
    replica: str
    rank: int
    world: int
    launch: str | None = None
    epoch: int = 0
    last: int = 0
    step: int = 0
    committed: int = 0
    least: int = 1
    timeout: float = 60.0
    grace: float = 3.0
    suspects: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    asked: str = ""

    def __post_init__(self) -> None:
        check_name("group", self.group)
        check_name("replica", self.replica)
        if not 1 <= self.world <= MAX_WORLD or not 0 <= self.rank < self.world:
            raise ConfigError(f"group {self.group}: rank {self.rank} is no rank of a replica of {self.world} ranks")
        if self.launch is not None and not 0 < len(self.launch) <= 500:
            raise ConfigError(f"launch id of {len(self.launch)} characters: 1 to 500 are allowed")


class GroupRecords:
    """The elastic groups of a namespace in Redis: ``store.groups``."""

    def __init__(self, session: StoreSession) -> None:
        self._session, self._keys = session, session.keys
        #: Put back after Redis has lost it: what ranks of this agent's workers were when they last entered.
        self.held: dict[tuple[str, str, int], tuple[Entrance, RankHolder]] = {}
        #: Those of them that ask for the next epoch now: their wish is put back, too.
        self.wishes: set[tuple[str, str, int]] = set()

    async def enter(
        self, entrance: Entrance, member: RankHolder, *, wants: bool, timeout: float | None = None
    ) -> Seating:
        """Ask for the next epoch (``wants``), or say that the member is there. Does not wait for the others.

        ConfigError: sizes disagree, or the rank is held by a process that lives. GroupLostError: this replica has lost
        a rank or was launched again, so it is over.
        """
        keys = [self._keys.group(entrance.group), self._keys.replica(entrance.group, entrance.replica)]
        request: dict[str, Any] = {
            **asdict(entrance),
            "member": member.holder(),
            "wants": wants,
            "dead": {},
            "timeout": int(entrance.timeout * 1000),
            "grace": int(entrance.grace * 1000),
        }
        if entrance.launch is None:
            del request["launch"]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._session.limit(timeout)
        while True:
            try:
                done = await self._session.connection.script("enter", keys, request, deadline - loop.time())
                break
            except ScriptRefused as refusal:
                if refusal.code == "unpublished":
                    if (record := self._session.owned.agent) is None:
                        raise ConfigError(f"agent {member.agent} enters a group while it leaves") from None
                    await self._session.write_agent("publish", record, deadline - loop.time())
                    self._session.forgotten = True
                    continue
                if not (dead := self._dead(refusal.held, member.host)):
                    raise refusal.as_error() from None
                request["dead"].update(dead)
        return Seating.read(keys[0], done)

    def _dead(self, held: list[dict[str, Any]], host: str) -> dict[str, bool]:
        """The holders of this host that have ended, as the script names processes."""
        found = {}
        for holder in held:
            read = FieldReader(self._keys.prefix + "group", holder)
            pid, start = read.integer("pid", least=1), read.integer("start")
            if read.text("host") == host and not alive(pid, start):
                found[f"{host}/{pid}/{start}"] = True
        return found

    async def depart(
        self,
        group: str,
        replica: str,
        rank: int,
        member: RankHolder,
        reason: str,
        *,
        launch: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Take a rank out, and its replica with it, if ``member`` still holds it. Returns whether it did.

        ``launch``: that of the rank. If Redis has lost the rank, this launch is over, because others of it may be put
        back and wait for the rank.
        """
        keys = [self._keys.group(group), self._keys.replica(group, replica)]
        request = {"group": group, "replica": replica, "rank": rank, "member": member.holder(), "reason": reason}
        if launch is not None:
            request["launch"] = launch
        return bool(await self._session.script("depart", keys, request, timeout))

    async def state(self, group: str, *, timeout: float | None = None) -> GroupState | None:
        """State and epoch of a group: one small read. None if nobody has entered it."""
        key = self._keys.group(group)

        async def read(client: Client) -> GroupState | None:
            names = ["state", "epoch", "broken"]
            values = dict(zip(names, await client.hmget(key, names), strict=True))
            known = {name: value for name, value in values.items() if value is not None}
            return GroupState.from_redis(key, known) if "state" in known else None

        return await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))

    async def views(self, *, timeout: float | None = None) -> list[GroupView]:
        """Every group of the namespace that has replicas, with all that Redis knows of it."""
        limit = self._session.limit(timeout)

        async def read(client: Client) -> list[GroupView]:
            found = []
            for name in sorted(await client.smembers(self._keys.groups)):
                key = self._keys.group(name)
                values = await client.hgetall(key)
                names = GroupView.replica_names(key, values) if "state" in values else ()
                pipe = client.pipeline(transaction=False)
                for replica in names:
                    pipe.hgetall(self._keys.replica(name, replica))
                pipe.time()
                *replicas, clock = await pipe.execute()
                held = dict(zip(names, replicas, strict=True))
                if any(held.values()):
                    now = int(clock[0]) * 1000 + int(clock[1]) // 1000
                    found.append(GroupView.read(key, name, values, held, now))
            agents = sorted({member.holder.agent for view in found for member in view.ranks()})
            pipe = client.pipeline(transaction=False)
            for agent in agents:
                pipe.exists(self._keys.agent(agent))
            served = dict(zip(agents, await pipe.execute(), strict=True)) if agents else {}
            return [view.silenced({agent for agent, there in served.items() if not there}) for view in found]

        return await self._session.connection.call(f"read {self._keys.groups}", read, limit)

    async def names(self, *, timeout: float | None = None) -> list[str]:
        """Names of the namespace's groups."""
        key = self._keys.groups
        found = await self._session.connection.call(
            f"read {key}", lambda client: client.smembers(key), self._session.limit(timeout)
        )
        return sorted(found)

    async def restore(self, timeout: float) -> None:
        """Put back what this agent's workers hold, after Redis has lost it."""
        # First all ranks, so that no epoch forms without those that have no wish.
        for wants in (False, True):
            for key, (entrance, member) in list(self.held.items()):
                if wants and key not in self.wishes:
                    continue
                try:
                    await self.enter(entrance, member, wants=wants, timeout=timeout)
                except RedisUnavailableError:
                    raise
                except EthaError as error:
                    log.warning("rank %d of replica %s of group %s is not put back: %s", key[2], key[1], key[0], error)

    # ---- what the members of an epoch tell each other ---------------------------------------------

    async def put(self, group: str, epoch: int, values: Mapping[str, bytes], *, timeout: float | None = None) -> None:
        """Write values for the other members of an epoch, and wake those who wait for them."""
        key = self._keys.group_values(group, epoch)
        for name, value in values.items():
            if len(value) > MAX_VALUE:
                raise ConfigError(f"value {name!r} of group {group} has {len(value)} bytes, at most {MAX_VALUE}")
        text = {name: _text(value) for name, value in values.items()}

        async def write(client: Client) -> None:
            pipe = client.pipeline(transaction=False)
            pipe.hset(key, mapping=text)
            pipe.pexpire(key, int(REGISTRATION_LEASE * 1000))
            pipe.publish(key, "set")
            await pipe.execute()

        await self._session.connection.call(f"write {key}", write, self._session.limit(timeout))

    async def add(self, group: str, epoch: int, name: str, amount: int, *, timeout: float | None = None) -> int:
        """Add to a number, which begins with 0; returns the sum. Not repeated if the answer is lost."""
        key = self._keys.group_values(group, epoch)

        async def write(client: Client) -> int:
            pipe = client.pipeline(transaction=False)
            pipe.hincrby(key, name, amount)
            pipe.pexpire(key, int(REGISTRATION_LEASE * 1000))
            pipe.publish(key, "set")
            return int((await pipe.execute())[0])

        return await self._session.connection.call(f"write {key}", write, self._session.limit(timeout))

    async def compare_set(
        self, group: str, epoch: int, name: str, expected: bytes, desired: bytes, *, timeout: float | None = None
    ) -> bytes:
        """Write ``desired`` if the value is ``expected`` (b"": if there is none); returns the value afterwards."""
        request = {"name": name, "expected": _text(expected), "desired": _text(desired)}
        keys = [self._keys.group_values(group, epoch)]
        return _value(await self._session.script("swap", keys, request, timeout))

    async def values(
        self, group: str, epoch: int, names: list[str], *, timeout: float | None = None
    ) -> dict[str, bytes]:
        """Those values that have been written."""
        key = self._keys.group_values(group, epoch)
        texts = await self._session.connection.call(
            f"read {key}", lambda client: client.hmget(key, names), self._session.limit(timeout)
        )
        return {name: _value(text) for name, text in zip(names, texts, strict=True) if text is not None}

    async def remove(self, group: str, epoch: int, name: str, *, timeout: float | None = None) -> bool:
        """Remove a value; returns whether it was there."""
        key = self._keys.group_values(group, epoch)
        return bool(
            await self._session.connection.call(
                f"write {key}", lambda client: client.hdel(key, name), self._session.limit(timeout)
            )
        )


def _text(value: bytes) -> str:
    """A value as Redis holds it: = and base64. Numbers that are added to are plain."""
    return "=" + base64.b64encode(value).decode()


def _value(text: str) -> bytes:
    return base64.b64decode(text[1:]) if text.startswith("=") else text.encode()
