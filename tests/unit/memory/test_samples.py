"""Samples notice what is written to tensors, whatever their strides, and nothing that is written beside them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from etha.memory.handles import TensorHandle
from etha.memory.mapping import StandingSegment
from etha.memory.pages import sealed_memfd
from etha.memory.samples import SAMPLES, Samples
from tests.examples import examples

NBYTES = 1 << 20


@dataclass
class Page:
    """A segment of an agent, and the same memory as its worker has it."""

    segment: StandingSegment
    memory: torch.Tensor

    def tensor(self, handle: TensorHandle) -> torch.Tensor:
        dtype = getattr(torch, handle.dtype)
        flat = self.memory[handle.offset : handle.offset + (NBYTES - handle.offset) // dtype.itemsize * dtype.itemsize]
        return flat.view(dtype).as_strided(handle.shape, handle.strides)


@pytest.fixture
def page() -> Iterator[Page]:
    fd = sealed_memfd("test", NBYTES)
    segment = StandingSegment("ab", os.dup(fd), NBYTES)
    os.close(fd)
    yield Page(segment, torch.frombuffer(segment.pages, dtype=torch.uint8))
    segment.close()


def handle(offset: int, like: torch.Tensor) -> TensorHandle:
    return TensorHandle(
        segment="ab",
        offset=offset,
        shape=tuple(like.shape),
        strides=tuple(like.stride()),
        dtype=str(like.dtype).removeprefix("torch."),
    )


def some(chance: random.Random) -> torch.Tensor:
    """A tensor of any strides; only these count."""
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool])
    shape = [chance.choice([0, 1, 2, 3, 7, 40]), *(chance.randint(1, 30) for _ in range(chance.randint(0, 2)))]
    whole = torch.empty(shape if chance.random() < 0.9 else (), dtype=dtype, device="meta")
    match chance.choice(["dense", "transposed", "gaps", "expanded"]):
        case "transposed" if whole.dim() > 1:
            return whole.transpose(0, -1)
        case "gaps" if whole.dim() > 0:
            return whole[..., ::3]
        case "expanded":
            return whole.expand(2, *whole.shape)
    return whole


def laid_out(chance: random.Random, count: int) -> list[TensorHandle]:
    """Tensors one after the other, with gaps between them and within."""
    found, offset = [], 0
    for _ in range(count):
        like = some(chance)
        offset += -offset % 16 + 16 * chance.randint(0, 3)
        found.append(handle(offset, like))
        last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        offset += (last + 1) * like.itemsize
    assert offset <= NBYTES
    return found


@pytest.mark.parametrize("seed", range(examples(50)))
def test_what_is_written_to_a_tensor_is_noticed_and_what_lies_beside_is_not(seed: int, page: Page) -> None:
    chance = random.Random(seed)
    handles = laid_out(chance, chance.randint(1, SAMPLES // 2))
    page.memory.copy_(torch.randint(0, 2, (NBYTES,), dtype=torch.uint8))
    samples = Samples(handles, [page.segment])
    assert samples.changed() is None

    beside = torch.ones(NBYTES, dtype=torch.bool)
    for one in handles:
        size = getattr(torch, one.dtype).itemsize
        starts = torch.arange(one.offset, NBYTES, size)
        places = starts.as_strided(one.shape, one.strides).reshape(-1, 1) + torch.arange(size)
        beside[places.reshape(-1)] = False
    page.memory[beside] += 1
    assert samples.changed() is None

    for number in chance.sample(range(len(handles)), min(len(handles), 5)):
        tensor = page.tensor(handles[number])
        if not tensor.numel():
            continue
        before = page.memory.clone()
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 16: torch.int64}[tensor.itemsize]
        if tensor.itemsize == 16:
            tensor = torch.view_as_real(tensor)
        changed = tensor.view(carrier).bitwise_xor(1)
        tensor.view(carrier).copy_(changed) if 0 not in tensor.stride() else tensor.view(carrier)[0].copy_(changed[0])
        assert samples.changed() == number
        page.memory.copy_(before)
        assert samples.changed() is None


def test_all_of_many_is_noticed(page: Page) -> None:
    handles = [handle(100 * n, torch.empty(25, device="meta")) for n in range(10_000)]
    samples = Samples(handles, [page.segment])
    assert samples.changed() is None
    page.memory += 1
    assert samples.changed() is not None


def test_a_large_tensor_is_sampled_all_over(page: Page) -> None:
    """Half of it written is missed once in 2**SAMPLES."""
    samples = Samples([handle(0, torch.empty(NBYTES // 4, device="meta"))], [page.segment])
    page.memory[NBYTES // 2 :] += 1
    assert samples.changed() == 0


@pytest.mark.parametrize("like", [torch.empty(0, 5, device="meta"), torch.empty(3, 0, device="meta").expand(4, 3, 0)])
def test_tensors_without_elements_have_no_samples(like: torch.Tensor, page: Page) -> None:
    samples = Samples([handle(NBYTES, like)], [page.segment])
    page.memory += 1
    assert samples.changed() is None
    assert Samples([], []).changed() is None


def test_memory_that_the_agent_has_closed_is_not_read(page: Page) -> None:
    handles = [handle(0, torch.empty(10, device="meta"))]
    samples = Samples(handles, [page.segment])
    del page.memory
    page.segment.close()
    samples.changed()
