"""Which batch each replica takes in a step, while replicas come and go.

    committed batches   0 1 2 3 4 5 | 6 7 8 | 9 10 11
    taken by            r0 r1 r2 ...| r0 r1 r2 step of 3 | r0 r1 r2, not committed: 9, 10, 11 again, by whoever is there

The batches of the data set have numbers. A step takes as many as there are replicas, beginning with the number of those
that are committed. So every batch is in exactly one step that counts, whatever happens to replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils import data as torch_data

from etha.errors import ConfigError


class Sampler:
    """Batches of a data set, each in exactly one committed step of all replicas. Iterate it once per run:

        for batch in groups.Sampler(dataset, members, batch_size=32):
            quorum = members.begin()
            ...
            members.commit()

    Asking for the next batch calls ``members.begin()`` (``quorum`` has its result), because who takes part decides
    which batch is whose. A batch whose step was not committed comes again, perhaps at another replica. The iteration
    ends on all replicas after the same step. Only in that last step the first batches may come a second time, so that
    every replica has one.

    ``data``: a data set with a length. ``epochs``: how often all of it comes, in another order each time if
    ``shuffle``; ``seed`` must be equal everywhere. ``drop_last``: leave out an epoch's last batch if it is smaller.
    ``shard``: (index, count) of this rank among the ranks of a replica that take different samples; default all of
    them. For ranks that compute the same samples, as in tensor parallelism, give (0, 1). A batch has ``batch_size``
    samples for each of them. Other arguments go to torch's DataLoader, which reads ahead with ``num_workers`` as if
    nothing changed; what it read in vain is dropped.
    """

    def __init__(
        self,
        data: Any,
        members: Any,
        *,
        batch_size: int = 1,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
        **loader: Any,
    ) -> None:
        index, count = shard if shard is not None else (getattr(members, "rank", 0), getattr(members, "world_size", 1))
        if isinstance(data, torch_data.IterableDataset) or not hasattr(data, "__len__"):
            raise ConfigError(
                "a Sampler needs a data set with a length, because replicas take batches by their numbers"
            )
        if batch_size < 1 or epochs < 0 or not 0 <= index < count:
            raise ConfigError(f"batch_size={batch_size}, epochs={epochs}, shard={(index, count)} cannot be")
        if bad := {"batch_sampler", "sampler"} & set(loader):
            raise ConfigError(f"{', '.join(sorted(bad))}: which samples are taken is the Sampler's decision")
        self._data, self._members, self._loader = data, members, loader
        self._batch_size, self._epochs, self._shuffle, self._seed = batch_size, epochs, shuffle, seed
        self._drop_last, self._index, self._count = drop_last, index, count
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._ahead: Iterator[Any] | None = None
        self._next = self._stride = -1
        self._last: tuple[int, Any] = (-1, None)
        #: What ``begin`` said about the current step.
        self.quorum: Any = None

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch, all replicas together."""
        unit = self._batch_size * self._count
        return len(self._data) // unit if self._drop_last else -(-len(self._data) // unit)

    @property
    def batches(self) -> int:
        """Batches of all epochs."""
        return self.batches_per_epoch * self._epochs

    def indices(self, number: int) -> list[int]:
        """The samples of batch ``number`` that this rank takes."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        order = self._order_of(epoch)
        unit = self._batch_size * self._count
        chosen = list(order[batch * unit : (batch + 1) * unit])
        chosen += islice(cycle(order), -len(chosen) % self._count)  # every rank has as many
        each = len(chosen) // self._count
        return chosen[self._index * each : (self._index + 1) * each]

    def _order_of(self, epoch: int) -> Sequence[int]:
        """The samples of an epoch in their order; kept for the latest epoch."""
        if self._order[0] != epoch:
            if self._shuffle:
                generator = torch.Generator().manual_seed(self._seed + epoch)
                order: Sequence[int] = torch.randperm(len(self._data), generator=generator).tolist()
            else:
                order = range(len(self._data))
            self._order = (epoch, order)
        return self._order[1]

    def __iter__(self) -> Iterator[Any]:
        try:
            while True:
                self.quorum = quorum = self._members.begin()
                if quorum.batches_committed >= self.batches:
                    return
                # A member that is behind takes a batch too, because it makes all calls, but contributes nothing.
                number = quorum.batches_committed + quorum.rank % quorum.size
                yield self._load(number, quorum.size)
        finally:
            self._ahead = None

    def _load(self, number: int, stride: int) -> Any:
        """A batch: the last one again, the next one of those read ahead, or the first one of a new reader."""
        if self._last[0] == number:
            return self._last[1]
        if self._ahead is None or (self._next, self._stride) != (number, stride):
            loader = torch_data.DataLoader(self._data, batch_sampler=_Numbers(self, number, stride), **self._loader)
            self._ahead = iter(loader)
        batch = next(self._ahead)
        self._next, self._stride = number + stride, stride
        self._last = (number, batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What decides the order of the batches. The position is the members' (`Members.state_dict`)."""
        return {
            "length": len(self._data),
            "batch_size": self._batch_size,
            "shards": self._count,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the order is that of the checkpoint. ConfigError: samples would come twice or never."""
        mine = self.state_dict()
        if wrong := [
            f"{name} was {state.get(name)}, is {mine[name]}" for name in mine if state.get(name) != mine[name]
        ]:
            raise ConfigError(f"the order of the batches differs from the checkpoint's: {'; '.join(wrong)}")


class _Numbers(torch_data.Sampler[list[int]]):
    """The samples of every ``stride``-th batch, for a DataLoader that reads ahead."""

    def __init__(self, sampler: Sampler, first: int, stride: int) -> None:
        self._sampler, self._first, self._stride = sampler, first, stride

    def __iter__(self) -> Iterator[list[int]]:
        sampler, total = self._sampler, self._sampler.batches
        yield sampler.indices(
            self._first % total
        )  # beyond the end: one of the first, for a replica that would have none
        for number in range(self._first + self._stride, total + self._stride, self._stride):
            yield sampler.indices(number % total)
