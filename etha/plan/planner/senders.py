"""Who sends which slice of a piece to whom: a replica of the source, or a copy on the target side that has it.

A holder on the same agent comes first, then one on the same host; otherwise every replica sends exactly 1/P of the
bytes. With a fan-out one copy per host is sent, and the others are forwarded (relay.py). Both ends evaluate the same
closed forms, so there is nothing to negotiate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.plan.planner.m2m import MIN_SLICE, Topology
from etha.plan.planner.relay import Trees, trees

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: Most slices into which a piece is cut only to load entries and replicas evenly at once.
_MOST_SLICES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Who sends what: arrays over (turns, pieces, slices, copies); ``copies`` are the copies of the columns.

    ``column`` is the sender's place among the piece's holders. But if ``via`` is not -1, that copy forwards it, as hop
    ``depth``. ``parts[m]`` is the number of slices into which the copies from other hosts are cut along ``dim[m]``;
    ``whole`` (pieces, copies) are not cut.
    """

    copies: Ints
    column: Ints
    valid: Bools
    whole: Bools
    parts: Ints
    dim: Ints
    via: Ints | None = None
    depth: Ints | None = None
    ends: Bools | None = None  # (pieces, copies): nobody else gets it from this copy; None where so for all


def assign(
    ranks: Ints,  # (M, P) holders of each piece on the source side
    count: Ints,  # (M,)
    holders: Ints,  # (cells, Q) holders of every target cell
    cell: Ints,  # (M,) the target cell of each piece
    wanted: Ints,  # (M,) how many it has
    ordinal: Ints,  # (M,) number of the piece among those of its source cell
    degree: Ints,  # (M,) how many there are
    number: Ints,  # (M,) number of the piece among those of its target cell
    crowd: Ints,  # (M,) how many there are
    extents: Ints,  # (M, d)
    nbytes: Ints,  # (M,)
    turns: int,
    topology: Topology,
    only: int | None = None,
    chains: int | None = None,
    *,
    direct: bool = False,
) -> Assignment:
    """Choose the senders of the copies of each piece.

    A copy with a holder on its agent, or else on its host, comes from such a holder, in rotation. For the others, with
    Q copies and P replicas, each piece is cut into k slices so that Q k is a multiple of P, and unit u = q k + s goes
    to sender floor(u P / (Q k)), so that every replica sends exactly 1/P. With ``chains``, Q counts the heads of that
    many chains of hosts. ``only``: the answer for one copy (with ``chains`` also for those to which it may forward),
    equal to that in the answer for all. ``direct``: the answer for the copies to which the source itself sends.
    """
    pieces, most = ranks.shape
    q = np.arange(holders.shape[1], dtype=np.int64)
    relayed = chains is not None and not topology.one_agent and pieces > 0
    one = q if only is None else q[only : only + 1]
    tree: Trees | None = None
    if relayed and topology.apart:
        # Who wants a piece depends on its target cell alone.
        assert chains is not None
        tree = _trees_of_cells(holders, cell, wanted, topology, chains)
        one = tree.direct() if direct else tree.beside(only)
    asked = one < wanted[:, None]  # (M, copies)
    dim = np.zeros(pieces, dtype=np.int64)
    parts = np.ones(pieces, dtype=np.int64)
    if (most == 1 and not relayed) or pieces == 0:
        each = (turns, pieces, 1, asked.shape[1])  # more than one turn if other pieces of the class have more holders
        valid = np.broadcast_to((asked & (count > 0)[:, None])[:, None, :], each)
        column = np.broadcast_to(np.int64(0), each)
        return Assignment(copies=one, column=column, valid=valid, whole=np.ones_like(asked), parts=parts, dim=dim)
    alive = np.maximum(count, 1)
    # A running number of the copies of a source cell, over its pieces and the tensors of the class.
    serial = np.arange(turns, dtype=np.int64)[:, None] * degree + ordinal  # (W, M)
    if topology.one_agent:
        column = (serial[:, :, None] * wanted[:, None] + one) % alive[:, None]
        valid = np.broadcast_to(asked & (count > 0)[:, None], column.shape)
        return Assignment(
            copies=one, column=column[:, :, None, :], valid=valid[:, :, None, :], whole=np.ones_like(asked),
            parts=parts, dim=dim,
        )  # fmt: skip

    far = asked & (count > 0)[:, None]
    match = None
    entries = np.ones(pieces, dtype=np.int64)
    if topology.apart:
        near = np.zeros_like(far)
        # The number of each copy among those that come from other hosts, and how many there are.
        before, total = np.broadcast_to(one, far.shape), np.where(count > 0, wanted, 0)
    else:
        every = (q < wanted[:, None]) & (count > 0)[:, None]
        match = _match(ranks, count, holders[cell], topology)  # (M, Q, P)
        matches = match.sum(axis=2)
        remote = every & (matches == 0)
        if relayed:
            assert chains is not None
            tree = trees(remote, topology.target_host[np.maximum(holders[cell], 0)], chains)
            one = tree.direct() if direct else tree.beside(only)
        before, total = np.cumsum(remote, axis=1)[:, one] - 1, remote.sum(axis=1)
        near, far = (every & (matches > 0))[:, one], remote[:, one]
    if tree is not None:
        before, total, entries = tree.chain_of(one), np.where(count > 0, tree.heads, 0), cuts(tree.widest, crowd)
    near_column = None
    if match is not None:
        order = np.argsort(~match[:, one], axis=2, kind="stable")
        pick = (serial[:, :, None] * wanted[:, None] + one) % np.maximum(match[:, one].sum(axis=2), 1)
        order = np.broadcast_to(order, (turns, *order.shape))
        near_column = np.take_along_axis(order, pick[..., None], axis=3)[..., 0]
    parts, dim = _slices(alive, total, entries, nbytes, extents)
    units = np.maximum(total * parts, 1)
    s = np.arange(int(parts.max()), dtype=np.int64)
    unit = before[:, None, :] * parts[:, None, None] + s[:, None]  # (M, S, Q)
    column = (unit * alive[:, None, None] // units[:, None, None])[None]
    uneven = units % alive != 0
    if uneven.any():
        column = column + np.where(uneven, serial * units, 0)[:, :, None, None]  # (W, M, S, Q)
    column = np.broadcast_to(column % alive[:, None, None], (turns, *unit.shape))
    valid = far[:, None, :] & (s[:, None] < parts[:, None, None])
    if near_column is not None:
        column = np.where(near[:, None, :], near_column[:, :, None, :], column)
        valid = np.where(near[:, None, :], (s == 0)[:, None], valid)
    via = depth = ends = None
    if tree is not None:
        rail = number + np.arange(turns, dtype=np.int64)[:, None]
        via, depth = tree.routes(rail, len(s), one)
        ends = tree.ends(one)
        via, depth = np.where(far[:, None, :], via, -1), np.where(far[:, None, :], depth, 0)
    return Assignment(
        copies=one,
        column=column,
        valid=np.broadcast_to(valid, column.shape),
        whole=near | (parts == 1)[:, None],
        parts=parts,
        dim=dim,
        via=via,
        depth=depth,
        ends=ends,
    )


def _trees_of_cells(holders: Ints, cell: Ints, wanted: Ints, topology: Topology, chains: int) -> Trees:
    """One tree for each of the target cells ``cell``, all of whose copies are far."""
    some, first, row = np.unique(cell, return_index=True, return_inverse=True)
    far = np.arange(holders.shape[1]) < wanted[first][:, None]
    return trees(far, topology.target_host[np.maximum(holders[some], 0)], chains, row.reshape(-1))


def _match(ranks: Ints, count: Ints, copies: Ints, topology: Topology) -> Bools:
    """(M, Q, P): which holders are nearest to each copy: on its agent, or else on its host; otherwise none."""
    here, there = np.maximum(ranks, 0), np.maximum(copies, 0)
    held = (np.arange(ranks.shape[1]) < count[:, None])[:, None, :]
    same: Bools = held & (topology.source_agent[here][:, None, :] == topology.target_agent[there][:, :, None])
    host: Bools = held & (topology.source_host[here][:, None, :] == topology.target_host[there][:, :, None])
    return np.where(same.any(axis=2, keepdims=True), same, host)


def cuts(entries: Ints, crowd: Ints) -> Ints:
    """Number of slices of a piece for the entries of a host; 1 if its many neighbours load them evenly."""
    many = (crowd >= 32 * entries) | ((crowd >= 8 * entries) & (crowd % entries == 0))
    return np.where(many, 1, entries)


def _wanted(alive: Ints, total: Ints, entries: Ints) -> Ints:
    """Number of slices with which every replica sends the same, and every rank of a host receives the same."""
    even = np.where(total > 0, alive // np.gcd(alive, np.maximum(total, 1)), 1)
    both = np.lcm(even, entries)
    return np.where(both <= _MOST_SLICES, both, np.maximum(even, entries))


def _slices(alive: Ints, total: Ints, entries: Ints, nbytes: Ints, extents: Ints) -> tuple[Ints, Ints]:
    """Number of slices of pieces with ``total`` copies from other hosts, and the dim along which they are cut."""
    parts = np.where(total > 0, _wanted(alive, total, entries), 1)
    parts = np.minimum(parts, np.maximum(nbytes // MIN_SLICE, 1))
    if not extents.shape[1]:
        return np.ones_like(parts), np.zeros_like(parts)
    long = extents >= parts[:, None]
    dim = np.where(long.any(axis=1), long.argmax(axis=1), extents.argmax(axis=1))
    if (entries > 1).any():
        # Entries receive the same if the slices are equal, or have many rows each.
        even = long & ((extents % parts[:, None] == 0) | (extents >= _MOST_SLICES * parts[:, None]))
        dim = np.where(even.any(axis=1) & (entries > 1), even.argmax(axis=1), dim)
    parts = np.minimum(parts, np.take_along_axis(extents, dim[:, None], axis=1)[:, 0])
    return np.maximum(parts, 1), dim


def always_even(replicas: int, copies: int, entries: int, nbytes: int, extents: Sequence[int]) -> bool:
    """Whether every piece of at least these bytes and elements per dim is shared evenly, whatever its turn."""
    parts = int(_wanted(*(np.array([n], dtype=np.int64) for n in (replicas, copies, entries)))[0])
    whole = parts % entries == 0 and (copies * parts) % replicas == 0
    return whole and parts <= max(nbytes // MIN_SLICE, 1) and (parts == 1 or max(extents, default=0) >= parts)
