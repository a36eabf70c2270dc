"""Why the READYs that a coordinator holds can never begin together; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from etha.errors import EthaError, ProtocolError, TransferError
from etha.peer.messages import Ready

Key = tuple[str, str]  # (agent, side)


def conflict(name: str, source: str, wanted: Collection[Key], ready: Mapping[Key, Ready]) -> EthaError | None:
    """What is wrong with ``ready`` in the direction from ``source``, of which all ``wanted`` have to come; or None."""
    if set(wanted) <= ready.keys() and all(m.verb == "send" for m in ready.values()):
        a, b = sorted({side for _, side in wanted})
        return TransferError(
            f"{name}: both sides send, {a} and {b}; one of them has to call transfer(..., 'recv')",
            outcome="withdrawn",
        )
    # Of this direction only: READYs of the other one may be of a transfer whose GO has not been heard of here.
    sends = [m for (_, side), m in ready.items() if side == source and m.verb == "send"]
    editions = {m.edition for m in sends}
    if "" in editions and len(editions) > 1:
        return TransferError(
            f"{name}: some ranks of {source} send a snapshot, others what their tensors hold; "
            f"give the same snapshot= on every rank",
            outcome="withdrawn",
        )
    labels = {str(m.version) for m in sends if m.version is not None}
    if len(labels) > 1 and len(editions) <= 1:  # of snapshots, a rank may be one ahead
        return TransferError(
            f"{name}: the ranks of {source} send under different versions, {', '.join(sorted(labels))}; "
            f"give the same version on every rank, or on one only",
            outcome="withdrawn",
        )
    digests = {m.digest for (_, side), m in ready.items() if m.verb == ("send" if side == source else "recv")}
    if len(digests) > 1:
        return ProtocolError(f"{name}: the agents hold different plans ({', '.join(sorted(digests))})")
    return None
