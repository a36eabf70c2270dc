"""A target that is certainly as it was is not called torn, whatever ended the transfer."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from etha.errors import PeerLostError, RegistrationError, TransferError
from tests.flow.sides import Sides
from tests.flow.sites import Site

PAGE = mmap.PAGESIZE
_PROT = {"none": 0, "read": mmap.PROT_READ, "both": mmap.PROT_READ | mmap.PROT_WRITE}


class Memory:
    """Pages of this process whose protection can be changed, seen as one tensor of int64."""

    def __init__(self, pages: int) -> None:
        self._map = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=torch.int64)

    def protect(self, how: str) -> None:
        """ "none", "read" or "both" is allowed from now on."""
        address, nbytes = ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(len(self._map))
        assert ctypes.CDLL(None, use_errno=True).mprotect(address, nbytes, _PROT[how]) == 0


@pytest.fixture(params=[1, 512], ids=["a page", "2 MiB"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    memory = Memory(request.param)
    yield memory
    memory.protect("both")


async def fail(site: Site, pair: str, tensors: dict[str, torch.Tensor], memory: Memory, how: str) -> Any:
    """The receiver's error of a transfer while ``memory`` is protected; then it sends, and all is well."""
    async with Sides(site, pair, timeout=60.0) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side]}, {}))
        memory.protect(how)
        ended = await sides.move(handles)
        memory.protect("both")
        assert all(isinstance(error, TransferError) for error in ended.values()), ended
        assert [error.torn for error in ended.values()] == [False, False]
        back = await sides.move(handles, source="inference")
        assert [getattr(result, "seq", result) for result in back.values()] == [2, 2]
        assert torch.equal(tensors["trainer"], tensors["inference"])
        return ended["inference", 0]


async def test_a_source_that_cannot_be_read_tears_no_target(site: Site, pair: str, memory: Memory) -> None:
    target = torch.full_like(memory.tensor, 7)
    error = await fail(site, pair, {"trainer": memory.tensor, "inference": target}, memory, "none")
    assert error.outcome == "aborted"
    assert "trainer rank 0" in error.message, "who it is whose memory is gone"
    assert torch.all(target == 7)


async def test_a_target_that_cannot_be_written_is_not_torn(site: Site, pair: str, memory: Memory) -> None:
    memory.tensor.fill_(7)
    source = torch.ones_like(memory.tensor)
    error = await fail(site, pair, {"trainer": source, "inference": memory.tensor}, memory, "read")
    assert error.outcome == "aborted"
    assert "inference rank 0 at its tensor 'w'" in error.message and "read-only" in error.message
    assert torch.all(memory.tensor == 7)


@pytest.mark.parametrize("side", ["trainer", "inference"])
@pytest.mark.parametrize("left", [0, 16])
async def test_freed_storage_is_refused_by_name(site: Site, pair: str, side: str, left: int) -> None:
    freed = torch.ones(1024)
    freed.untyped_storage().resize_(left)
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        reported = await sides.register(
            "b", lambda where, rank: ({"w": freed if where == side else torch.ones(1024)}, {})
        )
        for error in reported.values():
            assert isinstance(error, RegistrationError), error
            found = [v for v in error.violations if v.code == "unsupported"]
            assert [(v.name, v.side, v.rank) for v in found] == [("w", side, 0)] and "freed" in found[0].text


@pytest.mark.ways("local", "tcp")
@pytest.mark.parametrize("direction", ["recv", None])
async def test_an_atomic_target_that_is_read_only_is_refused_before_the_commit(
    site: Site, pair: str, memory: Memory, direction: str | None
) -> None:
    """With a direction at registration, without one at the first transfer; the sender is told at once."""
    memory.protect("read")
    async with Sides(site, pair, timeout=60.0) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {"trainer": torch.ones_like(memory.tensor), "inference": memory.tensor}
        asked = {"trainer": None if direction is None else "send", "inference": direction}
        ended = await sides.register(
            "b", lambda side, rank: ({"w": tensors[side]}, {"atomic": True, "direction": asked[side]})
        )
        if direction is None:
            ended = await sides.move(ended)
        elif not isinstance(sender := ended["trainer", 0], PeerLostError):
            ended |= {("trainer", 0): (await sides.move({("trainer", 0): sender}))["trainer", 0]}
        error = ended["inference", 0]
        assert isinstance(error, RegistrationError), error
        assert "'w'" in error.message and "read-only" in error.message
        assert isinstance(ended["trainer", 0], PeerLostError) and "read-only" in ended["trainer", 0].message
    assert torch.all(memory.tensor == 0)


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_read_only_source_is_sent_as_any_other(site: Site, pair: str, memory: Memory, atomic: bool) -> None:
    memory.tensor.fill_(7)
    memory.protect("read")
    async with Sides(site, pair, timeout=60.0) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {"trainer": memory.tensor, "inference": torch.zeros_like(memory.tensor)}
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side]}, {"atomic": atomic}))
        for snapshot in (False, True):
            moved = await sides.move(handles, trainer={"snapshot": snapshot})
            assert [getattr(moved["inference", 0], "seq", moved)] == [1 + snapshot]
    assert torch.all(tensors["inference"] == 7)


async def test_a_staged_target_that_is_read_only_is_refused_before_the_commit(
    site: Site, pair: str, memory: Memory
) -> None:
    """The agent cannot write into this worker, so that the worker itself copies what it received."""
    async with Sides(site, pair, timeout=60.0) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        connection = sides.clients["inference", 0]._connection
        assert connection is not None
        connection.reaches = False
        tensors = {"trainer": torch.ones_like(memory.tensor), "inference": memory.tensor}
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side]}, {}))
        memory.protect("read")
        ended = await sides.move(handles)
        assert isinstance(ended["inference", 0], RegistrationError), ended
        assert "read-only" in ended["inference", 0].message
        assert isinstance(ended["trainer", 0], PeerLostError), ended
    assert torch.all(memory.tensor == 0)


async def test_a_target_made_read_only_after_the_commit_is_an_error_of_the_receiver(
    site: Site, pair: str, memory: Memory
) -> None:
    async with Sides(site, pair, timeout=60.0) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {"trainer": torch.ones_like(memory.tensor), "inference": memory.tensor}
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side]}, {"atomic": True}))
        ended = await sides.move(handles, inference={"on_commit": lambda: memory.protect("read")})
        error = ended["inference", 0]
        assert isinstance(error, RegistrationError), ended
        assert "read-only" in error.message and "The transfer is committed" in error.message
        memory.protect("both")
        assert torch.all(memory.tensor == 0)
        again = await sides.move(handles)
        assert [getattr(result, "seq", result) for result in again.values()] == [2, 2]
    assert torch.all(memory.tensor == 1)
