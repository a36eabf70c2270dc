"""What a side of a publication has: the ranks exchange what they have registered, and each derives the same table."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from etha.agent.protocol.evaluation import clashes, describe_side, parts_of, with_products
from etha.agent.protocol.records import Manifest
from etha.agent.services.manifests import ManifestCache
from etha.bus.messages import Publish, Register, Subscribe
from etha.errors import LayoutError, PeerLostError, ProtocolError, RegistrationError, Violation
from etha.plan import TensorSpec
from etha.plan.layouts import dtypes
from etha.plan.layouts.element_set import WHOLE, element_set, includes
from etha.plan.planner.m2m import held_products
from etha.store.process import alive
from etha.store.publication_records import (
    MAX_ELEMENT_SET,
    PublishedTensor,
    TensorTable,
    WaitingRank,
    company_of,
    set_digest,
)
from etha.store.records import RankHolder
from etha.store.registry import Store


@dataclass(slots=True)
class SideMeeting:
    """One rank that meets the others of its side. ``missing``: the ranks that have not come yet."""

    publication: str
    side: str
    rank: int
    world: int
    missing: tuple[int, ...] = ()

    async def table(
        self, message: Publish | Subscribe, store: Store, manifests: ManifestCache, holder: RankHolder
    ) -> TensorTable:
        """The table of the whole side, once all ranks have come. RegistrationError with what is wrong on any rank.

        ``holder``: this rank's process.
        """
        self.missing = tuple(rank for rank in range(self.world) if rank != self.rank)
        mine = await asyncio.to_thread(Manifest.of, _as_register(message), self.rank)
        digest = await manifests.publish(mine, timeout=math.inf)
        if self.world == 1:
            found = {self.rank: mine}
        else:
            entry = WaitingRank(
                world=self.world,
                launch=message.launch or "",
                manifest=digest,
                pid=holder.pid,
                token=secrets.token_hex(8),
            )
            found = await self._meet(entry, holder, store, manifests)
        return await asyncio.to_thread(_table, self.publication, self.side, found)

    async def _meet(
        self, entry: WaitingRank, holder: RankHolder, store: Store, manifests: ManifestCache
    ) -> dict[int, Manifest]:
        """What each rank has registered, once all say that they have seen each other.

        Whoever is listed may have ended, because its agent was killed or could not reach Redis.
        """
        key = store.keys.publication_ranks(self.publication, self.side)
        async with store.changes(key) as changed:
            await store.publications.meet(self.publication, self.side, self.rank, entry, timeout=math.inf)
            while True:
                there = await store.publications.waiting(self.publication, self.side, timeout=math.inf)
                same = {
                    rank: one for rank, one in there.items() if (one.world, one.launch) == (entry.world, entry.launch)
                }
                company = company_of(same) if len(same) == self.world else ""
                self.missing = tuple(
                    rank for rank in range(self.world) if rank not in same or company not in ("", same[rank].company)
                )
                if company != entry.company:
                    if not alive(holder.pid, holder.start):  # a rank of the next launch may be there already
                        raise PeerLostError(f"{self.side} rank {self.rank} has ended", reason="died")
                    entry = replace(entry, company=company)
                    await store.publications.meet(self.publication, self.side, self.rank, entry, timeout=math.inf)
                elif not self.missing:
                    break
                else:
                    await changed()
        known = await manifests.fetch({one.manifest for one in same.values()})
        return {rank: known[one.manifest] for rank, one in same.items()}


def misfits(table: TensorTable, description: TensorTable, subscriber: str, publisher: str) -> list[Violation]:
    """Why a subscriber's tensors cannot be received from what is published."""
    found = []
    for name in sorted(description.tensors.keys() - table.tensors.keys()):
        text = f"{publisher} publishes it, {subscriber} does not have it: subscribe with a tensor of this name"
        found.append(Violation(code="missing_name", name=name, side=subscriber, rank=None, text=text))
    for name, mine in sorted(table.tensors.items()):
        theirs = description.tensors.get(name)
        if theirs is None:
            text = f"{subscriber} has it, {publisher} does not publish it"
            found.append(Violation(code="unknown_name", name=name, side=subscriber, rank=None, text=text))
        elif theirs.shape != mine.shape:
            text = f"shape {mine.shape} on {subscriber} and {theirs.shape} on {publisher}"
            found.append(Violation(code="shape_mismatch", name=name, side=subscriber, rank=None, text=text))
        elif (reason := _uncastable(theirs, mine, name, publisher)) is not None:
            found.append(Violation(code="dtype", name=name, side=subscriber, rank=None, text=reason))
        elif mine.covers != theirs.covers:
            wanted, there = table.elements(name), description.elements(name)
            try:
                inside = there == WHOLE or (there is not None and wanted is not None and includes(there, wanted))
            except LayoutError as error:
                raise ProtocolError(f"Redis: tensor {name!r} of {publisher}: {error.message}") from None
            if not inside:
                text = f"{subscriber} wants elements of it that no rank of {publisher} holds"
                found.append(Violation(code="uncovered", name=name, side=subscriber, rank=None, text=text))
    return found


def _uncastable(theirs: PublishedTensor, mine: PublishedTensor, name: str, publisher: str) -> str | None:
    try:
        return dtypes.castable(dtypes.from_name(theirs.dtype), dtypes.from_name(mine.dtype))
    except LayoutError as error:
        raise ProtocolError(f"Redis: tensor {name!r} of {publisher}: {error.message}") from None


def _as_register(message: Publish | Subscribe) -> Register:
    """What a rank has registered, in the form in which batches keep it."""
    return Register(
        batch="publication",
        epoch=0,
        form="map",
        pairs=(message.publication,),
        layouts=message.layouts,
        entries=message.entries,
        refusals=message.refusals,
        direction=None,
        bucket_size=None,
        atomic=False,
        verify=None,
        seq=0,
    )


def _table(publication: str, side: str, manifests: Mapping[int, Manifest]) -> TensorTable:
    """The table of a side from what each rank has registered."""
    wrong = [
        Violation(code=one.code, name=one.name, side=side, rank=rank, text=one.text)
        for rank, manifest in sorted(manifests.items())
        for one in manifest.refusals
    ]
    specs, more = describe_side(side, manifests)
    wrong += more + clashes(manifests, side, parts_of(manifests))
    if not wrong and not specs:
        wrong.append(Violation(code="missing_name", name="all tensors", side=side, rank=None, text="no rank has any"))
    if wrong:
        listed = "\n  ".join(map(str, wrong[:20]))
        raise RegistrationError(f"publication {publication!r}: {side} cannot enter it:\n  {listed}", violations=wrong)
    known: dict[int, str] = {}
    tied = _tied(manifests)
    sets: dict[str, str] = {}
    tensors = {}
    for name, spec in with_products(specs, parts_of(manifests)).items():
        covers = known.get(id(spec))
        if covers is None:  # equal tensors share a spec
            text = _elements(spec)
            covers = known[id(spec)] = set_digest(text)
            if text != covers and len(text) <= MAX_ELEMENT_SET:
                sets[covers] = text
        tensors[name] = PublishedTensor(
            dtype=dtypes.name_of(spec.dtype), shape=tuple(spec.shape), covers=covers, tied=tied.get(name, "")
        )
    return TensorTable(tensors, sets)


def _elements(spec: TensorSpec) -> str:
    """The elements of a tensor that the side's ranks have together."""
    products = held_products(spec)
    return WHOLE if products is None else element_set(spec.shape, products)


def _tied(manifests: Mapping[int, Manifest]) -> dict[str, str]:
    """For each tensor that shares its memory with another one, on any rank, a mark of those that do."""
    found: dict[str, str] = {}
    for _, manifest in sorted(manifests.items()):
        groups: dict[str, set[str]] = {}
        for name, first in manifest.ties.items():
            groups.setdefault(first, {first}).add(name)
        for group in groups.values():
            names = sorted({manifest.tensors[name].of or name for name in group if name in manifest.tensors})
            mark = hashlib.sha256(names[0].encode()).hexdigest()[:16]
            found |= {name: mark for name in names if len(names) > 1}
    return found
