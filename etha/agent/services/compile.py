"""Compile the two directions of a batch into programs over this agent's workers' memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from etha.agent.protocol.capabilities import Terms
from etha.agent.protocol.verification import VerificationPlan
from etha.agent.runtime.lane import Lane
from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.run import DirectionProgram
from etha.agent.runtime.transports import BatchTransport, NcclBatchTransport
from etha.agent.runtime.verification import ChecksumReaders, TransferVerification
from etha.agent.services.batch_state import LocalRegistration, RegisteredBatch, RunningProgram
from etha.agent.services.differences import batch_may_differ
from etha.errors import TransferError
from etha.memory.handles import TensorHandle
from etha.memory.revocation import Guard
from etha.memory.views import View
from etha.observe.records import Payload
from etha.plan import Plan
from etha.plan.layouts.region import part_name
from etha.transport.base import TransportPeer
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import Member, Program
from etha.transport.copy.pulling import pull_plan
from etha.transport.tcp.transport import TcpTransport
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.flows import BUCKET, WireProgram
from etha.transport.wire.host_reads import compile_host
from etha.transport.wire.nccl_messages import device_cut
from etha.transport.wire.routing import account
from etha.transport.wire.worker_rows import worker_stretches

Views = dict[int, dict[int, View]]


class TransferCompiler:
    """Compiles programs, and opens the streams that they need."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._readers: ChecksumReaders | None = None

    async def compile(self, batch: RegisteredBatch, current: RunningProgram) -> DirectionProgram | None:
        """This agent's program for ``current``, compiled off the loop; EthaErrors give reasons against it.

        None if it was stopped while it waited for other agents to share their snapshots.
        """
        source = current.source
        if current.snapshot:
            shown = {(source, rank): agent for rank, agent in self._read(batch, source).items()}
            if not await batch.registration.shared_snapshots.open(shown, lambda: current.stopped):
                return None
        sources, targets = self._views(batch, source, current.snapshot)
        program = await asyncio.to_thread(_compile, batch, source, sources, targets)
        if self._links.card is not None:
            await asyncio.to_thread(self._links.card.prepare, program.near)
        if program.wire is not None and program.wire.sends:
            assert batch.transport is not None
            peers = [
                TransportPeer(agent=agent, address=self._links.data_address(agent, batch.scope))
                for agent in program.wire.sends
            ]
            await batch.transport.open(peers)
        return program

    def verification(
        self, batch: RegisteredBatch, seq: int, plan: VerificationPlan, guards: Mapping[Member, Guard], lane: Lane
    ) -> TransferVerification:
        """The verification of transfer ``seq`` of a direction with this plan."""
        if self._readers is None:
            self._readers = ChecksumReaders(lane, self._links.plane.budget, self._links.plane.memory)
        return TransferVerification(
            plan,
            seq,
            guards,
            readers=self._readers,
            received_sums=batch.received_sums,
            tell=lambda agent, message: self._links.tell(agent, batch.scope, message),
        )

    def transport(self, registration: LocalRegistration, terms: Terms) -> BatchTransport:
        """The transport of one batch: NCCL if all of its agents have it, else streams over this agent's data plane."""
        if not terms.nccl or self._links.nccl is None:
            return TcpTransport(self._links.plane)
        return NcclBatchTransport(
            self._links.nccl,
            me=registration.machine.me,
            members=sorted(registration.agents),
            scope=registration.scope,
            unique_id=bytes.fromhex(terms.nccl),
            tell=lambda agent, message: self._links.tell(agent, registration.scope, message),
        )

    @staticmethod
    def _read(batch: RegisteredBatch, source: str) -> dict[int, str]:
        """Source ranks of other agents whose memory this agent reads."""
        routing = batch.routing(source)
        return {
            r: agent
            for r, agent in enumerate(routing.source)
            if agent != routing.me and routing.reach(routing.me, agent)
        }

    def _views(self, batch: RegisteredBatch, source: str, snapshot: bool) -> tuple[Views, Views]:
        """Views of this agent's ranks, and of other agents' source ranks whose memory it reads."""
        plan = batch.evaluation.plans[source]
        names = plan.names
        held = _source_names(plan, batch.evaluation.parts)
        sources: Views = {}
        targets: Views = {}
        for (side, rank), tensors in batch.tensors.items():
            receives = side != source
            shadows = tensors.shadows if receives and batch.evaluation.atomic else None
            if receives and batch.evaluation.atomic and shadows is None:
                raise TransferError(f"{side} rank {rank} has not attached its shadows")
            aside = tensors.snapshot if snapshot and not receives else None
            handles = shadows or aside or tensors.handles
            found = _resolve(tensors.session.memory.resolve, handles, names if receives else held)
            (targets if receives else sources)[rank] = found
        for rank in self._read(batch, source):
            shown = batch.registration.shared_snapshots if snapshot else batch.registration.shared_tensors
            sources[rank] = shown.memory((source, rank)).views(held)
        return sources, targets


def _source_names(plan: Plan, parts: Mapping[str, str]) -> list[str]:
    """The names that the source's ranks use for their local tensors, by ``plan.local_number``."""
    held = [parts.get(name, name) for name in plan.names]
    most = max((len(plan.source[name].products) for name in plan.names), default=0)
    return [part_name(name, number) for number in range(most + 1) for name in held]


def _resolve(
    resolve: Callable[[TensorHandle], View], handles: Mapping[str, TensorHandle], names: Sequence[str]
) -> dict[int, View]:
    return {i: resolve(handles[name]) for i, name in enumerate(names) if name in handles}


def _compile(batch: RegisteredBatch, source: str, sources: Views, targets: Views) -> DirectionProgram:
    plan = batch.evaluation.plans[source]
    verification_plan = _verification_plan(batch, source, sources, targets)
    if batch.registration.machine.alone:
        near = compile_local(plan, sources, targets)
        return DirectionProgram(
            near=near,
            nbytes=near.nbytes,
            peers=_named(near.peers, batch, source),
            verification_plan=verification_plan,
            pull=None if verification_plan is not None else pull_plan(near),
            payload=_payload(batch, source, near.nbytes, near, None),
        )
    routing = batch.routing(source)
    nbytes, peers = account(plan, routing)
    name = f"{batch.scope} from {source}"
    wire = compile_wire(
        plan,
        routing,
        sources,
        targets,
        staging=batch.terms.staging,
        bucket_size=batch.evaluation.bucket_size or BUCKET,
        streams=batch.terms.streams,
        cut=device_cut(sorted(batch.agents), batch.terms.staging) if batch.over_nccl else None,
    )
    near = compile_host(plan, routing, sources, targets)
    return DirectionProgram(
        near=near,
        nbytes=nbytes,
        peers=_named(peers, batch, source),
        wire=replace(
            wire,
            observer=None if verification_plan is None else verification_plan.reduction_sums,
            differs=not batch.over_nccl and batch_may_differ(batch, source),
        ),
        key=hashlib.sha256(name.encode()).digest(),
        joins=batch.over_nccl,
        verification_plan=verification_plan,
        pull=None if verification_plan is not None or wire.aliased else pull_plan(near),
        stretches={} if batch.over_nccl or verification_plan is not None else worker_stretches(wire),
        payload=_payload(batch, source, nbytes, near, wire),
    )


def _named(
    peers: Mapping[Member, Iterable[Member]], batch: RegisteredBatch, source: str
) -> dict[Member, tuple[tuple[str, int], ...]]:
    """The other ends of each rank, as results name them."""
    sides = {"source": source, "target": batch.other(source)}
    return {member: tuple(sorted((sides[role], rank) for role, rank in others)) for member, others in peers.items()}


def _payload(
    batch: RegisteredBatch, source: str, nbytes: Mapping[Member, int], near: Program, wire: WireProgram | None
) -> Payload:
    """What records say of a program."""
    ways: dict[str, int] = {}
    whole = batch.evaluation.nbytes(source)
    for pair, moved in enumerate(near.bytes_of_pairs()):
        ends = near.pairs[pair].source, near.pairs[pair].target
        way = "device" if any(v.device for v in ends) else "process_vm" if any(v.private for v in ends) else "mapped"
        ways[way] = ways.get(way, 0) + moved
    if wire is not None and (crossing := sum(f.nbytes for f in (*wire.sends.values(), *wire.receives.values()))):
        ways["nccl" if batch.over_nccl else "tcp"] = crossing
    shares = {role: sum(n for (r, _), n in nbytes.items() if r == role) for role in ("source", "target")}
    staged = any(tensors.session.staged for tensors in batch.tensors.values())
    return Payload(sent=shares["source"], received=shares["target"], ways=ways, staged=staged, whole=whole)


def _verification_plan(batch: RegisteredBatch, source: str, sources: Views, targets: Views) -> VerificationPlan | None:
    if batch.evaluation.verify is None:
        return None
    return VerificationPlan(
        batch.evaluation.plans[source],
        batch.routing(source),
        sources,
        targets,
        sides=(source, batch.other(source)),
        staging=batch.terms.staging,
        full=batch.evaluation.verify == "full",
    )
