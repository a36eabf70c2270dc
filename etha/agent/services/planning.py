"""Before a batch is registered: plan both directions from its roster, and find out how bytes can go between agents.

Each agent shares its workers' memory with the agents that read it, opens what is shared with it, and gives its verdict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from etha.agent.protocol.capabilities import HAS_NCCL, Apart, Capabilities
from etha.agent.protocol.effects import Member
from etha.agent.protocol.evaluation import Evaluation, Where
from etha.agent.protocol.records import Record
from etha.agent.runtime.host_sharing import exhibits
from etha.agent.runtime.peers import PeerLinks
from etha.agent.services.batch_state import BatchState
from etha.agent.services.manifests import ManifestCache
from etha.store.registry import Store
from etha.transport.geometry.overlap import Written


async def plan(
    live: BatchState, entries: Mapping[Member, str], store: Store, manifest_cache: ManifestCache, links: PeerLinks
) -> tuple[Evaluation, Capabilities | None]:
    """Evaluate a complete roster; returns the evaluation, and this agent's verdict if there are other agents.

    An equal registration is not planned again. EthaErrors: Redis is away, or holds what no agent writes.
    """
    key = store.keys.batch(live.pairs[0], live.name)
    records = {member: Record.from_json(key, text) for member, text in entries.items()}
    manifests = await manifest_cache.fetch({record.manifest for record in records.values()})
    where = Where(
        agents=live.machine.agents,
        hosts={s: [x.members[r].host for r in sorted(x.members)] for s, x in live.view.sides.items()},
    )
    evaluation = await asyncio.to_thread(manifest_cache.evaluations.of, records, manifests, where)
    for pair in live.pairs:
        view = await store.batches.get(pair, live.name)
        live.seq = max(live.seq, view.seq if view is not None else 0)
    if live.machine.alone or evaluation.refused:
        return evaluation, None
    return evaluation, await introduce(live, links, evaluation)


async def introduce(live: BatchState, links: PeerLinks, evaluation: Evaluation) -> Capabilities:
    """This agent's verdict on a registration. Waits for the memory that other agents share with it."""
    agents = live.agents
    readers, readable = sorted(agents & links.read_by), sorted(agents & links.reads)
    if readers:
        shown = {member: (t.session, t.handles) for member, t in live.tensors.items()}
        for message in await asyncio.to_thread(exhibits, shown):
            for agent in readers:
                links.tell(agent, live.scope, message)
    await live.shared_tensors.wait(readable)
    # Checksums need reductions as streams cut them, so a verified batch with reductions uses streams.
    seen = evaluation.verify is not None and any(k.reduction for p in evaluation.plans.values() for k in p.classes)
    nccl = ""
    if links.nccl is not None and links.nccl.stuck is None and not seen:
        # An id costs its maker a thread and a descriptor until the communicator exists, so only one agent makes one.
        mine = live.machine.me == min(agents)
        nccl = (await links.nccl.communicators.unique_id()).hex() if mine else HAS_NCCL
    return await asyncio.to_thread(_capabilities, live, links, evaluation.digest, readable, nccl)


def _capabilities(live: BatchState, links: PeerLinks, digest: str, readable: list[str], nccl: str) -> Capabilities:
    reads = tuple(agent for agent in readable if live.shared_tensors.open(agent, live.machine.agents))
    return Capabilities(
        digest=digest,
        nccl=nccl,
        reads=reads,
        shared=_shares(live),
        apart=_apart(live),
        staging=links.staging,
        streams=links.plane.streams,
        seq=live.seq,
    )


def _shares(live: BatchState) -> bool:
    """Whether workers of both sides on this agent have registered overlapping memory."""
    views = {member: [t.session.memory.resolve(h) for h in t.handles.values()] for member, t in live.tensors.items()}
    first = min(live.machine.agents)
    written = Written(view for (side, _), some in views.items() if side == first for view in some)
    return any(written.overlaps(view) for (side, _), some in views.items() if side != first for view in some)


def _apart(live: BatchState) -> tuple[Apart, ...]:
    """For each side, a tensor here that overlaps one of the other side's, whose worker another agent serves."""
    shown = live.shared_tensors.opened()
    found: dict[str, Apart] = {}
    for side in live.machine.agents:
        far = {rank: memory.all_views() for (other, rank), memory in sorted(shown.items()) if other != side}
        lent = Written(view for views in far.values() for view in views)
        for (own, rank), tensors in sorted(live.tensors.items(), key=lambda item: item[0]):
            for name, handle in tensors.handles.items() if own == side and side not in found else ():
                view = tensors.session.memory.resolve(handle)
                if lent.overlaps(view):
                    lender = next(rank for rank, views in far.items() if Written(views).overlaps(view))
                    found[side] = (side, rank, name, lender)
                    break
    return tuple(found.values())
