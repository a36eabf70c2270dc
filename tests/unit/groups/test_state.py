"""What a newcomer loads: taken apart, sent tensor by tensor, put together; and what is refused."""

from __future__ import annotations

import collections
import random
import threading
from typing import Any

import pytest
import torch

from etha.errors import ConfigError, ProtocolError
from etha.groups.state import MemberState


class Done:
    def wait(self) -> bool:
        return True


class Wire:
    """The point-to-point calls of two members, in one process. ``spoil``: which tensor arrives changed."""

    def __init__(self, spoil: int | None = None) -> None:
        self.sent: collections.deque[torch.Tensor] = collections.deque()
        self.spoil, self.count = spoil, 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        self.sent += [tensor.clone() for tensor in tensors]
        return Done()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        for tensor in tensors:
            tensor.copy_(self.sent.popleft())
            self.count += 1
            if self.count == self.spoil:
                tensor.view(-1)[0] += 1
        return Done()


def net(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[:2](torch.ones(5, 3).cumsum(0)).square().sum().backward()  # type: ignore[index]
    optimizer.step()
    optimizer.zero_grad()


def test_a_newcomer_has_all_that_the_others_have() -> None:
    there, here = net(1), net(2)
    step(*there)
    extra: list[Any] = []
    given = {"position": 7, "rng": random.getstate(), "ids": torch.arange(3), "none": None, (1, "a"): [b"x", 0.5]}
    wire = Wire()
    MemberState(*there, (lambda: given, extra.append)).send(wire, 1, {"step": 5, "batches_committed": 9})
    counts = MemberState(*here, (lambda: None, extra.append)).receive(wire, 0)
    assert counts == {"step": 5, "batches_committed": 9}
    assert str(extra) == str([given])
    random.setstate(extra[0]["rng"])
    for _ in range(2):
        for name, value in there[0].state_dict().items():
            assert torch.equal(value, here[0].state_dict()[name]), name
        step(*there)
        step(*here)


def test_parameters_stay_where_they_are() -> None:
    model, optimizer = net(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    wire = Wire()
    MemberState(*net(2), None).send(wire, 1, {})
    MemberState(model, optimizer, None).receive(wire, 0)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_bytes_that_differ_are_noticed_before_anything_changes() -> None:
    model, optimizer = net(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wire = Wire(spoil=4)
    MemberState(*net(2), None).send(wire, 1, {})
    with pytest.raises(ProtocolError, match="its checksum differs"):
        MemberState(model, optimizer, None).receive(wire, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_that_differ_are_named() -> None:
    wire = Wire()
    MemberState(torch.nn.Linear(3, 4), None, None).send(wire, 1, {})
    with pytest.raises(ConfigError, match=r"weight is torch.float32 of \[5, 3\] here and torch.float32 of \[4, 3\]"):
        MemberState(torch.nn.Linear(3, 5), None, None).receive(wire, 0)
    wire = Wire()
    MemberState(torch.nn.Linear(3, 4), None, None).send(wire, 1, {})
    with pytest.raises(ConfigError, match=r"the models of the replicas differ: \['bias'\]"):
        MemberState(torch.nn.Linear(3, 4, bias=False), None, None).receive(wire, 0)


def test_what_cannot_be_handed_over_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hand over a lock"):
        MemberState(None, None, (threading.Lock, print)).send(Wire(), 1, {})
    with pytest.raises(ConfigError, match=r"a torch.nn.Module is needed, not int"):
        MemberState(5, None, None)
    with pytest.raises(ConfigError, match="no load_state_dict"):
        MemberState(None, 5, None)
    with pytest.raises(ConfigError, match="two functions"):
        MemberState(None, None, (1, 2))  # type: ignore[arg-type]
