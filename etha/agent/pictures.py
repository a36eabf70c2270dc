"""Pictures of registered batches' plans, for ``etha plot``. Counted in a thread, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from etha.agent.services.batch_state import LocalRegistration, RegisteredBatch
from etha.bus.messages import GetPicture
from etha.errors import AgentUnavailableError, ConfigError
from etha.printable import one_line
from etha.units import counted, seconds, size

if TYPE_CHECKING:
    from etha.picture import PlanPicture

#: Pairs of ranks that are counted at most. 512 to 512 ranks take some 50 MB while they are counted.
MOST_RANK_PAIRS = 1 << 18
#: Requests that wait for the one before.
MOST_WAITING = 8


class Pictures:
    """``agent_name``: what an agent is called."""

    def __init__(self, agent_name: Callable[[str], str]) -> None:
        self._agent_name = agent_name
        self._one = asyncio.Lock()
        self._waiting = 0

    async def of(self, known: Iterable[LocalRegistration], asked: GetPicture) -> PlanPicture:
        """The picture of the batch that is asked for. ConfigError names the batches and directions that there are."""
        batch = _find(known, asked)
        source = _source(batch, asked.source)
        if self._waiting >= MOST_WAITING:
            raise AgentUnavailableError(f"{self._waiting} pictures are being counted already: try again")
        self._waiting += 1
        try:
            async with self._one:
                return await asyncio.to_thread(self._picture, batch, source)
        finally:
            self._waiting -= 1

    def _picture(self, batch: RegisteredBatch, source: str) -> PlanPicture:
        from etha.plan.analysis.bounds import survey
        from etha.plan.analysis.plot import PictureNames, picture_of

        evaluation, target = batch.evaluation, batch.other(source)
        plan = evaluation.plans[source]
        title = f"batch {batch.name} of pair {batch.pairs[0]}: {source} to {target}\n{_last(batch, source)}"
        names = PictureNames(
            title=title,
            sides=(source, target),
            hosts={
                member.host: member.shown_host
                for side in batch.registration.view.sides.values()
                for member in side.members.values()
            },
            agents={agent: self._agent_name(agent) for agent in batch.agents},
        )
        # Not plan.survey(), which would keep its tables for the life of the batch.
        return picture_of(plan, survey(plan), names)


def _find(known: Iterable[LocalRegistration], asked: GetPicture) -> RegisteredBatch:
    """The newest registration of the batch. ConfigError if there is none, or it is not complete yet."""
    there = list(known)
    mine = [one for one in there if one.name == asked.batch and asked.pair in one.pairs]
    registered = [one.registered for one in mine if one.registered is not None]
    if registered:
        return max(registered, key=lambda batch: (batch.registration.epoch, batch.registration.generation))
    if mine:
        raise ConfigError(f"batch {asked.batch!r} of pair {asked.pair!r} is not registered by all ranks yet")
    names = sorted({f"{pair} {one.name}" for one in there for pair in one.pairs})
    raise ConfigError(
        f"this agent has no batch {asked.batch!r} of pair {asked.pair!r}; "
        f"pairs and batches here: {', '.join(names) or 'none'}"
    )


def _source(batch: RegisteredBatch, asked: str) -> str:
    """The side that sends: as asked for, as in the last transfer, or as the ranks have registered."""
    evaluation = batch.evaluation
    if asked and asked not in evaluation.sides:
        raise ConfigError(f"batch {batch.name!r} has no side {asked!r}: its sides are {' and '.join(evaluation.sides)}")
    wanted = asked or batch.last_source or next(iter(sorted(evaluation.asked)), "")
    source = wanted if wanted in evaluation.plans or asked else next(iter(evaluation.plans), "")
    if source not in evaluation.plans:
        raise ConfigError(
            f"batch {batch.name!r} cannot be sent from {source or asked}: it has no plan in that direction"
        )
    pairs = len(batch.registration.machine.agents[source]) * len(batch.registration.machine.agents[batch.other(source)])
    if pairs > MOST_RANK_PAIRS:
        raise ConfigError(
            f"batch {batch.name!r} has {pairs:,} pairs of ranks, and an agent counts at most {MOST_RANK_PAIRS:,}: "
            f"describe both sides (etha.plan.describe) and run `etha plan SOURCE.json TARGET.json --plot FILE`"
        )
    return source


def _last(batch: RegisteredBatch, source: str) -> str:
    """What the last transfer was, for the title."""
    if batch.last_seconds is None:
        return f"{counted(batch.evaluation.tensors, 'tensor')}, not sent yet"
    version = "" if batch.version is None else f" version {one_line(str(batch.version))},"
    way = "" if batch.last_source == source else f" from {batch.last_source}"
    moved = size(batch.evaluation.nbytes(batch.last_source))
    return f"last transfer{way}:{version} {moved} in {seconds(batch.last_seconds)}"
