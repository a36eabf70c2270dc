"""What a process holds in memory, as the kernel counts it: now, and at most since the peak was last forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FIELDS = {"VmHWM": "peak", "VmRSS": "resident", "RssShmem": "shared"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes. ``shared`` is mapped shared memory, here tensors: part of ``resident`` and of ``peak``."""

    peak: int
    resident: int
    shared: int

    @classmethod
    def of(cls, pid: int | str = "self") -> Footprint:
        """Read it from the kernel."""
        found = {}
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in _FIELDS:
                found[_FIELDS[name]] = int(value.split()[0]) << 10
        return cls(**found)

    @property
    def own(self) -> int:
        """Resident, shared memory left out."""
        return self.resident - self.shared


def forget_peak(pid: int | str = "self") -> None:
    """Count the peak from what is resident now (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
