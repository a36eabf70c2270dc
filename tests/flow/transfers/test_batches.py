"""Life of batches: several at once, both directions, registered again, closed, numbered without a gap."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from tests.flow.team import Seat, Team
from tests.flow.truth import cut, stale, whole

pytestmark = pytest.mark.ways("tcp", "local", "host", "three")


def lay(me: Seat) -> list[Any]:
    """The trainer cuts rows, the inference side columns."""
    return [Shard(0 if me.sends else 1)]


def mine(me: Seat, version: int = 0, shape: tuple[int, ...] = (6, 5)) -> torch.Tensor:
    """What this worker holds of a version of a tensor that is laid out as ``lay`` says."""
    return cut(whole(shape, version), 0 if me.sends else 1, 2, me.rank)


def register(me: Seat, batch: str, tensor: torch.Tensor, **options: Any) -> Any:
    options = {"pair_name": "weights", "placements": {"w": lay(me)}, **options}
    return me.client.register_tensors(batch, {"w": tensor}, **options)


# ---- several at once ----------------------------------------------------------------------------


def all_at_once(me: Seat) -> list[int]:
    """Eight batches over three pairs; each rank begins its transfers in an order of its own."""
    pairs = ["one", "two", "three"]
    for pair in pairs:
        me.client.init_pair(pair, me.side, me.remote, me.world, (2,), rank=me.rank)
    handles, tensors, truths = [], [], []
    for i in range(8):
        truths.append(mine(me, i, (40 + i, 50)))
        tensors.append(truths[i].clone() if me.sends else stale(truths[i]))
        handles.append(register(me, f"batch{i}", tensors[i], pair_name=pairs[i % 3], shapes={"w": (40 + i, 50)}))
    order = list(range(8))
    random.Random(f"{me.side}{me.rank}").shuffle(order)
    futures = {}
    for i in order:
        futures[i] = handles[i].transfer(
            "send" if me.sends else "recv", blocking=False, version=i if me.sends else None
        )
    results = [futures[i].result(15) for i in range(8)]
    assert [r.version for r in results] == list(range(8))
    assert all(torch.equal(t, truth) for t, truth in zip(tensors, truths, strict=True))
    for handle in handles:
        handle.close()
    return [r.seq for r in results]


def test_batches_over_several_pairs_move_at_the_same_time(team: Team) -> None:
    returned = team.run(all_at_once)
    assert returned["trainer"] == returned["inference"] == [[1] * 8] * 2


def queued(me: Seat) -> None:
    """Several calls on one batch wait in line: the oldest of each rank goes first."""
    values = torch.zeros(4) if me.sends else torch.full((4,), -1.0)
    with register(me, "queued", values, placements={"w": [Replicate()]}) as handle:
        verb = "send" if me.sends else "recv"
        futures = [handle.transfer(verb, blocking=False, version=v if me.sends else None) for v in range(4)]
        results = [future.result(10) for future in futures]
    assert [(r.seq, r.version) for r in results] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert not values.any()


def test_waiting_calls_of_a_rank_are_served_in_their_order(team: Team) -> None:
    team.run(queued)


def several_pairs_in_one_batch(me: Seat) -> dict[str, Any]:
    for pair in ("left", "right"):
        me.client.init_pair(pair, me.side, me.remote, me.world, (2,), lay(me), rank=me.rank)
    truths = [mine(me, 1), mine(me, 2)]
    tensors = truths if me.sends else [stale(t) for t in truths]
    with me.client.register_tensors("over_both", [(tensors[0], "left"), (tensors[1], "right")]) as handle:
        handle.transfer("send" if me.sends else "recv", version="x" if me.sends else None)
        assert all(torch.equal(t, truth) for t, truth in zip(tensors, truths, strict=True))
        status = me.client.status()
        handle.transfer("send" if me.sends else "recv")  # nobody closes the batch before all have looked
    return {b["pair"]: (b["seq"], b["version"]) for b in status["batches"] if b["batch"] == "over_both"}


def test_a_batch_over_two_pairs_is_one_transfer_and_shows_in_both(team: Team) -> None:
    returned = team.run(several_pairs_in_one_batch)
    assert returned["trainer"][0] == {"left": (1, "x"), "right": (1, "x")}


# ---- both directions ----------------------------------------------------------------------------


def there_and_back(me: Seat) -> list[Any]:
    """The trainer sends, the other side doubles and sends back, three times."""
    values = mine(me, 0) if me.sends else stale(mine(me, 0))
    said = []
    with register(me, "there_and_back", values, direction="both") as handle:
        for lap in range(3):
            if me.sends:
                said.append(handle.transfer("send", version=f"there {lap}"))
                values.fill_(-1)
                said.append(handle.transfer("recv"))
            else:
                said.append(handle.transfer("recv"))
                values.mul_(2)
                said.append(handle.transfer("send", version=f"back {lap}"))
            assert torch.equal(values, mine(me, 0) * 2 ** (lap + 1))
            assert handle.version == f"back {lap}"
    return [(r.seq, r.version, r.direction) for r in said]


def test_a_batch_moves_in_both_directions_under_one_sequence(team: Team) -> None:
    returned = team.run(there_and_back)
    labels = [f"{way} {lap}" for lap in range(3) for way in ("there", "back")]
    assert returned["trainer"][0] == [(i + 1, label, ("send", "recv")[i % 2]) for i, label in enumerate(labels)]
    assert returned["inference"][1] == [(i + 1, label, ("recv", "send")[i % 2]) for i, label in enumerate(labels)]


# ---- handles ------------------------------------------------------------------------------------


def registered_again(me: Seat) -> None:
    values = mine(me, 1)
    tensor = values.clone() if me.sends else stale(values)
    first = register(me, "again", tensor)
    second = register(me, "again", tensor)
    assert second.batch_id == first.batch_id == "again"
    second.transfer("send" if me.sends else "recv")
    assert torch.equal(tensor, values)
    with pytest.raises(etha.RegistrationError, match="other tensors"):
        register(me, "again", tensor.clone())
    with pytest.raises(etha.RegistrationError, match="other tensors"):
        me.client.register_tensors("again", {"v": tensor}, pair_name="weights", placements={"v": lay(me)})
    first.transfer("send" if me.sends else "recv")
    first.close()
    first.close()
    with pytest.raises(etha.RegistrationError, match="again"):
        second.transfer("send" if me.sends else "recv")


def test_the_same_tensors_under_an_open_id_change_nothing_and_others_are_refused(team: Team) -> None:
    team.run(registered_again)


#: Enough that what is said late of one life would meet the next.
LIVES = 20


def closed_and_free(me: Seat) -> list[int]:
    """The id is taken again by other tensors of other names, shapes and layouts; seq goes on."""
    seqs = []
    for life in range(LIVES):
        truth = mine(me, life, (5 + life, 4))
        tensor = truth.clone() if me.sends else stale(truth)
        with me.client.register_tensors(
            "phoenix", {f"w{life}": tensor}, pair_name="weights", placements={f"w{life}": lay(me)}
        ) as handle:
            seqs.append(handle.transfer("send" if me.sends else "recv").seq)
            assert torch.equal(tensor, truth)
    return seqs


def test_a_closed_id_is_free_again_and_its_sequence_goes_on(team: Team) -> None:
    returned = team.run(closed_and_free)
    assert returned["trainer"] == returned["inference"] == [list(range(1, LIVES + 1))] * 2


def moved_away(me: Seat) -> str:
    parameter = torch.nn.Parameter(mine(me, 1))
    with register(me, "moved", parameter) as handle:
        handle.transfer("send" if me.sends else "recv")
        old, parameter.data = parameter.data, parameter.data.clone()
        with pytest.raises(etha.RegistrationError) as caught:
            handle.transfer("send" if me.sends else "recv")
        parameter.data = old
        assert handle.transfer("send" if me.sends else "recv").seq == 2, "the refused calls have consumed nothing"
    return str(caught.value)


def test_a_tensor_whose_memory_has_changed_is_refused_by_name(team: Team) -> None:
    for text in chain(*team.run(moved_away).values()):
        assert "'w'" in text and "memory" in text


def summary(me: Seat) -> Any:
    with register(me, "summary", mine(me)) as handle:
        return handle.plan, handle.version


def test_a_handle_tells_its_plan_and_that_nothing_has_been_received(team: Team) -> None:
    for plan, version in chain(*team.run(summary).values()):
        assert version is None
        assert plan["tensors"] == 1
        assert {name: way["bytes"] for name, way in plan["directions"].items()} == {
            "trainer->inference": 120,
            "inference->trainer": 120,
        }
