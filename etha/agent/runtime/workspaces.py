"""Scratch memory of an agent's threads: one workspace each, with a copier where the agent has a card."""

from __future__ import annotations

import threading

from etha.cuda.driver import Driver
from etha.transport.copy.cpu import Workspace


class Workspaces:
    """Kept from job to job. On a GPU's agent give ``driver`` and the ``uuid``: each thread has a stream there."""

    def __init__(self, driver: Driver | None = None, uuid: str = "") -> None:
        self._driver, self._uuid = driver, uuid
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: list[Workspace] = []

    @property
    def device(self) -> bool:
        """Whether copies are a device's, which the event loop leaves to threads."""
        return self._driver is not None

    def make(self) -> Workspace:
        """One more, of whoever asks; CardError where the device has failed."""
        if self._driver is None:
            return Workspace()
        # Only an agent that has a card loads what serves it.
        from etha.transport.copy.device import Copier

        made = Workspace(Copier(self._driver, self._uuid))
        with self._lock:
            self._all.append(made)
        return made

    def mine(self) -> Workspace:
        """The calling thread's."""
        found: Workspace | None = getattr(self._mine, "work", None)
        if found is None:
            found = self._mine.work = self.make()
        return found

    def close(self) -> None:
        """Give streams and device memory back; no thread may be using one any more. Idempotent."""
        with self._lock:
            while self._all:
                copier = self._all.pop().copier
                if copier is not None:
                    copier.close()
