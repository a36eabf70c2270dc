"""What a process holds of the machine, as the kernel counts it, and how two such counts compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """``rss`` and ``private`` (anonymous) in KiB; ``fds`` without ``sockets``; ``mapped`` are mappings of memfds."""

    rss: int
    private: int
    fds: int
    sockets: int
    memfds: int
    mapped: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """A process's, now."""
        process = Path(f"/proc/{pid}")
        status = _numbers((process / "status").read_text())
        handles = [_target(entry) for entry in (process / "fd").iterdir()]
        sockets = sum(handle.startswith("socket:") for handle in handles)
        return cls(
            rss=status["VmRSS"],
            private=status["RssAnon"],
            fds=len(handles) - sockets,
            sockets=sockets,
            memfds=sum(handle.startswith("/memfd:") for handle in handles),
            mapped=sum("/memfd:" in line for line in (process / "maps").read_text().splitlines()),
            threads=status["Threads"],
        )

    def all(self) -> dict[str, int]:
        """Everything, by name."""
        return asdict(self)


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:  # closed while we looked
        return ""


def _numbers(text: str) -> dict[str, int]:
    fields = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}
