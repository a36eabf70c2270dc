"""The messages of one exchange, chosen once for the strides of the tensors at hand: what goes in place, what is packed.

A stage lists pieces for each peer. A piece whose elements lie one after the other in memory is sent from there, or
received there, without a copy. Both ends cut a link into messages by the sizes of its pieces alone, so each decides for
itself what it packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from etha.redistribute.piece import LocalRegion
from etha.redistribute.stage import Arrival, ExchangeStage

#: Bytes from which each piece of a link is a message of its own, instead of packed into one with the others.
OWN_MESSAGE = 1 << 16

Strides = tuple[int, ...]
T = TypeVar("T")


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
class Messages:
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
    width: int,
    shape: tuple[int, ...],
    here: Strides | None,
    there: Strides | None,
) -> Messages:
    """The messages of ``rank`` for elements of ``width`` bytes.

    ``shape`` and ``here``: shape and strides of the local tensor; ``there``: strides of the result, None if nothing is
    received in place. If ``here`` is None everything is packed, peers in ``order``, as a collective takes it.
    Otherwise each rank begins with the next one in ``order``, so that not all of them send to the first.
    """
    first = order.index(rank) + 1
    out = order if here is None else order[first:] + order[:first]
    sends = [
        Sending(peer=peer, numel=_numel(part), start=_start(part, here), pieces=tuple(part))
        for peer in out
        for part in _parts([(piece, piece) for piece in stage.sends.get(peer, ())], width)
    ]
    receives = [
        Receiving(
            peer=peer,
            numel=_numel([a.piece for a in part]),
            start=_start([a.piece for a in part], there),
            arrivals=tuple(part),
        )
        for peer in (order if here is None else reversed(out))
        for part in _parts([(a.piece, a) for a in stage.receives.get(peer, ())], width)
    ]
    return Messages(
        sends=tuple(sends),
        receives=tuple(receives),
        packed=tuple(m.numel for m in sends if m.start is None),
        unpacked=tuple(m.numel for m in receives if m.start is None),
        home=_home(stage, shape, there),
    )


def _parts(pieces: Sequence[tuple[LocalRegion, T]], width: int) -> list[list[T]]:
    """What each message of a link carries. Empty pieces are in none."""
    some = [(piece.numel, what) for piece, what in pieces if piece.numel]
    if some and min(n for n, _ in some) * width >= OWN_MESSAGE:
        return [[what] for _, what in some]
    return [[what for _, what in some]] if some else []


def _numel(pieces: Sequence[LocalRegion]) -> int:
    return sum(piece.numel for piece in pieces)


def _start(pieces: Sequence[LocalRegion], strides: Strides | None) -> int | None:
    return pieces[0].start_in(strides) if strides is not None and len(pieces) == 1 else None


def _home(stage: ExchangeStage, shape: tuple[int, ...], there: Strides | None) -> int | None:
    if there is None or len(stage.kept) != 1:
        return None
    piece, arrival = stage.kept[0]
    return arrival.piece.start_in(there) if piece.is_whole(shape) else None
