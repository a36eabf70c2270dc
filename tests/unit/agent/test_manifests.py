"""What an agent keeps of manifests: as many as it may, the most recently used ones, and of large ones few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from torch.distributed.tensor import Shard

from etha.agent.protocol.records import Described, Manifest
from etha.agent.services import manifests
from etha.agent.services.manifests import ManifestCache
from etha.plan import Layout

LAYOUT = Layout((2,), [Shard(0)])


class Shelf:
    """A store of manifests and layouts that counts what it is asked for."""

    def __init__(self) -> None:
        self.batches = self  # the part of a store that is asked for them
        self.read: Counter[str] = Counter()
        self._manifests: dict[str, dict[str, str]] = {}
        self._layouts: dict[str, str] = {}

    async def put_layouts(self, layouts: Mapping[str, str], *, timeout: float) -> None:
        self._layouts |= layouts

    async def put_manifest(self, digest: str, fields: dict[str, str], *, timeout: float) -> None:
        self._manifests[digest] = fields

    async def manifest(self, digest: str) -> dict[str, str]:
        self.read[digest] += 1
        return self._manifests[digest]

    async def layouts(self, digests: Iterable[str]) -> dict[str, str]:
        return {digest: self._layouts[digest] for digest in digests}


def of_pair(pair: str, tensors: int) -> Manifest:
    return Manifest(
        tensors={
            f"t{n}": Described(pair=pair, dtype="float32", layout=LAYOUT, shape=(4, n + 1), local=None, of=None)
            for n in range(tensors)
        },
        refusals=(),
    )


async def published(cache: ManifestCache, sizes: Iterable[int]) -> list[str]:
    return [await cache.publish(of_pair(f"p{n}", size), timeout=1.0) for n, size in enumerate(sizes)]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(manifests, "KEPT", 4)
    monkeypatch.setattr(manifests, "KEPT_TENSORS", 100)
    return Shelf()


@pytest.mark.parametrize(
    "sizes, kept",
    [
        ([1] * 6, {2, 3, 4, 5}),
        ([40, 40, 20], {0, 1, 2}),
        ([40, 40, 21], {1, 2}),
        ([99, 1, 100], {2}),
        ([1, 2, 500], {2}),
        ([500, 1], {1}),
    ],
)
async def test_the_newest_are_kept_and_others_are_read_again(sizes: list[int], kept: set[int], shelf: Shelf) -> None:
    cache = ManifestCache(shelf)  # type: ignore[arg-type]
    digests = await published(cache, sizes)
    for number in sorted(range(len(sizes)), key=lambda number: number not in kept):
        fetched = await cache.fetch([digests[number]])
        assert fetched[digests[number]] == of_pair(f"p{number}", sizes[number])
    assert {digests.index(digest) for digest in shelf.read} == set(range(len(sizes))) - kept


async def test_what_was_used_last_stays(shelf: Shelf) -> None:
    cache = ManifestCache(shelf)  # type: ignore[arg-type]
    first, second, *_ = await published(cache, [30, 30, 30])
    await cache.fetch([first])
    await published(cache, [30, 30, 30, 30])
    await cache.fetch([first])
    assert not shelf.read
    await cache.fetch([second])
    assert shelf.read == {second: 1}


async def test_more_at_once_than_are_kept(shelf: Shelf) -> None:
    cache = ManifestCache(shelf)  # type: ignore[arg-type]
    digests = await published(cache, [60] * 5)
    fetched = await cache.fetch(digests)
    assert [fetched[digest] for digest in digests] == [of_pair(f"p{n}", 60) for n in range(5)]
