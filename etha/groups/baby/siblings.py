"""The other members' children on this host: their deaths are seen, because Gloo does not always notice a lost member.

If a connection ends while Gloo has nothing to do on it, a call that begins then may wait for its whole timeout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etha.errors import GroupLostError
from etha.groups.host.monitor import DeathMonitor
from etha.groups.inprocess.formation import AGAIN
from etha.groups.store_client import as_bytes
from etha.memory.process import start_time
from etha.memory.reach import WorkerGoneError

#: Seconds for a call to end to which the dead member had given its part.
_PATIENCE = 0.1


class Siblings:
    """The children of one group's members, as far as this process can see them by their process ids."""

    def __init__(self, rank: int, size: int, epoch: int | None) -> None:
        self._rank, self._size, self._epoch = rank, size, epoch
        self._host = _pids_of()
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._monitor: DeathMonitor | None = None

    def introduce(self, store: Any) -> None:
        """Tell the others who this process is, before the group forms."""
        pid = os.getpid()
        store.set(f"child/{self._rank}", f"{self._host} {pid} {start_time(pid)}")

    def meet(self, store: Any) -> None:
        """Find the others when the group has formed. GroupLostError if one has died already."""
        for rank in range(self._size):
            if rank == self._rank:
                continue
            host, pid, started = as_bytes(store.get(f"child/{rank}")).decode().split()
            if host == self._host:
                self._pids[rank] = int(pid)
                self._pidfds[rank] = self._open(rank, int(started))

    def _open(self, rank: int, started: int) -> int:
        try:
            found = os.pidfd_open(self._pids[rank])
            if start_time(self._pids[rank]) == started:
                return found
            os.close(found)
        except (OSError, WorkerGoneError):
            pass
        raise self._lost(rank)

    def watch(self, report: Callable[[GroupLostError], None]) -> None:
        """Call ``report`` from a thread when one of them has died."""

        def died(rank: int) -> None:
            threading.Event().wait(_PATIENCE)
            report(self._lost(rank))

        self._monitor = DeathMonitor(self._pidfds, died) if self._pidfds else None

    def _lost(self, rank: int) -> GroupLostError:
        reason = f"the child process {self._pids[rank]} of rank {rank} died"
        return GroupLostError(f"{reason}; {AGAIN}", ranks=(rank,), reason=reason, epoch=self._epoch)


def _pids_of() -> str:
    """What processes have in common that know each other by the same process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"
