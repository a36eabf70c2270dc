"""What memory may be written, without a change to it and without a signal."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from etha.memory.writable import writable

PAGE = mmap.PAGESIZE


def test_pages_mapped_for_reading_are_not_writable(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE))
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 3 * PAGE, prot=mmap.PROT_READ)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    assert not writable(address, 1) and not writable(address + PAGE - 1, 1) and not writable(address, 3 * PAGE)
    assert writable(address, 0), "nothing is written"
    assert path.read_bytes() == bytes(3 * PAGE)


def test_a_file_that_has_become_shorter_is_not_writable(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * PAGE))
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 2 * PAGE)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        assert writable(address, 2 * PAGE)
        file.truncate(PAGE)
    assert writable(address, PAGE) and not writable(address, 2 * PAGE), "the last byte counts, too"


@pytest.mark.parametrize("nbytes", [1, 3, 4, 5, PAGE, 3 * PAGE])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_plain_memory_is_writable_and_stays_as_it_is(start: int, nbytes: int) -> None:
    memory = np.arange(start + nbytes, dtype=np.uint64).astype(np.uint8)
    before = memory.tobytes()
    assert writable(memory.ctypes.data + start, nbytes)
    assert memory.tobytes() == before


def test_no_memory_is_not_writable() -> None:
    assert not writable(8, 8) and not writable((1 << 63) - 8, 4)
