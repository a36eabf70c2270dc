"""Pairs: who holds which rank of which side, and whether both sides are complete.

Every change is one Lua script. A script cannot know whether a process of this host lives, or whether an agent has
renewed its lease since a question. That is found out here, and then the script is called again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from etha.config import MAX_WORLD, NAME, check_name
from etha.errors import ConfigError
from etha.store.connect import Client, ScriptRefused
from etha.store.process import alive
from etha.store.reading import FieldReader
from etha.store.records import PairState, PairView, RankHolder, Reason, side_names
from etha.store.session import HeldRank, StoreSession


class PairRecords:
    """The pairs of a namespace in Redis: ``store.pairs``."""

    def __init__(self, session: StoreSession) -> None:
        self._session, self._keys = session, session.keys

    async def join(
        self,
        pair: str,
        side: str,
        remote: str,
        *,
        rank: int,
        world_size: int,
        member: RankHolder,
        launch: str | None,
        run: str | None = None,
        takeover: bool = False,
        known_epoch: int = 0,
        timeout: float | None = None,
    ) -> PairView:
        """Take ``rank`` of ``side`` for ``member``. The view tells whether that completed the pair.

        It does not wait for the others: watch ``keys.pair(pair)`` and read ``state``. A repeated call of the same
        worker changes nothing. ConfigError: names or sizes disagree, or the rank's holder is alive.
        PeerLostError("relaunched"): ``launch`` was superseded. ``run`` is torchrun's run id, if ``launch`` is made from
        it. Then a join is refused while another launch lives, unless that has the same run id, or ``takeover`` is
        given. The next epoch comes after ``known_epoch``, even where Redis has gone back to an older state.
        """
        if side == remote:
            raise ConfigError(f"pair {pair}: local and remote name are both {side!r}, a pair links two sides")
        if not 1 <= world_size <= MAX_WORLD or not 0 <= rank < world_size:
            raise ConfigError(f"pair {pair}: rank {rank} is not in side {side} of world_size {world_size}")
        if launch is not None and not 0 < len(launch) <= 500:
            raise ConfigError(f"launch id of {len(launch)} characters: 1 to 500 are allowed")
        if self._session.owned.agent is None or self._session.owned.agent.id != member.agent:
            raise ConfigError(f"agent {member.agent} joins pair {pair} before it has published its record")
        keys = [self._keys.pair(pair), self._keys.side(pair, side), self._keys.side(pair, remote)]
        request: dict[str, Any] = {
            "pair": pair,
            "side": side,
            "remote": remote,
            "rank": rank,
            "world": world_size,
            "member": member.holder(),
            "dead": {},
            "known_epoch": max(known_epoch, self._known_epoch(pair)),
            "takeover": takeover,
        }
        if launch is not None:
            request |= {"launch": launch, "run": run or ""}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._session.limit(timeout)
        while True:
            try:
                done = await self._session.connection.script("join", keys, request, deadline - loop.time())
                break
            except ScriptRefused as refusal:
                if refusal.code == "unpublished":
                    if (record := self._session.owned.agent) is None:
                        raise ConfigError(f"agent {member.agent} joins pair {pair} while it leaves") from None
                    await self._session.write_agent("publish", record, deadline - loop.time())
                    self._session.forgotten = True
                    continue
                dead, living = await self._dead(refusal.held, member.host, deadline)
                if living is not None:
                    raise ConfigError(refusal.text.replace("{living}", living)) from None
                if not dead:
                    raise refusal.as_error() from None
                request["dead"].update(dead)
        mine = HeldRank(request={**request, "dead": {}}, member=member)
        known = self._session.owned.memberships.get((pair, side, rank))
        if known is not None and member.is_same(known.member):
            mine.member, mine.view = known.member, known.view
        self._session.owned.memberships[pair, side, rank] = mine
        view = await self.get(pair, timeout=deadline - loop.time())
        if view is None:  # Redis has lost it since; the lease puts it back
            return PairView(name=pair, state="forming", epoch=int(done["epoch"]))
        return view

    async def leave(
        self, pair: str, side: str, rank: int, member: RankHolder, reason: Reason, *, timeout: float | None = None
    ) -> bool:
        """Give the rank up if ``member`` still holds it, and return whether it did. A formed pair is lost by that."""
        mine = self._session.owned.memberships.get((pair, side, rank))
        if mine is not None and mine.member.is_same(member):
            del self._session.owned.memberships[pair, side, rank]
        keys = [self._keys.pair(pair), self._keys.side(pair, side)]
        request = {"pair": pair, "side": side, "rank": rank, "member": member.holder(), "reason": reason}
        async with self._session.changing:
            return bool(await self._session.script("leave", keys, request, timeout))

    async def sever(
        self,
        pair: str,
        epoch: int,
        reason: Reason,
        text: str,
        culprits: Sequence[tuple[str, int]] = (),
        *,
        timeout: float | None = None,
    ) -> bool:
        """A formed pair is lost because its agents have lost each other. True if ``epoch`` was still formed.

        ``culprits``: the (side, rank) whose agents are gone.
        """
        request = {"pair": pair, "epoch": epoch, "reason": reason, "text": text[:1000], "culprits": list(culprits)}
        return bool(await self._session.script("sever", [self._keys.pair(pair)], request, timeout))

    async def forget(self, pair: str, batch: str, *, timeout: float | None = None) -> bool:
        """Remove a pair and its one batch, unless somebody still belongs to it. Returns whether they were removed."""
        keys = [self._keys.pair(pair), self._keys.batch(pair, batch)]
        return bool(await self._session.script("forget", keys, {"pair": pair, "batch": batch}, timeout))

    async def get(self, pair: str, *, timeout: float | None = None) -> PairView | None:
        """The pair and all its members, read at one moment; None if there is none."""
        key = self._keys.pair(pair)

        async def read(client: Client) -> PairView | None:
            values = await client.hgetall(key)
            while values:
                names = side_names(key, values)
                pipe = client.pipeline(transaction=True)
                for hash_key in (key, *(self._keys.side(pair, name) for name in names)):
                    pipe.execute_command("HGETALL", hash_key)  # .hgetall() breaks in a transaction of redis-py 5.1.0
                values, *members = await pipe.execute()
                if values and side_names(key, values) == names:
                    return PairView.read(key, pair, values, dict(zip(names, members, strict=True)))
            return None

        view = await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))
        if view is not None:
            self._session.owned.see(view)
        return view

    async def state(self, pair: str, *, timeout: float | None = None) -> PairState | None:
        """The pair without its members: one small read, whatever the number of ranks."""
        key, names = self._keys.pair(pair), ("state", "epoch", "reason", "error")

        async def read(client: Client) -> PairState | None:
            values = dict(zip(names, await client.hmget(key, list(names)), strict=True))
            if values["state"] is None and values["epoch"] is None:
                return None
            return PairState.from_redis(key, pair, {k: v for k, v in values.items() if v is not None})

        return await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))

    async def states(self, pairs: Sequence[str], *, timeout: float | None = None) -> dict[str, PairState | None]:
        """Many pairs without their members, in one request."""
        names = ("state", "epoch", "reason", "error")

        async def read(client: Client) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for pair in pairs:
                pipe.hmget(self._keys.pair(pair), list(names))
            return list(await pipe.execute())

        found: dict[str, PairState | None] = dict.fromkeys(pairs)
        if pairs:
            rows = await self._session.connection.call(f"read {len(pairs)} pairs", read, self._session.limit(timeout))
            for pair, row in zip(pairs, rows, strict=True):
                values = {name: value for name, value in zip(names, row, strict=True) if value is not None}
                if "state" in values or "epoch" in values:
                    found[pair] = PairState.from_redis(self._keys.pair(pair), pair, values)
        return found

    async def all(self, *, timeout: float | None = None) -> list[PairView]:
        """All pairs of the namespace, by name."""
        names = await self._session.connection.call(
            f"read {self._keys.pairs}", lambda client: client.smembers(self._keys.pairs), self._session.limit(timeout)
        )
        found = []
        for name in sorted(names):
            view = await self.get(check_name("pair", name), timeout=timeout)
            if view is not None:
                found.append(view)
            else:
                await self._session.prune(self._keys.pairs, name, timeout)
        return found

    async def names(self, *, timeout: float | None = None) -> set[str]:
        """Names of all pairs of the namespace. The hash of some may be gone."""
        names = await self._session.connection.call(
            f"read {self._keys.pairs}", lambda client: client.smembers(self._keys.pairs), self._session.limit(timeout)
        )
        return {name for name in names if NAME.fullmatch(name)}

    def _known_epoch(self, pair: str) -> int:
        seen = [m.view.epoch for (name, _, _), m in self._session.owned.memberships.items() if name == pair and m.view]
        return max(seen, default=0)

    async def _dead(self, held: list[dict[str, Any]], host: str, deadline: float) -> tuple[dict[str, bool], str | None]:
        """The holders that are dead, as the script names processes; or the first one that lives, as messages name
        it."""
        found: dict[str, bool] = {}
        verdicts: dict[str, bool] = {}
        for holder in held:
            read = FieldReader(self._keys.prefix + "pair", holder)  # as a script found it in some side's hash
            agent, pid, start = read.name("agent"), read.integer("pid", least=1), read.integer("start")
            if read.text("host") == host:
                ended = not alive(pid, start)
            else:
                if agent not in verdicts:
                    verdicts[agent] = await self._agent_died(agent, deadline)
                ended = verdicts[agent]
            if not ended:
                rank = f"rank {holder['rank']}, " if isinstance(holder.get("rank"), int) else ""
                return {}, f"{rank}pid {pid} on host {holder.get('name') or holder['host']}"
            found[f"{holder['host']}/{pid}/{start}"] = True
        return found, None

    async def _agent_died(self, agent: str, deadline: float) -> bool:
        """Wait until the lease of ``agent`` is renewed (False) or ends (True). False if the deadline comes first.

        A lease only says that its agent lived up to ten seconds ago. A living agent reports the death of its workers
        itself, so a renewal after the question vouches for them.
        """
        loop = asyncio.get_running_loop()
        key = self._keys.agent(agent)

        async def beats() -> str | None:
            return await self._session.connection.call(
                f"read {key}",
                lambda client: client.hget(key, "beats"),
                deadline - loop.time(),
            )

        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline):
                async with self._session.watches.changes(key) as changed:
                    first = await beats()
                    while first is not None:
                        await changed()
                        now = await beats()
                        if now is not None and now != first:
                            return False
                        first = now
        except TimeoutError:
            return False
        return True

    async def restore(self, pair: str, side: str, rank: int, timeout: float) -> None:
        """Put one of our ranks back after Redis has lost it. A rank that was still waiting joins again."""
        async with self._session.changing:
            mine = self._session.owned.memberships.get((pair, side, rank))
            if mine is None:
                return
            remote = mine.request["remote"]
            keys = [self._keys.pair(pair), self._keys.side(pair, side), self._keys.side(pair, remote)]
            if mine.view is None or mine.member.epoch > mine.view.epoch:
                known_epoch = max(mine.request["known_epoch"], self._known_epoch(pair))
                request = {**mine.request, "known_epoch": known_epoch}
                await self._session.script("join", keys, request, timeout)
                return
            view = mine.view
            known = {
                "epoch": view.epoch,
                "state": view.state,
                "reason": view.reason or "",
                "error": view.error,
                "sides": sorted(view.sides),
                "world_sizes": {name: s.world_size for name, s in view.sides.items()},
                "launches": {name: s.launch for name, s in view.sides.items()},
            }
            request = {"pair": pair, "side": side, "rank": rank, "member": asdict(mine.member), "known": known}
            await self._session.script("restore", keys, request, timeout)
