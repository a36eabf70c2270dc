"""The checks of one direction of a batch, compiled once, and for each transfer a book of its chunks and sums. Pure.

A line is a chunk with the sums of its two ends. Which of them this agent computes depends on where it is: both (near),
the source's (it sends the sum to another agent), or the target's (it receives the source's sum).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etha.errors import ConfigError, TransferError
from etha.plan import Plan
from etha.transport.geometry.bounds import clip
from etha.transport.verify.checksums import ChecksumReader, Read, Reads
from etha.transport.verify.chunks import MAX_SUMS, CheckChunk, Kind, Scheme, derive
from etha.transport.verify.reduction_sums import ReductionSums, key_of
from etha.transport.wire.compiler import Views
from etha.transport.wire.routing import Routing

#: Most elements and lines of one piece of work. An abort takes effect between pieces.
_PIECE, _MAX_LINES = 1 << 20, 128


@dataclass(slots=True, eq=False)
class Line:
    """A chunk and its sums. This agent computes the source's sum (``gives``), the targets' sums (``takes``), or
    both."""

    chunk: CheckChunk
    gives: bool
    takes: bool
    expected: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    @property
    def wrong(self) -> int | None:
        """The first target that differs; None while all agree or something is missing."""
        wanted = self.expected if len(self.expected) != 1 else self.expected * len(self.found)
        differing = (i for i, pair in enumerate(zip(wanted, self.found, strict=False)) if pair[0] != pair[1])
        return next(differing, None)


class Step(NamedTuple):
    """What one piece of work does for a line: sum its source's end, its targets' ends, or both."""

    line: Line
    source: bool
    target: bool


Piece = Sequence[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationBook:
    """``first`` reads sources that the transfer overwrites, before it; ``then`` everything else, after it."""

    gives: Mapping[str, list[Line]]
    takes: Mapping[str, list[Line]]
    first: Sequence[Piece]
    then: Sequence[Piece]


class VerificationPlan:
    """The checks of one direction. ``sides`` are the names of the source and the target side, for messages."""

    def __init__(
        self,
        plan: Plan,
        routing: Routing,
        sources: Views,
        targets: Views,
        *,
        sides: tuple[str, str],
        staging: int,
        full: bool,
    ) -> None:
        self._names, self._sides = plan.names, dict(zip(("source", "target"), sides, strict=True))
        self._scheme: Scheme = derive(plan, routing, staging=staging, full=full)
        self._reads = Reads(plan, routing, sources, targets)
        #: Takes the sums of the wire program's reductions.
        self.reduction_sums = ReductionSums(plan)
        most = max(map(len, (*self._scheme.gives.values(), *self._scheme.takes.values())), default=0)
        if most > MAX_SUMS:
            raise ConfigError(
                f"verify='full' would compare {most} chunks between two agents, at most {MAX_SUMS} can be: "
                "use verify='sample', or fewer tensors a batch"
            )

    def book(self, seq: int) -> VerificationBook:
        """The chunks of transfer ``seq``. Tells ``reduction_sums`` which sums will be asked for. May take long."""
        near = [Line(chunk, True, True) for chunk in self._scheme.near.choose(seq)]
        gives = {a: [Line(c, True, False) for c in course.choose(seq)] for a, course in self._scheme.gives.items()}
        takes = {a: [Line(c, False, True) for c in course.choose(seq)] for a, course in self._scheme.takes.items()}
        lines = [*near, *(x for some in gives.values() for x in some), *(x for some in takes.values() for x in some)]
        self.reduction_sums.start(
            [key_of(x.chunk) for x in lines if (x.gives, x.chunk.subject.kind) in _OF_REDUCTION_SUMS or _both(x)]
        )
        early = [x for x in lines if x.gives and self._reads.shares and self._early(x.chunk)]
        done = set(map(id, early))
        return VerificationBook(
            gives=gives,
            takes=takes,
            first=list(_pieces([Step(x, True, False) for x in early])),
            then=list(_pieces([Step(x, x.gives and id(x) not in done, x.takes) for x in lines])),
        )

    def _early(self, chunk: CheckChunk) -> bool:
        subject = chunk.subject
        return subject.kind is not Kind.RESULT and subject.source[0] == "source" and self._reads.overwritten(chunk)

    def run(self, piece: Piece, reader: ChecksumReader) -> None:
        """Compute the sums of a piece, and compare the lines both of whose ends are here. TransferError names the first
        difference."""
        wanted: list[tuple[list[int], int]] = []
        reads: list[Read] = []

        def read(into: list[int], some: Sequence[Read]) -> None:
            wanted.append((into, len(some)))
            reads.extend(some)

        for line, source, target in piece:
            chunk, kind = line.chunk, line.chunk.subject.kind
            if source:
                match kind:
                    case Kind.RESULT:
                        line.expected.append(self.reduction_sums.sums[key_of(chunk)])
                    case Kind.FOLDED:
                        line.expected += reader.folded(chunk, self._reads, self._reads.sinks(chunk))
                    case _:
                        read(line.expected, [self._reads.source(chunk)])
            if target:
                if kind is Kind.GIVEN:
                    line.found.append(self.reduction_sums.sums[key_of(chunk)])
                else:
                    read(line.found, self._reads.sinks(chunk))
        sums = reader.sums(reads)
        at = 0
        for into, count in wanted:
            into += sums[at : at + count]
            at += count
        for line, _, target in piece:
            if target:
                self.compare(line)

    def compare(self, line: Line) -> None:
        """Raise TransferError if the two ends of a line differ."""
        i = line.wrong
        if i is None:
            return
        subject = line.chunk.subject
        (role, rank), region = subject.sinks[i]
        giver, given = subject.source
        there, here = f"{self._sides[role]} rank {rank}", f"{self._sides[giver]} rank {given}"
        dims = self._reads.places(line.chunk, region)
        what = f"of {there} is not what {here} holds"
        if subject.kind is Kind.GIVEN:
            dims = clip(region.dims, line.chunk.bounds, 1)
            what = f"of {here} is not what came to the reduction at {there}"
        elif subject.kind is not Kind.MOVE:
            what = f"of {there} is not what was reduced at {here}"
        spans = [(int(r[:, 0].min()), int((r[:, 0] + r[:, 2]).max())) for r in dims or ()]
        where = ", ".join(f"{first}:{last}" for first, last in spans)
        wanted = line.expected[0] if len(line.expected) == 1 else line.expected[i]
        raise TransferError(
            f"verify: tensor {self._names[subject.tensor]!r} chunk [{where}] {what} (checksums "
            f"{line.found[i]:016x} and {wanted:016x}): its bits changed on the way. "
            "Send it again; if this comes back, look for failing memory or a failing network between the two"
        )


#: (whether this agent is the source's, kind) of lines whose sum ``reduction_sums`` has.
_OF_REDUCTION_SUMS = {(True, Kind.RESULT), (False, Kind.GIVEN)}


def _both(line: Line) -> bool:
    return line.gives and line.takes and line.chunk.subject.kind in (Kind.RESULT, Kind.GIVEN)


def _pieces(steps: Sequence[Step]) -> Iterator[Piece]:
    some: list[Step] = []
    numel = 0
    for step in steps:
        size = step.line.chunk.numel * (step.source + step.target * len(step.line.chunk.subject.sinks))
        if some and (numel + size > _PIECE or len(some) == _MAX_LINES):
            yield some
            some, numel = [], 0
        some.append(step)
        numel += size
    if some:
        yield some
