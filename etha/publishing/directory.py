"""A directory of safetensors as the first holder of a publication, so that a fleet starts without a trainer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.tensor import Replicate

from etha import AsyncPublication, AsyncTensorBusClient, PublishedVersion, SubscriberState
from etha.publishing.checkpoint_files import MappedCheckpoint, map_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryOptions:
    """What ``etha publish`` is given. ``version`` None: the label that the files have. ``until``: leave once so many
    subscribers have received it; None: stay."""

    name: str
    directory: Path
    version: int | str | None = None
    publisher: str = "checkpoint"
    fan_out: int | None = None
    max_rate: float | None = None
    until: int | None = None
    timeout: float = 600.0


class PublishedDirectory:
    """A directory while it is published. ``received``: names of the subscribers that have received it."""

    def __init__(self, options: DirectoryOptions, files: MappedCheckpoint, put: PublishedVersion) -> None:
        self.options, self.files, self.put = options, files, put
        self.received: frozenset[str] = frozenset()

    async def follow(self, publication: AsyncPublication, tell: Callable[[str, SubscriberState | None], None]) -> None:
        """Call ``tell`` with the name of each subscriber that has received it, and with its state unless it has left;
        return once ``until`` have received it."""
        until = math.inf if self.options.until is None else self.options.until
        while len(self.received) < until:
            received = await publication.holders(other_than=self.received, left=True, timeout=math.inf)
            states = {one.name: one for one in await publication.subscribers(timeout=self.options.timeout)}
            for name in sorted(received - self.received):
                tell(name, states.get(name))
            self.received = received


async def publish_directory(
    client: AsyncTensorBusClient,
    options: DirectoryOptions,
    published: Callable[[PublishedDirectory], None],
    tell: Callable[[str, SubscriberState | None], None],
) -> None:
    """Publish a directory and stay its holder until ``options.until`` subscribers have received it, or until
    cancelled.

    The files are copied once, from the page cache into the slot that the agent keeps. ConfigError if the directory
    holds no checkpoint, or somebody else publishes under this name.
    """
    files = await asyncio.to_thread(map_checkpoint, options.directory)
    publication = await client.publish(
        options.name,
        files.tensors,
        publisher=options.publisher,
        expected_world_size=1,
        rank=0,
        device_mesh=(1,),
        placements={name: [Replicate()] for name in files.tensors},
        slots=1,
        fan_out=options.fan_out,
        max_rate=options.max_rate,
        timeout=options.timeout,
    )
    async with publication:
        label = files.version if options.version is None else options.version
        directory = PublishedDirectory(options, files, await publication.put(label, timeout=options.timeout))
        published(directory)
        await directory.follow(publication, tell)
