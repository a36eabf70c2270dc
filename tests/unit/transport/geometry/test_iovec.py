"""Batches through the bounce buffers: where bytes are read to, whatever shares memory with whatever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etha.memory.handles import describe
from etha.memory.mapping import WorkerMemory
from etha.memory.process import start_time
from etha.memory.reach import ReachError
from etha.transport.copy import cpu
from etha.transport.copy.cpu import Buffer, Workspace
from etha.transport.geometry import iovec
from etha.transport.geometry.boxes import BoxAxis, span
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Ends, Path, Tile

ENDS = Ends(source=torch.float32, target=torch.float32, source_private=True, target_private=True)
CASTS = replace(ENDS, target=torch.float64)


@pytest.fixture(scope="module")
def me() -> Iterator[WorkerMemory]:
    """This process's own memory, reached the way another's is."""
    memory = WorkerMemory(os.getpid(), start_time(os.getpid()))
    yield memory
    memory.close()


def tile(*axes: tuple[int, int, int], spanning: bool, ends: Ends = ENDS) -> Tile:
    return Tile(path=Path.BOUNCE, axes=tuple(BoxAxis(*a) for a in axes), ends=ends, spanning=spanning)


def column(rows: int, width: int, into: int) -> Tile:
    """``rows`` elements, ``width`` apart in the source, read with all that lies between them."""
    return tile((rows, width, into), spanning=True)


def block(n: int) -> Tile:
    """``n`` elements that follow each other."""
    return tile((n, 1, 1), spanning=False)


def test_a_span_that_grows_leaves_what_lies_behind_it_alone(me: WorkerMemory) -> None:
    """Columns, a block, and columns again that begin inside the first span: the block's bytes stay."""
    source, target = torch.arange(64.0), torch.zeros(64)
    here, there = me.resolve(describe(source)), me.resolve(describe(target))
    ops = [
        Op(column(4, 8, 1), here, there, 0, 0),
        Op(block(16), here, there, 0, 16),
        Op(column(4, 8, 1), here, there, 4, 40),
    ]
    iovec.prove(ops)
    cpu.run(ops, Workspace())
    assert target[:4].tolist() == source[0:32:8].tolist()
    assert target[16:32].tolist() == source[:16].tolist()
    assert target[40:44].tolist() == source[4:36:8].tolist()


def test_what_comes_after_a_shared_span_is_not_laid_into_it(me: WorkerMemory) -> None:
    """A span that holds the next columns already does not say where the buffer ends."""
    source, target = torch.arange(256.0), torch.zeros(256)
    here, there = me.resolve(describe(source)), me.resolve(describe(target))
    ops = [
        Op(column(8, 8, 1), here, there, 0, 0),
        Op(block(100), here, there, 0, 8),
        Op(column(4, 8, 1), here, there, 4, 108),
        Op(block(100), here, there, 100, 112),
    ]
    iovec.prove(ops)
    cpu.run(ops, Workspace())
    expected = torch.cat([source[0:64:8], source[:100], source[4:36:8], source[100:200]])
    assert target[:212].tolist() == expected.tolist()


class _Fenced(Buffer):
    """A buffer with memory behind it that tells whether anything wrote there."""

    def __init__(self) -> None:
        super().__init__(0)
        self.fence = torch.zeros(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            whole = torch.zeros(nbytes + (1 << 16), dtype=torch.uint8)
            self._bytes, self.fence = whole[:nbytes], whole[nbytes:]
            self._typed.clear()


@pytest.mark.parametrize("wrong", ["read", "span", "start"])
def test_nothing_is_written_behind_the_buffer_whatever_a_batch_says(
    wrong: str, me: WorkerMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = torch.ones(4096), torch.zeros(4096)
    here, there = me.resolve(describe(source)), me.resolve(describe(target))
    ops = [Op(column(64, 8, 1), here, there, 0, 0), Op(block(512), here, there, 0, 64)]
    [batch] = iovec.batches(ops)
    address, place, nbytes = batch.spans[0]
    changes = {
        "read": {"read_nbytes": 512},
        "span": {"spans": ((address, place, nbytes + 4096),)},
        "start": {"starts": (0, batch.read_nbytes - 64)},
    }
    bad = replace(batch, **changes[wrong])
    with pytest.raises(RuntimeError, match="fault in Etha"):
        bad.check()
    monkeypatch.setattr(iovec, "batches", lambda _: iter([bad]))
    work = Workspace()
    work.read = fenced = _Fenced()
    with pytest.raises(ReachError, match="outside of the agent's buffer"):
        cpu.run(ops, work)
    assert fenced.fence.numel() and not fenced.fence.any(), "the kernel wrote behind the buffer"
    assert not target.any()


@st.composite
def mixed(draw: st.DrawFn) -> list[tuple[Tile, int]]:
    """Tiles of any kind and the places of a small memory where they begin, by address: most of them overlap."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        ends = draw(st.sampled_from([ENDS, CASTS]))
        rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 40))
        if draw(st.booleans()):
            one = tile((rows, width, 1), spanning=True, ends=ends)
        elif draw(st.booleans()):
            one = tile((rows, max(2, width), 2), (2, 1, 1), spanning=draw(st.booleans()), ends=ends)
        else:
            one = tile((draw(st.integers(1, 300)), 1, 1), spanning=draw(st.booleans()), ends=ends)
        found.append((one, draw(st.integers(0, 1000 - span(one.axes, 1)))))
    return sorted(found, key=lambda f: f[1])


@settings(deadline=None)
@given(mixed(), st.sampled_from([1 << 21, 2048]))
def test_whatever_overlaps_arrives(me: WorkerMemory, drawn: list[tuple[Tile, int]], room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iovec, "BOUNCE_BYTES", room)
        for ends in (ENDS, CASTS):
            tiles = [(one, at) for one, at in drawn if one.ends == ends]
            if not tiles:
                continue
            source = torch.arange(1000, dtype=ends.source)
            target = torch.zeros(sum(one.numel for one, _ in tiles), dtype=ends.target)
            here, there = me.resolve(describe(source)), me.resolve(describe(target))
            ops, expected, at = [], [], 0
            for one, begin in tiles:
                ops.append(Op(one, here, there, begin, at))
                picked = source.as_strided(one.counts, one.source_strides, begin)
                expected.append(
                    torch.empty(one.numel).as_strided(one.counts, one.target_strides).copy_(picked).reshape(-1)
                )
                at += one.numel
            cpu.run(ops, Workspace())
            assert torch.equal(target, torch.cat(expected).to(ends.target))
