"""Two segments change places: nobody faults, nothing is lost, and whoever may see the old pages prevents it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from etha.client.memory.tensors import empty
from etha.memory import pages, shared
from etha.memory.handles import describe, is_dense
from etha.memory.pages import HUGE

SIZES = [shared.SMALL, HUGE, 3 * HUGE + 5 * mmap.PAGESIZE]
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def two(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of ones and one of twos, each with pages of its own."""
    made = empty((nbytes,), torch.uint8), empty((nbytes,), torch.uint8)
    for tensor, value in zip(made, (1, 2), strict=True):
        tensor.fill_(value)
    return made


def values(*tensors: torch.Tensor) -> list[set[int]]:
    return [set(tensor.unique().tolist()) for tensor in tensors]


def exchange(holder: object, first: int, second: int) -> tuple[str, str]:
    with pages.Asides() as asides:
        return shared.exchange(holder, first, second, asides)


def mapped() -> int:
    """How many mappings this process has of segments, and of large ranges that are only reserved. Of others it has
    sometimes one more or less, because threads of other tests come and go."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access = line.split()[:2]
        start, stop = (int(address, 16) for address in where.split("-"))
        found += "memfd" in line or (access == "---p" and stop - start >= shared.SMALL)
    return found


@pytest.mark.parametrize("nbytes", SIZES)
def test_each_address_shows_what_the_other_one_did(nbytes: int) -> None:
    a, b = two(nbytes)
    one, other = describe(a).segment, describe(b).segment
    before = mapped()
    for _ in range(3):
        assert exchange(None, a.data_ptr(), b.data_ptr()) == (one, other)
        assert values(a, b) == [{2}, {1}] and (describe(a).segment, describe(b).segment) == (other, one)
        a[7], b[-1] = 5, 6
        assert exchange(None, a.data_ptr(), b.data_ptr()) == (other, one)
        assert values(a, b) == [{1, 6}, {2, 5}] and (a[-1], b[7]) == (6, 5)
        a[-1], b[7] = 1, 2
    assert mapped() == before


def test_exchanges_of_any_sizes_go_through_the_same_asides_and_leave_nothing() -> None:
    made = [two(nbytes) for nbytes in (HUGE, *SIZES, 3 * HUGE, HUGE, shared.SMALL)]
    before = mapped()
    with pages.Asides() as asides:
        for _ in range(3):
            for a, b in made:
                shared.exchange(None, a.data_ptr(), b.data_ptr(), asides)
    assert mapped() == before
    assert all(values(a, b) == [{2}, {1}] for a, b in made)


def test_after_a_refusal_the_others_that_are_exchanged_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [two(HUGE) for _ in range(3)]
    real: Callable[..., None] = pages._move
    with pages.Asides() as asides:
        for number, (a, b) in enumerate(made):
            with monkeypatch.context() as patch:
                if number == 1:
                    steps = iter([real])
                    patch.setattr(pages, "_move", lambda *where, steps=steps: next(steps, refuse)(*where))
                    with pytest.raises(shared.ExchangeError, match="Cannot allocate memory"):
                        shared.exchange(None, a.data_ptr(), b.data_ptr(), asides)
                else:
                    shared.exchange(None, a.data_ptr(), b.data_ptr(), asides)
    assert [values(a, b) for a, b in made] == [[{2}, {1}], [{1}, {2}], [{2}, {1}]]


@pytest.mark.parametrize("first", [0, 1])
def test_no_addresses_are_left_for_either_aside(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (a, b), (c, d) = two(HUGE), two(3 * HUGE)
    before = mapped()
    real: Callable[[int], int] = pages._reserve
    with pages.Asides() as asides:
        shared.exchange(None, a.data_ptr(), b.data_ptr(), asides)
        with monkeypatch.context() as patch:
            steps = iter([real] * first)
            patch.setattr(pages, "_reserve", lambda nbytes: next(steps, refuse)(nbytes))
            with pytest.raises(shared.ExchangeError, match="Cannot allocate memory"):
                shared.exchange(None, c.data_ptr(), d.data_ptr(), asides)
        assert values(a, b, c, d) == [{2}, {1}, {1}, {2}]
        shared.exchange(None, c.data_ptr(), d.data_ptr(), asides)
    assert values(c, d) == [{2}, {1}] and mapped() == before


def refuse(*where: int) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_the_descriptor_of_a_segment_is_that_of_its_pages() -> None:
    """Whoever opens a segment by its id after an exchange gets what the tensor shows."""
    a, b = two(HUGE)
    exchange(None, a.data_ptr(), b.data_ptr())
    for tensor, value in ((a, 2), (b, 1)):
        segment = shared.segment(describe(tensor).segment or "")
        assert segment is not None and segment.address == tensor.data_ptr()
        with mmap.mmap(segment.fd, segment.nbytes) as file:
            assert set(file[:]) == {value}


def test_what_is_dropped_after_an_exchange_is_closed_and_nothing_else() -> None:
    a, b = two(HUGE)
    exchange(None, a.data_ptr(), b.data_ptr())
    kept, dropped = (shared.segment(describe(tensor).segment or "") for tensor in (b, a))
    assert kept is not None and dropped is not None
    del a
    assert shared.segment(dropped.id) is None and shared.segment(kept.id) == kept and values(b) == [{1}]
    os.fstat(kept.fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(dropped.fd)


def test_threads_read_and_write_meanwhile() -> None:
    """A page is one version or the other at any moment, and no write is lost."""
    a, b = two(HUGE)
    mine = [0, 0]
    over = threading.Event()
    found: set[int] = set()

    def read() -> None:
        while not over.is_set():
            found.update(a.unique().tolist())

    def write() -> None:  # into a page of its own, of whichever segment is there
        place = b[-mmap.PAGESIZE :]
        while not over.is_set():
            mine[0] += 1
            place.fill_(mine[0] % 2 + 1)

    threads = [threading.Thread(target=work) for work in (read, write)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        exchange(None, a.data_ptr(), b.data_ptr())
    over.set()
    for thread in threads:
        thread.join()
    assert found <= {1, 2} and mine[0] > 0
    assert values(a, b)[0] >= {1}


@pytest.mark.parametrize("part", ["first", "second"])
def test_mappings_of_several_parts_are_exchanged_whole_or_not_at_all(part: str) -> None:
    """A part with other rights makes two mappings of one, which newer kernels move and older ones refuse."""
    a, b = two(HUGE)
    split = (a if part == "first" else b).data_ptr() + mmap.PAGESIZE
    assert _libc.mprotect(split, mmap.PAGESIZE, mmap.PROT_READ) == 0
    try:
        exchange(None, a.data_ptr(), b.data_ptr())
    except shared.ExchangeError as error:
        assert error.refused and values(a, b) == [{1}, {2}]
    else:
        assert values(a, b) == [{2}, {1}]


def test_a_refusal_changes_nothing() -> None:
    a, b = two(HUGE)
    ids = describe(a).segment, describe(b).segment
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + HUGE, before[1]))
    try:
        with pytest.raises(shared.ExchangeError, match="the kernel refuses: Cannot allocate memory") as raised:
            exchange(None, a.data_ptr(), b.data_ptr())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert raised.value.refused
    assert values(a, b) == [{1}, {2}] and (describe(a).segment, describe(b).segment) == ids
    exchange(None, a.data_ptr(), b.data_ptr())
    assert values(a, b) == [{2}, {1}]


@pytest.mark.parametrize("step", [1, 2])
def test_a_kernel_that_refuses_a_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mappings left (``vm.max_map_count``), or one that is too old."""
    a, b = two(3 * HUGE)
    real: Callable[..., None] = pages._move
    steps: list[int] = []

    def move(address: int, nbytes: int, to: int) -> None:
        steps.append(address)
        if len(steps) == step:
            raise OSError(12, "Cannot allocate memory")
        real(address, nbytes, to)

    monkeypatch.setattr(pages, "_move", move)
    with pytest.raises(shared.ExchangeError, match="Cannot allocate memory"):
        exchange(None, a.data_ptr(), b.data_ptr())
    assert len(steps) == step and values(a, b) == [{1}, {2}]
    a.fill_(3)
    assert values(a, b) == [{3}, {2}]


def test_only_two_segments_of_one_size_are_exchanged() -> None:
    a, b = two(HUGE)
    large, plain = empty((2 * HUGE,), torch.uint8).fill_(3), torch.full((HUGE,), 4, dtype=torch.uint8)
    for first, second in ((a, large), (large, a), (a, plain), (plain, b), (a[1:], b)):
        with pytest.raises(shared.ExchangeError, match="its memory was replaced") as raised:
            exchange(None, first.data_ptr(), second.data_ptr())
        assert not raised.value.refused
    assert values(a, b, large, plain) == [{1}, {2}, {3}, {4}]


def test_who_else_holds_a_segment_prevents_it() -> None:
    class Holder:
        pass

    me, other = Holder(), Holder()
    a, b = two(HUGE)
    ids = [describe(t).segment or "" for t in (a, b)]
    shared.hold(me, ids)
    exchange(me, a.data_ptr(), b.data_ptr())
    with pytest.raises(shared.ExchangeError, match="another open batch"):
        exchange(None, a.data_ptr(), b.data_ptr())
    for id in ids:
        shared.hold(other, [id])
        with pytest.raises(shared.ExchangeError, match="another open batch") as raised:
            exchange(me, a.data_ptr(), b.data_ptr())
        assert not raised.value.refused and values(a, b) == [{2}, {1}]
        shared.let_go(other, ids)
    shared.hold(other, ids)
    del other  # collected without a word
    exchange(me, a.data_ptr(), b.data_ptr())
    assert values(a, b) == [{1}, {2}]


def test_a_child_keeps_seeing_what_its_parent_sees() -> None:
    """It maps the same pages, so no segment of before the fork is exchanged any more."""
    a, b = two(HUGE)
    read, write = os.pipe()
    back, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os.write(answer, bytes([int(a[0]), int(a[-1])]))
        os._exit(0)
    try:
        with pytest.raises(shared.ExchangeError, match="forked"):
            exchange(None, a.data_ptr(), b.data_ptr())
        a.copy_(b)
        os.write(write, b"x")
        assert os.read(back, 2) == bytes([2, 2])
    finally:
        os.waitpid(child, 0)
        for fd in (read, write, back, answer):
            os.close(fd)
    later, place = two(HUGE)
    exchange(None, later.data_ptr(), place.data_ptr())
    assert values(later, place) == [{2}, {1}]


def test_a_fork_never_sees_an_exchange_half_done() -> None:
    """A child that is forked by another thread meanwhile sees the tensor as its parent does from then on."""
    a, b = two(3 * HUGE)
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                exchange(None, a.data_ptr(), b.data_ptr())
            except shared.ExchangeError:
                return

    thread = threading.Thread(target=work)
    thread.start()
    back, answer = os.pipe()
    go, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        os.write(answer, bytes([int(a[0]), int(a[-1]), int(b[0])]))
        os._exit(0)
    try:
        over.set()
        thread.join()
        a.fill_(7)
        b.fill_(8)
        os.write(say, b"x")
        assert os.read(back, 3) == bytes([7, 7, 8])
    finally:
        os.waitpid(child, 0)
        for fd in (back, answer, go, say):
            os.close(fd)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((), (), True),
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((2, 3, 4), (4, 8, 1), True),
        ((3, 1, 4), (4, 99, 1), True),
        ((3, 4), (5, 1), False),
        ((3, 4), (4, 2), False),
        ((3, 4), (0, 1), False),
        ((2, 2, 2), (1, 2, 2), False),
    ],
)
def test_dense(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) is dense
    indexes = itertools.product(*map(range, shape))
    places = [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indexes]
    assert (sorted(places) == list(range(len(places)))) is dense
