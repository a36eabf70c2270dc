"""Relays: a slice enters a host once, and is forwarded inside the host and from host to host.

The copies of a piece that come from other hosts are grouped by host, and the hosts are cut into contiguous chains. The
source sends to the first host of each chain. That host's entry forwards the slice to its neighbours and to the entry of
the next host. The entry is the copy on the sender's rail, and another copy for the next slice, so that the slices of a
piece come in over all copies of a host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """How the copies of M pieces on other hosts are reached. Pieces that the same copies want share one of N trees.

    ``row`` (M,) is the tree of each piece; the other arrays are (N, Q), except ``groups`` and ``chains`` (N,).
    ``group`` numbers the hosts of a tree, ``member`` the copies of a host. Copies that are ``far`` have numbers:
    ``seat[n]`` is the copy with number n, and host g has the numbers ``bounds[g]:bounds[g + 1]``. ``chain`` is the
    chain of a copy's host, and ``hop`` the host's place in it.
    """

    row: Ints
    far: Bools
    group: Ints
    member: Ints
    seat: Ints
    bounds: Ints  # (N, Q + 1)
    chain: Ints
    hop: Ints
    groups: Ints
    chains: Ints

    @property
    def widest(self) -> Ints:
        """(M,): the most copies on one host, at least 1."""
        most: Ints = np.maximum(np.diff(self.bounds, axis=1).max(axis=1, initial=1), 1)
        return most[self.row]

    @property
    def heads(self) -> Ints:
        """(M,): number of hosts to which the source itself sends."""
        return np.where(self.groups > 0, self.chains, 0)[self.row]

    def chain_of(self, copies: Ints) -> Ints:
        """(M, copies): the number of each copy's chain."""
        return self.chain[:, copies][self.row]

    def beside(self, only: int | None) -> Ints:
        """Copy ``only``, and the copies that it may exchange data with: those of its host and of the next one."""
        if only is None:
            return np.arange(self.far.shape[1], dtype=np.int64)
        mine = self.group[:, only : only + 1]
        near = self.far[:, only : only + 1] & self.far & ((self.group == mine) | (self.group == mine + 1))
        found = near.any(axis=0)
        found[only] = True
        return np.flatnonzero(found).astype(np.int64)

    def direct(self) -> Ints:
        """The copies to which the source itself may send: those on the first host of a chain, and those not far."""
        return np.flatnonzero((~self.far | (self.hop == 0)).any(axis=0)).astype(np.int64)

    def ends(self, copies: Ints) -> Bools:
        """(M, copies): whether it is alone on its host, and no host comes after it."""
        g = np.maximum(self.group[:, copies], 0)
        size = np.take_along_axis(self.bounds, g + 1, axis=1) - np.take_along_axis(self.bounds, g, axis=1)
        alone: Bools = (size == 1) & (self.groups == self.chains)[:, None]
        return alone[self.row]

    def routes(self, rail: Ints, slices: int, copies: Ints) -> tuple[Ints, Ints]:
        """(the copy that forwards each slice, -1 for the source; its hop), both (W, M, S, copies). ``rail`` is (W,
        M)."""
        at = np.arange(len(self.far), dtype=np.int64)[:, None]
        g = np.maximum(self.group[:, copies], 0)
        start, up = self.bounds[at, g], self.bounds[at, np.maximum(g - 1, 0)]
        size, above = np.maximum(self.bounds[at, g + 1] - start, 1), np.maximum(start - up, 1)
        member, hop = self.member[:, copies], self.hop[:, copies]
        start, up, size, above, member, hop = (x[self.row][:, None, :] for x in (start, up, size, above, member, hop))
        turn = np.arange(slices, dtype=np.int64)[:, None] + rail[:, :, None, None]  # (W, M, S, 1)
        row, last = self.row[:, None, None], self.seat.shape[1] - 1
        entry = turn % size
        inside = member != entry
        own = self.seat[row, np.minimum(start + entry, last)]
        before = self.seat[row, np.minimum(up + turn % above, last)]
        via = np.where(inside, own, np.where(hop > 0, before, -1))
        return via, hop + inside


def trees(far: Bools, host: Ints, chains: int, row: Ints | None = None) -> Trees:
    """Trees over copies ``far`` (N, Q) on ``host`` (N, Q), equal hosts side by side, with at most ``chains`` chains
    each.

    ``row`` is the tree of each piece; without it, each piece has its own.
    """
    n, q = far.shape
    number = np.cumsum(far, axis=1) - 1
    last = np.maximum.accumulate(np.where(far, np.arange(q), -1), axis=1)
    before = np.concatenate([np.full((n, 1), -1), last[:, :-1]], axis=1)
    first = far & ((before < 0) | (np.take_along_axis(host, np.maximum(before, 0), axis=1) != host))
    group = np.cumsum(first, axis=1) - 1
    groups = first.sum(axis=1)
    bounds = np.repeat(far.sum(axis=1)[:, None], q + 1, axis=1)
    i, j = np.nonzero(first)
    bounds[i, group[i, j]] = number[i, j]
    g, many = np.maximum(group, 0), np.maximum(groups, 1)[:, None]
    cut = np.minimum(many, chains)
    chain = g * cut // many
    return Trees(
        row=np.arange(n, dtype=np.int64) if row is None else row,
        far=far,
        group=group,
        member=number - np.take_along_axis(bounds, g, axis=1),
        seat=np.argsort(~far, axis=1, kind="stable"),
        bounds=bounds,
        chain=chain,
        hop=g - -(-chain * many // cut),
        groups=groups,
        chains=cut[:, 0],
    )


def brought(slice_: Ints, mine: Bools) -> Ints:
    """For each row that is not ``mine``, the row of the same slice that is, or -1. For rows that are ``mine``, -1."""
    at = np.flatnonzero(mine)
    order = at[np.argsort(slice_[at], kind="stable")]
    if not len(order):
        return np.full(len(slice_), -1, dtype=np.int64)
    found = order[np.minimum(np.searchsorted(slice_[order], slice_), len(order) - 1)]
    return np.where(~mine & (slice_[found] == slice_), found, -1)
