"""What one agent's NCCL transfers use of its card: three streams, events, and staging within the budget.

    pack   ──packed──>  wire  ──wired──>  unpack  ──done──>  the slot's next group

Its memory is DEPTH slots, two slabs (reductions of the even and of the odd waves), one contribution, one value, and
what is staged before anything is written. It grows with what programs need and is kept. An agent has one ring.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod

import torch

from etha.cuda.driver import DeviceError, Driver
from etha.memory.views import View
from etha.transport.copy.device_memory import DeviceMemory, reaching
from etha.transport.copy.staging import Budget
from etha.transport.nccl.schedule import NcclSchedule
from etha.transport.wire.flows import EARLY, WireProgram
from etha.transport.wire.nccl_messages import DEPTH

SLOTS, SLABS, GIVEN, VALUE = "slots", "slabs", "given", "value"


class StagingRing:
    """See the module. One thread uses it, for one run at a time. ConfigError if the budget is too small."""

    def __init__(self, driver: Driver, uuid: str, budget: Budget) -> None:
        self.driver, self.uuid, self._budget = driver, uuid, budget
        with reaching(uuid):
            self.pack, self.wire, self.unpack = (driver.stream(uuid) for _ in range(3))
            self.packed, self.wired, self.done = ([driver.event(uuid) for _ in range(DEPTH)] for _ in range(3))
        self._memory: dict[str, DeviceMemory] = {}
        self._slot = self._slab = 0
        #: Counts up whenever memory has moved, which makes earlier compilations invalid.
        self.generation = 0
        self._closed = False

    def provide(self, program: WireProgram, rounds: NcclSchedule) -> None:
        """Allocate the memory that a program needs. Nothing of an earlier run may be queued any more."""
        numbers = [program.values[part.number] for part in program.parts]
        sizes = [(part.numel, work) for part, work in zip(program.parts, numbers, strict=True)]
        given = max((n * work.source.itemsize for n, work in sizes), default=0)
        value = max((n * work.wire.itemsize for n, work in sizes), default=0)
        slot, slab = max(self._slot, rounds.slot), max(self._slab, *program.slabs)
        self._have(SLOTS, slot * DEPTH if rounds.slot else 0)
        self._have(SLABS, 2 * slab if any(program.slabs) else 0)
        self._have(GIVEN, given)
        self._have(VALUE, value)
        self._have(EARLY, program.staged)
        self._slot, self._slab = slot, slab

    def _have(self, name: str, nbytes: int) -> None:
        held = self._memory.get(name)
        if nbytes <= (0 if held is None else held.nbytes):
            return
        if held is not None:
            del self._memory[name]
            held.release()
            self._budget.take(-held.nbytes)
        self._budget.take(nbytes)
        try:
            self._memory[name] = DeviceMemory(self.driver, self.uuid, nbytes)
        except BaseException:
            self._budget.take(-nbytes)
            raise
        finally:
            self.generation += 1

    def slot(self, number: int) -> int:
        """The address of the ring's slot for a group."""
        held = self._memory.get(SLOTS)
        return 0 if held is None else held.address + number % DEPTH * self._slot

    def slab(self, wave: int) -> int:
        """The address of the memory of a wave of reductions."""
        return self._memory[SLABS].address + wave % 2 * self._slab

    def address(self, name: str) -> int:
        """The address of GIVEN, VALUE or EARLY."""
        return self._memory[name].address

    def placed(self, view: View) -> View:
        """The view at its address; views that are staged early count their addresses from 0."""
        return self.view(self.address(EARLY) + view.address, view.shape, view.dtype) if view.space == EARLY else view

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> View:
        """A dense tensor at an address in this ring."""
        strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
        return View(
            shape=shape,
            strides=strides,
            dtype=dtype,
            address=address,
            space=("ring", id(self)),
            place=address,
            nbytes=prod(shape) * dtype.itemsize,
            device=self.uuid,
        )

    def close(self) -> None:
        """Free everything, once the device is done with it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for event in (*self.packed, *self.wired, *self.done):
            with suppress(DeviceError):
                self.driver.drop_event(event)
        for stream in (self.pack, self.wire, self.unpack):
            with suppress(DeviceError):
                self.driver.drop_stream(stream)
        for held in self._memory.values():
            held.release()
            self._budget.take(-held.nbytes)
        self._memory.clear()
