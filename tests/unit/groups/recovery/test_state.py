"""What a newcomer loads: taken apart, given memory in its own sharding, put together; and what is refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from etha.errors import ConfigError, ProtocolError
from etha.groups.recovery.state import Landing, MemberState, StateFrame
from etha.groups.recovery.values import put_together


def net(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[:2](torch.ones(5, 3).cumsum(0)).square().sum().backward()  # type: ignore[index]
    optimizer.step()
    optimizer.zero_grad()


def arrived(source: MemberState, newcomer: MemberState) -> Landing:
    """What the newcomer has when all bytes have come, of tensors that both have whole."""
    frame, tensors = source.take(5, 9)
    landing = newcomer.expect(StateFrame.unpacked(frame.packed()))
    for name, tensor in landing.tensors.items():
        tensor.copy_(tensors[name])
    return landing


def test_a_newcomer_has_all_that_the_others_have() -> None:
    there, here = net(1), net(2)
    step(*there)
    extra: list[Any] = []
    given = {"position": 7, "rng": random.getstate(), "ids": torch.arange(3), "none": None, (1, "a"): [b"x", 0.5]}
    newcomer = MemberState(*here, (lambda: None, extra.append))
    landing = arrived(MemberState(*there, (lambda: given, extra.append)), newcomer)
    newcomer.load(landing)
    assert (landing.frame.step, landing.frame.batches_committed) == (5, 9)
    assert str(extra) == str([given])
    random.setstate(extra[0]["rng"])
    for _ in range(2):
        for name, value in there[0].state_dict().items():
            assert torch.equal(value, here[0].state_dict()[name]), name
        step(*there)
        step(*here)


def test_parameters_stay_where_they_are_and_nothing_changes_before_the_load() -> None:
    model, optimizer = net(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    newcomer = MemberState(model, optimizer, None)
    landing = arrived(MemberState(*net(2), None), newcomer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    newcomer.load(landing)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_a_tied_weight_travels_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    _, tensors = MemberState(model, None, None).take(0, 0)
    assert sorted(tensors) == ["model/0.bias", "model/0.weight", "model/1.bias"]
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    other[1].weight = other[0].weight
    newcomer = MemberState(other, None, None)
    newcomer.load(arrived(MemberState(model, None, None), newcomer))
    assert torch.equal(other[1].weight, model[0].weight)


class Counter(torch.nn.Module):
    """A module whose state has more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_of_modules_is_set() -> None:
    there, here = torch.nn.Sequential(Counter()), torch.nn.Sequential(Counter())
    there[0].count = 7
    newcomer = MemberState(here, None, None)
    newcomer.load(arrived(MemberState(there, None, None), newcomer))
    assert here[0].count == 7


def test_plain_values_that_differ_are_noticed() -> None:
    data = bytearray(MemberState(*net(1), None).take(0, 0)[0].packed())
    data[-1] ^= 1
    with pytest.raises(ProtocolError, match="their checksum differs"):
        StateFrame.unpacked(bytes(data))


def test_models_that_differ_are_named() -> None:
    with pytest.raises(ConfigError, match=r"weight is torch.float32 of \[5, 3\] here and torch.float32 of \[4, 3\]"):
        arrived(MemberState(torch.nn.Linear(3, 4), None, None), MemberState(torch.nn.Linear(3, 5), None, None))
    with pytest.raises(ConfigError, match=r"the models of the replicas differ: \['bias'\]"):
        arrived(
            MemberState(torch.nn.Linear(3, 4), None, None), MemberState(torch.nn.Linear(3, 4, bias=False), None, None)
        )
    with pytest.raises(ConfigError, match="one replica names a model or an optimizer"):
        arrived(MemberState(*net(1), None), MemberState(net(1)[0], None, None))


def test_what_cannot_be_handed_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot hand over extra/mine/0, a lock"):
        MemberState(None, None, (lambda: {"mine": [threading.Lock()]}, print)).take(0, 0)
    model = torch.nn.Linear(3, 4)
    model.register_buffer("scale", torch.ones(1, 3).expand(4, 3))
    with pytest.raises(ConfigError, match=r"cannot hand over model/scale: it was expanded"):
        MemberState(model, None, None).check()
    MemberState(None, None, (lambda: torch.ones(1).expand(4), print)).check()
    with pytest.raises(ConfigError, match=r"a torch.nn.Module is needed, not int"):
        MemberState(5, None, None)
    with pytest.raises(ConfigError, match="no load_state_dict"):
        MemberState(None, 5, None)
    with pytest.raises(ConfigError, match="two functions"):
        MemberState(None, None, (1, 2))  # type: ignore[arg-type]


@pytest.fixture
def world() -> Iterator[Any]:
    """The second of two ranks, whose peer is not there."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(model: torch.nn.Module, mesh: Any, placement: Any) -> torch.nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            new = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))
            module.register_parameter(name, new)
    return model


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_memory_is_laid_out_as_the_newcomer_shards_it(world: Any, placement: Any) -> None:
    """The newcomer's optimizer has made no step, so its state is laid out like its parameters."""
    torch.manual_seed(1)
    there = torch.nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.Adam(there.parameters())
    there(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    here = sharded(torch.nn.Linear(6, 4, bias=False), world, placement)
    newcomer = MemberState(here, torch.optim.Adam(here.parameters()), None)
    landing = newcomer.expect(MemberState(there, optimizer, None).take(1, 1)[0])
    local = here.weight.to_local().shape
    for name in ("model/weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"):
        tensor = landing.tensors[name]
        assert isinstance(tensor, DTensor), name
        assert tensor.shape == (4, 6) and tensor.placements == (placement,), name
        assert tensor.to_local().shape == local, name
    assert not isinstance(landing.tensors["optimizer/state/0/step"], DTensor)
    assert set(landing.sharded) == {"model/weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}
    for tensor in landing.tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(3)
    newcomer.load(landing)
    assert (here.weight.to_local() == 3).all()


def test_a_sharded_tensor_of_extra_needs_one_here(world: Any) -> None:
    average = distribute_tensor(torch.zeros(4), world, [Shard(0)])
    frame, _ = MemberState(None, None, (lambda: {"average": average}, print)).take(0, 0)
    with pytest.raises(ConfigError, match=r"extra/average is a DTensor of .* create it before the first begin"):
        MemberState(None, None, (dict, print)).expect(frame)
    whole = distribute_tensor(torch.zeros(4), world, [Replicate()])
    landing = MemberState(None, None, (lambda: {"average": whole}, print)).expect(frame)
    average = landing.tensors["extra/average"]
    assert isinstance(average, DTensor) and average.to_local().shape == (4,)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1}, "extra/it, a set"),
        (2**70, "does not fit into 64 bits"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(2, 2).to_sparse(), "must be dense"),
    ],
)
def test_what_cannot_be_handed_over_is_named_before_anybody_joins(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MemberState(None, None, (lambda: {"it": value}, print)).check()


def test_numbers_of_other_classes_arrive_as_plain_ones() -> None:
    class Word(str):
        __slots__ = ()

    given = [np.float64(0.5), np.int64(3), np.bool_(True), Word("a"), IntEnum("Level", "low")(1)]
    state = MemberState(None, None, (lambda: given, print))
    frame = StateFrame.unpacked(state.take(0, 0)[0].packed())
    arrived = put_together(frame.values["extra"], {})
    assert arrived == [0.5, 3, True, "a", 1]
    assert [type(one) for one in arrived] == [float, int, bool, str, int]
