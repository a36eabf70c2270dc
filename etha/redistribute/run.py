"""Run a route on real tensors: for each stage send, receive, and write or reduce what has come."""

from __future__ import annotations

import torch
import torch.distributed as dist

from etha.plan import Slot
from etha.redistribute.exchange import GroupExchange
from etha.redistribute.messages import choose_messages
from etha.redistribute.piece import bits
from etha.redistribute.reduce import Coming, Piece, reduce_parts
from etha.redistribute.route import Route
from etha.redistribute.stage import ExchangeStage


def run(route: Route, wire: GroupExchange, rank: int, local: torch.Tensor, result: torch.Tensor | None) -> None:
    """Redistribute ``local`` of ``rank`` into ``result`` (None on a rank that is no target). They share no memory."""
    if route.stages[0].quiet and route.reduction is None:
        if result is not None:
            for piece, arrival in route.stages[0].kept:
                piece.copy_to(bits(local), arrival.piece, bits(result))
        return
    if len(route.stages) == 1:
        only = Opened(route.stages[0], wire, rank, local, result, route.reduction)
        only.send(local)
        only.finish(local)
        return
    first, last = route.stages
    # A rank that is no target reduces nothing, and has nothing to send in the second exchange.
    middle = None if first.shape is None else local.new_empty(first.shape)
    after = Opened(last, wire, rank, local if middle is None else middle, result, None)
    if middle is not None and result is not None and after.messages.home is not None:
        middle = _stretch(result, after.messages.home, middle.numel()).view(middle.shape)
    before = Opened(first, wire, rank, local, middle, route.reduction)
    # What the second exchange brings may come before the first one is over.
    before.expect()
    after.expect()
    before.send(local)
    before.finish(local)
    after.send(local if middle is None else middle)
    after.finish(local if middle is None else middle)


class Opened:
    """One exchange of one rank, from ``local`` into ``result``: ``expect`` (or not), ``send``, ``finish``.

    ``messages`` are those chosen for it. In a collective everything is packed, and sent and received at once.
    """

    def __init__(
        self,
        stage: ExchangeStage,
        wire: GroupExchange,
        rank: int,
        local: torch.Tensor,
        result: torch.Tensor | None,
        reduction: Slot | None,
    ) -> None:
        self._stage, self._wire, self._result, self._reduction = stage, wire, result, reduction
        alone = not stage.quiet and (stage.apart or wire.group is None)
        self._link = wire.link(local.device, stage.tag) if alone else None
        self.messages = choose_messages(
            stage,
            rank,
            wire.order,
            tuple(local.shape),
            None if self._link is None else local.stride(),
            # What is still to be reduced is not received in place.
            None if self._link is None or result is None or reduction is not None else result.stride(),
        )
        self._into = bits(local).new_empty(sum(self.messages.unpacked))
        self._dense = iter(self._into.split_with_sizes(self.messages.unpacked))
        self._coming: list[tuple[Coming, torch.Tensor | None]] = []
        self._going: list[dist.Work] = []

    def expect(self) -> None:
        """Begin to receive."""
        if self._link is None or self._coming:
            return
        for message in self.messages.receives:
            if message.start is None:
                dense = next(self._dense)
                self._coming.append((Coming(self._link.receive(dense, message.peer)), dense))
            else:
                assert self._result is not None
                place = _stretch(bits(self._result), message.start, message.numel)
                self._coming.append((Coming(self._link.receive(place, message.peer)), None))

    def send(self, local: torch.Tensor) -> None:
        """Begin to send what ``local`` holds, which stays as it is until ``finish``."""
        self.expect()
        source = bits(local)
        out = source.new_empty(sum(self.messages.packed))
        packs = iter(out.split_with_sizes(self.messages.packed))
        for message in self.messages.sends:
            if message.start is None:
                flat = next(packs)
                sizes = [piece.numel for piece in message.pieces]
                for piece, dense in zip(message.pieces, flat.split_with_sizes(sizes), strict=True):
                    piece.pack(source, dense.view(piece.shape))
            else:
                flat = _stretch(source, message.start, message.numel)
            if self._link is not None:
                self._going.append(self._link.send(flat, message.peer))
        if self._link is None and not self._stage.quiet:
            sent = {message.peer: message.numel for message in self.messages.sends}
            received = {message.peer: message.numel for message in self.messages.receives}
            self._wire.exchange(out, sent, self._into, received, self._stage.tag)
        if self._link is None:
            self._coming = [(Coming(None), dense) for dense in self._dense]

    def finish(self, local: torch.Tensor) -> None:
        """Put what has come, and what this rank has kept of ``local``, where it goes. All was sent when it returns."""
        if self._result is not None and self._reduction is not None:
            reduce_parts(self._parts(bits(local)), self._result, self._reduction)
        elif self._result is not None:
            self._write(bits(local), bits(self._result))
        for message, _ in self._coming:
            message.wait()
        for work in self._going:
            work.wait()

    def _write(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for piece, arrival in self._stage.kept:
            if self.messages.home is None or source.data_ptr() != _stretch(target, self.messages.home, 1).data_ptr():
                piece.copy_to(source, arrival.piece, target)
        for message, (coming, flat) in zip(self.messages.receives, self._coming, strict=True):
            coming.wait()
            if flat is not None:
                sizes = [arrival.piece.numel for arrival in message.arrivals]
                for arrival, dense in zip(message.arrivals, flat.split_with_sizes(sizes), strict=True):
                    arrival.piece.unpack(target, dense.view(arrival.piece.shape))

    def _parts(self, source: torch.Tensor) -> list[list[Piece]]:
        """The pieces of each contribution, in order."""
        parts: list[list[Piece]] = [[] for _ in range(self._stage.parts)]
        for message, (coming, flat) in zip(self.messages.receives, self._coming, strict=True):
            assert flat is not None
            sizes = [arrival.piece.numel for arrival in message.arrivals]
            for arrival, dense in zip(message.arrivals, flat.split_with_sizes(sizes), strict=True):
                parts[arrival.part].append(Piece(arrival.piece, dense.view(arrival.piece.shape), coming))
        for piece, arrival in self._stage.kept:
            parts[arrival.part].append(Piece(arrival.piece, piece.dense(source), Coming(None)))
        return parts


def _stretch(tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """Elements of its memory, from ``start`` after its first one."""
    return tensor.as_strided((numel,), (1,), tensor.storage_offset() + start)
