"""A checkpointer is a subscriber: what it writes is a version, whole, and nothing of it is there before."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import etha
from etha.publishing import AsyncCheckpointer, Checkpoint, Checkpointer
from etha.publishing.checkpoint_files import map_checkpoint
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sites import Site

SHAPES = {"w": (64, 33), "b": (7,), "scalar": (), "v": (40, 50)}
ROWS = Cut(world=2, dims={"w": 0, "v": 1}, dtypes={"b": torch.bfloat16})
pytestmark = pytest.mark.ways("local")


def holds(path: Path, version: int) -> None:
    """The checkpoint has every element of a version, in the publisher's dtypes."""
    found = map_checkpoint(path)
    expected = Cut(dtypes=ROWS.dtypes).held(SHAPES, version, 0)
    assert found.version == version and found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name


def listed(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


async def test_every_second_version_is_written_and_two_stay(site: Site, pair: str, tmp_path: Path) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        client = site.client("checkpointer", 0, timeout=60)
        async with client, AsyncCheckpointer(client, pair, tmp_path, every=2, keep=2, rank=0) as checkpointer:
            written = []
            for version in range(101, 107):
                await trainer.put(version)
                if version % 2:
                    written.append(await checkpointer.next())
                else:
                    with pytest.raises(etha.TransferTimeoutError, match=f"seq {version - 100} is the newest"):
                        await checkpointer.next(timeout=0.5)
            assert [(one.seq, one.version, one.complete) for one in written] == [
                (1, 101, True),
                (3, 103, True),
                (5, 105, True),
            ]
            assert listed(tmp_path) == ["latest", "seq-00000003", "seq-00000005"]
            assert listed(tmp_path / "latest") == ["model.safetensors"]
            holds(written[1].path, 103)
            holds(tmp_path / "latest", 105)
            assert written[0].bytes == 4 * (64 * 33 + 1 + 40 * 50) + 2 * 7


async def test_it_skips_what_it_missed_and_feeds_others(site: Site, pair: str, tmp_path: Path) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        client = site.client("checkpointer", 0, timeout=60)
        async with client, AsyncCheckpointer(client, pair, tmp_path, every=2, rank=0) as checkpointer:
            for version in (1, 2, 3, 4):
                await trainer.put(version)
            assert (await checkpointer.next()).version == 4
            await trainer.close()
            replica = await fleet.subscribe("replica", Cut(world=2, dims={"w": 1}), serve=False)
            update = await replica.next()
            assert (update.version, update.source) == (4, "checkpointer")


async def test_several_ranks_write_a_file_each_and_one_of_them_completes_it(
    site: Site, pair: str, tmp_path: Path
) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        ranks = range(5)  # one more than there are tensors
        clients = [site.client("checkpointer", rank, timeout=60) for rank in ranks]
        try:
            checkpointers = [
                AsyncCheckpointer(client, pair, tmp_path, expected_world_size=len(ranks), rank=rank, serve=False)
                for rank, client in zip(ranks, clients, strict=True)
            ]
            for version in (1, 2):
                await trainer.put(version)
                found = await asyncio.gather(*(one.next() for one in checkpointers))
                assert sum(one.complete for one in found) == 1
                assert {one.path for one in found} == {tmp_path / f"seq-{version:08}"}
                files = [f"model-{n:05}-of-00004.safetensors" for n in (1, 2, 3, 4)]
                assert listed(found[0].path) == [*files, "model.safetensors.index.json"]
                holds(found[0].path, version)
            await asyncio.gather(*(one.close() for one in checkpointers))
        finally:
            await asyncio.gather(*(client.close() for client in clients))


def test_the_blocking_client(site: Site, pair: str, tmp_path: Path) -> None:
    source = torch.zeros(300, 7)
    options: dict[str, Any] = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,)}
    seen: list[Checkpoint] = []
    second = threading.Event()
    with (
        site.blocking("trainer", 0, timeout=60) as trainer,
        site.blocking("checkpointer", 0, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
        Checkpointer(client, pair, tmp_path, rank=0) as checkpointer,
    ):

        def follow() -> None:
            for checkpoint in checkpointer:
                seen.append(checkpoint)
                if len(seen) == 2:
                    second.set()

        following = pool.submit(follow)  # before anybody publishes
        placements = {"w": [torch.distributed.tensor.Replicate()]}
        with trainer.publish(pair, {"w": source}, placements=placements, **options) as publication:
            assert {name: (t.shape, t.dtype) for name, t in trainer.describe_publication(pair).items()} == {
                "w": (torch.Size([300, 7]), torch.float32)
            }
            for version in ("one", "two"):
                publication.put(version, wait=1)
            assert second.wait(30)
            checkpointer.close()
            following.result(30)
        assert [(one.seq, one.version) for one in seen] == [(1, "one"), (2, "two")]
        with pytest.raises(etha.ConfigError, match="is closed"):
            checkpointer.next()


async def test_a_later_launch_goes_on_and_another_run_is_refused(site: Site, pair: str, tmp_path: Path) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        for versions, expected in (((1, 2), 2), ((3,), 3)):
            for version in versions:
                await trainer.put(version)
            client = site.client("checkpointer", 0, timeout=60)
            async with client, AsyncCheckpointer(client, pair, tmp_path, rank=0) as checkpointer:
                assert (await checkpointer.next()).version == expected
                with pytest.raises(etha.TransferTimeoutError):
                    await checkpointer.next(timeout=0.3)
    assert listed(tmp_path) == ["latest", "seq-00000002", "seq-00000003"]
    async with Fleet(site, f"{pair}.other", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        await trainer.put(1)
        client = site.client("checkpointer", 0, timeout=60)
        async with client, AsyncCheckpointer(client, f"{pair}.other", tmp_path, rank=0) as checkpointer:
            with pytest.raises(etha.ConfigError, match=r"of seq 3, .* is 1: that checkpoint is of another run"):
                await checkpointer.next()


async def test_a_file_that_cannot_be_written_costs_that_version_only(
    site: Site, pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        client = site.client("checkpointer", 0, timeout=60)
        async with client, AsyncCheckpointer(client, pair, tmp_path, rank=0) as checkpointer:
            await trainer.put(1)
            with monkeypatch.context() as patch:
                patch.setattr("os.fsync", _full)
                with pytest.raises(OSError, match="No space left"):
                    await checkpointer.next()
            assert listed(tmp_path) == [".seq-00000001.1"]
            await trainer.put(2)
            assert (await checkpointer.next()).seq == 2
            assert listed(tmp_path) == ["latest", "seq-00000002"]


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


async def test_a_call_that_is_cancelled_writes_its_file_to_the_end(
    site: Site, pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        await trainer.put(1)
        client = site.client("checkpointer", 0, timeout=60)
        async with client, AsyncCheckpointer(client, pair, tmp_path, rank=0) as checkpointer:
            write = checkpointer._write

            def slow(seq: int, version: Any) -> Checkpoint:
                writing.set()
                assert go_on.wait(30)
                return write(seq, version)

            monkeypatch.setattr(checkpointer, "_write", slow)
            running = asyncio.ensure_future(checkpointer.next())
            assert await asyncio.to_thread(writing.wait, 30)
            running.cancel()
            await asyncio.sleep(0)
            assert not running.done(), "the tensors are being read"
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            holds(tmp_path / "seq-00000001", 1)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
async def test_wrong_arguments(site: Site, tmp_path: Path, wrong: dict[str, Any]) -> None:
    async with site.client("checkpointer", 0) as client:
        with pytest.raises(etha.ConfigError, match="must be a whole number, at least 1"):
            AsyncCheckpointer(client, "policy", tmp_path, rank=0, **wrong)


async def test_a_publication_that_nobody_publishes(site: Site, pair: str, tmp_path: Path) -> None:
    async with site.client("checkpointer", 0, timeout=60) as client:
        async with AsyncCheckpointer(client, pair, tmp_path, rank=0) as checkpointer:
            with pytest.raises(etha.TransferTimeoutError, match=f"nobody has published '{pair}' by the deadline"):
                await checkpointer.next(timeout=0.5)
