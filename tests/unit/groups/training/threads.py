"""Replicas as threads of one process: members that come and go, and a group over them. No sockets, no real time.

`Members` here has what the wrappers need of the real one: begin, commit, state. A change of who takes part is agreed
in the vote, so it comes at the same step on all replicas. `World.leave` is a death that the others' next call notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from etha.errors import GroupLostError, GroupMismatchError
from etha.groups.base import ProcessGroup
from etha.groups.calls import GroupCall
from etha.groups.schedule import Kind
from etha.groups.work import GroupWork

SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    epoch: int
    rank: int
    size: int
    step: int
    batches_committed: int
    recovered: bool
    changed: bool


class World:
    """What all replicas share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.present: dict[str, Members] = {}
        self.epoch = 0
        self.entered: set[str] = set()
        self.seats: list[str] = []
        self.given: dict[Any, dict[str, Any]] = {}

    def members(self, name: str) -> Members:
        with self.changed:
            for each in self.present.values():
                each.changing = True
            self.present[name] = found = Members(self, name)
        return found

    def leave(self, name: str) -> None:
        with self.changed:
            del self.present[name]
            for each in self.present.values():
                each.changing = True
            self._form()
            self.changed.notify_all()

    def leave_in_call(self, name: str) -> None:
        """Leave when another member waits for this one in a call or a vote."""
        with self.changed:
            self.changed.wait_for(lambda: any(name not in entry for entry in self.given.values()), SECONDS)
        self.leave(name)

    def enter(self, name: str) -> None:
        """Wait until all who are present have entered."""
        with self.changed:
            epoch = self.epoch
            self.entered.add(name)
            self._form()
            if not self.changed.wait_for(lambda: self.epoch > epoch, SECONDS):
                raise TimeoutError(f"{name} waits for {set(self.present) - self.entered}")

    def _form(self) -> None:
        if not self.present or not self.entered.issuperset(self.present):
            return
        self.seats = sorted(self.present, key=lambda name: (-self.present[name].step, name))
        source = self.present[self.seats[0]]
        for name in self.seats:
            self.present[name].take_seat(source)
        self.entered.clear()
        self.given.clear()
        self.epoch += 1
        self.changed.notify_all()

    def exchange(self, epoch: int, seats: list[str], key: Any, name: str, value: Any) -> list[Any]:
        """The values of all members of an epoch, by rank."""

        def lost() -> list[int]:
            return [rank for rank, each in enumerate(seats) if each not in self.present]

        with self.changed:
            self.given.setdefault((epoch, key), {})[name] = value
            self.changed.notify_all()
            entry = self.given[epoch, key]
            if not self.changed.wait_for(lambda: len(entry) == len(seats) or lost(), SECONDS):
                raise TimeoutError(f"{name} waits in {key}")
            if len(entry) < len(seats):
                raise GroupLostError("a replica is lost", ranks=tuple(lost()), reason="died", epoch=epoch)
            return [entry[each] for each in seats]


class Members:
    rank, world_size = 0, 1

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.step = self.batches = self.epoch = self.votes = 0
        self.changing = True
        self.recovered = False
        self.seats: list[str] = []
        self.groups: list[ThreadGroup] = []
        self.get: Callable[[], Any] = lambda: None
        self.set: Callable[[Any], None] = lambda given: None

    def state(self, get: Callable[[], Any], set_: Callable[[Any], None]) -> None:
        self.get, self.set = get, set_

    def take_seat(self, source: Members) -> None:
        self.recovered = self.step < source.step
        if self.recovered:
            self.set(source.get())
            self.step, self.batches = source.step, source.batches

    def begin(self) -> Quorum:
        changed = self.changing or any(group.failure is not None for group in self.groups)
        self.recovered = False
        if changed:
            self.world.enter(self.name)
            self.changing, self.votes = False, 0
            self.epoch, self.seats = self.world.epoch, list(self.world.seats)
            for group in self.groups:
                group.enter_epoch()
        return Quorum(
            epoch=self.epoch,
            rank=self.seats.index(self.name),
            size=len(self.seats),
            step=self.step,
            batches_committed=self.batches,
            recovered=self.recovered,
            changed=changed,
        )

    def commit(self, ok: bool = True) -> bool:
        self.votes += 1
        good = ok and all(group.failure is None for group in self.groups)
        with self.world.changed:
            # A newcomer is noticed here only, so that all replicas notice it in the same vote.
            changing = self.changing or set(self.seats) != set(self.world.present)
        try:
            votes = self.world.exchange(self.epoch, self.seats, f"vote {self.votes}", self.name, (good, changing))
        except GroupLostError:
            self.changing = True
            return False
        self.changing = any(each for _, each in votes)
        committed = all(each for each, _ in votes)
        if committed:
            self.step += 1
            self.batches += len(self.seats)
        return committed


class ThreadGroup(ProcessGroup):
    """All collectives of the replicas. Errors are swallowed, as a ManagedProcessGroup does."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self.members = members
        self.failure: Exception | None = None
        self.number = 0
        members.groups.append(self)

    def enter_epoch(self) -> None:
        self.failure, self.number = None, 0
        self._set_members(self.members.seats.index(self.members.name), len(self.members.seats))

    def getBackendName(self) -> str:
        return "threads"

    def _issue(self, call: GroupCall) -> GroupWork:
        work = GroupWork(call)
        with torch.no_grad():
            if self.failure is None and self.members.seats:
                self._carry_out(call)
            if self.failure is not None or not self.members.seats:
                call.fill_defaults(self.rank())
        work.finish(None)
        return work

    def _carry_out(self, call: GroupCall) -> None:
        self.number += 1
        members = self.members
        offered = (call.kind, [tensor.clone() for tensor in call.inputs])
        try:
            given = members.world.exchange(members.epoch, members.seats, self.number, members.name, offered)
        except GroupLostError as error:
            self.failure = error
            return
        shapes = {(kind, tuple(tensor.shape for tensor in tensors)) for kind, tensors in given}
        if len(shapes) > 1:
            self.failure = GroupMismatchError("calls do not match", calls={})
            return
        self._give(call, [tensors for _, tensors in given])

    def _give(self, call: GroupCall, given: list[list[torch.Tensor]]) -> None:
        for i, output in enumerate(call.outputs):
            if call.kind is Kind.ALLREDUCE:
                total = given[0][i].clone()
                for tensors in given[1:]:
                    total += tensors[i]
                output.copy_(total)
            elif call.kind is Kind.BROADCAST:
                output.copy_(given[call.root][i])
            elif call.kind is Kind.ALLGATHER:
                output.copy_(given[i % len(given)][i // len(given)])
            else:
                raise NotImplementedError(call.kind)


def run_all(*replicas: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own; their results, or the first error."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(each) for each in replicas]]
