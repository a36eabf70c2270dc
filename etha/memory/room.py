"""How much more memory this process can have: what the machine, its cgroups and its own limits leave.

It is checked before a worker's shared memory or an agent's staging is made. Pages are touched one after the other, and
too many would wake the kernel's OOM killer, which may kill any process.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etha.config import STAGING, Settings
from etha.errors import ConfigError

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
#: Bytes that may be allocated between two checks, because a model has thousands of small tensors.
UNASKED = 32 << 20
CURE = "check the shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """``nbytes`` are left, by the limit named ``limit``."""

    nbytes: int
    limit: str


def room(proc: Path = _PROC, cgroups: Path = _CGROUPS, *, shared: bool = True) -> Room:
    """The least that any limit leaves for one more mapping, ``shared`` or private."""
    limits = (*_machine(proc), *_groups(proc, cgroups), *_limits(proc, shared=shared))
    return min(limits, key=lambda found: found.nbytes)


class RoomCheck:
    """Checks large allocations, and small ones after every 32 MiB of them. Thread-safe. Options as for
    ``check_room``."""

    def __init__(self, *, shared: bool = True, cure: str = CURE) -> None:
        self._shared, self._cure = shared, cure
        self._unasked = 0

    def check(self, nbytes: int, what: str) -> None:
        """Call ``check_room`` if it is due."""
        self._unasked += nbytes
        if self._unasked >= UNASKED:
            self._unasked = 0
            check_room(nbytes, what, shared=self._shared, cure=self._cure)


def check_room(nbytes: int, what: str, *, shared: bool = True, cure: str = CURE) -> None:
    """Raise ConfigError, with both numbers, if ``nbytes`` for ``what`` do not fit. ``cure`` says what to do first."""
    left = room(shared=shared)
    if nbytes > left.nbytes:
        kind = "shared memory" if shared else "memory"
        raise ConfigError(
            f"{what} needs {nbytes} bytes of {kind}, {left.nbytes} are left ({left.limit}): "
            f"{cure}, free memory or raise that limit"
        )


def capacity(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Room:
    """The most memory that processes here can ever have: the machine's, or what a cgroup of this process allows."""
    found = [Room(nbytes=_meminfo(proc)["MemTotal"], limit="memory of this machine")]
    for place, names in _places(proc, cgroups):
        if (most := _number(place / names[0])) is not None:
            found.append(Room(nbytes=most, limit=f"{names[0]} of cgroup {place}"))
    return min(found, key=lambda room: room.nbytes)


def check_staging(settings: Settings) -> None:
    """Raise ConfigError if ETHA_STAGING allows an agent more memory than there is. The default is accepted anywhere."""
    most = capacity()
    if settings.staging != STAGING and settings.staging > most.nbytes:
        raise ConfigError(
            f"ETHA_STAGING={settings.staging} bytes is more than the {most.nbytes} that there are ({most.limit}): "
            f"give an agent a part of them, the default is {STAGING >> 20}MiB"
        )


def _meminfo(proc: Path) -> dict[str, int]:
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields


def _machine(proc: Path) -> Iterator[Room]:
    fields = _meminfo(proc)
    yield Room(nbytes=fields["MemAvailable"] + fields.get("SwapFree", 0), limit="memory and swap of this machine")


def _groups(proc: Path, cgroups: Path) -> Iterator[Room]:
    for place, names in _places(proc, cgroups):
        if (left := _group(place, *names)) is not None:
            yield Room(nbytes=left, limit=f"{names[0]} of cgroup {place}")


def _places(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The process's own cgroup and all above it, of versions 1 and 2, with the names of their files."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "", "")[:3]
        if not path:
            continue
        if not controllers:
            base, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        # In a container the path may be the host's, and the container's own group the root of what is mounted.
        for place in dict.fromkeys((group, *group.parents, base)):
            if place == base or base in place.parents:
                yield place, names


def _group(place: Path, limit: str, used: str, cache: str) -> int | None:
    """What a cgroup leaves; None without a limit. Cached files count as free, because the kernel can drop them."""
    try:
        most = _number(place / limit)
        if most is None:
            return None
        now = int((place / used).read_text())
        stats = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return max(0, most - now + int(stats.get(cache, 0)))
    except (OSError, ValueError):
        return None


def _number(limit: Path) -> int | None:
    """A limit of a cgroup; None if there is none."""
    try:
        text = limit.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def _limits(proc: Path, *, shared: bool) -> Iterator[Room]:
    """The process's own limits: address space, and private memory or the size of a file (a memfd is one)."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    private, _ = resource.getrlimit(resource.RLIMIT_DATA)
    pages = [int(field) * resource.getpagesize() for field in (proc / "self/statm").read_text().split()]
    if space != resource.RLIM_INFINITY:
        yield Room(nbytes=max(0, space - pages[0]), limit="RLIMIT_AS of this process, `ulimit -v`")
    if not shared:
        if private != resource.RLIM_INFINITY:
            yield Room(nbytes=max(0, private - pages[5]), limit="RLIMIT_DATA of this process, `ulimit -d`")
        return
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield Room(nbytes=size, limit="RLIMIT_FSIZE of this process, `ulimit -f`")
