"""A subscriber that writes every n-th version as safetensors.

    describe:  which tensors are published   -->  each rank takes some of them whole, about equally many bytes
    next:      the newest version that is due -->  its file, written beside the event loop
               the rank whose file is the last makes the checkpoint appear, under its name, with all its files

No rank waits for another one's file, and nothing is gathered: hops bring each rank whole tensors, however the publisher
has cut them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate

import etha
from etha import AsyncSubscription, AsyncTensorBusClient, ConfigError, TensorBusClient
from etha.client.arguments.world import RankInfo
from etha.client.publishing import Versions
from etha.client.results import Version
from etha.client.subscription import AsyncVersions
from etha.client.tasks import Deadline, Shield
from etha.config import LaunchEnv
from etha.publishing.checkpoint_files import CheckpointDirectory, check_dtypes
from etha.publishing.checkpoint_index import PUBLICATION, SEQ, VERSION, CheckpointName, share_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A version on disk. ``path`` is its directory, with the files of all ranks.

    ``complete``: this rank's file was the last, so that the directory is there from now on. It is so on one rank of a
    version, which may then upload it, and on the only rank always. ``bytes`` and ``seconds``: this rank's file.
    """

    seq: int
    version: Version
    path: Path
    complete: bool
    bytes: int
    seconds: float


class AsyncCheckpointer(AsyncVersions[Checkpoint]):
    """Writes versions of a publication to ``directory``; ``async for`` yields each ``Checkpoint``.

    async with etha.AsyncTensorBusClient() as client:
        async with AsyncCheckpointer(client, "policy", "/checkpoints/run-7", every=10, keep=3) as checkpoints:
            async for checkpoint in checkpoints:
                print(checkpoint.path, checkpoint.version)

    It is a subscriber like any other, named ``subscriber``, and also feeds others unless ``serve=False``. It needs no
    tensors: it asks what is published, and holds it once, over all its ranks together. With several ranks all of them
    see the same directory, and each writes its own file; ``expected_world_size`` and ``rank`` as for ``subscribe``.

    ``every``: at least so many versions lie between two that are written; one that was busy takes the newest and skips
    what it missed. It goes on after the newest checkpoint of ``directory``. ``keep``: how many checkpoints stay, the
    newest ones; None: all.

    A checkpoint is ``directory/seq-00000012``, named by the version's ``seq``, with ``model.safetensors``, or a file
    for each rank and an index, as Hugging Face's libraries read them and ``etha publish`` does. It appears under its
    name when all of it is on disk. ``directory/latest`` is a link to the newest one.

    ConfigError for arguments that do not fit, and for a directory of another run.
    """

    def __init__(
        self,
        client: AsyncTensorBusClient,
        name: str,
        directory: str | os.PathLike[str],
        *,
        subscriber: str = "checkpointer",
        every: int = 1,
        keep: int | None = None,
        serve: bool = True,
        expected_world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        for what, value in (("every", every), ("keep", 1 if keep is None else keep)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{what}={value!r} must be a whole number, at least 1")
        self.name, self.subscriber, self.every = name, subscriber, every
        self._client, self._serve = client, serve
        self._place = RankInfo.of(world_size=expected_world_size, rank=rank, ranks=None, env=LaunchEnv.from_env())
        self._files = CheckpointDirectory(Path(directory), keep=keep)
        self._subscription: AsyncSubscription | None = None
        self._parts: list[list[str]] = []
        self._sizes: dict[str, int] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._last = 0
        self._turn = asyncio.Lock()
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self._open

    async def next(self, *, timeout: float | None = None) -> Checkpoint:
        """Receive the newest version that is due, and write it. Collective over the ranks, as ``subscription.next``.

        The deadline is for the publication to be there and for the version to come; a file is written to its end, also
        if the call is cancelled. Raises what ``subscribe`` and ``subscription.next`` raise, and OSError if this rank's
        file cannot be written: that checkpoint never appears, and the next call goes on with a newer version.
        """
        async with self._turn:
            if not self._open:
                raise ConfigError(f"the checkpointer of publication {self.name!r} is closed")
            deadline = Deadline(self._client.seconds(timeout))
            if self._subscription is None:
                await self._begin(deadline)
            assert self._subscription is not None
            newer = self._last + self.every - 1 if self._last else 0
            update = await self._subscription.next(newer_than=newer, timeout=deadline.left)
            self._last = update.seq
            shield = Shield()
            checkpoint = await shield.in_thread(lambda: self._write(update.seq, update.version))
            shield.release()
            return checkpoint

    async def close(self) -> None:
        """Follow the publication no more. What is written stays. Idempotent."""
        self._open = False
        if self._subscription is not None:
            await self._subscription.close()

    # ---- inside -------------------------------------------------------------------------------

    async def _begin(self, deadline: Deadline) -> None:
        place = self._place
        if place.rank == 0:  # before it enters, so that no rank writes yet
            await asyncio.to_thread(self._files.prepare)
        described = await self._client.describe_publication(self.name, timeout=deadline.left)
        check_dtypes(described)
        self._sizes = {name: one.numel() * one.itemsize for name, one in described.items()}
        self._parts = [part for part in share_out(self._sizes, place.world_size) if part]
        mine = self._parts[place.rank] if place.rank < len(self._parts) else []
        self._tensors = {name: etha.empty(described[name].shape, dtype=described[name].dtype) for name in mine}
        subscription = await self._client.subscribe(
            self.name,
            self._tensors,
            subscriber=self.subscriber,
            expected_world_size=place.world_size,
            rank=place.rank,
            ranks={number: number for number in range(place.world_size)},
            device_mesh=torch.tensor([place.rank]),
            placements={name: [Replicate()] for name in mine},
            serve=self._serve,
            timeout=deadline.left,
        )
        try:
            self._last = await asyncio.to_thread(self._files.newest)
            if self._last > subscription.lag:
                raise ConfigError(
                    f"{self._files.path} has a checkpoint of seq {self._last}, and the newest version of publication "
                    f"{self.name!r} is {subscription.lag}: that checkpoint is of another run; give a new directory"
                )
        except BaseException:
            await subscription.close()
            raise
        self._subscription = subscription

    def _write(self, seq: int, version: Version) -> Checkpoint:
        begun, files, place = time.monotonic(), self._files, self._place
        metadata = {PUBLICATION: self.name, VERSION: json.dumps(version), SEQ: str(seq)}
        complete = False
        if self._tensors:
            complete = files.write(
                CheckpointName(seq), self._parts, place.rank, self._tensors, metadata, sum(self._sizes.values())
            )
        return Checkpoint(
            seq=seq,
            version=version,
            path=files.path / str(CheckpointName(seq)),
            complete=complete,
            bytes=sum(self._sizes[name] for name in self._tensors),
            seconds=time.monotonic() - begun,
        )


class Checkpointer(Versions[Checkpoint]):
    """The same for ``TensorBusClient``: ``with`` closes it, ``for`` yields each ``Checkpoint``.

    See ``AsyncCheckpointer`` for the arguments and for what is written.
    """

    def __init__(
        self,
        client: TensorBusClient,
        name: str,
        directory: str | os.PathLike[str],
        *,
        subscriber: str = "checkpointer",
        every: int = 1,
        keep: int | None = None,
        serve: bool = True,
        expected_world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        async_client, run, run_closing = client.facade()
        self._inner = AsyncCheckpointer(
            async_client,
            name,
            directory,
            subscriber=subscriber,
            every=every,
            keep=keep,
            serve=serve,
            expected_world_size=expected_world_size,
            rank=rank,
        )
        super().__init__(self._inner, run, run_closing)

    def next(self, *, timeout: float | None = None) -> Checkpoint:
        """Receive the newest version that is due, and write it; see ``AsyncCheckpointer.next``."""
        checkpoint: Checkpoint = self._run(self._inner.next(timeout=timeout))
        return checkpoint
