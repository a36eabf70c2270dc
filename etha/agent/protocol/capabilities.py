"""What an agent declares before a batch is registered: its plans' digest, and how it can move bytes; pure.

All agents of a batch read all verdicts, so all derive the same ways: who copies from whose workers, and how streams are
cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from etha.config import MAX_WORLD
from etha.errors import ProtocolError, Violation

#: What an agent with NCCL declares if it does not make the id.
HAS_NCCL = "yes"
_NCCL = re.compile(rf"(|{HAS_NCCL}|[0-9a-f]{{256}})")


#: See ``Verdict.apart``.
Apart = tuple[str, int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one agent declares.

    ``digest`` is that of both plans. ``reads`` are the agents from whose workers this one can copy everything itself.
    ``shared``: a source tensor of its workers overlaps a target, so no other agent may read it at any moment.
    ``staging`` is in bytes, ``streams`` per peer; ``seq`` is the highest number that it knows of. ``apart`` has at most
    one (side, rank, tensor, other rank) per side: this tensor of a worker here overlaps one of rank ``other rank`` of
    the other side, which another agent serves. ``nccl`` is the unique id (hex) of their communicator from the first
    agent, ``HAS_NCCL`` from the others; "" means no NCCL.
    """

    digest: str
    reads: tuple[str, ...] = ()
    shared: bool = False
    staging: int = 0
    streams: int = 0
    seq: int = 0
    nccl: str = ""
    apart: tuple[Apart, ...] = ()

    def to_text(self) -> str:
        """The digest, a space, and short JSON."""
        fields = [self.reads, self.shared, self.staging, self.streams, self.seq, self.nccl, self.apart]
        return f"{self.digest} {json.dumps(fields)}"

    @classmethod
    def from_text(cls, agent: str, text: str) -> Capabilities:
        """The inverse of ``to_text``. ProtocolError names the agent."""
        digest, _, rest = text.partition(" ")
        try:
            match json.loads(rest):
                case [[*reads], bool(shared), int(staging), int(streams), int(seq), str(nccl), [*apart]] if (
                    all(isinstance(read, str) for read in reads)
                    and staging > 0
                    and 0 < streams <= 64
                    and seq >= 0
                    and _NCCL.fullmatch(nccl)
                    and all(_is_apart(found) for found in apart)
                ):
                    return cls(
                        digest=digest,
                        reads=tuple(reads),
                        shared=shared,
                        staging=staging,
                        streams=streams,
                        seq=seq,
                        nccl=nccl,
                        apart=tuple((side, rank, name, other) for side, rank, name, other in apart),
                    )
        except (ValueError, RecursionError):  # RecursionError: thousands of brackets
            pass
        raise ProtocolError(f"Redis: what agent {agent} says of a registration is not a verdict: {text[:120]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What follows from the verdicts of all agents of a batch; the same on each of them.

    ``nccl`` is the id (hex) of the communicator of all of them; "" if one of them has no NCCL.
    """

    reads: frozenset[tuple[str, str]] = frozenset()
    staging: int = 1
    streams: int = 1
    seq: int = 0
    nccl: str = ""

    @classmethod
    def of(cls, verdicts: Mapping[str, Capabilities]) -> Terms:
        """``reads`` as in ``transport.wire.routing.Ways``; the least staging and streams of all; the highest seq."""
        first = verdicts[min(verdicts)].nccl
        return cls(
            reads=frozenset(
                (reader, agent)
                for reader, verdict in verdicts.items()
                for agent in verdict.reads
                if agent in verdicts and agent != reader and not verdicts[agent].shared
            ),
            staging=min(v.staging for v in verdicts.values()),
            streams=min(v.streams for v in verdicts.values()),
            seq=max(v.seq for v in verdicts.values()),
            nccl=first if all(v.nccl for v in verdicts.values()) and first != HAS_NCCL else "",
        )


def _is_apart(found: object) -> bool:
    match found:
        case [str(), int(rank), str(), int(other)]:
            return 0 <= rank < MAX_WORLD and 0 <= other < MAX_WORLD
    return False


def torn_apart(
    agents: Mapping[str, tuple[str, ...]], verdicts: Mapping[str, Capabilities]
) -> dict[str, tuple[Violation, ...]]:
    """By source side: targets that overlap sources which another agent serves, if several agents receive.

    One agent reads what its targets overlap before it writes them. Nothing orders the reads and writes of several
    agents, so one would write where another still reads.
    """
    first, second = agents
    other = {first: second, second: first}
    found: dict[str, list[Violation]] = {}
    for _, verdict in sorted(verdicts.items()):
        for side, rank, name, lender in verdict.apart:
            if side in other and len(set(agents[side])) > 1:
                text = (
                    f"it lies in memory that {other[side]} rank {lender} sends from by another agent, and several "
                    f"agents receive: let one agent serve both sides of this process, or receive with atomic=True"
                )
                violation = Violation(code="shared_memory", name=name, side=side, rank=rank, text=text)
                found.setdefault(other[side], []).append(violation)
    return {source: tuple(dict.fromkeys(violations)) for source, violations in found.items()}
