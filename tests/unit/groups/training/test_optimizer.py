"""An optimizer wrapper steps exactly if the members commit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etha.errors import ConfigError
from etha.groups.training.optimizer import Optimizer

from .test_sampler import Seat
from .threads import Quorum


class Fickle(Seat):
    """Commits every second step, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def begin(self) -> Quorum:
        self.asked.append("begin")
        return super().begin()

    def commit(self, ok: bool = True) -> bool:
        self.asked.append("commit")
        return super().commit(len(self.asked) % 4 == 2)


def test_a_step_begins_in_zero_grad_and_commits_in_step() -> None:
    members, net = Fickle(), nn.Linear(2, 1)
    optimizer = Optimizer(members, torch.optim.SGD(net.parameters(), lr=1.0))
    for counts in (True, False, True):
        before = net.weight.clone()
        optimizer.zero_grad()
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        assert optimizer.committed is counts
        assert torch.equal(net.weight, before) is not counts
    assert members.asked == ["begin", "commit"] * 3
    assert optimizer.quorum.step == 1


def test_schedulers_hooks_and_checkpoints_see_the_wrapped_optimizer() -> None:
    net = nn.Linear(2, 1)
    inner = torch.optim.AdamW(net.parameters(), lr=1.0)
    optimizer = Optimizer(Seat(), inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.zero_grad()
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert seen == ["pre", "post"]
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1)
    assert optimizer.state_dict()["state"].keys() == inner.state_dict()["state"].keys()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert optimizer.defaults["lr"] == 1.0
    assert "AdamW" in repr(optimizer)
    with pytest.raises(AttributeError):
        optimizer.nonsense  # noqa: B018


def test_a_closure_is_refused() -> None:
    members = Fickle()
    optimizer = Optimizer(members, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 1.0)
    assert members.asked == []
