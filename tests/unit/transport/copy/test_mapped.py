"""Mapped copies in compiled loops: the same bytes as torch's, casts and short runs left to torch, nothing outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from etha.memory.reach import ReachError
from etha.memory.views import view_of
from etha.native.tiles import load_tiles
from etha.transport.copy import cpu, mapped, program
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.program import Columns, Program, ViewPair
from etha.transport.geometry.boxes import BoxAxis
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Ends, Path, Tile

compiler = pytest.mark.skipif(load_tiles() is None, reason="no C compiler (cc) on the path")
BYTES = Ends(source=torch.uint8, target=torch.uint8, source_private=False, target_private=False)


def tile(*axes: tuple[int, int, int], ends: Ends = BYTES) -> Tile:
    """Axes as (steps, source stride, target stride)."""
    return Tile(path=Path.MAPPED, axes=tuple(BoxAxis(*axis) for axis in axes), ends=ends)


def programs(tiles: list[Tile], source: torch.Tensor, target: torch.Tensor) -> Program:
    """Two copies of each tile, the second of them 1024 elements further."""
    columns = Columns()
    pair = columns.add_pair(ViewPair(view_of(source), view_of(target), (("source", 0), ("target", 0))))
    for i, one in enumerate(tiles):
        at = torch.tensor([2048 * i, 2048 * i + 1024]).numpy()
        columns.add(1, columns.number(one), pair, at, at)
    return columns.program(nbytes={}, peers={}, total=0, staged=0)


def run(found: Program) -> None:
    work = Workspace()
    for number in range(len(found.pieces)):
        found.run(number, work)
    assert work.wrote


ROWS = tile((4, 200, 100), (100, 1, 1))
SHORT = tile((4, 200, 100), (50, 2, 2))
CAST = tile((4, 200, 100), (100, 1, 1), ends=replace(BYTES, target=torch.int16))
FLOATS = replace(BYTES, source=torch.float32, target=torch.bfloat16)


@compiler
def test_which_tiles_are_compiled() -> None:
    assert mapped.compiled(ROWS) and not mapped.compiled(SHORT) and not mapped.compiled(CAST)
    assert mapped.compiled(tile((mapped.MIN_RUN, 1, 1))) and not mapped.compiled(tile((mapped.MIN_RUN - 1, 1, 1)))
    assert not mapped.compiled(tile(*[(2, 100, 100)] * 9, (100, 1, 1))), "more axes than the table has"
    assert not mapped.compiled(replace(ROWS, path=Path.READ))
    assert mapped.compiled(tile((mapped.MIN_CAST_RUN // 4, 1, 1), ends=FLOATS))
    assert not mapped.compiled(tile((mapped.MIN_CAST_RUN // 4 - 1, 1, 1), ends=FLOATS))


@pytest.mark.parametrize("tiles", [[ROWS], [SHORT], [ROWS, SHORT], [ROWS, tile((900, 1, 1))]])
def test_a_program_copies_what_torch_copies(tiles: list[Tile], monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randint(0, 256, (8192,), dtype=torch.uint8)
    found = []
    for library in (load_tiles(), None):
        monkeypatch.setattr(program, "load_tiles", lambda library=library: library)
        monkeypatch.setattr(mapped, "load_tiles", lambda library=library: library)
        target = torch.zeros_like(source)
        run(programs(tiles, source, target))
        found.append(target)
    assert torch.equal(*found) and found[0].any()


@compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrows", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_program_casts_what_torch_casts(
    dtype: torch.dtype, narrows: bool, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (torch.float32, dtype) if narrows else (dtype, torch.float32)
    monkeypatch.setattr(mapped, "STREAMED", 1 if streamed else 1 << 40)
    source = torch.randn(8192).to(before)
    target = torch.zeros(8192, dtype=after)
    run(
        programs([tile((2, 2100, 2050), (600, 1, 1), ends=replace(BYTES, source=before, target=after))], source, target)
    )
    due = torch.zeros(8192, dtype=after)
    for begin in (0, 1024):
        for row in range(2):
            due[begin + 2050 * row :][:600] = source[begin + 2100 * row :][:600].to(after)
    assert torch.equal(target, due)


@compiler
def test_a_compiled_piece_makes_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "ops", lambda *_: pytest.fail("operations were made"))
    run(programs([ROWS], torch.zeros(8192, dtype=torch.uint8), torch.zeros(8192, dtype=torch.uint8)))


@compiler
@pytest.mark.parametrize("end", ["source", "target"])
@pytest.mark.parametrize("way", ["program", "operations"])
def test_a_copy_that_reaches_outside_is_not_begun(way: str, end: str) -> None:
    source = torch.ones(8192, dtype=torch.uint8)
    target = torch.zeros_like(source)
    views = [view_of(source), view_of(target)]
    number = ["source", "target"].index(end)
    views[number] = replace(views[number], nbytes=1024 + 699)  # the second copy's last byte is number 1024 + 699
    with pytest.raises(ReachError, match="outside of the tensors' memory"):
        if way == "program":
            columns = Columns()
            pair = columns.add_pair(ViewPair(views[0], views[1], (("source", 0), ("target", 0))))
            at = torch.tensor([0, 1024]).numpy()
            columns.add(1, columns.number(tile((4, 200, 200), (100, 1, 1))), pair, at, at)
            run(columns.program(nbytes={}, peers={}, total=0, staged=0))
        else:
            ops = [Op(tile((4, 200, 200), (100, 1, 1)), views[0], views[1], at, at) for at in (0, 1, 2, 1024)]
            assert len(ops) >= cpu.FEW
            cpu.run(ops, Workspace())
    assert not target.any()
