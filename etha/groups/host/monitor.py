"""Watches the processes of a group's members: one thread per configured group, which sleeps until somebody ends."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Mapping


class DeathMonitor:
    """Calls ``on_death(rank)`` on its own thread for each descriptor that becomes readable."""

    def __init__(self, pidfds: Mapping[int, int], on_death: Callable[[int], None]) -> None:
        """``pidfds``: by rank. They stay open until ``close()`` has returned."""
        self._on_death = on_death
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        for rank, pidfd in pidfds.items():
            self._selector.register(pidfd, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="etha-group-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._selector.unregister(key.fd)
                self._on_death(key.data)

    def close(self) -> None:
        """End the thread. On the thread itself, that is from ``on_death``, it ends after the current call."""
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def disown(self) -> None:
        """In a forked child, which has the descriptors but not the thread."""
        self._selector.close()
        os.close(self._wake)
