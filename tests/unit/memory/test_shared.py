"""Segments: sealed, found by address, gone with their last tensor; and the public makers of them."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from etha.client.memory.tensors import empty, empty_like, share_module
from etha.errors import ConfigError
from etha.memory import huge, shared
from etha.memory.handles import describe
from etha.memory.huge import Collapser, joined
from etha.memory.pages import HUGE, collapse


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:etha")


def test_a_segment_is_found_by_any_address_inside_it_and_by_no_other() -> None:
    t = empty((1024, 1024))
    handle = describe(t[3:, 5:])
    assert handle.segment is not None
    segment = shared.segment(handle.segment)
    assert segment is not None and segment.nbytes == 4 << 20
    assert handle.offset == (3 * 1024 + 5) * 4
    assert shared.find(t.data_ptr(), t.nbytes) == (segment.id, 0)
    assert shared.find(t.data_ptr(), t.nbytes + 1) is None
    assert shared.find(t.data_ptr() + segment.nbytes, 1) is None
    assert shared.find(torch.ones(1000).data_ptr(), 4) is None


def test_a_segment_can_neither_shrink_nor_grow() -> None:
    t = empty((1 << 20,), torch.uint8)
    segment = shared.segment(describe(t).segment or "")
    assert segment is not None
    for size in (0, 2 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


@pytest.mark.slow
def test_the_last_tensor_takes_the_segment_along() -> None:
    gc.collect()
    before = descriptors(), mappings(), len(shared.segments())
    t = empty((2 << 20,), torch.uint8)
    view = t[5:].view(-1, 1)
    assert (descriptors(), mappings(), len(shared.segments())) == tuple(n + 1 for n in before)
    del t
    assert len(shared.segments()) == before[2] + 1
    view.fill_(7)
    del view
    gc.collect()
    assert (descriptors(), mappings(), len(shared.segments())) == before


def test_small_tensors_share_a_segment() -> None:
    held = [empty((100,)) for _ in range(50)]
    assert len({describe(t).segment for t in held}) <= 2
    places = sorted((t.data_ptr(), t.nbytes) for t in held)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128])
def test_empty_has_the_shape_and_dtype_asked_for(dtype: torch.dtype) -> None:
    t = empty((3, 0, 5), dtype)
    assert t.shape == (3, 0, 5) and t.dtype == dtype
    t = empty((3, 5), dtype)
    assert t.shape == (3, 5) and t.dtype == dtype and t.is_contiguous() and not t._is_view()
    assert empty((), dtype).shape == ()
    assert empty(7, dtype).shape == (7,)
    assert describe(t).segment is not None


def test_empty_like_keeps_dense_strides() -> None:
    source = torch.empty(5, 7).t()
    t = empty_like(source)
    assert t.shape == source.shape and t.stride() == source.stride()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="meta"):
        empty((3,), device="meta")
    with pytest.raises(ConfigError, match="meta"):
        empty_like(torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"'weight'.*meta"):
        share_module(nn.Linear(2, 2, device="meta"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(4, 6)
        self.b.weight = self.a.weight
        self.flat = nn.Parameter(torch.arange(20.0))
        self.part = nn.Parameter(self.flat.data[4:16].view(4, 3).t())
        self.register_buffer("steps", torch.arange(6, dtype=torch.int64))
        self.register_buffer("none", torch.empty(0))


def test_share_module_moves_values_and_keeps_ties_strides_and_identity() -> None:
    module = Tied()
    before = dict(module.named_parameters())
    values = {name: t.clone() for name, t in module.state_dict().items()}
    strides = {name: t.stride() for name, t in module.state_dict().items()}
    module.a.weight.sum().backward()
    assert share_module(module) is module
    for name, t in module.state_dict().items():
        assert torch.equal(t, values[name]) and t.stride() == strides[name]
        assert t.numel() == 0 or describe(t).segment is not None
    assert all(module.get_parameter(name) is p for name, p in before.items())
    assert module.b.weight is module.a.weight and module.a.weight.grad is not None
    module.flat.data[4] = 99.0
    assert module.part[0, 0] == 99.0
    assert len({describe(t).segment for t in module.state_dict().values() if t.numel()}) == 1


def large_module(count: int) -> nn.Module:
    """``count`` parameters of 1 MiB and as many small ones, with their values."""
    layers = [nn.Linear(512, 512) for _ in range(count)]
    for value, layer in enumerate(layers):
        nn.init.constant_(layer.weight, value)
        nn.init.constant_(layer.bias, -value)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("scarce", [False, True], ids=["plenty", "scarce"])
def test_large_parameters_have_pages_of_their_own_while_there_are_descriptors(scarce: bool) -> None:
    module = large_module(5)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if scarce:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 15, before[1]))
        share_module(module)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    weights = [t for name, t in module.named_parameters() if "weight" in name]
    biases = [t for name, t in module.named_parameters() if "bias" in name]
    for value, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        assert bool((weight == value).all()) and bool((bias == -value).all())
    assert len({describe(t.data).segment for t in weights}) == (1 if scarce else 5)
    assert len({describe(t.data).segment for t in biases}) == 1
    alone = [shared.at(t.data_ptr()) for t in weights]
    assert [one is not None and one.alone == 1 << 20 for one in alone] == [not scarce] * 5


def test_share_module_can_be_repeated_and_trained_on() -> None:
    module = share_module(share_module(nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    place = module.weight.data_ptr()
    optimizer.step()
    assert module.weight.data_ptr() == place


def test_huge_pages_change_nothing_but_the_pages() -> None:
    tensors = [torch.arange(5 << 20, dtype=torch.int32), torch.arange(100, dtype=torch.int32)]
    places = [t.data_ptr() for t in tensors]
    collapser = Collapser()
    collapser.ask((t.data_ptr(), t.nbytes) for t in tensors)
    collapser.settle(timeout=30)
    assert [t.data_ptr() for t in tensors] == places
    assert all(torch.equal(t, torch.arange(len(t), dtype=torch.int32)) for t in tensors)
    collapser.cancel()
    collapser.ask([(places[0], 2 << 21)])
    collapser.settle(timeout=30)


def test_small_tensors_share_huge_pages() -> None:
    memory = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # new, because malloc's may be huge already
    whole = torch.frombuffer(memory, dtype=torch.float32)
    tensors = [whole[i : i + 4096] for i in range(0, len(whole), 4096 + 16)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    collapser = Collapser()
    before = _huge_bytes()
    collapser.ask((t.data_ptr(), t.nbytes) for t in tensors)
    collapser.settle(timeout=30)
    if not collapse(torch.ones(4 << 20).data_ptr(), 16 << 20):
        pytest.skip("this kernel gives no huge pages to whoever asks")
    assert _huge_bytes() > before
    assert all(bool((t == i).all()) for i, t in enumerate(tensors))


def test_no_huge_page_is_left_out_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(huge, "collapse", lambda address, nbytes: asked.append((address, nbytes)) or True)
    collapser = Collapser()
    collapser.ask([(5 * HUGE + 64, 9 * HUGE)])
    collapser.settle(timeout=30)
    pages = [page for address, nbytes in asked for page in range(-(-address // HUGE), (address + nbytes) // HUGE)]
    assert pages == list(range(6, 14))
    assert len(asked) > 2 and all(nbytes <= 2 * HUGE for _, nbytes in asked)


def test_huge_pages_wait_while_a_transfer_runs() -> None:
    tensor = torch.ones(16 << 20)
    collapser = Collapser()
    with collapser.transferring():
        collapser.ask([(tensor.data_ptr(), tensor.nbytes)])
        collapser.settle(timeout=0.1)
        assert collapser._queue == [(tensor.data_ptr(), tensor.nbytes)]
        with collapser.transferring():  # when it ends there is time for one step
            pass
        while len(collapser._queue) == 1 and collapser._queue[0][1] == tensor.nbytes:
            os.sched_yield()
    collapser.settle(timeout=30)
    assert not collapser._queue


def test_a_client_that_closes_does_not_wait_for_a_transfer_of_another() -> None:
    tensor = torch.ones(1 << 20)
    collapser = Collapser()
    with collapser.transferring():
        collapser.ask([(tensor.data_ptr(), tensor.nbytes)])
        collapser.cancel()
        collapser.settle(timeout=30)
        assert collapser._thread is None


def _huge_bytes() -> int:
    """Bytes of this process's ordinary memory that lie in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def test_ranges_are_joined_where_no_page_of_another_lies_between() -> None:
    assert joined([]) == []
    assert joined([(100, 50), (0, 50)]) == [(0, 150)]
    assert joined([(0, 50), (50 + 8192, 10), (50 + 8192 + 10 + 8193, 5)]) == [(0, 8252), (16445, 5)]
    assert joined([(0, 1000), (10, 20)]) == [(0, 1000)]


def test_ranges_that_are_not_mapped_are_refused_quietly() -> None:
    assert collapse(2 << 21, 2 << 21) is False
    assert collapse(torch.empty(10).data_ptr(), 40) is False
