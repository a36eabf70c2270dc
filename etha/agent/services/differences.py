"""What need not be sent on hops of publications, because the targets have it.

    a receiving worker's call --HeldBase--> agents of the sources       before READY
    GO --> a source's agent looks for that version in its slots (``bases``); a target's agent knows it (``held_here``)

    a receiving worker's call --HeldPart--> agents of the sources       the hop before has failed
    GO --> a source's agent asks for the rest (``resumed``)

A word that comes too late, or about another claim, costs nothing but that all bytes are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from etha.agent.protocol.effects import Member
from etha.agent.runtime.sessions import HopClaim, WorkerSession
from etha.agent.services.batch_state import RegisteredBatch
from etha.peer.introductions import HeldBase, HeldPart
from etha.transport.wire.differences import BaseVersion, joined, may_differ


def tell_held(
    batch: RegisteredBatch, member: Member, session: WorkerSession, tell: Callable[[str, HeldBase | HeldPart], None]
) -> None:
    """A receiving rank begins its call: tell the agents of the sources what it holds."""
    hop = session.hops.get(batch.name)
    if hop is None:
        return
    source = batch.other(member[0])
    for agent in sorted(set(batch.routing(source).source) - {batch.me}):
        if hop.held:
            tell(agent, HeldBase(claim=hop.claim, rank=member[1], seq=hop.held))
        if hop.arriving is not None and hop.arriving.resumed:
            tell(agent, HeldPart(claim=hop.claim))


def batch_may_differ(batch: RegisteredBatch, source: str) -> bool:
    """Whether transfers of the direction from side ``source`` may send differences. Both ends find the same."""
    hop = any(batch.name in tensors.session.hops for tensors in batch.tensors.values())
    return hop and may_differ(batch.evaluation.plans[source], batch.terms.staging)


def held_here(batch: RegisteredBatch, source: str) -> int:
    """The version that all target ranks here hold whole, 0 if there is none."""
    hops = [_hop(batch, member) for member in batch.tensors if member[0] != source]
    held = {(hop.claim, hop.held) if hop is not None else (0, 0) for hop in hops}
    return held.pop()[1] if len(held) == 1 else 0


def bases(batch: RegisteredBatch, source: str) -> dict[str, BaseVersion]:
    """Versions that the sources here still have, by the agent all of whose target ranks hold them."""
    senders = [_hop(batch, member) for member in batch.tensors if member[0] == source]
    claim = _claim_of(senders)
    if not claim:
        return {}
    ranks: dict[str, list[int]] = {}
    for rank, agent in enumerate(batch.routing(source).target):
        ranks.setdefault(agent, []).append(rank)
    found: dict[str, BaseVersion] = {}
    versions: dict[int, BaseVersion | None] = {}
    for agent, some in ranks.items():
        held = {batch.held_bases.get(rank) for rank in some}
        said = held.pop() if len(held) == 1 else None
        if agent == batch.me or said is None or said[0] != claim:
            continue
        seq = said[1]
        if seq not in versions:
            versions[seq] = joined(hop.find(seq) for hop in senders if hop is not None and hop.find is not None)
        if (base := versions[seq]) is not None:
            found[agent] = base
    return found


def resumed(batch: RegisteredBatch, source: str) -> frozenset[str]:
    """The agents at whose targets there is a part of the version already."""
    claim = _claim_of([_hop(batch, member) for member in batch.tensors if member[0] == source])
    return frozenset(agent for agent, said in batch.held_parts.items() if said == claim and agent != batch.me)


def _claim_of(senders: Sequence[HopClaim | None]) -> int:
    """The claim for which all ranks here send; 0 if there is none."""
    claims = {hop.claim if hop is not None and hop.find is not None else 0 for hop in senders}
    return claims.pop() if len(claims) == 1 else 0


def _hop(batch: RegisteredBatch, member: Member) -> HopClaim | None:
    return batch.tensors[member].session.hops.get(batch.name)
