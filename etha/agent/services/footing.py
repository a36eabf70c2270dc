"""What a registration stands on: its worker's seats in the pairs, and their epochs while it is on its way."""

from __future__ import annotations

from collections.abc import Mapping

from etha.agent.protocol.effects import Member
from etha.agent.runtime.sessions import Session
from etha.agent.services.rendezvous import Pairs
from etha.bus.messages import Register
from etha.errors import ConfigError, PeerLostError, ProtocolError, RegistrationError


def footing(pairs: Pairs, session: Session, message: Register) -> tuple[Member, dict[str, int]]:
    """The worker's (side, rank), which all pairs of the batch must agree on, and the epoch of each pair.

    Raises ConfigError, PeerLostError, RegistrationError.
    """
    if not message.pairs or list(message.pairs) != sorted(set(message.pairs)):
        raise ProtocolError("the pairs of a registration are a sorted list of at least one")
    seats = []
    for pair in message.pairs:
        seat = session.seats.get(pair)
        if seat is None:
            raise ConfigError(f"this client is not in pair {pair!r}: call init_pair first")
        if (error := pairs.error(seat)) is not None:
            raise error
        seats.append(seat)
    first = seats[0]
    for seat in seats[1:]:
        if (seat.side, seat.rank, seat.remote) != (first.side, first.rank, first.remote):
            raise RegistrationError(
                f"pairs {first.pair!r} and {seat.pair!r} do not join the same two sides with the same ranks "
                f"({first.side} rank {first.rank} to {first.remote}, {seat.side} rank {seat.rank} to "
                f"{seat.remote}): register one batch for each"
            )
    if message.epoch != first.epoch:
        raise PeerLostError(f"pair {first.pair!r} is at epoch {first.epoch} now", reason="relaunched")
    return first.member, {seat.pair: seat.epoch for seat in seats}


def lost_since(pairs: Pairs, session: Session, epochs: Mapping[str, int]) -> PeerLostError | None:
    """Why a registration that began at these epochs cannot go on; None when it can."""
    for pair, epoch in epochs.items():
        seat = session.seats.get(pair)
        if seat is None:
            return PeerLostError(f"this client has left pair {pair!r}", reason="closed")
        if (error := pairs.error(seat)) is not None:
            return error
        if seat.epoch != epoch:
            return PeerLostError(f"pair {pair!r} is at epoch {seat.epoch} now, not {epoch}", reason="relaunched")
    return None
