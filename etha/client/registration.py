"""What a client does to register a batch: show its memory, tell its agent, allocate shadows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import torch

from etha.bus.calls import Answer
from etha.bus.codec import Reply
from etha.bus.messages import AttachShadows, CloseBatch, Entry, Register, Registered, Verify
from etha.client.arguments import check_bucket_size, check_flag, shown
from etha.client.batch import Registration
from etha.client.connection import Connection
from etha.client.manifest import Manifest
from etha.client.memory.base import Home, Stage
from etha.client.memory.segments import SegmentUse
from etha.client.results import Pair
from etha.errors import ConfigError, EthaError, PeerLostError
from etha.memory.handles import span_nbytes
from etha.plan import Layout

#: Seconds that an agent is given at most to tell all others of a rank that cannot take part.
_PATIENCE = 5.0


def check_options(direction: object, bucket_size: object, atomic: object, verify: object) -> None:
    """ConfigError for options of a registration that are wrong."""
    if direction not in (None, "send", "recv", "both"):
        raise ConfigError(f"direction={shown(direction)} must be 'send', 'recv', 'both' or None")
    check_bucket_size(bucket_size)
    check_flag("atomic", atomic)
    if verify not in (None, "sample", "full"):
        raise ConfigError(f"verify={shown(verify)} must be 'sample', 'full' or None")


async def register(
    connection: Connection,
    batch: str,
    pairs: tuple[Pair, ...],
    manifest: Manifest,
    *,
    direction: Literal["send", "recv", "both"] | None,
    bucket_size: int | None,
    atomic: bool,
    verify: Verify | None,
    seq: int,
    timeout: Callable[[], float],
) -> Registration:
    """Register ``manifest`` with the agent; ``timeout()`` is what is left. Raises what the agent refuses with."""
    segments = connection.segments.use()
    try:
        return await _register(
            connection,
            batch,
            pairs,
            manifest,
            segments,
            direction=direction,
            bucket_size=bucket_size,
            atomic=atomic,
            verify=verify,
            seq=seq,
            timeout=timeout,
        )
    except BaseException:
        with contextlib.suppress(EthaError):  # what failed is told, and the end of the session unmaps as well
            await segments.release(0)
        raise


async def _register(
    connection: Connection,
    batch: str,
    pairs: tuple[Pair, ...],
    manifest: Manifest,
    segments: SegmentUse,
    *,
    direction: Literal["send", "recv", "both"] | None,
    bucket_size: int | None,
    atomic: bool,
    verify: Verify | None,
    seq: int,
    timeout: Callable[[], float],
) -> Registration:
    pair = pairs[0]
    locals_ = [item.local for item in manifest.items]
    home = connection.home
    live = [home.describe(tensor) for tensor in locals_]
    # What the agent cannot reach is staged by this process in memory that it can.
    hidden = [h.segment is None and not connection.reaches and 0 not in h.shape for h in live]
    source = await stage(home, locals_, hidden)
    handles = source.handles(live)
    await segments.show(handles, timeout())
    layouts: dict[Layout, int] = {}
    entries = tuple(
        Entry(
            name=item.name,
            pair=item.pair,
            layout=layouts.setdefault(item.layout, len(layouts)),
            shape=item.shape,
            handle=handle,
            of=item.of,
            tied=item.tied,
        )
        for item, handle in zip(manifest.items, handles, strict=True)
    )
    message = Register(
        batch=batch,
        epoch=pair.epoch,
        form=manifest.form,
        pairs=manifest.pairs,
        layouts=tuple(layout.to_plain() for layout in layouts),
        entries=entries,
        refusals=manifest.refusals,
        direction=direction,
        bucket_size=bucket_size,
        atomic=atomic,
        verify=verify,
        seq=seq,
        staged=home.refused[:500] if source.serves else "",
    )
    answers: list[Answer | None] = []
    try:
        registered = await connection.link.request(message, timeout=timeout(), on_cancel=answers.append)
    except asyncio.CancelledError:
        if answers and isinstance(answers[0], Reply):  # it stands already, and nobody here will hold it
            await _leave(connection, batch, pair, "its register_tensors was cancelled", 0)
        raise
    assert isinstance(registered, Registered)
    registration = Registration(
        batch=batch,
        pair=pair,
        pairs=pairs,
        generation=registered.generation,
        connection=connection,
        manifest=manifest,
        segments=segments,
        source=source,
        atomic=registered.atomic,
        shadowed=registered.shadows,
        plan=registered.summary,
    )
    private = [t for t, handle in zip(locals_, handles, strict=True) if handle.segment is None and not t.is_cuda]
    connection.collapser.ask((t.data_ptr(), span_nbytes(t.shape, t.stride(), t.itemsize)) for t in private)
    if registered.shadows and registered.receives:
        try:
            await attach_shadows(registration, timeout)
        except BaseException as error:
            await leave(registration, no_place(error), 0 if isinstance(error, asyncio.CancelledError) else timeout())
            raise
    return registration


async def attach_shadows(registration: Registration, timeout: Callable[[], float]) -> None:
    """Allocate the memory into which an atomic batch is received here, and let the agent know it.

    A worker that may never receive has none until it does.
    """
    connection, tensors = registration.connection, registration.locals
    shadows = await stage(connection.home, tensors, [tensor.numel() > 0 for tensor in tensors])
    handles = shadows.handles([connection.home.describe(tensor) for tensor in tensors])
    await registration.segments.show(handles, timeout())
    message = AttachShadows(batch=registration.batch, epoch=registration.pair.epoch, handles=tuple(handles))
    await connection.link.request(message, timeout=timeout())
    registration.shadows = shadows


def no_place(error: BaseException) -> str:
    """What all ranks hear of one that cannot receive."""
    return f"it has no place to receive in: {error or type(error).__name__}"


async def leave(registration: Registration, why: str, timeout: float) -> None:
    """Take back a registration that stands but that this worker cannot use; all others have heard ``why`` then."""
    text = f"this worker could not take part in batch {registration.batch!r}, register it again: {why}"
    registration.forsaken = PeerLostError(text, reason="closed")
    registration.left = True
    await _leave(registration.connection, registration.batch, registration.pair, why, min(timeout, _PATIENCE))


async def _leave(connection: Connection, batch: str, pair: Pair, why: str, timeout: float) -> None:
    with contextlib.suppress(EthaError):  # an agent that does not hear it hears the session's end
        message = CloseBatch(batch=batch, epoch=pair.epoch, why=why[:2000])
        await connection.link.request(message, timeout=timeout)


async def stage(home: Home, tensors: list[torch.Tensor], chosen: list[bool]) -> Stage:
    """Touching fresh pages is slow (1.8 GB/s), so it happens here and off the loop."""
    return await asyncio.to_thread(home.stage, tensors, chosen) if any(chosen) else home.stage(tensors, chosen)
