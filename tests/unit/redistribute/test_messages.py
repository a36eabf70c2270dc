"""Which messages go from and to the places where their elements lie, and that both ends of a link agree on them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from etha.plan import Layout
from etha.redistribute.messages import StageMessages, choose_messages
from etha.redistribute.route import make_route
from tests.unit.plan.truth import random_truth

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ORDER = tuple(range(4))


def chosen(
    source: Any, target: Any, rank: int, shape: tuple[int, ...] = (64, 64), turned: bool = False
) -> StageMessages:
    """Of float32 from one layout to another over 4 ranks; ``turned``: the result's dims lie in the other order."""
    shape, here, there = (64, 64), Layout((4,), [source]), Layout((4,), [target])
    (stage,) = make_route(shape, torch.float32, (here,), (there,), rank).stages
    local, result = (torch.empty(layout.local_shape(shape, rank)) for layout in (here, there))
    strides = result.t().contiguous().t().stride() if turned else result.stride()
    return choose_messages(stage, rank, ORDER, tuple(local.shape), local.stride(), strides)


def test_rows_are_sent_and_received_in_place() -> None:
    found = chosen(S0, R, 1)
    assert [(m.peer, m.start, m.numel) for m in found.sends] == [(peer, 0, 1024) for peer in (2, 3, 0)]
    # The one before this rank sends to it first.
    assert [(m.peer, m.start) for m in found.receives] == [(0, 0), (3, 3 * 1024), (2, 2 * 1024)]
    assert (found.packed, found.unpacked, found.home) == ((), (), 1024)


def test_columns_are_packed_or_unpacked_where_they_do_not_follow_each_other() -> None:
    gathered = chosen(S1, R, 1)
    assert [m.start for m in gathered.sends] == [0, 0, 0]
    assert gathered.unpacked == (1024,) * 3 and gathered.home is None
    turned = chosen(S0, S1, 1)
    assert turned.packed == (256,) * 3 and turned.unpacked == ()
    assert chosen(S0, R, 1, turned=True).unpacked == (1024,) * 3


def test_a_collective_takes_everything_packed_and_in_order() -> None:
    (stage,) = make_route((64, 64), torch.float32, (Layout((4,), [S0]),), (Layout((4,), [R]),), 1).stages
    found = choose_messages(stage, 1, ORDER, (16, 64), None, None)
    assert [m.peer for m in found.sends] == [m.peer for m in found.receives] == [0, 2, 3]
    assert found.packed == found.unpacked == (1024,) * 3


def test_both_ends_of_a_link_have_the_same_message() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        shape = tuple(rng.choice([1, 3, 8, 64]) for _ in range(rng.choice([1, 2, 3])))
        truths = [random_truth(rng, rng.sample(range(6), rng.choice([1, 2, 4, 6])), len(shape), None) for _ in "ab"]
        here, there = (truth.layout().with_reading("order") for truth in truths)
        sent, received = {}, {}
        for rank in range(6):
            (stage,) = make_route(shape, torch.float32, (here,), (there,), rank).stages
            held = here.local_shape(shape, rank) if rank in here else ()
            result = None if stage.shape is None else torch.empty(stage.shape).stride()
            found = choose_messages(stage, rank, tuple(range(6)), held, torch.empty(held).stride(), result)
            sent |= {(rank, out.peer): out.numel for out in found.sends}
            received |= {(coming.peer, rank): coming.numel for coming in found.receives}
        assert sent == received and 0 not in sent.values()
