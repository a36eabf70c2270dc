"""A segment that an agent holds itself: it outlives the process that has shared it, and is checked as any other."""

from __future__ import annotations

import os
import weakref

import pytest
import torch

from etha.errors import RegistrationError
from etha.memory.handles import TensorHandle
from etha.memory.mapping import StandingSegment, WorkerMemory
from etha.memory.pages import sealed_memfd
from etha.memory.process import start_time

NBYTES = 4096


def test_what_was_written_stays_when_the_writer_has_closed_it() -> None:
    fd = sealed_memfd("test", NBYTES)
    os.pwrite(fd, torch.arange(8, dtype=torch.float32).numpy().tobytes(), 64)
    segment = StandingSegment("ab", os.dup(fd), NBYTES)
    os.close(fd)
    memory = WorkerMemory(os.getpid(), start_time(os.getpid()), private=False)
    memory.adopt(segment)
    view = memory.resolve(TensorHandle(segment="ab", offset=64, shape=(8,), strides=(1,), dtype="float32"))
    assert view.flat is not None and view.flat.tolist() == list(range(8))
    with pytest.raises(RegistrationError, match="does not fit"):
        memory.resolve(TensorHandle(segment="ab", offset=4090, shape=(8,), strides=(1,), dtype="float32"))
    # Other agents of the host find it among this process's descriptors, until it is closed.
    os.fstat(segment.fd)
    kept, number = weakref.ref(segment.pages), segment.fd
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert kept() is not None  # a view holds it
    memory.close()
    del view
    assert kept() is None


def test_a_file_that_is_no_sealed_memfd_of_that_size_is_refused_and_closed() -> None:
    for fd, nbytes, name in (
        (os.memfd_create("test"), NBYTES, "ab"),
        (sealed_memfd("test", NBYTES), NBYTES + 1, "ab"),
        (sealed_memfd("test", NBYTES), NBYTES, "no hex"),
    ):
        with pytest.raises(RegistrationError):
            StandingSegment(name, fd, nbytes)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
