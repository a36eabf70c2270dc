"""Whether a process of this host is still the same one. Pids are reused, so a process is (pid, start time)."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Clock ticks after boot at which ``pid`` started; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may itself contain spaces and parentheses; the state is the field after it.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, start: int) -> bool:
    """Whether the process ``pid`` that started ``start`` ticks after boot lives on this host."""
    return start_ticks(pid) == start
