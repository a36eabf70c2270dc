"""Messages: the pieces of a flow as NCCL carries them, each with a key that both of its ends derive. Pure.

    piece of STRAIGHT bytes or more   a message of its own: from or to the tensor itself if it is one segment there
    a contribution                    a message of its own, received where it is reduced
    smaller neighbours                one message, packed and unpacked

NCCL has neither tags nor byte streams: what one end sends, the other must receive with the same size and in the same
group. So the cuts depend on sizes and stages alone, never on how a tensor lies at either end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from etha.transport.wire.flows import Flow, FlowPiece, Span, join
from etha.transport.wire.forwarding import LAST

#: Groups whose memory is in use at once: one is packed, one travels, one is unpacked.
DEPTH = 3
#: Most operations of one group. NCCL itself cuts larger groups up.
GROUP = 256
#: Most messages of one flow in one group, and bytes of the largest.
MOST, LARGEST = 16, 32 << 20
#: From this many bytes on a piece travels alone, and so without a copy if its tensor allows it.
STRAIGHT = 1 << 20
#: Bytes of a wave per agent. Groups are then well filled, and a relay begins once the first wave has arrived.
WAVE = 32 << 20
_LEAST = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCut:
    """How flows between these agents are cut; the same on all of them. ``members`` are sorted; their places are their
    ranks.

    In bytes: ``limit`` of one flow in one group, ``chunk`` of one piece, ``straight`` from which a piece travels alone,
    ``part`` of what is reduced as a unit, ``wave`` of whole tensors that go before the next ones begin. ``most``:
    messages of one flow in one group.
    """

    members: tuple[str, ...]
    limit: int
    chunk: int
    straight: int
    part: int
    wave: int
    most: int

    def rank(self, agent: str) -> int:
        """Its rank in the communicator. ValueError for an agent that is not a member."""
        return self.members.index(agent)

    def colour(self, one: str, other: str) -> int:
        """In which of the groups of one turn two agents meet.

        (i + j) mod n gives an agent each number with at most one other agent, so a group of ``width`` numbers holds at
        most that many peers, in both directions.
        """
        width = max(1, GROUP // (2 * self.most))
        return (self.rank(one) + self.rank(other)) % len(self.members) // width


def device_cut(members: Sequence[str], staging: int) -> MessageCut:
    """The cut for these agents' cards, each with ``staging`` bytes (the least of all) besides the workers' own memory.

    The ring of DEPTH groups takes 3/8 of them if all pieces have to be packed and unpacked and all others are peers.
    """
    names = tuple(sorted(set(members)))
    flows = 2 * max(1, len(names) - 1)
    limit = min(LARGEST, max(_LEAST, staging * 3 // 8 // (DEPTH * flows) // 256 * 256))
    return MessageCut(
        members=names,
        limit=limit,
        chunk=limit,
        straight=min(STRAIGHT, limit),
        part=min(4 << 20, limit),
        wave=WAVE * len(names),
        most=max(1, min(MOST, GROUP // max(2, len(names)) // 2)),
    )


def waves(nbytes: Sequence[int], cut: MessageCut) -> tuple[int, ...]:
    """The wave of each tensor, given the whole tensors' bytes, which all agents know."""
    before = np.cumsum(np.array([0, *nbytes], np.int64))[:-1]
    # Numbered without gaps, because a wave's next hop is to run beside the following wave, however large a tensor was.
    return tuple(np.unique(before // cut.wave, return_inverse=True)[1].tolist())


def order(stage: int, tensor: int, waves: Sequence[int]) -> tuple[int, int]:
    """The place of a stage in the order of groups: (0, step of the reductions) or (1, step of the tensors).

    Contributions of the next wave go before the results of this one, so that the wire is busy during the reduction. A
    tensor goes in step (wave + hop): its next hop depends on earlier steps, and other waves run beside it.
    """
    if stage >= LAST:
        tensor, hop = divmod(stage - LAST, 1 << 16)
        return 1, waves[tensor] + hop
    if stage == 1:
        return 1, waves[tensor]
    wave, kind = divmod(stage, 3)
    return 0, 2 * wave + (3 if kind else 0)


def contribution(stage: int) -> bool:
    """Whether pieces of this stage are contributions, at both ends."""
    return stage < LAST and stage % 3 == 0


def message_flow(
    *, peer: str, names: tuple[str, str], mark: str, pieces: Sequence[FlowPiece], cut: MessageCut, waves: Sequence[int]
) -> Flow:
    """The pieces, in any order of stages, as one lane of messages in ascending order of their keys.

    ``names`` is (sender, receiver), ``mark`` the plan's digest, and ``waves`` those of the tensors.
    """
    placed = sorted(((order(p.stage, p.tensor, waves), p) for p in pieces), key=lambda one: one[0])
    table = np.array([(p.stage, p.tensor, p.nbytes) for _, p in placed], "<i8").reshape(-1, 3)
    h = hashlib.sha256(f"etha-messages-1 {mark} {names} {cut}".encode())
    h.update(np.ascontiguousarray(table).tobytes())
    spans = tuple(_keyed(placed, cut, cut.colour(*names)))
    return Flow(peer=peer, digest=h.digest(), nbytes=int(table[:, 2].sum()), lanes=(spans,))


#: A piece's place in the order of groups, and the piece.
_Placed = tuple[tuple[int, int], FlowPiece]


def _keyed(placed: Sequence[_Placed], cut: MessageCut, colour: int) -> Iterator[Span]:
    step: tuple[int, int] | None = None
    turn = count = nbytes = 0
    for here, run in _runs(placed, cut):
        span = join(run)
        if here != step:
            step, turn, count, nbytes = here, 0, 0, 0
        elif count == cut.most or nbytes + span.wire > cut.limit:
            turn, count, nbytes = turn + 1, 0, 0
        count, nbytes = count + 1, nbytes + span.wire
        yield replace(span, key=(*here, turn, colour))


def _runs(placed: Sequence[_Placed], cut: MessageCut) -> Iterator[tuple[tuple[int, int], list[FlowPiece]]]:
    run: list[FlowPiece] = []
    step, wire = (0, 0), 0
    for here, piece in placed:
        alone = piece.nbytes >= cut.straight or contribution(piece.stage)
        if run and (alone or here != step or wire + piece.padded > cut.limit):
            yield step, run
            run, wire = [], 0
        step = here
        run.append(piece)
        wire += piece.padded
        if alone:
            yield step, run
            run, wire = [], 0
    if run:
        yield step, run
