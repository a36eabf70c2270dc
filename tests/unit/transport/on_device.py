"""Tensors on a fake GPU, and programs over them, for the tests of the data plane on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from etha.memory.views import View, view_of
from etha.plan import Plan
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.device import Copier
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import Program
from tests.fakes.cuda import GPU0, FakeDriver

Local = dict[int, dict[str, torch.Tensor]]


def on_card(driver: FakeDriver, t: torch.Tensor, uuid: str = GPU0) -> torch.Tensor:
    """The same values at the same strides on the GPU, gaps included."""
    extent = 0 if 0 in t.shape else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    flat = driver.empty(uuid, (extent,), t.dtype)
    flat.copy_(t.as_strided((extent,), (1,)))
    return flat.as_strided(t.shape, t.stride())


def card_view(t: torch.Tensor, uuid: str = GPU0) -> View:
    """The view that an agent has of it: an address, no tensor."""
    return replace(view_of(t), device=uuid, flat=None, raw=None, keep=t)


def compiled(plan: Plan, source: Local, target: Local) -> Program:
    """A program between tensors that all lie on the GPU."""
    number = {name: i for i, name in enumerate(plan.names)}
    here, there = (
        {r: {number[k]: card_view(t) for k, t in held.items()} for r, held in side.items()} for side in (source, target)
    )
    return compile_local(plan, here, there)


def run(program: Program, copier: Copier) -> int:
    """All pieces, one after the other."""
    work = Workspace(copier)
    return sum(program.run(i, work) for i in range(len(program.pieces)))


@contextmanager
def card(*, bounce: int = 1 << 20) -> Iterator[tuple[FakeDriver, Copier]]:
    """A fake GPU with a copier; at the end everything has been given back."""
    driver = FakeDriver()
    copier = Copier(driver, GPU0, bounce=bounce)
    try:
        yield driver, copier
        copier.close()
        driver.check()
    finally:
        driver.shut()
