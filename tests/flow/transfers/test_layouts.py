"""Plain tensors of any layout arrive in the other side's: shards, replicas, stages, Partial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.flow.team import Seat, Team, bits
from tests.flow.truth import cut, stale, whole
from tests.flow.ways import Way

pytestmark = pytest.mark.ways(*Way)

Cases = dict[str, tuple[tuple[int, ...], Placement, Placement]]


def held(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """What ``rank`` of two holds of a global tensor."""
    return cut(tensor, placement.dim, 2, rank) if isinstance(placement, Shard) else tensor.clone()


# ---- cuts ---------------------------------------------------------------------------------------

UNEVEN: Cases = {
    "rows to columns": ((13, 7), Shard(0), Shard(1)),
    "columns to rows": ((5, 9), Shard(1), Shard(0)),
    "one row": ((1, 6), Shard(0), Shard(1)),
    "one column of three": ((3, 1), Shard(0), Shard(1)),
    "to replicas": ((7,), Shard(0), Replicate()),
    "from replicas": ((3, 5), Replicate(), Shard(1)),
    "inner dim": ((2, 3, 5), Shard(2), Shard(1)),
    "as it is": ((9, 4), Shard(0), Shard(0)),
    "a number": ((), Replicate(), Replicate()),
    "nothing": ((0, 4), Shard(0), Shard(1)),
    "nothing, inside": ((4, 0), Shard(0), Shard(1)),
}


def uneven(me: Seat) -> Any:
    shapes = {name: shape for name, (shape, _, _) in UNEVEN.items()}
    lay = {name: source if me.sends else target for name, (_, source, target) in UNEVEN.items()}
    mine = {name: held(whole(shapes[name], 3), lay[name], me.rank) for name in UNEVEN}
    tensors = mine if me.sends else {name: stale(tensor) for name, tensor in mine.items()}
    result = me.move("uneven", tensors, placements={name: [p] for name, p in lay.items()}, shapes=shapes, version=3)
    assert result.version == 3
    for name, tensor in tensors.items():
        assert torch.equal(tensor, mine[name]), name
    return result.bytes


def test_shards_of_uneven_and_empty_sizes_and_replicas(team: Team) -> None:
    moved = team.run(uneven)
    received = 4 * (13 * 7 + 5 * 9 + 6 + 3 + 2 * 7 + 3 * 5 + 2 * 3 * 5 + 9 * 4 + 2)
    assert sum(moved["inference"]) == sum(moved["trainer"]) == received


#: As many dims as a tensor of Etha may have, and one more than numpy's broadcasting takes.
DEEP: Cases = {
    f"{dims} dims, {source} to {target}": ((4, *[1] * (dims - 3), 2, 3), source, target)
    for dims in (33, 64)
    for source, target in ((Shard(0), Shard(dims - 2)), (Shard(dims - 1), Replicate()), (Partial(), Shard(0)))
}


def deep(me: Seat) -> None:
    shapes = {name: shape for name, (shape, _, _) in DEEP.items()}
    lay = {name: source if me.sends else target for name, (_, source, target) in DEEP.items()}
    mine = {name: held(whole(shapes[name], 3), lay[name], me.rank) for name in DEEP}
    tensors = mine if me.sends else {name: stale(tensor) for name, tensor in mine.items()}
    for number, options in enumerate(({}, {"verify": "full", "atomic": True}, {"bucket_size": 16})):
        options = {"placements": {name: [p] for name, p in lay.items()}, "shapes": shapes, **options}
        me.move(f"deep_{number}", tensors, **options)
        for name, (_, source, _) in DEEP.items():
            factor = 2 if isinstance(source, Partial) and not me.sends else 1
            assert torch.equal(tensors[name], mine[name] * factor), (name, options)


def test_tensors_of_more_dims_than_numpy_broadcasts(team: Team) -> None:
    team.run(deep)


def unsaid(me: Seat) -> None:
    full = whole((13, 7))
    mine = cut(full, 0 if me.sends else 1, 2, me.rank)
    tensor = mine.clone() if me.sends else stale(mine)
    me.move("unsaid", {"w": tensor}, placements={"w": [Shard(0 if me.sends else 1)]})
    assert torch.equal(tensor, mine)


def test_the_global_shape_is_found_from_the_local_shapes_of_all_ranks(team: Team) -> None:
    team.run(unsaid)


# ---- names, lists, stages -----------------------------------------------------------------------


def shuffled(me: Seat) -> None:
    names = [f"layers.{i}.weight" for i in range(7)] + ["Ünïcode/with: spaces", "a", "A" * 500]
    full = {name: whole((4, 6), version) for version, name in enumerate(names)}
    order = names if me.sends else names[::-1]
    mine = {name: cut(full[name], 0 if me.sends else 1, 2, me.rank) for name in order}
    if me.rank == 1:
        mine = dict(sorted(mine.items()))
    tensors = mine if me.sends else {name: stale(tensor) for name, tensor in mine.items()}
    me.move("shuffled", tensors, placements={name: [Shard(0 if me.sends else 1)] for name in names})
    for name, tensor in tensors.items():
        assert torch.equal(tensor, mine[name]), name


def test_names_match_whatever_their_order(team: Team) -> None:
    team.run(shuffled)


def listed(me: Seat) -> None:
    """Two pairs of the same sides, a default layout each; positions count within each pair."""
    dims = {"rows": 0, "columns": 1} if me.sends else {"rows": 1, "columns": 0}
    for pair, dim in dims.items():
        me.client.init_pair(pair, me.side, me.remote, me.world, device_mesh=(2,), placements=[Shard(dim)], rank=me.rank)
    full = {"rows": [whole((5, 4), 1), whole((3, 3), 2)], "columns": [whole((7, 2), 3)]}
    mine = {pair: [cut(t, dims[pair], 2, me.rank) for t in tensors] for pair, tensors in full.items()}
    there = mine if me.sends else {pair: [stale(t) for t in tensors] for pair, tensors in mine.items()}
    order = [("rows", 0), ("columns", 0), ("rows", 1)] if me.sends else [("rows", 0), ("rows", 1), ("columns", 0)]
    shapes = {f"{pair}[{i}]": tuple(t.shape) for pair, tensors in full.items() for i, t in enumerate(tensors)}
    assert shapes["rows[1]"] == (3, 3)
    result = me.move("listed", [(there[pair][i], pair) for pair, i in order], version="v1")
    assert result.version == "v1"
    for pair, tensors in there.items():
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, mine[pair][i]), (pair, i)


def test_a_list_over_two_pairs_is_matched_by_position_within_each(team: Team) -> None:
    team.run(listed)


def stages(me: Seat) -> Any:
    """Rank 0 has the first layer, rank 1 the second, both the tied embedding; each on a mesh of its own."""
    mesh = torch.tensor([me.rank]) if me.sends else (2,)
    me.client.init_pair("stages", me.side, me.remote, me.world, device_mesh=mesh, rank=me.rank)
    full = {"embedding": whole((11, 4), 1), "layers.0": whole((6, 4), 2), "layers.1": whole((5, 4), 3)}
    if me.sends:
        mine = {name: full[name].clone() for name in ("embedding", f"layers.{me.rank}")}
        place: list[Placement] = [Replicate()]
    else:
        mine = {name: cut(tensor, 0, 2, me.rank) for name, tensor in full.items()}
        place = [Shard(0)]
    tensors = mine if me.sends else {name: stale(tensor) for name, tensor in mine.items()}
    result = me.move("stages", tensors, pair_name="stages", placements=dict.fromkeys(mine, place))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, mine[name]), name
    return result.bytes


def test_pipeline_stages_each_hold_some_names_and_tied_weights_on_two(team: Team) -> None:
    moved = team.run(stages)
    assert sum(moved["trainer"]) == 4 * 4 * (11 + 6 + 5)
    assert all(moved["trainer"]), "both stages have sent"


def silent(me: Seat) -> Any:
    """The trainer's second rank and the other side's first hold nothing."""
    full = whole((4, 4))
    there = me.rank == (0 if me.sends else 1)
    mesh = torch.tensor([me.rank])
    me.client.init_pair(
        "silent", me.side, me.remote, me.world, device_mesh=mesh, placements=[Replicate()], rank=me.rank
    )
    tensor = full.clone() if me.sends else stale(full)
    result = me.move("silent", {"w": tensor} if there else {}, pair_name="silent", version=8)
    assert not there or torch.equal(tensor, full)
    return result.version, result.bytes


def test_ranks_that_hold_nothing_take_part(team: Team) -> None:
    assert team.run(silent) == {"trainer": [(8, 64), (8, 0)], "inference": [(8, 0), (8, 64)]}


# ---- Partial ------------------------------------------------------------------------------------

REDUCTIONS = ["sum", "avg", "max", "min", "product"]


def reduced(me: Seat) -> None:
    random = torch.Generator().manual_seed(9)
    given = {
        f"{op} {dtype}": [torch.randn(7, 5, generator=random).to(dtype) for _ in range(2)]
        for op in REDUCTIONS
        for dtype in (torch.float32, torch.bfloat16)
    }
    if me.sends:
        tensors = {name: pair[me.rank].clone() for name, pair in given.items()}
        lay: dict[str, Any] = {name: [Partial(name.split()[0])] for name in given}
    else:
        tensors = {name: torch.zeros(7, 5, dtype=pair[0].dtype) for name, pair in given.items()}
        lay = {name: [Replicate()] for name in given}
    me.move("reduced", tensors, placements=lay)
    for name, (a, b) in given.items():
        if me.sends:
            assert torch.equal(tensors[name], given[name][me.rank]), f"{name}: the source has changed"
            continue
        a, b = a.float(), b.float()
        truth = {
            "sum": a + b,
            "avg": (a + b) / 2,
            "max": torch.maximum(a, b),
            "min": torch.minimum(a, b),
            "product": a * b,
        }[name.split()[0]]
        assert torch.equal(bits(tensors[name]), bits(truth.to(tensors[name].dtype))), name


def test_partial_sources_arrive_reduced_once_and_stay_as_they_were(team: Team) -> None:
    team.run(reduced)
