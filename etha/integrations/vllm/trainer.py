"""The trainer's side: every rank sends the shards it holds; rank 0 speaks to the engine, too.

    rank 0    start_weight_update   send   pause  update_weights  finish_weight_update  resume
    others                          send

Both sides may be relaunched at any time, with other world sizes: the pair forms again with the next version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from etha import AsyncTensorBusClient, TransferResult
from etha.client.place import Place
from etha.client.portal import Membership
from etha.client.results import Pair
from etha.config import LaunchEnv
from etha.errors import ConfigError, EthaError, PeerLostError, RendezvousTimeoutError, TransferError
from etha.integrations.vllm.control import Control, Pause, told, unreachable
from etha.integrations.vllm.source import EthaSource, merged

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Seconds between two looks for an engine that does not answer.
_AGAIN = 0.5
#: Seconds within which agents tell that a worker has died, be it with its whole host.
_NEWS = 5.0


@dataclass
class EthaTrainerInitInfo(TrainerInitInfo):
    """A trainer rank's part in the pair ``pair``; every rank gives the same but for ``rank``.

    ``world_size``: ranks of the trainer (default: torch.distributed's, else $WORLD_SIZE, else 1). ``names``: ordered
    regex replacements from the model's names to the checkpoint's. ``direct``: engine parameters that can be written
    as they are take no way through loaders. ``atomic=False``, with ``direct``: into the live parameters themselves,
    without a copy; the engine is paused for as long, and torn if a transfer fails. ``pause``: what becomes of
    requests under way while a version comes in, "wait", "abort", "keep" (go on, computed anew), or None.
    ``timeout``: seconds for meeting, and for each version. ``redis_url``, ``namespace``: of both sides where they
    are given, else each side's environment.
    """

    backend: ClassVar[str] = "etha"

    pair: str = "weights"
    world_size: int | None = None
    names: Mapping[str, str] | None = None
    direct: bool = False
    atomic: bool = True
    pause: Pause | None = "wait"
    timeout: float = 300.0
    local_name: str = "trainer"
    remote_name: str = "inference"
    batch: str = "weights"
    redis_url: str | None = field(default=None, repr=False)
    namespace: str | None = None


class EthaTrainerWeightTransferEngine(TrainerWeightTransferEngine[EthaTrainerInitInfo]):
    """vLLM's trainer engine of the backend ``etha``; made by ``WeightTransferTrainerFactory.trainer_init``."""

    init_info_cls = EthaTrainerInitInfo

    def __init__(
        self, init_info: EthaTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._weights = EthaSource.of(source, init_info.names)
        self._control = Control(client, init_info.pause)
        self._bus = AsyncTensorBusClient(
            redis_url=init_info.redis_url, namespace=init_info.namespace, timeout=init_info.timeout
        )
        self._membership: Membership | None = Membership(self)
        self._pair: Pair | None = None
        self._metas: list[ParamMeta] = []
        self._spread = False
        # Whether the model of the engine may be of two versions: then nothing may be computed with it.
        self._torn = False

    @classmethod
    def trainer_init(
        cls, init_info: EthaTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Meet the engine, on every rank of the trainer; an engine that does not answer yet is waited for.

        Errors of ``init_pair`` and ``register_tensors``, and the client's.
        """
        engine = cls(init_info, client=client, source=source)
        try:
            engine._announce()
            engine._run(engine._form())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def send_weights(self, version: int | str | None = None) -> TransferResult:
        """Bring the weights as they are now into the engine as ``version``; on every rank.

        The engine's weight version is ``version``, else the transfer's number. Where the pair was lost before a
        byte has moved, it is formed again first, which waits for an engine that is starting. TransferError and its
        subclasses: the engine answers with what it had; call again for the next version. On rank 0 the engine is
        live with it when this returns.
        """
        self._weights.refresh()
        return self._run(self._send(version))

    def verify(self) -> TransferResult:
        """Prove that the engine computes with the weights as they are here now; on every rank, after an update.

        They are sent once more, beside the live model, and each worker compares: parameters that can be read bit by
        bit, packed ones by their products with a fixed probe, to within the dtype's rounding. Nothing of the engine
        changes; requests wait while it compares. TransferError, on rank 0, names the parameters that differ.
        ConfigError with ``atomic=False``, where there is no place beside the model.
        """
        if self._info.direct and not self._info.atomic:
            raise ConfigError(
                f"pair {self._info.pair!r}: with atomic=False weights are sent into the live parameters, so that there "
                f"is nothing to compare them with: use atomic=True to verify"
            )
        self._weights.refresh()
        return self._run(self._verify())

    def shutdown(self) -> None:
        """Leave the pair; idempotent."""
        if self._membership is not None:
            left, self._membership = self._membership, None
            try:
                left.portal.call(self._bus.close())
            finally:
                left.leave()

    def _announce(self) -> None:
        """Learn what all ranks hold: a collective of torch.distributed where the trainer is its world.

        Elsewhere each rank's source must know the whole model.
        """
        self._weights.refresh()
        mine = self._weights.metadata()
        held = [list(self._weights.tensors())]
        self._metas = mine
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == self._place().world_size > 1:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, (mine, held[0]))
            self._metas = merged([metas for metas, _ in told])
            held = [names for _, names in told]
        self._spread = any(set(names) != {meta.name for meta in self._metas} for names in held)

    def _place(self) -> Place:
        info = self._info
        return Place.of(world_size=info.world_size, rank=info.rank, ranks=None, env=LaunchEnv.from_env())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._membership is None:
            work.close()
            raise ConfigError(f"the trainer engine of pair {self._info.pair!r} is shut down: make another")
        return self._membership.portal.call(work)

    # ---- on the loop ---------------------------------------------------------------------------

    async def _form(self) -> None:
        self._pair = None
        if self.is_sender:
            # First: the engine may still wait for a trainer that has died, and would take this one for it.
            await self._engine_joins()
        self._pair = await self._join()

    async def _join(self) -> Pair:
        info = self._info
        place = self._place()
        # Of plain tensors every rank has all, or each has some: then each is a replica by itself.
        mesh: Any = (place.world_size,)
        if self._spread:
            mesh = torch.tensor([info.rank if place.ranks is None else dist.get_rank()])
        pair = await self._bus.init_pair(
            info.pair, info.local_name, info.remote_name, place.world_size, mesh, [Replicate()], rank=info.rank
        )
        await self._bus.register_tensors(info.batch, self._weights.tensors(), pair_name=info.pair, direction="send")
        return pair

    async def _engine_joins(self) -> None:
        info, metas = self._info, self._metas
        plan: dict[str, Any] = {
            "pair": info.pair,
            "local_name": info.remote_name,
            "remote_name": info.local_name,
            "batch": info.batch,
            "names": [meta.name for meta in metas],
            "dtypes": [str(meta.dtype).removeprefix("torch.") for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
            "direct": info.direct,
            "atomic": info.atomic,
            "timeout": info.timeout,
        }
        plan |= {key: value for key in ("redis_url", "namespace") if (value := getattr(info, key)) is not None}
        last: Exception | None = None
        try:
            async with asyncio.timeout(info.timeout):
                while True:
                    last = await self._ask_to_join(plan, last)
                    if last is None:
                        return
                    await asyncio.sleep(_AGAIN)
        except TimeoutError:
            text = f"pair {info.pair!r}: no engine has answered in {info.timeout:g} s: {last}"
            raise RendezvousTimeoutError(text, missing={info.remote_name: (0,)}) from last

    async def _ask_to_join(self, plan: dict[str, Any], before: Exception | None) -> Exception | None:
        """Tell the engine to meet this trainer; the error where nobody answers for it, ``before`` the one before."""
        try:
            # A trainer that was killed may have left the engine waiting.
            await asyncio.to_thread(self._control.recover)
            await asyncio.to_thread(told, self.client.init_weight_transfer_engine, plan)
        except Exception as error:
            if not unreachable(error):
                raise
            level = logging.WARNING if before is None else logging.DEBUG
            log.log(level, "pair %s: no engine yet: %s", self._info.pair, error)
            return error
        return None

    async def _send(self, version: int | str | None) -> TransferResult:
        fresh = self._pair is None or self._pair.lost.is_set()
        if fresh:
            await self._form()
        try:
            return await self._round(version)
        except PeerLostError as error:
            if fresh or error.outcome != "withdrawn":  # bytes have moved: that is for the caller to know
                raise
            log.info("pair %s was lost: forming it again", self._info.pair)
        await self._form()
        return await self._round(version)

    async def _round(self, version: int | str | None) -> TransferResult:
        if not self.is_sender:
            return await self._bus.transfer(self._info.batch, "send", version=version)
        try:
            async with self._documented(version):
                result = await self._bring_in(version)
        except BaseException:
            if not self._torn:
                with suppress(Exception):  # what failed first is what is told
                    await asyncio.to_thread(self._control.resume)
            raise
        async with self._documented(version):
            await asyncio.to_thread(self._control.resume)
        return result

    @asynccontextmanager
    async def _documented(self, version: int | str | None) -> AsyncIterator[None]:
        """Errors of the client as ours: an engine that nobody answers for has died, one that answers has refused."""
        import requests

        try:
            yield
        except Exception as error:
            if isinstance(error, EthaError):
                raise
            pair, which = self._info.pair, "the version" if version is None else f"version {version}"
            if unreachable(error):
                await self._engine_left(_NEWS)
                text = f"pair {pair!r}: the engine has left while {which} was brought in: {error}"
                raise PeerLostError(text, reason="died", outcome="unknown") from error
            if isinstance(error, requests.RequestException):
                raise TransferError(f"pair {pair!r}: the engine did not bring in {which}: {error}") from error
            raise

    async def _bring_in(self, version: int | str | None) -> TransferResult:
        live = self._info.direct and not self._info.atomic  # bytes go into the live parameters
        if live:
            await asyncio.to_thread(self._control.pause)
        await self._start()
        try:
            result = await self._bus.transfer(self._info.batch, "send", version=version)
        except BaseException:
            await self._cancel()
            raise
        if not live:
            await asyncio.to_thread(self._control.pause)
        await asyncio.to_thread(told, self.client.update_weights, {})
        await self._finish(str(result.seq if version is None else version))
        return result

    async def _verify(self) -> TransferResult:
        if self._pair is None or self._pair.lost.is_set():
            await self._form()
        if not self.is_sender:
            return await self._bus.transfer(self._info.batch, "send")
        async with self._documented(None):
            await self._start()
            try:
                result = await self._bus.transfer(self._info.batch, "send")
            except BaseException:
                await self._cancel()
                raise
            try:
                await asyncio.to_thread(told, self.client.update_weights, {"verify": True})
            except Exception as error:
                if unreachable(error):
                    raise
                text = f"pair {self._info.pair!r}: the engine does not compute with the trainer's weights: {error}"
                raise TransferError(text) from error
            await asyncio.to_thread(told, self.client.finish_weight_update)
        return result

    async def _finish(self, version: str) -> None:
        try:
            await asyncio.to_thread(told, self.client.finish_weight_update, version)
        except Exception as error:
            if unreachable(error):
                raise
            self._torn = True
            raise TransferError(
                f"pair {self._info.pair!r}: the engine has received version {version} and could not bring it into "
                f"its model: {error}; it stays paused until it has taken a version whole (pause=None: see to it)",
                torn=True,
            ) from error
        self._torn = False

    async def _start(self) -> None:
        try:
            await asyncio.to_thread(self.client.start_weight_update)
        except Exception as error:
            if await self._engine_left(_NEWS if unreachable(error) else 0.0):
                text = f"pair {self._info.pair!r}: the engine has left"
                raise PeerLostError(text, reason="died", outcome="withdrawn") from None
            if unreachable(error):
                text = f"pair {self._info.pair!r}: nobody answers for the engine: {error}"
                raise PeerLostError(text, reason="died", outcome="withdrawn") from error
            # An update that a trainer before this one began and never ended.
            await self._cancel()
            await asyncio.to_thread(told, self.client.start_weight_update)

    async def _engine_left(self, seconds: float) -> bool:
        """Whether the pair is lost, or becomes so in a moment: its workers' death is heard of by another way."""
        if self._pair is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pair.lost
        return self._pair.lost.is_set()

    async def _cancel(self) -> None:
        with suppress(Exception):  # it always ends in an error: that is how vLLM ends an update
            await asyncio.to_thread(self.client.update_weights, {"cancel": True})
