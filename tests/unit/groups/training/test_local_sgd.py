"""LocalSGD and DiLoCo over replicas that come and go equal what one process computes for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from etha.errors import ConfigError
from etha.groups.training.local_sgd import DiLoCo, LocalSGD

from .test_sampler import Seat
from .threads import ThreadGroup, World, run_all


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def inner_step(net: nn.Module, optimizer: torch.optim.Optimizer, replica: int, number: int) -> None:
    data = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * replica + number))
    optimizer.zero_grad()
    net(data).pow(2).mean().backward()
    optimizer.step()


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def assert_close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def mean(all_weights: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*all_weights, strict=True)]


def put(net: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(net.parameters(), values, strict=True):
            p.copy_(value)


class Replica:
    """A replica that trains with one of the two methods."""

    def __init__(self, world: World, number: int) -> None:
        self.number, self.name = number, f"replica {number}"
        self.net = model()
        self.inner = torch.optim.SGD(self.net.parameters(), lr=0.2)
        self.members = world.members(self.name)
        self.group = ThreadGroup(self.members)
        self.steps = 0

    def run(self, method: LocalSGD | DiLoCo, steps: int) -> None:
        with method:
            for _ in range(steps):
                inner_step(self.net, self.inner, self.number, self.steps)
                self.steps += 1


# ---- LocalSGD ---------------------------------------------------------------------------------


def local(replica: Replica, every: int = 3) -> LocalSGD:
    return LocalSGD(replica.members, replica.net, replica.inner, every, process_group=replica.group)


def test_local_sgd_averages_every_few_steps() -> None:
    world = World()
    replicas = [Replica(world, k) for k in range(3)]
    run_all(*(lambda r=r: r.run(local(r), 6) for r in replicas))
    nets = [model() for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.2) for net in nets]
    for number in range(6):
        for k in range(3):
            inner_step(nets[k], optimizers[k], k, number)
        if number % 3 == 2:
            average = mean([weights(net) for net in nets])
            for net in nets:
                put(net, average)
    for replica in replicas:
        assert_close(weights(replica.net), weights(nets[0]))
        assert all(torch.equal(a, b) for a, b in zip(weights(replica.net), weights(replicas[0].net), strict=True))
        assert replica.members.step == 2


def test_local_sgd_goes_on_without_a_replica_and_keeps_its_weights_if_a_synchronization_does_not_count() -> None:
    world = World()
    a, b = Replica(world, 0), Replica(world, 1)
    run_all(lambda: a.run(local(a), 3), lambda: b.run(local(b), 3))
    after = weights(a.net)

    def dies() -> None:
        b.members.begin()
        world.leave_in_call(b.name)

    sgd = local(a)
    run_all(lambda: a.run(sgd, 3), dies)
    alone = model()
    put(alone, after)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.2)
    for number in range(3, 6):
        inner_step(alone, optimizer, 0, number)
    assert_close(weights(a.net), weights(alone))
    assert a.members.step == 1
    a.run(sgd, 3)
    assert a.members.step == 2


def test_local_sgd_takes_a_newcomer() -> None:
    world = World()
    a = Replica(world, 0)
    a.members.state(lambda: weights(a.net), lambda given: put(a.net, given))
    a.run(local(a), 3)
    b = Replica(world, 1)
    b.members.state(lambda: weights(b.net), lambda given: put(b.net, given))
    b.steps = 3
    run_all(lambda: a.run(local(a), 6), lambda: b.run(local(b), 6))
    assert_close(weights(a.net), weights(b.net))
    assert a.members.step == b.members.step == 3


def test_leaving_the_context_ends_the_synchronization() -> None:
    members, net = Seat(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with LocalSGD(members, net, optimizer, 1, process_group=None):
        pass
    inner_step(net, optimizer, 0, 0)
    assert members.steps == 0


# ---- DiLoCo -----------------------------------------------------------------------------------


def outer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def diloco(replica: Replica, fragments: int = 1, shared: bool = True, **more: object) -> DiLoCo:
    parts = [replica.net] if fragments == 1 else [replica.net[0], replica.net[2]]
    optimizers = outer(replica.net.parameters()) if shared else [outer(part.parameters()) for part in parts]
    return DiLoCo(replica.members, parts, replica.inner, optimizers, 4, process_group=replica.group, **more)


class Reference:
    """DiLoCo of several replicas in one process, written from the papers."""

    def __init__(self, count: int, fragments: int, delay: int = 0, alpha: float = 0.0) -> None:
        self.nets = [model() for _ in range(count)]
        self.inner = [torch.optim.SGD(net.parameters(), lr=0.2) for net in self.nets]
        self.ranges = [range(4)] if fragments == 1 else [range(2), range(2, 4)]
        self.globals = weights(self.nets[0])
        self.momentum = [torch.zeros_like(w) for w in self.globals]
        self.started = [False] * 4
        self.delay, self.alpha, self.interval = delay, alpha, 4 // fragments

    def run(self, steps: int) -> None:
        synced = 0
        for number in range(steps):
            for k, net in enumerate(self.nets):
                inner_step(net, self.inner[k], k, number)
            chosen = self.ranges[synced % len(self.ranges)]
            if (number + 1) % self.interval == (self.interval - self.delay) % self.interval:
                sent = [[self.globals[i] - w[i] for i in range(4)] for w in (weights(net) for net in self.nets)]
            if (number + 1) % self.interval == 0:
                self.use(mean(sent), chosen)
                synced += 1

    def use(self, gradient: list[torch.Tensor], chosen: range) -> None:
        own = [weights(net) for net in self.nets]
        for i in chosen:
            # torch's SGD with Nesterov momentum: buf = m * buf + g; p -= lr * (g + m * buf)
            self.momentum[i] = 0.9 * self.momentum[i] + gradient[i] if self.started[i] else gradient[i].clone()
            self.started[i] = True
            self.globals[i] = self.globals[i] - 0.7 * (gradient[i] + 0.9 * self.momentum[i])
        for k, net in enumerate(self.nets):
            mixed = [
                self.globals[i] + self.alpha * (own[k][i] - self.globals[i]) if i in chosen else own[k][i]
                for i in range(4)
            ]
            put(net, mixed)


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "shared"),
    [(1, 0, 0.0, True), (1, 2, 0.0, True), (2, 0, 0.0, False), (2, 0, 0.0, True), (2, 1, 0.25, False)],
)
def test_diloco_equals_the_reference(fragments: int, delay: int, alpha: float, shared: bool) -> None:
    world = World()
    replicas = [Replica(world, k) for k in range(3)]
    more = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    run_all(*(lambda r=r: r.run(diloco(r, fragments, shared, **more), 12) for r in replicas))
    expected = Reference(3, fragments, delay, alpha)
    expected.run(12)
    for k, replica in enumerate(replicas):
        assert_close(weights(replica.net), weights(expected.nets[k]))


def test_a_synchronization_that_does_not_count_goes_back() -> None:
    world = World()
    a, b = Replica(world, 0), Replica(world, 1)
    method = diloco(a)
    run_all(lambda: a.run(method, 4), lambda: b.run(diloco(b), 4))
    before = weights(a.net)

    def dies() -> None:
        b.members.begin()
        world.leave_in_call(b.name)

    run_all(lambda: a.run(method, 4), dies)
    assert a.members.step == 1
    assert_close(weights(a.net), before)
    a.run(method, 4)
    assert a.members.step == 2
    assert not torch.equal(weights(a.net)[0], before[0])


def test_a_newcomer_of_diloco_loads_weights_and_outer_state() -> None:
    world = World()
    a = Replica(world, 0)
    method = diloco(a)
    a.members.state(*state_of(a, method))
    a.run(method, 8)
    b = Replica(world, 1)
    newer = diloco(b)
    b.members.state(*state_of(b, newer))
    run_all(lambda: a.run(method, 8), lambda: b.run(newer, 8))
    assert a.members.step == b.members.step == 4
    assert_close(weights(a.net), weights(b.net))
    assert_close(method.state_dict()["fragments"][0]["weights"], newer.state_dict()["fragments"][0]["weights"])


def state_of(replica: Replica, method: DiLoCo) -> tuple[Callable[[], object], Callable[[tuple], None]]:
    def load(given: tuple) -> None:
        put(replica.net, given[0])
        method.load_state_dict(given[1])

    return lambda: copy.deepcopy((weights(replica.net), method.state_dict())), load


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"sync_every": 3, "fragments": 2}, "multiple"),
        ({"sync_every": 0}, "multiple"),
        ({"fragment_sync_delay": 4}, "less than 4"),
        ({"fragment_update_alpha": 1.5}, "between 0 and 1"),
        ({"optimizers": 2}, "2 outer optimizers"),
    ],
)
def test_wrong_arguments_are_refused(more: dict, text: str) -> None:
    net = model()
    parts = [net[0], net[2]][: more.pop("fragments", 1)]
    optimizers = [outer(net.parameters())] * more.pop("optimizers", len(parts))
    every = more.pop("sync_every", 4)
    with pytest.raises(ConfigError, match=text):
        DiLoCo(Seat(), parts, optimizers[0], optimizers, every, process_group=None, **more)
    with pytest.raises(ConfigError, match="at least 1"):
        LocalSGD(Seat(), net, optimizers[0], 0, process_group=None)
