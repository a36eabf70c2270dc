"""A group without other members: every call ends at once, as if all members had given the same."""

from __future__ import annotations

from typing import Any

import torch

from etha.groups.base import GroupConfig, ProcessGroup
from etha.groups.calls import GroupCall
from etha.groups.schedule import Kind
from etha.groups.work import GroupWork


class EchoGroup(ProcessGroup):
    """``fail_with``: what every call ends with until configure. ``calls``: all calls that were issued."""

    def __init__(self, rank: int = 0, size: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self.calls: list[GroupCall] = []
        self.failure: Exception | None = None
        self._set_members(rank, size)

    def fail_with(self, error: Exception | None) -> None:
        self.failure = error

    def _configure(self, config: GroupConfig) -> None:
        self.failure = None

    def _issue(self, call: GroupCall) -> GroupWork:
        self.calls.append(call)
        work = GroupWork(call)
        if self.failure is None:
            with torch.no_grad():
                give(call, self.rank(), self.size())
        work.finish(self.failure)
        return work


def give(call: GroupCall, rank: int, size: int) -> None:
    if call.kind is Kind.ALLGATHER:
        for i, output in enumerate(call.outputs):
            output.copy_(call.inputs[i // size])
    elif call.kind is Kind.ALLREDUCE and call.op.name == "SUM":
        for tensor in call.outputs:
            tensor.mul_(size)
