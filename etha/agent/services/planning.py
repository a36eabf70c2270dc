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
from etha.agent.services.batch_state import LocalRegistration
from etha.agent.services.manifests import ManifestCache
from etha.store.registry import Store
from etha.transport.geometry.overlap import Written
from etha.transport.wire.routing import Routing, exchanging


async def plan(
    registration: LocalRegistration,
    entries: Mapping[Member, str],
    store: Store,
    manifest_cache: ManifestCache,
    links: PeerLinks,
) -> tuple[Evaluation, Capabilities | None]:
    """Evaluate a complete roster; returns the evaluation, and this agent's verdict if there are other agents.

    An equal registration is not planned again. EthaErrors: Redis is away, or holds what no agent writes.
    """
    key = store.keys.batch(registration.pairs[0], registration.name)
    records = {member: Record.from_json(key, text) for member, text in entries.items()}
    manifests = await manifest_cache.fetch({record.manifest for record in records.values()})
    where = Where(
        agents=registration.machine.agents,
        hosts={s: [x.members[r].host for r in sorted(x.members)] for s, x in registration.view.sides.items()},
    )
    evaluation = await asyncio.to_thread(manifest_cache.evaluations.of, records, manifests, where)
    for pair in registration.pairs:
        view = await store.batches.get(pair, registration.name)
        registration.seq = max(registration.seq, view.seq if view is not None else 0)
    if registration.machine.alone or evaluation.refused:
        return evaluation, None
    return evaluation, await introduce(registration, links, evaluation)


async def introduce(registration: LocalRegistration, links: PeerLinks, evaluation: Evaluation) -> Capabilities:
    """This agent's verdict on a registration. Waits for the memory that other agents share with it."""
    agents = registration.agents
    if unlinked := links.far((registration.pairs[0], registration.epoch)):
        meets = await asyncio.to_thread(_exchanging, registration, evaluation)
        await links.link(f"batch {registration.name!r} of pair {registration.pairs[0]!r}", meets & unlinked)
    readers, readable = sorted(agents & links.read_by), sorted(agents & links.reads)
    if readers:
        shown = {member: (t.session, t.handles) for member, t in registration.tensors.items()}
        for message in await asyncio.to_thread(exhibits, shown):
            for agent in readers:
                links.tell(agent, registration.scope, message)
    await registration.shared_tensors.wait(readable)
    # Checksums need reductions as streams cut them, so a verified batch with reductions uses streams.
    seen = evaluation.verify is not None and any(k.reduction for p in evaluation.plans.values() for k in p.classes)
    nccl = ""
    if links.nccl is not None and links.nccl.stuck is None and not seen:
        # An id costs its maker a thread and a descriptor until the communicator exists, so only one agent makes one.
        mine = registration.machine.me == min(agents)
        nccl = (await links.nccl.communicators.unique_id()).hex() if mine else HAS_NCCL
        await asyncio.to_thread(evaluation.uncarried)  # the plans are kept, so that agreeing on NCCL makes none
    return await asyncio.to_thread(_capabilities, registration, links, evaluation.digest, readable, nccl)


def _exchanging(registration: LocalRegistration, evaluation: Evaluation) -> set[str]:
    """The agents with which this one exchanges data, in either direction.

    Also those whose data others carry: NCCL does not carry, and checksums go from end to end.
    """
    agents, found = registration.machine.agents, set[str]()
    for source, plan in evaluation.plans.items():
        target = agents[registration.other(source)]
        routing = Routing(me=registration.machine.me, source=agents[source], target=target)
        found |= exchanging(plan, routing)
        if plan.carries:
            found |= exchanging(plan.uncarried(), routing)
    return found


def _capabilities(
    registration: LocalRegistration, links: PeerLinks, digest: str, readable: list[str], nccl: str
) -> Capabilities:
    reads = tuple(agent for agent in readable if registration.shared_tensors.open(agent, registration.machine.agents))
    return Capabilities(
        digest=digest,
        nccl=nccl,
        reads=reads,
        shared=_shares(registration),
        apart=_apart(registration),
        staging=links.staging,
        streams=links.plane.streams,
        seq=registration.seq,
    )


def _shares(registration: LocalRegistration) -> bool:
    """Whether workers of both sides on this agent have registered overlapping memory."""
    views = {
        member: [t.session.memory.resolve(h) for h in t.handles.values()] for member, t in registration.tensors.items()
    }
    first = min(registration.machine.agents)
    written = Written(view for (side, _), some in views.items() if side == first for view in some)
    return any(written.overlaps(view) for (side, _), some in views.items() if side != first for view in some)


def _apart(registration: LocalRegistration) -> tuple[Apart, ...]:
    """For each side, a tensor here that overlaps one of the other side's, whose worker another agent serves."""
    shown = registration.shared_tensors.opened()
    found: dict[str, Apart] = {}
    for side in registration.machine.agents:
        far = {rank: memory.all_views() for (other, rank), memory in sorted(shown.items()) if other != side}
        lent = Written(view for views in far.values() for view in views)
        for (own, rank), tensors in sorted(registration.tensors.items(), key=lambda item: item[0]):
            for name, handle in tensors.handles.items() if own == side and side not in found else ():
                view = tensors.session.memory.resolve(handle)
                if lent.overlaps(view):
                    lender = next(rank for rank, views in far.items() if Written(views).overlaps(view))
                    found[side] = (side, rank, name, lender)
                    break
    return tuple(found.values())
