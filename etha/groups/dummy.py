"""A process group that discards all calls, for code that needs a group where nothing shall be communicated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etha.errors import GroupError
from etha.groups.base import GroupConfig, ProcessGroup
from etha.groups.work import DummyWork


class ProcessGroupDummy(ProcessGroup):
    """Returns at once from every call. A reduction leaves its input, a gather has the own piece and zeros.

    ``configure_count`` counts configures. Arguments that fit no call are discarded, too.
    """

    DEVICES = ()

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.configure_count = 0
        self._set_members(rank, world)

    def _configure(self, config: GroupConfig) -> None:
        self.configure_count += 1

    def _begin(self, method: str, args: tuple[Any, ...]) -> DummyWork:
        try:
            call = self._normal_form(method, args)
        except GroupError:
            return DummyWork(_tensors(args[0]) if args else [])
        with torch.no_grad():
            call.fill_defaults(self.rank())
        return DummyWork(call.result())

    def getBackendName(self) -> str:
        return "etha-dummy"


def _tensors(given: Any) -> list[Tensor]:
    """The tensors of a first argument, which are the outputs: one, a list, or a list of lists."""
    if isinstance(given, Tensor):
        return [given]
    if not isinstance(given, list | tuple):
        return []
    return [tensor for each in given for tensor in _tensors(each)]
