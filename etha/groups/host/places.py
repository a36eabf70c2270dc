"""Tensors that the other members of a group read where they lie: those of ``etha.empty``, which lie in sealed memfds.

A member writes into its block in which memfds the inputs of a call lie. The others open these through /proc, once, and
keep the mappings. Where that is not possible, for example between containers, calls go through the windows.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from etha.errors import GroupError
from etha.groups.host.windows import map_shared, unmapped_in_forks
from etha.memory import shared
from etha.memory.pages import is_sealed

#: A member's table for one call: how many tensors; for each the descriptor, its inode, the segment's bytes, the offset.
_COUNT, _PLACE = struct.Struct("<Q"), struct.Struct("<qQQQ")
MOST_TENSORS = 64
TABLE_BYTES = _COUNT.size + MOST_TENSORS * _PLACE.size
#: Mapped segments of others that are kept.
_MOST_MAPPED = 256


class OwnPlaces:
    """Which segments of this member the others have mapped, as far as it knows."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._inodes: dict[str, int] = {}

    def close(self) -> None:
        """The others read nothing any more."""
        shared.let_go(self, self._inodes)

    def find(self, tensors: Sequence[Tensor]) -> tuple[bytes, frozenset[int]] | None:
        """The table of the tensors, and the inodes of their segments; None if one lies elsewhere."""
        if len(tensors) > MOST_TENSORS:
            return None
        rows, inodes = [], set()
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if not nbytes:
                rows.append(_PLACE.pack(-1, 0, 0, 0))
                continue
            segment = shared.hold_at(self, tensor.data_ptr(), nbytes)
            if segment is None:
                return None
            inode = self._inodes.get(segment.id)
            if inode is None:
                inode = self._inodes[segment.id] = os.fstat(segment.fd).st_ino
            inodes.add(inode)
            rows.append(_PLACE.pack(segment.fd, inode, segment.nbytes, tensor.data_ptr() - segment.address))
        return _COUNT.pack(len(rows)) + b"".join(rows), frozenset(inodes)

    def all_known(self, inodes: frozenset[int]) -> bool:
        """Whether all members have mapped these segments in an earlier call."""
        return inodes <= self._known

    def note(self, inodes: frozenset[int]) -> None:
        """All members have mapped these segments."""
        if len(self._known) > 16 * _MOST_MAPPED:
            self._known.clear()
        self._known |= inodes


class PeerPlaces:
    """The segments of one other member, as far as this process has mapped them."""

    def __init__(self, pidfd: int) -> None:
        self._pid = _pid_of(pidfd)
        self._mapped: OrderedDict[int, tuple[object, int, int]] = OrderedDict()

    def addresses(self, table: bytes | memoryview) -> list[int] | None:
        """Where the tensors of the table lie in this process; None if one cannot be mapped."""
        (count,) = _COUNT.unpack_from(table)
        found = []
        for i in range(min(count, MOST_TENSORS)):
            fd, inode, nbytes, offset = _PLACE.unpack_from(table, _COUNT.size + i * _PLACE.size)
            if fd < 0:
                found.append(0)
                continue
            address = self._map(fd, inode, nbytes)
            if address is None or offset >= nbytes:
                return None
            found.append(address + offset)
        return found

    def _map(self, fd: int, inode: int, nbytes: int) -> int | None:
        known = self._mapped.get(inode)
        if known is not None and known[2] == nbytes:
            self._mapped.move_to_end(inode)
            return known[1]
        if not self._pid:
            return None
        try:
            opened = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            state = os.fstat(opened)
            if (state.st_ino, state.st_size) != (inode, nbytes) or not is_sealed(opened):
                return None
            pages, address = map_shared(opened, nbytes)
        except (OSError, GroupError):
            return None
        finally:
            os.close(opened)
        self._mapped[inode] = (pages, address, nbytes)
        while len(self._mapped) > _MOST_MAPPED:
            self._mapped.popitem(last=False)
        return address

    def close(self) -> None:
        """Unmap everything."""
        self._mapped.clear()

    def disown(self) -> None:
        """In a forked child: the mappings are not there, so they must not be unmapped."""
        unmapped_in_forks.extend(self._mapped.values())
        self._mapped.clear()


def _pid_of(pidfd: int) -> int:
    """The process behind ``pidfd`` as this process sees it; 0 if it is in a namespace that this one does not see."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:"):
            return max(0, int(line.split()[1]))
    return 0
