"""Run a route on real tensors: for each stage pack, exchange, and write or reduce."""

from __future__ import annotations

import torch

from etha.plan import Slot
from etha.plan.proof.simulate import combine, finish
from etha.redistribute.exchange import GroupExchange
from etha.redistribute.piece import bits
from etha.redistribute.route import Route
from etha.redistribute.stage import Arrival, ExchangeStage


def run(route: Route, wire: GroupExchange, local: torch.Tensor, result: torch.Tensor | None) -> None:
    """Redistribute ``local`` into ``result`` (None on a rank that is not a target). They share no memory."""
    *before, last = route.stages
    for stage in before:
        middle = None if stage.shape is None else local.new_empty(stage.shape)
        _run_stage(stage, wire, local, middle, route.reduction)
        local = local if middle is None else middle
    _run_stage(last, wire, local, result, None if before else route.reduction)


def _run_stage(
    stage: ExchangeStage, wire: GroupExchange, local: torch.Tensor, result: torch.Tensor | None, reduction: Slot | None
) -> None:
    source = bits(local)
    sent = {peer: sum(piece.numel for piece in pieces) for peer, pieces in stage.sends.items()}
    received = {peer: sum(a.piece.numel for a in arrivals) for peer, arrivals in stage.receives.items()}
    out, into = source.new_empty(sum(sent.values())), source.new_empty(sum(received.values()))
    at = 0
    for peer in wire.order:
        for piece in stage.sends.get(peer, ()):
            piece.pack(source, out[at : at + piece.numel].view(piece.shape))
            at += piece.numel
    if not stage.quiet:
        wire.exchange(out, sent, into, received, stage.tag)
    if result is None:
        return
    dense: list[list[tuple[Arrival, torch.Tensor]]] = [[] for _ in range(stage.parts)]
    at = 0
    for peer in wire.order:
        for arrival in stage.receives.get(peer, ()):
            n = arrival.piece.numel
            dense[arrival.part].append((arrival, into[at : at + n].view(arrival.piece.shape)))
            at += n
    for piece, arrival in stage.kept:
        kept = source.new_empty(piece.shape)
        piece.pack(source, kept)
        dense[arrival.part].append((arrival, kept))
    if reduction is None:
        _lay(dense[0], bits(result))
    else:
        _reduce(dense, result, reduction)


def _lay(pieces: list[tuple[Arrival, torch.Tensor]], result: torch.Tensor) -> None:
    for arrival, dense in pieces:
        arrival.piece.unpack(result, dense)


def _reduce(parts: list[list[tuple[Arrival, torch.Tensor]]], result: torch.Tensor, how: Slot) -> None:
    """Combine the parts in ascending order, in the accumulating dtype; round once."""
    total: torch.Tensor | None = None
    for pieces in parts:
        if len(pieces) == 1 and pieces[0][0].piece.is_whole(result.shape):
            part = pieces[0][1].view(result.dtype)
        else:
            part = torch.empty(result.shape, dtype=result.dtype, device=result.device)
            _lay(pieces, bits(part))
        part = part.to(how.accumulate)
        if how.op == "norm":
            part = part**how.p
        if total is None:
            total = part
        elif how.op in ("sum", "avg"):
            total.add_(part)  # combine's addition, in place in our own buffer
        else:
            total = combine(total, part, how)
    assert total is not None  # there is at least one contribution
    result.copy_(finish(total, how))
