"""How many messages each trial gets, how a failing one is told, and what memory a trial may take.

ETHA_FUZZ_MESSAGES   in all, 20,000 by default; `make fuzz` takes a million
ETHA_FUZZ_SEED       repeats a run; 1 by default
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.footprint import Footprint, forget_peak

MESSAGES = int(os.environ.get("ETHA_FUZZ_MESSAGES", "20000"))
SEED = int(os.environ.get("ETHA_FUZZ_SEED", "1"))
#: What a trial gets of every million.
SHARES = {
    "bus codec": 330_000,
    "peer codec": 300_000,
    "Redis readers": 200_000,
    "bus socket": 60_000,
    "bus session": 30_000,
    "descriptor socket": 10_000,
    "link": 40_000,
    "link handshake": 3_000,
    "data port": 5_000,
    "data stream": 20_000,
    "Redis values": 2_000,
}
assert sum(SHARES.values()) == 1_000_000
MIB = 1 << 20
#: What a process may grow by while it refuses messages: some of them have a few MiB themselves.
MORE = 96 * MIB
#: What was really sent, for the summary.
counts: dict[str, dict[str, int]] = {}


def share(name: str) -> int:
    """How many messages trial ``name`` gets in this run."""
    return -(-SHARES[name] * MESSAGES // 1_000_000)


def seeds(name: str) -> Iterator[int]:
    """A seed for each message of a trial."""
    for i in range(share(name)):
        yield hash_of(name) + SEED * 1_000_003 + i


def hash_of(name: str) -> int:
    """The same number for a trial's name in every run."""
    return int.from_bytes(name.encode(), "big") % 1_000_000_007 * 1_000_000


def count(name: str, outcome: str, more: int = 1) -> None:
    """Note what became of messages."""
    found = counts.setdefault(name, {})
    found[outcome] = found.get(outcome, 0) + more


def judge(name: str, seed: int, data: Any, take: Callable[[], object], clean: tuple[type[Exception], ...]) -> bool:
    """``take()`` is refused by one of ``clean`` or works (True); anything else fails with the input as hex."""
    try:
        take()
    except clean as error:
        text = str(error)
        if len(text) > 10_000:
            pytest.fail(f"{name}, seed {seed}: a refusal of {len(text)} characters\ninput: {shown(data)}")
        count(name, "refused")
        return False
    except Exception as error:
        pytest.fail(f"{name}, seed {seed}: {type(error).__name__}: {str(error)[:500]}\ninput: {shown(data)}")
    count(name, "taken")
    return True


def shown(data: Any) -> str:
    """Bytes as hex, texts as UTF-8 bytes in hex, hashes as their fields; enough to put it into a test."""
    if isinstance(data, bytes):
        return data.hex()
    return str(data).encode("utf-8", "backslashreplace").hex()


class Lines(logging.Filter):
    """What modules log while entered, as text and to nobody else: pytest would keep every record with its error."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._loggers = [logging.getLogger(name) for name in names]
        self.said: list[str] = []
        self.broken: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        (self.broken if record.exc_info else self.said).append(record.getMessage())
        return False

    def __enter__(self) -> Lines:
        for logger in self._loggers:
            logger.addFilter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)


@contextmanager
def bounded(pid: int | str = "self", more: int = MORE) -> Iterator[None]:
    """The process's resident memory never exceeds what it was by ``more`` bytes while entered."""
    gc.collect()
    forget_peak(pid)
    before = Footprint.of(pid).resident
    yield
    grown = Footprint.of(pid).peak - before
    assert grown < more, f"process {pid} has grown by {grown} bytes, at most {more} are allowed"


def rng_of(seed: int) -> random.Random:
    """The generator of one message."""
    return random.Random(seed)
