"""Hints for a rendezvous to which nobody came: another Redis, another namespace, another name.

Other names are those at which a worker waits, or has given up lately. They are read after a call's deadline, for its
error text. If Redis is slow, the error lacks the names, but is not delayed.
"""

from __future__ import annotations

import asyncio
import difflib
import socket
from collections.abc import Iterable, Mapping, Sequence

from etha.agent.protocol.effects import name_ranks
from etha.config import Settings
from etha.errors import EthaError
from etha.store.embedded import embedded_path
from etha.store.records import PairView
from etha.store.registry import Store

#: Seconds for reading: less than a client waits beyond its deadline.
LIMIT = 0.5
#: How many names are compared, are read, and are shown in a message.
_COMPARED, _READ, _SHOWN = 2000, 16, 3
#: Similarity from which a name may be a typo of another.
_ALIKE = 0.6
#: How many events are read to see who has given up, and for how many seconds that counts as recent. A busy batch adds
#: six a minute, and each kind of failure one.
_EVENTS, _LATELY = 1000, 600.0


class Hints:
    """``redis``: the URL that this agent was given, None for the embedded server of its host."""

    def __init__(self, store: Store, settings: Settings, redis: str | None) -> None:
        self._store, self._settings, self._redis = store, settings, redis

    def where(self) -> str:
        """Which Redis this was, and what to set if the other side uses another."""
        namespace = f"namespace {self._settings.namespace!r}"
        if self._redis is not None:
            return (
                f"Redis is {self._store.url}, {namespace}: both sides need the same ETHA_REDIS_URL and ETHA_NAMESPACE"
            )
        return (
            f"Redis is the embedded server of host {socket.gethostname()} at {embedded_path(self._settings)}, "
            f"{namespace}, which serves this host and this runtime directory only: if the other side runs on another "
            f"host, in another container, or with another ETHA_RUNTIME_DIR, XDG_RUNTIME_DIR or TMPDIR, set "
            f"ETHA_REDIS_URL to one Redis for both"
        )

    async def of_pair(self, pair: str, sides: Iterable[str], *, alone: bool) -> str:
        """A hint for the error of an ``init_pair``. ``alone``: no worker of one side has come."""
        found: list[str] = []
        try:
            async with asyncio.timeout(LIMIT):
                names = await self._store.pairs.names(timeout=LIMIT)
                views = await asyncio.gather(
                    *(self._store.pairs.get(name, timeout=LIMIT) for name in _alike(pair, names))
                )
                similar = [view for view in views if view is not None and _similar(view, pair, frozenset(sides))]
                found = [_waits(view) for view in similar if _came(view)]
                # The second worker that times out finds the pair of the first, at which nobody waits any more.
                left = _left(await self._store.events(_EVENTS, timeout=LIMIT))
                found += [_waited(view, left[view.name]) for view in similar if not _came(view) and view.name in left]
        except (EthaError, TimeoutError):
            pass  # the error is raised without other names
        return "".join([f". {self.where()}" if alone else "", _listed("pairs", found)])

    async def of_batch(self, pair: str, batch: str) -> str:
        """A hint for the error of a ``register_tensors``: other ids that wait on the same pair."""
        found: list[str] = []
        try:
            async with asyncio.timeout(LIMIT):
                for name in _alike(batch, await self._store.batches.names(pair, timeout=LIMIT)):
                    ranks = await self._store.batches.registering(pair, name, timeout=LIMIT)
                    if ranks:
                        found.append(f"batch {name!r} of {name_ranks(ranks)}")
        except (EthaError, TimeoutError):
            pass
        return _listed("batches of this pair", found)


def _alike(name: str, others: Iterable[str]) -> list[str]:
    """The names to read: those most similar to ``name``."""
    some = [other for other in sorted(others)[:_COMPARED] if other != name]
    return sorted(some, key=lambda other: -_likeness(name, other))[:_READ]


def _likeness(one: str, two: str) -> float:
    return difflib.SequenceMatcher(None, one.casefold(), two.casefold()).ratio()


def _similar(view: PairView, pair: str, sides: frozenset[str]) -> bool:
    """Whether the pair has the same two sides, or a name similar to the one that was asked for."""
    return frozenset(view.sides) == sides or _likeness(pair, view.name) >= _ALIKE


def _came(view: PairView) -> dict[str, list[int]]:
    """The ranks that wait for the next epoch of a pair."""
    here = {
        name: [rank for rank, member in side.members.items() if member.epoch == view.epoch + 1]
        for name, side in view.sides.items()
    }
    return {name: ranks for name, ranks in here.items() if ranks} if view.state != "formed" else {}


def _waits(view: PairView) -> str:
    return f"pair {view.name!r} of {' and '.join(sorted(view.sides))} with {name_ranks(_came(view))}"


def _left(events: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, tuple[dict[str, list[int]], float]]:
    """Pairs at which workers have given up lately: ranks by side, and seconds between that and the newest event."""
    newest = _milliseconds(events[-1][0]) if events else 0
    found: dict[str, tuple[dict[str, list[int]], float]] = {}
    formed: set[str] = set()
    for at, event in events:
        ago = (newest - _milliseconds(at)) / 1000
        pair, side, rank = (event.get(name, "") for name in ("pair", "side", "rank"))
        match event.get("kind"):
            case "formed":
                formed.add(pair)
                found.pop(pair, None)
            case "joined":  # a rank that leaves from now on has waited for the next epoch
                formed.discard(pair)
            case "left" if pair not in formed and rank.isdecimal() and ago <= _LATELY:
                ranks, _ = found.get(pair, ({}, 0.0))
                ranks[side] = sorted({*ranks.get(side, []), int(rank)})
                found[pair] = (ranks, ago)
    return found


def _milliseconds(event: str) -> int:
    """When an event was written: the first half of its id in a Redis stream."""
    text = event.partition("-")[0]
    return int(text) if text.isdecimal() else 0


def _waited(view: PairView, left: tuple[dict[str, list[int]], float]) -> str:
    ranks, ago = left
    who = f"pair {view.name!r} of {' and '.join(sorted(view.sides))}"
    return f"{who}, which {name_ranks(ranks)} left {ago:.0f} s ago"


def _listed(what: str, found: list[str]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f". Other {what} are there, is one of them meant? {', '.join(found[:_SHOWN])}{more}"
