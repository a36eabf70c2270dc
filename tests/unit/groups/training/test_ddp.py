"""DDP with replicas that come and go: the same calls in every step, the weights of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from etha.errors import ConfigError, GroupMismatchError
from etha.groups.managed import ManagedProcessGroup
from etha.groups.plain_ddp import plain_ddp_hint, plain_ddp_modules
from etha.groups.schedule import Kind
from etha.groups.training.ddp import DistributedDataParallel

from ..echo import EchoGroup
from .threads import Members, ThreadGroup, World, run_all


def model(**more: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def loss(net: nn.Module, number: int) -> torch.Tensor:
    return net(batch(number)).pow(2).mean()


def calls_of_steps(ddp: nn.Module, group: EchoGroup, steps: int = 3) -> list[list[tuple[str, int]]]:
    found = []
    for number in range(steps):
        group.calls.clear()
        loss(ddp, number).backward()
        found.append([(call.kind.name, call.inputs[0].numel()) for call in group.calls])
    return found


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_all_steps_make_the_same_calls(options: dict) -> None:
    group = EchoGroup(0, 2)
    steps = calls_of_steps(DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.02, **options), group)
    assert steps[0] == steps[1] == steps[2]
    assert len(steps[0]) > 1


def test_nothing_but_gradients_is_reduced_and_the_last_layer_comes_first() -> None:
    group = EchoGroup(0, 2)
    ddp = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.02)
    steps = calls_of_steps(ddp, group)
    assert sum(numel for _, numel in steps[0]) == sum(p.numel() for p in ddp.parameters())
    assert steps[0][0][1] < steps[0][-1][1] + 64 * 64


def test_torchs_ddp_makes_other_calls_in_its_first_two_steps() -> None:
    """If torch ever changes that, the whole of ddp.py can go."""
    group = EchoGroup(0, 2)
    steps = calls_of_steps(nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.02), group)
    assert len({str(each) for each in steps}) == 3


def test_the_constructor_leaves_gradients_and_weights_alone() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net[0].weight.grad = torch.ones_like(net[0].weight)
    DistributedDataParallel(net, process_group=EchoGroup(0, 2))
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert net[2].weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_hooks_of_parameters_see_no_gradient_before_the_first_step() -> None:
    net, seen = model(), []
    net[0].weight.register_post_accumulate_grad_hook(seen.append)
    group = EchoGroup(0, 2)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.02)
    assert seen == []
    steps = calls_of_steps(ddp, group)
    assert len(seen) == 3
    assert steps[0] == steps[1] == steps[2]


def test_complex_and_mixed_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.b = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.c = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a.abs() * self.b * self.c * x).sum()

    ddp = DistributedDataParallel(Mixed(), process_group=EchoGroup(0, 1))
    ddp(torch.ones(3)).backward()
    assert ddp.module.a.grad is not None
    assert ddp.module.b.grad is not None


def test_a_static_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match="static_graph"):
        DistributedDataParallel(model(), process_group=EchoGroup(), static_graph=True)


@pytest.mark.slow
def test_a_plain_ddp_over_the_group_is_found_and_named() -> None:
    group, other = EchoGroup(), EchoGroup()
    ours = DistributedDataParallel(model(), process_group=group)
    assert plain_ddp_hint(group) == ""
    plain = nn.parallel.DistributedDataParallel(model(), process_group=group)
    assert plain_ddp_modules(group) == [plain]
    assert "etha.groups.DistributedDataParallel" in plain_ddp_hint(group)
    assert plain_ddp_hint(other) == ""
    nn.parallel.DistributedDataParallel(model(), process_group=other, find_unused_parameters=True)
    assert plain_ddp_hint(other) == "", "it never rebuilds"
    assert isinstance(ours, nn.parallel.DistributedDataParallel)


# ---- replicas that come and go ----------------------------------------------------------------


class Replica:
    """A training loop; ``log`` has the numbers of the batches of each committed step."""

    def __init__(self, world: World, name: str, ddp: type[nn.Module] = DistributedDataParallel) -> None:
        self.members: Members = world.members(name)
        self.group = ThreadGroup(self.members)
        self.net = model()
        self.ddp = ddp(self.net, process_group=self.group, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.members.state(self.get, self.set)
        self.log: list[list[int]] = []
        self.reached = threading.Event()

    def get(self) -> dict:
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def set(self, state: dict) -> None:
        self.net.load_state_dict(state)

    def steps(self, until: int) -> Iterator[bool]:
        while self.members.step < until:
            self.optimizer.zero_grad()
            quorum = self.members.begin()
            loss(self.ddp, quorum.batches_committed + quorum.rank).backward()
            committed = self.members.commit()
            if committed:
                self.optimizer.step()
                first = quorum.batches_committed
                self.log.append(list(range(first, first + quorum.size)))
            yield committed

    def run(self, until: int) -> list[bool]:
        return list(self.steps(until))


def one_process(log: list[list[int]]) -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batches in log:
        optimizer.zero_grad()
        torch.stack([loss(net, number) for number in batches]).mean().backward()
        optimizer.step()
    return net


def assert_same_weights(replicas: list[Replica], log: list[list[int]]) -> None:
    expected = one_process(log).state_dict()
    for replica in replicas:
        for name, value in replica.net.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(value, replicas[0].net.state_dict()[name])


def test_a_newcomer_joins_and_a_replica_leaves() -> None:
    world = World()
    a, b = Replica(world, "a"), Replica(world, "b")
    run_all(lambda: a.run(3), lambda: b.run(3))
    c = Replica(world, "c")
    outcomes = run_all(lambda: a.run(7), lambda: b.run(7), lambda: c.run(7))
    assert all(all(each) for each in outcomes), "a join costs no step"
    world.leave("b")
    run_all(lambda: a.run(9), lambda: c.run(9))
    assert [len(batches) for batches in a.log] == [2, 2, 2, 3, 3, 3, 3, 2, 2]
    assert_same_weights([a, c], a.log)
    assert [number for batches in a.log for number in batches] == list(range(sum(map(len, a.log))))


def test_a_replica_that_dies_in_backward_costs_a_step() -> None:
    world = World()
    a, b = Replica(world, "a"), Replica(world, "b")

    def dies() -> None:
        for _ in b.steps(2):
            pass
        b.members.begin()
        world.leave_in_call("b")

    outcomes, _ = run_all(lambda: a.run(5), dies)
    assert outcomes.count(False) == 1
    assert [len(batches) for batches in a.log] == [2, 2, 1, 1, 1]
    assert_same_weights([a], a.log)


def test_torchs_ddp_does_not_survive_a_newcomer() -> None:
    """Why this class is there: no step counts after the join."""
    world = World()
    plain = nn.parallel.DistributedDataParallel
    a = Replica(world, "a", plain)
    a.run(3)
    b = Replica(world, "b", plain)

    def some(replica: Replica) -> list[bool]:
        return [committed for committed, _ in zip(replica.steps(100), range(2), strict=False)]

    assert run_all(lambda: some(a), lambda: some(b))[0][0] is False
    assert plain_ddp_hint(a.group)


def test_kinds_of_the_tests_group_are_those_of_ddp() -> None:
    group = EchoGroup(0, 2)
    calls_of_steps(
        DistributedDataParallel(nn.Sequential(model(), nn.BatchNorm1d(4).double()), process_group=group), group
    )
    assert {call.kind for call in group.calls} <= {Kind.ALLREDUCE, Kind.BROADCAST}


@pytest.mark.slow
def test_a_managed_group_logs_why_the_calls_of_a_plain_ddp_do_not_match(caplog: pytest.LogCaptureFixture) -> None:
    class One:
        timeout = 60.0

        def manage(self, group: object) -> None:
            pass

    group = ManagedProcessGroup(One(), via=lambda seconds: EchoGroup())
    module = nn.parallel.DistributedDataParallel(model(), process_group=group)
    group.report_error(GroupMismatchError("calls differ", calls={}))
    assert isinstance(group.step_error(), GroupMismatchError)
    assert isinstance(group.step_error(), GroupMismatchError)
    assert [record.message for record in caplog.records if "DDP" in record.message or "Dist" in record.message] == [
        plain_ddp_hint(group)
    ]
    assert module.process_group is group
