"""Batches: what each rank registers, stored once by digest, and the roster that says who has come.

A registration is one generation of a batch. A rank that comes while it is open belongs to it. A rank that comes after
it was completed (it closed early and registers again) waits for the others in the next one.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping

from etha.config import MAX_WORLD, NAME
from etha.errors import ConfigError, ProtocolError
from etha.store.connect import Client, RedisConnection
from etha.store.keys import REGISTRATION_LEASE
from etha.store.reading import MAX_FIELD, FieldReader
from etha.store.rosters import BATCH_FIELDS, MAX_LAYOUT, MAX_NAMES, BatchView, Roster, version_to_text
from etha.store.session import StoreSession

_LEASE_MS = int(REGISTRATION_LEASE * 1000)
_CHUNK = 2000


class BatchRecords:
    """The batches of a namespace in Redis: ``store.batches``."""

    def __init__(self, session: StoreSession) -> None:
        self._session, self._keys = session, session.keys

    async def put_layouts(self, layouts: Mapping[str, str], *, timeout: float | None = None) -> None:
        """Store layouts, digest -> JSON. Those that exist only get their lease renewed."""
        keys = {self._keys.layout(digest): text for digest, text in layouts.items()}

        async def write(client: Client) -> None:
            pipe = client.pipeline(transaction=False)
            for key, text in keys.items():
                pipe.hset(key, "json", text)
                pipe.pexpire(key, _LEASE_MS)
            await pipe.execute()

        await self._session.connection.call("store layouts", write, self._session.limit(timeout))
        self._session.owned.registration_keys.update(keys)

    async def layouts(self, digests: Iterable[str], *, timeout: float | None = None) -> dict[str, str]:
        """Layouts by digest, as JSON. Digests without a layout are missing from the result."""
        wanted = list(dict.fromkeys(digests))

        async def read(client: Client) -> list[str | None]:
            pipe = client.pipeline(transaction=False)
            for digest in wanted:
                pipe.hget(self._keys.layout(digest), "json")
            return list(await pipe.execute())

        texts = await self._session.connection.call("read layouts", read, self._session.limit(timeout))
        found = {digest: text for digest, text in zip(wanted, texts, strict=True) if text is not None}
        for digest, text in found.items():
            if len(text) > MAX_LAYOUT:
                raise ProtocolError(
                    f"Redis key {self._keys.layout(digest)!r}: {len(text)} characters, at most {MAX_LAYOUT}"
                )
        return found

    async def put_manifest(self, digest: str, fields: Mapping[str, str], *, timeout: float | None = None) -> None:
        """Store what a rank registers, name -> short JSON, under the digest of all of it; once for all ranks."""
        key = self._keys.manifest(digest)
        part = f"{key}:part:{uuid.uuid4().hex}"
        names = list(fields)

        async def write(client: Client) -> None:
            if not fields or await client.pexpire(key, _LEASE_MS):
                return
            # A key under its digest is always complete: it is written under another name, then renamed.
            pipe = client.pipeline(transaction=False)
            for at in range(0, len(names), _CHUNK):
                pipe.hset(part, mapping={name: fields[name] for name in names[at : at + _CHUNK]})
                pipe.pexpire(part, _LEASE_MS)
            pipe.rename(part, key)
            await pipe.execute()

        await self._session.connection.call(f"store {key}", write, self._session.limit(timeout))
        self._session.owned.registration_keys.add(key)

    async def manifest(self, digest: str, *, timeout: float | None = None) -> dict[str, str]:
        """What ``put_manifest`` stored. Empty if it is not there (or was empty)."""
        key = self._keys.manifest(digest)

        async def read(client: Client) -> dict[str, str]:
            size = int(await client.hlen(key))
            if size > MAX_NAMES:
                raise ProtocolError(f"Redis key {key!r} has {size} fields, at most {MAX_NAMES} tensors are possible")
            return dict(await client.hgetall(key))

        fields = await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))
        for name, text in fields.items():
            if len(text) > MAX_FIELD:
                raise ProtocolError(
                    f"Redis key {key!r}: field {name[:80]!r} has {len(text)} characters, at most {MAX_FIELD}"
                )
        return fields

    async def enroll(
        self,
        pair: str,
        batch: str,
        epoch: int,
        side: str,
        rank: int,
        record: str,
        *,
        expected: int,
        over: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Register one rank with its ``record`` (short JSON). Returns the generation in which it waits for the others.

        ``expected`` is the number of ranks of both sides. The one that completes it sets state ``registered``.
        ``over``: the latest generation that is known to be over, whether Redis knows that or not.
        PeerLostError if the pair has formed a later epoch.
        """
        if len(record) > MAX_FIELD:
            raise ConfigError(f"batch {batch}: record of {len(record)} characters, at most {MAX_FIELD}")
        known = self._session.owned.batches.get((pair, batch), {})
        request = {
            "pair": pair,
            "batch": batch,
            "epoch": epoch,
            "side": side,
            "rank": rank,
            "record": record,
            "expected": expected,
            "token": uuid.uuid4().hex,
            "known_generation": int(known.get("generation") or 0),
            "over": over,
        }
        done = await self._session.script("enroll", [self._keys.batch(pair, batch)], request, timeout)
        generation = int(done["generation"])
        self._session.owned.remember_batch(pair, batch, {"generation": str(generation), "epoch": str(epoch)})
        self._session.owned.enrolled[pair, batch, side, rank] = generation
        self._session.owned.forget_verdicts(pair, batch)
        self._session.owned.registration_keys.add(self._keys.roster(pair, batch, generation))
        return generation

    async def unenroll(
        self, pair: str, batch: str, generation: int, side: str, rank: int, *, timeout: float | None = None
    ) -> bool:
        """Take a registration back (deadline, refusal), or say that the batch is closed.

        True: it was still open, so nobody counts on this rank. False: all had come, and this rank is marked closed.
        """
        if self._session.owned.enrolled.get((pair, batch, side, rank)) == generation:
            del self._session.owned.enrolled[pair, batch, side, rank]
            self._session.owned.forget_verdicts(pair, batch)
            self._session.owned.forget_batches()
            if not self._session.owned.enrolled:
                self._session.owned.registration_keys.clear()
        request = {
            "pair": pair,
            "batch": batch,
            "generation": generation,
            "side": side,
            "rank": rank,
        }
        keys = [self._keys.batch(pair, batch), self._keys.roster(pair, batch, generation)]
        return bool(await self._session.script("unenroll", keys, request, timeout))

    async def roster(self, pair: str, batch: str, generation: int, *, timeout: float | None = None) -> Roster:
        """Who has come in this generation, and what the agents computed. Readable until all have come to the next
        one."""
        key, whole = self._keys.roster(pair, batch, generation), self._keys.batch(pair, batch)

        async def read(client: Client) -> Roster:
            pipe = client.pipeline(transaction=False)
            pipe.hlen(key)
            pipe.hget(whole, "generation")
            size, newest = await pipe.execute()
            if int(size) > 4 * MAX_WORLD:
                raise ProtocolError(f"Redis key {key!r} has {size} fields, at most {4 * MAX_WORLD} are possible")
            return Roster.from_redis(key, generation, await client.hgetall(key), _generation(whole, newest))

        return await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))

    async def verdicts(
        self,
        pair: str,
        batch: str,
        generation: int,
        agents: Collection[str],
        members: Collection[tuple[str, int]],
        *,
        timeout: float | None = None,
    ) -> Roster:
        """A roster with what these agents computed and the entries of these (side, rank) only: of many ranks, all
        entries are far more."""
        key, whole = self._keys.roster(pair, batch, generation), self._keys.batch(pair, batch)
        fields = [*(f"agent:{agent}" for agent in agents), *(f"{side}/{rank}" for side, rank in members)]

        async def read(client: Client) -> Roster:
            pipe = client.pipeline(transaction=False)
            pipe.hget(whole, "generation")
            pipe.hmget(key, fields)
            newest, texts = await pipe.execute()
            values = {field: text for field, text in zip(fields, texts, strict=True) if text is not None}
            return Roster.from_redis(key, generation, values, _generation(whole, newest))

        return await self._session.connection.call(f"read {key}", read, self._session.limit(timeout))

    async def verdict(
        self,
        pair: str,
        batch: str,
        generation: int,
        agent: str,
        digest: str,
        *,
        expected: int,
        timeout: float | None = None,
    ) -> None:
        """Publish the digest of the plan that ``agent`` computed for this generation. ``expected`` agents do that."""
        self._session.owned.verdicts[pair, batch, generation] = (agent, digest, expected)
        await self._write_verdict((pair, batch, generation), timeout)

    async def restore_verdicts(self, timeout: float) -> None:
        """Publish once more what this agent computed for the registrations that its ranks have open: others may not
        have read it before Redis lost it."""
        for key in list(self._session.owned.verdicts):
            await self._write_verdict(key, timeout)

    async def _write_verdict(self, of: tuple[str, str, int], timeout: float | None) -> None:
        found = self._session.owned.verdicts.get(of)
        if found is None:
            return
        pair, batch, generation = of
        agent, digest, expected = found
        keys = [self._keys.batch(pair, batch), self._keys.roster(pair, batch, generation)]
        request = {"agent": agent, "verdict": digest, "expected": expected}
        await self._session.script("verdict", keys, request, timeout)

    async def set_fields(
        self, pair: str, batch: str, fields: Mapping[str, int | float | str | None], *, timeout: float | None = None
    ) -> None:
        """Set fields of ``BatchView``. Generation, epoch and seq never go back, whoever writes last.

        With ``generation`` and ``seq`` among them, a writer that is behind changes nothing that is newer.
        """
        text = batch_text(fields)
        self._session.owned.remember_batch(pair, batch, fields)
        await self._write(pair, batch, text, self._session.limit(timeout))

    async def report_fields(
        self, pair: str, batch: str, fields: Mapping[str, int | float | str | None], *, timeout: float
    ) -> None:
        """Like ``set_fields``, after ``note_fields``, over the connection for reports, which nothing else waits for."""
        await self._write(pair, batch, batch_text(fields), timeout, self._session.reporter)

    async def restore(self, timeout: float) -> None:
        """Write what this agent remembers of batches."""
        for (pair, batch), fields in list(self._session.owned.batches.items()):
            await self._write(pair, batch, batch_text(fields), timeout)

    def note_fields(self, pair: str, batch: str, fields: Mapping[str, int | float | str | None]) -> None:
        """Like ``set_fields`` without writing: remember what this agent knows, in case Redis ever loses it."""
        self._session.owned.remember_batch(pair, batch, fields)

    async def get(self, pair: str, batch: str, *, timeout: float | None = None) -> BatchView | None:
        """The batch; None if nobody has registered it."""
        key = self._keys.batch(pair, batch)
        values = await self._session.connection.call(
            f"read {key}",
            lambda client: client.hgetall(key),
            self._session.limit(timeout),
        )
        return BatchView.from_redis(key, pair, batch, values) if values else None

    async def all(self, *, timeout: float | None = None) -> list[BatchView]:
        """All batches of the namespace, by pair and name."""
        names = await self._session.connection.call(
            f"read {self._keys.batches}",
            lambda client: client.smembers(self._keys.batches),
            self._session.limit(timeout),
        )
        found = []
        for name in sorted(names):
            pair, slash, batch = name.partition("/")
            if not slash:
                raise ProtocolError(f"Redis key {self._keys.batches!r}: member {name[:80]!r} is not PAIR/BATCH")
            view = await self.get(pair, batch, timeout=timeout)
            if view is not None:
                found.append(view)
            else:
                await self._session.prune(self._keys.batches, name, timeout)
        return found

    async def names(self, pair: str, *, timeout: float | None = None) -> set[str]:
        """Ids of all batches of a pair. The hash of some may be gone."""
        names = await self._session.connection.call(
            f"read {self._keys.batches}",
            lambda client: client.smembers(self._keys.batches),
            self._session.limit(timeout),
        )
        found = {name.removeprefix(f"{pair}/") for name in names if name.startswith(f"{pair}/")}
        return {name for name in found if NAME.fullmatch(name)}

    async def registering(self, pair: str, batch: str, *, timeout: float | None = None) -> dict[str, list[int]]:
        """The ranks, by side, that wait for others to register this batch."""
        view = await self.get(pair, batch, timeout=timeout)
        found: dict[str, list[int]] = {}
        if view is not None and view.state == "registering":
            for side, rank in (await self.roster(pair, batch, view.generation, timeout=timeout)).entries:
                found.setdefault(side, []).append(rank)
        return found

    async def _write(
        self, pair: str, batch: str, text: Mapping[str, str], timeout: float, over: RedisConnection | None = None
    ) -> None:
        request = {"pair": pair, "batch": batch, "fields": dict(text)}
        await self._session.script("batch", [self._keys.batch(pair, batch)], request, timeout, over)


def _generation(key: str, text: str | None) -> int:
    return FieldReader(key, {"generation": text or "0"}).integer("generation")


def batch_text(fields: Mapping[str, int | float | str | None]) -> dict[str, str]:
    """Fields of a batch as Redis holds them. ValueError for one that is not in the key table."""
    unknown = set(fields) - BATCH_FIELDS
    if unknown:
        raise ValueError(f"a batch has no fields {sorted(unknown)}")
    text = {}
    for name, value in fields.items():
        if name == "version":
            text[name] = version_to_text(value if isinstance(value, int | str) else None)
        elif isinstance(value, float):  # seconds, to the microsecond
            text[name] = str(round(value, 6))
        else:
            text[name] = "" if value is None else str(value)[:MAX_FIELD]
    return text
