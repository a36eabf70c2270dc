"""Handles from a socket: what fits resolves to the very bytes, anything else is refused."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from etha.client.memory.tensors import empty
from etha.errors import RegistrationError
from etha.memory import shared
from etha.memory.handles import TensorHandle, describe
from etha.memory.mapping import WorkerMemory, map_sealed
from etha.memory.pages import Asides, sealed_memfd
from etha.memory.process import start_time


@pytest.fixture
def memory() -> Iterator[WorkerMemory]:
    found = WorkerMemory(os.getpid(), start_time(os.getpid()))
    yield found
    found.close()


def attach(memory: WorkerMemory, t: torch.Tensor) -> TensorHandle:
    handle = describe(t)
    segment = shared.segment(handle.segment or "")
    assert segment is not None
    memory.attach(segment.id, os.dup(segment.fd), segment.nbytes)
    return handle


def test_a_view_of_a_segment_sees_the_workers_bytes(memory: WorkerMemory) -> None:
    t = empty((512, 1024))
    t.copy_(torch.arange(512 * 1024).view(512, 1024))
    view = memory.resolve(attach(memory, t[2:, ::3]))
    assert view.flat is not None and not view.private
    assert view.address != t.data_ptr()  # a mapping of its own
    seen = view.flat.as_strided(view.shape, view.strides)
    assert torch.equal(seen, t[2:, ::3])
    seen.fill_(-1)
    assert (t[2:, ::3] == -1).all() and t[0, 0] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 2 << 20},
        {"offset": 4},
        {"offset": -4},
        {"shape": (512, 1025)},
        {"shape": (1 << 40, 1 << 40)},
        {"strides": (1025, 1)},
        {"strides": (1 << 61, 1)},
        {"strides": (-1024, 1)},
        {"strides": (1,)},
        {"shape": (True, 1024)},
        {"shape": (512.0, 1024)},
        {"dtype": "float64"},
        {"dtype": "save"},
        {"dtype": "qint8"},
        {"segment": "0" * 16},
        {"segment": "../../etc"},
        {"shape": (1,) * 65, "strides": (1,) * 65},
    ],
)
def test_a_hostile_handle_is_refused(memory: WorkerMemory, change: dict[str, object]) -> None:
    handle = attach(memory, empty((512, 1024)))
    memory.resolve(handle)
    with pytest.raises(RegistrationError):
        memory.resolve(replace(handle, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("address", [0, -8, 1 << 57, (1 << 62) - 1, 1 << 63])
def test_addresses_that_no_process_has_are_refused(memory: WorkerMemory, address: int) -> None:
    with pytest.raises(RegistrationError):
        memory.resolve(TensorHandle(segment=None, offset=address, shape=(4,), strides=(1,), dtype="float32"))


def test_private_memory_that_cannot_be_reached_is_refused_with_the_way_out() -> None:
    memory = WorkerMemory(os.getpid(), start_time(os.getpid()), private=False)
    with pytest.raises(RegistrationError, match=r"etha\.share_module"):
        memory.resolve(describe(torch.empty(3)))
    memory.close()


def test_an_empty_tensor_has_no_memory(memory: WorkerMemory) -> None:
    assert memory.resolve(describe(torch.empty(0, 4))).nbytes == 0


def test_an_unsealed_or_wrong_descriptor_is_refused(tmp_path: Path) -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with pytest.raises(RegistrationError, match="not sealed"):
        map_sealed(loose, 4096)
    plain = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(plain, 4096)
    with pytest.raises(RegistrationError):
        map_sealed(plain, 4096)
    sealed = sealed_memfd("x", 4096)
    for nbytes in (0, -1, 4095, 8192):
        with pytest.raises(RegistrationError):
            map_sealed(sealed, nbytes)
    for fd in (loose, plain, sealed):
        os.close(fd)


def test_nothing_is_left_when_views_and_segments_are_gone(memory: WorkerMemory) -> None:
    t = empty((1 << 20,), torch.uint8)
    gc.collect()

    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:etha")
        return len(os.listdir("/proc/self/fd")), maps  # noqa: PTH208

    before = count()
    view = memory.resolve(attach(memory, t))
    assert count() == (before[0], before[1] + 1)
    memory.spare([describe(t).segment or ""]).release()
    assert view.flat is not None
    view.flat.fill_(3)  # a view keeps its mapping
    assert t[5] == 3
    del view
    gc.collect()
    assert count() == before


def test_exchanged_mappings_show_what_the_workers_tensors_show(memory: WorkerMemory) -> None:
    """A view stays where it is, and a handle of today finds the bytes of today."""
    made = [empty((1 << 20,), torch.uint8) for _ in range(4)]
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    handles = [attach(memory, tensor) for tensor in made]
    views = [memory.resolve(handle) for handle in handles]
    ids = [handle.segment or "" for handle in handles]

    def seen() -> list[int]:
        return [int(view.flat[-1]) for view in views if view.flat is not None]

    for _ in range(3):
        for first, second in ((0, 1), (2, 3)):
            with Asides() as asides:
                shared.exchange(None, made[first].data_ptr(), made[second].data_ptr(), asides)
        memory.exchange([(ids[0], ids[1]), (ids[2], ids[3])])
        assert seen() == [int(tensor[-1]) for tensor in made]
        for tensor in made:
            now = memory.resolve(describe(tensor))
            assert now.flat is not None and now.flat[-1] == tensor[-1]
        made[0].add_(10)
    assert seen() == [int(tensor[-1]) for tensor in made]


@pytest.mark.parametrize("wrong", ["unknown", "same", "size", "again"])
def test_what_cannot_be_exchanged_changes_nothing(memory: WorkerMemory, wrong: str) -> None:
    made = [empty((n,), torch.uint8) for n in (1 << 20, 1 << 20, 2 << 20)]
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    handles = [attach(memory, tensor) for tensor in made]
    views = [memory.resolve(handle) for handle in handles]
    a, b, large = (handle.segment or "" for handle in handles)
    bad = {"unknown": (a, "0" * 16), "same": (b, b), "size": (b, large), "again": (a, large)}[wrong]
    with pytest.raises(RegistrationError, match="are not two mapped ones of equal size"):
        memory.exchange([(a, b), bad])
    assert [int(view.flat[5]) for view in views if view.flat is not None] == [0, 1, 2]
    assert [int(memory.resolve(handle).flat[5]) for handle in handles] == [0, 1, 2]  # type: ignore[index]
