"""Jobs in which target agents pass on what they receive, and transfers played span by span in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.plan import Layout, Plan, TensorSpec, build_plan
from etha.plan.planner import reduction, senders
from etha.plan.planner.fanout import RELAY_BYTES
from etha.plan.planner.rank_plan import FORWARD
from etha.transport.wire.carrying import RingProgress
from etha.transport.wire.crossings import SlotPart
from etha.transport.wire.flows import Span, WireProgram
from etha.transport.wire.forwarding import ForwardingProgress
from tests.unit.transport.agents import Job, Local
from tests.unit.transport.copy.test_local import FLOATS, allocate, layout
from tests.unit.transport.tcp.test_transport import content


@contextmanager
def least_slice(nbytes: int) -> Iterator[None]:
    """Plans within cut pieces down to so many bytes."""
    with mock.patch.object(senders, "MIN_SLICE", nbytes), mock.patch.object(reduction, "MIN_SLICE", nbytes):
        yield


def relayed_job(seed: int, rng: random.Random | None = None, *, chains: int | None = 1, carry: bool = False) -> Job:
    """Random layouts, dtypes, strides and memory; one or two source hosts, up to four target hosts of up to two agents.

    ``chains``: at most so many chains of hosts a piece; None: as many as the planner likes. ``carry``: idle agents of a
    host receive for busy ones, and a part of the tensors is on some target ranks only.
    """
    rng = rng or random.Random(seed)
    m, n = rng.choice([1, 2, 4]), rng.choice([2, 3, 4, 6, 8])
    source, target = {}, {}
    for i in range(rng.randint(1, 4)):
        large = rng.random() < 0.2
        ndim = rng.randint(1, 3)
        shape = tuple(rng.choice([40, 64, 100] if large else [1, 2, 3, 5, 7, 8, 16, 33]) for _ in range(ndim))
        a = rng.choice(FLOATS)
        b = rng.choice([a, a, *FLOATS[:4]])
        there = layout(rng, n, ndim, False)
        if rng.random() < 0.6:  # copies, which is what relays are for
            two = n % 2 == 0 and rng.random() < 0.5
            there = Layout((2, n // 2), [Shard(0), Replicate()]) if two else Layout.replicated(n)
        if carry and rng.random() < 0.6:
            some = rng.sample(range(n), rng.randint(1, n))
            there = Layout(some, [Shard(rng.randrange(ndim))])
        source[f"t{i}"] = TensorSpec(shape, a, layout(rng, m, ndim, rng.random() < 0.3 and a.itemsize > 1))
        target[f"t{i}"] = TensorSpec(shape, b, there)
    here = tuple(rng.choice(["a", "b"]) for _ in range(m))
    several = rng.random() < (0.9 if carry else 0.4)
    names = [*"cdef"[: rng.choice([1, 2, 3, 4])], *(["a"] if rng.random() < 0.2 else [])]
    there_at = sorted(rng.choice(names) + (rng.choice(["", "2"]) if several else "") for _ in range(n))
    if rng.random() < 0.3:
        rng.shuffle(there_at)
    with least_slice(rng.choice([1, 16, 64, 1024])):
        plan = build_plan(
            source, target, source_agents=here, target_agents=there_at, source_hosts=here,
            target_hosts=[name[0] for name in there_at], fan_out="relay", relay_bytes=0, carry=carry,
        )  # fmt: skip
        for klass in [] if carry else plan.classes:
            if chains is not None and klass.passable and not plan.topology.one_agent:
                klass.chains = chains
    assert not plan.violations

    def held(specs: Mapping[str, TensorSpec], ranks: int, is_source: bool) -> Local:
        return {
            r: {
                k: allocate(random.Random(f"{seed} {k} {content(s, r)}"), shape, s.dtype, is_source)
                for k, s in specs.items()
                if (shape := s.local_shape(r)) is not None
            }
            for r in range(ranks)
        }

    private = (rng.random() < 0.5, rng.random() < 0.5)
    return Job(plan, here, tuple(there_at), held(source, m, True), held(target, n, False), private)


def copies(
    shape: tuple[int, ...], hosts: int, ranks: int = 1, *, dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    partial: int = 0, tensors: int = 1, relay_bytes: int = RELAY_BYTES, **options: object,
) -> Job:  # fmt: skip
    """Tensors on one source host, rows over two ranks or ``partial`` contributions, to a copy on every target rank."""
    a, b = dtypes or (torch.float32, torch.float32)
    m = partial or 2
    here = ("s",) * m
    there = tuple(f"t{host}" for host in range(hosts) for _ in range(ranks))
    source = TensorSpec(shape, a, Layout((m,), [Partial("sum") if partial else Shard(0)]))
    target = TensorSpec(shape, b, Layout.replicated(hosts * ranks))
    names = [f"w{i}" for i in range(tensors)]
    plan = build_plan(
        dict.fromkeys(names, source), dict.fromkeys(names, target), source_agents=here, target_agents=there,
        source_hosts=here, target_hosts=there, relay_bytes=relay_bytes, carry=False,
    )  # fmt: skip
    held = {r: {k: torch.rand(source.local_shape(r) or ()).to(a) for k in names} for r in range(m)}
    blank = {r: {k: torch.zeros(shape, dtype=b) for k in names} for r in range(hosts * ranks)}
    return Job(plan, here, there, held, blank, **options)  # type: ignore[arg-type]


class Crossed(Plan):
    """A plan of equal replicated tensors in which tensor i goes round the target ranks from rank i: chains that cross.

    The planner makes chains in one order of hosts; here every agent waits for every other one, for some tensor.
    """

    def __init__(self, plan: Plan, turns: Sequence[int]) -> None:
        # Not a plan of its own: only what is asked for to compile and to simulate it.
        self._whole, self._turns = plan, turns
        self.names, self.source, self.target = plan.names, plan.source, plan.target
        self.class_of, self.topology = plan.class_of, plan.topology
        self.classes = plan.classes
        self.n = len(plan.topology.target_host)

    def wire_dtype(self, tensor: int) -> torch.dtype:
        return self._whole.wire_dtype(tensor)

    def passed_on(self, tensor: int) -> bool:
        return True

    def digest(self) -> str:
        return f"{self._whole.digest()} {self._turns}"

    def for_rank(self, side: str, rank: int) -> Any:
        found: dict[str, list[int]] = {name: [] for name in ("kind", "phase", "round", "tensor", "source", "target")}
        regions = []
        for tensor, turn in enumerate(self._turns):
            rp = self._whole.for_rank(side, rank if side == "source" else (rank - turn) % self.n)
            for row in np.flatnonzero(rp.tensor == tensor).tolist():
                for name, column in found.items():
                    column.append(int(getattr(rp, name)[row]))
                found["target"][-1] = (found["target"][-1] + turn) % self.n
                if rp.kind[row] == FORWARD:
                    found["source"][-1] = (found["source"][-1] + turn) % self.n
                regions.append(rp.region(row))
        columns = {name: np.array(column, np.int64) for name, column in found.items()}
        return SimpleNamespace(
            **columns,
            region_index=np.arange(len(regions)),
            region_at=regions.__getitem__,
            slots=(),
            index=columns["kind"],
        )


def single(lane: Sequence[Span]) -> tuple[Span, ...]:
    """The lane, whose carried pieces go one by one: streams take as many at once as can go."""
    found: list[Span] = []
    for span in lane:
        found += [replace(span, ring=(place,), wire=place.nbytes) for place in span.ring] or [span]
    return tuple(found)


class Played:
    """One transfer over all agents without bytes: streams carry spans in order, a step at a time.

    A sender's span goes once what it waits for has come to its agent and its reductions are complete; a receiver's
    counts once all of its bytes have come. A carried piece needs its place in the ring.
    """

    def __init__(self, programs: Mapping[str, WireProgram]) -> None:
        self.programs = programs
        self.progress = {name: ForwardingProgress() for name in programs}
        self.rings = {name: RingProgress() for name in programs}
        self.missing = {name: {p.number: len(p.far) for p in program.parts} for name, program in programs.items()}
        self.lanes: list[tuple[str, str, tuple[Span, ...], tuple[Span, ...]]] = []
        for name, program in programs.items():
            for peer, flow in program.sends.items():
                back = programs[peer].receives[name]
                assert flow.digest == back.digest and flow.wire == back.wire
                self.lanes += [(name, peer, *map(single, both)) for both in zip(flow.lanes, back.lanes, strict=True)]
        self.sent, self.got = [0] * len(self.lanes), [0] * len(self.lanes)
        self.carried, self.taken = [0] * len(self.lanes), [0] * len(self.lanes)

    def moves(self) -> list[Callable[[], None]]:
        """What can happen next."""
        found: list[Callable[[], None]] = []
        for i, (sender, _, out, back) in enumerate(self.lanes):
            if self.sent[i] < len(out) and self._may(sender, out[self.sent[i]]):
                found.append(lambda i=i: self._send(i))  # type: ignore[misc]
            if self.got[i] < len(back) and self._come(i, back[self.got[i]]):
                found.append(lambda i=i: self._receive(i))  # type: ignore[misc]
        return found

    @property
    def over(self) -> bool:
        """Whether everything has come."""
        return all(n == len(lane[3]) for n, lane in zip(self.got, self.lanes, strict=True))

    def _may(self, agent: str, span: Span) -> bool:
        if not all(self.rings[agent].ready(place) for place in span.ring):
            return False
        return self.progress[agent].ready(span.after) and all(self._made(agent, part) for part in span.parts)

    def _come(self, i: int, span: Span) -> bool:
        if not all(self.rings[self.lanes[i][1]].free(place) for place in span.ring):
            return False
        return self.carried[i] >= self.taken[i] + span.wire

    def _made(self, agent: str, part: SlotPart) -> bool:
        return self.missing[agent][part.number] == 0

    def _send(self, i: int) -> None:
        sender, _, out, _ = self.lanes[i]
        span = out[self.sent[i]]
        self.carried[i] += span.wire
        self.sent[i] += 1
        self.rings[sender].went(span.ring)

    def _receive(self, i: int) -> None:
        _, receiver, _, back = self.lanes[i]
        span = back[self.got[i]]
        self.taken[i] += span.wire
        self.got[i] += 1
        self.progress[receiver].lay(span.arrivals)
        self.rings[receiver].came(span.ring)
        if span.index >= 0:
            self.missing[receiver][span.parts[0].number] -= 1
