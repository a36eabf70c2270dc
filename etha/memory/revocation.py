"""A page shared by a worker and its agent: which calls still lend their memory, and which threads are inside it.

    worker   open() -> word ... the call ends early: revoke(word), then busy(word)?
    agent    per piece:  enter(thread) -> False: do not touch it;  True: copy;  leave(thread)

A slot holds a ticket (0: nothing is lent) and one busy word per lane thread. A ticket is never given twice, so an agent
that thaws after years finds that its ticket has lapsed. ``word`` holds both: ticket * SLOTS + slot. The page is a
sealed memfd, so neither end can make the other fault.

**Ordering.** The agent stores busy, then loads the ticket. The worker stores ticket = 0, then loads busy. At least one
must see the other's store, and neither x86 nor arm promises that for a plain store followed by a load. The agent's side
runs before every piece, the worker's hardly ever, so only the worker has a fence: ``membarrier`` makes every thread of
the registered agents run a full barrier between the two loads and stores, wherever they are (membarrier(2), "asymmetric
fences"). Program order inside each process is kept, because a Python statement is an opaque call to the compiler. Each
access is one aligned 32-bit move (memoryview of "I").
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
from collections import deque
from typing import Any

from etha.errors import ConfigError, RegistrationError
from etha.memory.mapping import map_sealed
from etha.memory.pages import map_pages, sealed_memfd

log = logging.getLogger(__name__)

#: Pages of memory are used only for slots in use, the first slots first.
NBYTES = 1 << 17
#: Slots of a page. The first is a header, so SLOTS - 1 calls of one client may be in flight.
SLOTS = 2048
_WORDS = NBYTES // 4 // SLOTS
#: Lane threads of one agent that can be told apart.
THREADS = _WORDS - 1
_REGISTERED = 1  # header word: the agent has registered for expedited barriers
_MAX_TICKET = (1 << 32) - 1

_SYSCALL = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_GLOBAL, _GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1, 2, 4
_libc = ctypes.CDLL(None, use_errno=True)


def _membarrier(command: int) -> bool:
    return _SYSCALL is not None and _libc.syscall(_SYSCALL, command, 0, 0) == 0


def _words(pages: ctypes.Array[Any]) -> memoryview:
    return memoryview(pages).cast("B").cast("I")


class RevocationPage:
    """The worker's end. ``fd`` is sent to the agent once. Call close() when the session ends.

    For any thread, and without a lock, because a signal handler may transfer while the thread that it interrupts would
    hold one.
    """

    def __init__(self) -> None:
        self.fd = sealed_memfd("etha-revocation", NBYTES)
        self._pages = map_pages(self.fd, NBYTES)
        self._words = _words(self._pages)
        self._free = deque(range(SLOTS - 1, 0, -1))
        #: Slots that a frozen agent was inside when they were given back.
        self._stuck: deque[int] = deque()
        self._used = 0
        self._tickets = itertools.count(1)
        #: The words that are lent. Who takes one out gives its slot back.
        self._lent: dict[int, int] = {}

    def open(self) -> int:
        """Lend this worker's registered memory to one call. The returned word goes to the agent with the call."""
        for _ in range(len(self._stuck)):
            self._give_back(self._stuck.popleft())  # if the agent has left it meanwhile
        try:
            slot = self._free.pop()
        except IndexError:
            slot = 0
        ticket = next(self._tickets)
        if not slot or ticket > _MAX_TICKET:
            raise ConfigError(
                f"more than {SLOTS - 1} transfers of one client are in flight: wait for some, or use another client"
            )
        word = ticket * SLOTS + slot
        self._used = max(self._used, slot)
        self._lent[word] = slot
        self._words[slot * _WORDS] = ticket
        return word

    def revoke(self, word: int) -> bool:
        """Take the memory back, so that no piece starts in it from now on. Idempotent.

        Returns True if no lane thread is inside: nothing writes any more. False if one is (see ``busy``), for as long
        as one piece takes, or until its frozen agent thaws. It takes about 20 us.
        """
        ticket, slot = divmod(word, SLOTS)
        if self._words[slot * _WORDS] == ticket:
            self._words[slot * _WORDS] = 0
            self._fence()
        quiet = not self._inside(slot)
        if self._lent.pop(word, None) is not None:
            self._give_back(slot)
        return quiet

    def _give_back(self, slot: int) -> None:
        (self._stuck if self._inside(slot) else self._free).append(slot)

    def busy(self, word: int) -> bool:
        """Whether a lane thread is inside the memory lent under ``word``, which was revoked."""
        return self._inside(word % SLOTS)

    def _inside(self, slot: int) -> bool:
        return any(self._words[slot * _WORDS + 1 : (slot + 1) * _WORDS])

    def _fence(self) -> None:
        # Cheap if the agent has registered; otherwise the slow command (an RCU grace period, about 10 ms), which needs
        # no registration. Kernels without either run sandboxes on x86. There, releasing and taking the GIL and the lock
        # around each access is a locked instruction, hence a full barrier.
        command = _GLOBAL_EXPEDITED if self._words[0] == _REGISTERED else _GLOBAL
        if not _membarrier(command) and not _membarrier(_GLOBAL):
            log.debug("membarrier is not available: revocation relies on the interpreter's own barriers")

    def close(self) -> None:
        """Revoke everything and close the descriptor. Idempotent."""
        for slot in range(1, self._used + 1):
            self._words[slot * _WORDS] = 0
        self._free.clear()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class LentPage:
    """The agent's end of one worker's page."""

    def __init__(self, fd: int) -> None:
        """Map the page of a received descriptor; takes ``fd`` and closes it. RegistrationError if it is wrong."""
        try:
            self._pages = map_sealed(fd, NBYTES)
        finally:
            os.close(fd)
        self._words = _words(self._pages)
        if _membarrier(_REGISTER_GLOBAL_EXPEDITED):
            self._words[0] = _REGISTERED

    def lends(self, word: int) -> bool:
        """Whether the call of ``word`` still lends its memory. RegistrationError for a word that no page can hold."""
        return self.guard(word).lends

    def guard(self, word: int) -> Guard:
        """The guard of one call. RegistrationError for a word that no page can hold."""
        ticket, slot = divmod(word, SLOTS)
        if not (0 < ticket <= _MAX_TICKET and 0 < slot < SLOTS):
            raise RegistrationError(f"{word} is not a revocation word")
        return Guard(self._words, slot * _WORDS, ticket)


class Guard:
    """What a lane thread calls before and after it touches a worker's memory."""

    __slots__ = ("_base", "_ticket", "_words")

    def __init__(self, words: memoryview, base: int, ticket: int) -> None:
        self._words = words
        self._base = base
        self._ticket = ticket

    @property
    def lends(self) -> bool:
        """Whether the call has not returned yet, at this moment."""
        return bool(self._words[self._base] == self._ticket)

    def enter(self, thread: int) -> bool:
        """Enter the memory. True: it is lent, and the worker sees that ``thread`` is inside until ``leave``."""
        busy = self._base + 1 + thread
        self._words[busy] = 1
        if self._words[self._base] == self._ticket:
            return True
        self._words[busy] = 0
        return False

    def leave(self, thread: int) -> None:
        """Leave the memory; the piece is done."""
        self._words[self._base + 1 + thread] = 0
