"""Put what was received in place without a copy: ``register_tensors(..., atomic="swap")``.

A tensor of ``etha.empty`` and the memory into which an atomic batch receives are two segments of equal size. After
COMMIT they change places: the tensor keeps its address and shows the new version, and what it showed before becomes the
memory for the next one. The agent does the same with its own mappings, so all that it has compiled stays valid.

Whoever else maps the tensor's old pages would keep reading the old version. So a tensor is copied instead, as with
``atomic=True``, if its pages may be seen by anybody else (``memory.shared.exchange``) or are not its alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from etha.client.memory.base import StagedTensors, TensorMemory
from etha.client.memory.segments import SegmentUse
from etha.client.memory.tensors import empty_like
from etha.memory import shared
from etha.memory.handles import is_dense
from etha.memory.pages import Asides

log = logging.getLogger(__name__)


def why_copied(tensor: torch.Tensor) -> str:
    """Why the memory of a tensor cannot be exchanged whatever happens; "" if it can."""
    if not tensor.numel():
        return "it is empty"
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}"
    segment = shared.at(tensor.data_ptr())
    if segment is None and shared.find(tensor.data_ptr(), 1) is None:
        return "it is not in memory of etha.empty"
    if segment is None or not segment.alone:
        return "other tensors share its pages: etha.empty gives pages of its own to a tensor of 1 MiB and more"
    if segment.alone != tensor.nbytes or not is_dense(tensor.shape, tensor.stride()):
        return "it is a part of a tensor of etha.empty"
    return ""


class PageExchange:
    """Which tensors of one registration are exchanged with the memory into which they are received."""

    def __init__(self, what: str, names: Sequence[str], tensors: Sequence[torch.Tensor], segments: SegmentUse) -> None:
        """``what``: names the batch. ``segments``: those that it uses, and nobody else may."""
        self._what, self._names, self._segments = what, names, segments
        self._why = [why_copied(tensor) for tensor in tensors]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._warned: set[str] = set()
        #: Because of the kernel: it does not change its mind.
        self._over = False
        known: dict[int, str] = {}
        for i, tensor in enumerate(tensors):
            if not self._why[i] and (tied := known.setdefault(tensor.data_ptr(), names[i])) != names[i]:
                self._why[i] = f"it is the memory of {tied!r}"

    def stage(self, home: TensorMemory, tensors: Sequence[torch.Tensor]) -> StagedTensors:
        """Memory to receive into. That of a tensor that may be exchanged has equal strides and pages of its own.
        Blocking, because it touches the pages."""
        copied = [tensor.numel() > 0 and bool(why) for tensor, why in zip(tensors, self._why, strict=True)]
        staged = home.stage(tensors, copied)
        for i, tensor in enumerate(tensors):
            if not self._why[i]:
                staged.tensors[i] = empty_like(tensor)
            elif tensor.nbytes >= shared.SMALL:  # of smaller ones everybody knows
                self._warn(i, self._why[i])
        return staged

    def exchange(self, tensors: Sequence[torch.Tensor], stage: StagedTensors) -> dict[int, tuple[str, str]]:
        """Exchange each tensor with its place in ``stage``, as far as possible: item -> the ids of the two segments.

        Not on the main thread. Whoever calls it has to say what was exchanged to the agent, whatever happens."""
        done: dict[int, tuple[str, str]] = {}
        locked = _locked() if not self._over else []
        with Asides() as asides:
            for i, tensor in enumerate(tensors):
                place = stage.tensors[i]
                if self._why[i] or self._over or place is None:
                    continue
                # The user may have replaced its memory since the call began, also in on_commit.
                moved = "" if tensor.data_ptr() == self._addresses[i] else "its memory was replaced"
                if why := moved or _pinned(tensor, locked):
                    self._warn(i, why)
                    continue
                try:
                    done[i] = shared.exchange(self._segments, tensor.data_ptr(), place.data_ptr(), asides)
                except shared.ExchangeError as error:
                    self._over = error.refused
                    self._warn(i, str(error))
        return done

    def restore(self, done: Iterable[int], tensors: Sequence[torch.Tensor], stage: StagedTensors) -> bool:
        """Exchange them again; False if one could not be."""
        try:
            with Asides() as asides:
                for i in done:
                    place = stage.tensors[i]
                    assert place is not None
                    shared.exchange(self._segments, tensors[i].data_ptr(), place.data_ptr(), asides)
        except shared.ExchangeError as error:
            log.warning("%s: its pages stay exchanged: %s", self._what, error)
            return False
        return True

    def give_up(self, why: str) -> None:
        """Copy everything from now on."""
        self._over = True
        log.warning("%s: all tensors are copied at commit, because %s", self._what, why)

    def _warn(self, i: int, why: str) -> None:
        if why and why not in self._warned:
            self._warned.add(why)
            log.warning("%s: tensor %r is copied at commit, not swapped: %s", self._what, self._names[i], why)


def _pinned(tensor: torch.Tensor, locked: Sequence[tuple[int, int]]) -> str:
    """Why pages may be known to a device, or have to stay in memory, at their address; "" if there is no sign of it."""
    if torch.cuda.is_initialized() and tensor.is_pinned():  # type: ignore[no-untyped-call]
        return "it is pinned for a GPU"
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return "it is locked in memory" if any(first < end and begin < last for first, last in locked) else ""


def _locked() -> list[tuple[int, int]]:
    """The ranges of this process that are locked in memory (``mlock``)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    if "VmLck:\t       0 kB" in status:
        return []
    found: list[tuple[int, int]] = []
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        head = line.split(maxsplit=1)[0]
        if line.startswith("VmFlags:"):
            if "lo" in line.split():
                found.append((begin, end))
        elif "-" in head and not head.endswith(":"):
            begin, end = (int(number, 16) for number in head.split("-"))
    return found
