"""The messages of one exchange, chosen once for the strides of the tensors at hand: what goes in place, what is packed.

A stage lists pieces for each peer, which are one message. A piece whose elements lie one after the other in memory is
sent from there, or received there, without a copy. Each end decides that for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from etha.redistribute.piece import LocalRegion
from etha.redistribute.stage import Arrival, ExchangeStage

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """A message to ``peer``. ``start``: first element in the local tensor's memory; None if it is packed."""

    peer: int
    numel: int
    start: int | None
    pieces: tuple[LocalRegion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """A message from ``peer``. ``start``: first element in the result's memory; None if it is unpacked."""

    peer: int
    numel: int
    start: int | None
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMessages:
    """All messages of one rank in one exchange. ``packed`` and ``unpacked``: number of elements of each that is not in
    place, in order.

    ``home``: first element, in the result's memory, of all that the rank holds, if it keeps that in one piece there. It
    may then be made in that place.
    """

    sends: tuple[Sending, ...]
    receives: tuple[Receiving, ...]
    packed: tuple[int, ...]
    unpacked: tuple[int, ...]
    home: int | None


@lru_cache(maxsize=1024)
def choose_messages(
    stage: ExchangeStage,
    rank: int,
    order: tuple[int, ...],
    shape: tuple[int, ...],
    here: Strides | None,
    there: Strides | None,
) -> StageMessages:
    """The messages of ``rank``, which is in ``order``.

    ``shape`` and ``here``: shape and strides of the local tensor; ``there``: strides of the result, None if nothing is
    received in place. If ``here`` is None everything is packed, peers in ``order``, as a collective takes it.
    Otherwise each rank begins with the next one in ``order``, so that not all of them send to the first.
    """
    first = order.index(rank) + 1
    out = order if here is None else order[first:] + order[:first]
    sends = [
        Sending(peer=peer, numel=_numel(pieces), start=_start(pieces, here), pieces=pieces)
        for peer in out
        if _numel(pieces := stage.sends.get(peer, ()))
    ]
    receives = []
    for peer in order if here is None else reversed(out):
        arrivals = stage.receives.get(peer, ())
        pieces = tuple(arrival.piece for arrival in arrivals)
        if _numel(pieces):
            start = _start(pieces, there)
            receives.append(Receiving(peer=peer, numel=_numel(pieces), start=start, arrivals=arrivals))
    return StageMessages(
        sends=tuple(sends),
        receives=tuple(receives),
        packed=tuple(m.numel for m in sends if m.start is None),
        unpacked=tuple(m.numel for m in receives if m.start is None),
        home=_home(stage, shape, there),
    )


def _numel(pieces: Sequence[LocalRegion]) -> int:
    return sum(piece.numel for piece in pieces)


def _start(pieces: Sequence[LocalRegion], strides: Strides | None) -> int | None:
    return pieces[0].start_in(strides) if strides is not None and len(pieces) == 1 else None


def _home(stage: ExchangeStage, shape: tuple[int, ...], there: Strides | None) -> int | None:
    if there is None or len(stage.kept) != 1:
        return None
    piece, arrival = stage.kept[0]
    return arrival.piece.start_in(there) if piece.is_whole(shape) else None
