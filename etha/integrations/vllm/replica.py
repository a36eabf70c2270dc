"""One engine as the trainer's ranks have it: met, brought a version, verified; each rank's part in that.

    rank 0    start_weight_update  say "send"   send   pause  update  finish_weight_update  resume   say "done"
    others                         hear         send                                                 hear

Whatever fails on rank 0 is raised on all ranks (team.py). Both sides may be relaunched at any time, with other world
sizes: the pair forms again with the next version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient

from etha import AsyncTensorBusClient, TransferResult
from etha.client.place import Place
from etha.client.results import Pair
from etha.config import LaunchEnv
from etha.errors import ConfigError, EthaError, PeerLostError, RendezvousTimeoutError, TransferError
from etha.integrations.vllm.control import Control, told, unreachable
from etha.integrations.vllm.source import EthaSource, Iterated
from etha.integrations.vllm.team import Team

if TYPE_CHECKING:
    from etha.integrations.vllm.trainer import EthaTrainerInitInfo

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Seconds between two looks for an engine that does not answer.
_AGAIN = 0.5
#: Seconds within which agents tell that a worker has died, be it with its whole host.
_NEWS = 5.0
#: Calls of the engine in which a version is brought in: start, pause, update, finish, resume.
_CALLS = 5


class Replica:
    """This rank's part in bringing ``weights`` into the engine behind ``client``; runs on the loop of ``bus``."""

    def __init__(
        self,
        info: EthaTrainerInitInfo,
        client: VLLMWeightSyncClient,
        bus: AsyncTensorBusClient,
        weights: EthaSource | Iterated,
    ) -> None:
        self._info, self.client, self._bus, self._weights = info, client, bus, weights
        in_place = info.direct and not info.atomic
        self._control = Control(client, info.pause, lease=info.lease, in_place=in_place)
        self._team = Team(
            bus, info.pair, info.local_name, rank=info.rank, world=place_of(info).world_size, timeout=info.timeout
        )
        self._pair: Pair | None = None
        self._metas: Sequence[ParamMeta] = ()
        self._spread = False
        # Whether the model of the engine may be of two versions: then nothing may be computed with it.
        self._torn = False

    async def begin(self, metas: Sequence[ParamMeta], *, spread: bool) -> None:
        """Meet the other ranks and the engine. ``metas``: of all ranks; ``spread``: no rank has all of them."""
        self._metas, self._spread = metas, spread
        if self._info.is_sender:
            await self._lead(self._form())
        else:
            await self._follow(None)

    async def send(self, version: int | str | None) -> TransferResult:
        """Bring the weights into the engine as ``version``."""
        return await self._together(self._send, version)

    async def verify(self) -> TransferResult:
        """Prove that the engine computes with the weights."""
        return await self._together(self._verify)

    # ---- one outcome for all ranks -------------------------------------------------------------

    async def _together(
        self, work: Callable[..., Coroutine[Any, Any, TransferResult]], version: int | str | None = None
    ) -> TransferResult:
        """One transfer by all ranks: ``work`` is rank 0's, the others do what it says."""
        result = await (self._lead(work(version)) if self._info.is_sender else self._follow(version))
        assert result is not None
        return result

    async def _lead(self, work: Coroutine[Any, Any, T]) -> T:
        """Rank 0's part: its outcome is everybody's."""
        try:
            await self._team.meet()
            result = await work
        except BaseException as error:
            work.close()
            with suppress(EthaError):  # what failed first is what is told
                await self._team.say(_plain(error), self._info.timeout if isinstance(error, Exception) else _NEWS)
            raise
        await self._team.say("done", self._info.timeout)
        return result

    async def _follow(self, version: int | str | None) -> TransferResult | None:
        """Every other rank's part: do as rank 0 says, and fail as it does."""
        await self._team.meet()
        result: TransferResult | None = None
        failed: EthaError | None = None
        while (word := await self._team.hear(self._patience())) != "done":
            failed = None
            try:
                if word == "join":
                    self._pair = await self._join()
                else:
                    result = await self._bus.transfer(self._info.batch, "send", version=version)
            except EthaError as error:
                failed = error  # rank 0 fails as well, and says how: or it does not, and that is this rank's alone
        if failed is not None:
            raise failed
        return result

    def _patience(self) -> float:
        """Seconds that rank 0 may take from one word to the next: the meeting, or the calls that bring a version in."""
        return self._info.timeout + _CALLS * float(getattr(self.client, "timeout", self._info.timeout))

    async def _form(self) -> None:
        """Rank 0's: the engine first, for it may still wait for a trainer that has died, and take this one for it."""
        self._pair = None
        await self._engine_joins()
        await self._team.say("join", self._info.timeout)
        try:
            self._pair = await self._join()
        except RendezvousTimeoutError as error:
            if set(error.missing) != {self._info.remote_name}:
                raise
            text = f"{error}{await self._engines_word()}"
            raise RendezvousTimeoutError(text, missing=error.missing) from None

    async def _engines_word(self) -> str:
        """Why the engine has not come, which it says when it is asked to receive."""
        import requests

        try:
            await self._ask(told, self.client.start_weight_update)
        except requests.HTTPError as error:
            return f"; the engine says: {error}"
        except Exception as error:
            return f"; nobody answers for the engine: {error}"
        await self._cancel()
        return ""

    async def _join(self) -> Pair:
        info = self._info
        place = place_of(self._info)
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
        self._control.holder = uuid4().hex
        plan: dict[str, Any] = {
            "holder": self._control.holder,
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
        import requests

        try:
            # A trainer that was killed may have left the engine waiting.
            await self._ask(self._control.recover)
            await self._ask(told, self.client.init_weight_transfer_engine, plan)
        except requests.HTTPError as error:
            raise ConfigError(f"pair {self._info.pair!r}: the engine refuses this trainer: {error}") from error
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
        try:
            async with self._documented(version):
                result = await self._bring_in(version)
        except BaseException:
            if not self._torn:
                with suppress(Exception):  # what failed first is what is told
                    await self._ask(self._control.resume)
            raise
        async with self._documented(version):
            await self._ask(self._control.resume)
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
            await self._ask(self._control.pause)
        await self._start()
        try:
            await self._team.say("send", self._info.timeout)
            result = await self._bus.transfer(self._info.batch, "send", version=version)
        except BaseException:
            await self._cancel()
            raise
        if not live:
            await self._ask(self._control.pause)
        await self._ask(told, self.client.update_weights, {})
        await self._finish(str(result.seq if version is None else version))
        return result

    async def _verify(self, version: None) -> TransferResult:
        if self._pair is None or self._pair.lost.is_set():
            await self._form()
        async with self._documented(version):
            await self._start()
            try:
                await self._team.say("send", self._info.timeout)
                result = await self._bus.transfer(self._info.batch, "send")
            except BaseException:
                await self._cancel()
                raise
            try:
                await self._ask(told, self.client.update_weights, {"verify": True})
            except Exception as error:
                if unreachable(error) or isinstance(error, PeerLostError):
                    raise
                text = f"pair {self._info.pair!r}: the engine does not compute with the trainer's weights: {error}"
                raise TransferError(text) from error
            await self._ask(told, self.client.finish_weight_update)
        return result

    async def _finish(self, version: str) -> None:
        try:
            await self._ask(told, self.client.finish_weight_update, version)
        except Exception as error:
            if unreachable(error) or isinstance(error, PeerLostError):
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
            await self._ask(self.client.start_weight_update)
        except Exception as error:
            if await self._engine_left(_NEWS if unreachable(error) else 0.0):
                text = f"pair {self._info.pair!r}: the engine has left"
                raise PeerLostError(text, reason="died", outcome="withdrawn") from None
            if unreachable(error):
                text = f"pair {self._info.pair!r}: nobody answers for the engine: {error}"
                raise PeerLostError(text, reason="died", outcome="withdrawn") from error
            # An update that a trainer before this one began and never ended.
            await self._cancel()
            await self._ask(told, self.client.start_weight_update)

    async def _ask(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call of the engine, in a thread of its own.

        PeerLostError where it has not returned a while after the pair was lost: vLLM does not answer calls that were
        under way when one of several engines behind a URL died.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def end(error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        def make() -> None:
            failed: BaseException | None = None
            try:
                call(*arguments)
            except BaseException as error:
                failed = error
            with suppress(RuntimeError):  # nobody waits any more: the loop has ended
                loop.call_soon_threadsafe(end, failed)

        Thread(target=make, name="etha-engine-call", daemon=True).start()
        if self._pair is not None:
            async with asyncio.TaskGroup() as waiting:
                lost = waiting.create_task(self._pair.lost.wait())
                either: list[asyncio.Future[Any]] = [answer, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    await asyncio.wait({answer}, timeout=_NEWS)
                lost.cancel()
            if not answer.done():
                text = f"pair {self._info.pair!r} was lost and the engine answers no more: {self._pair.lost.text}"
                raise PeerLostError(text, reason="died", outcome="unknown")
        await answer

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
            await self._ask(self.client.update_weights, {"cancel": True})


def place_of(info: EthaTrainerInitInfo) -> Place:
    """This process's rank in the trainer."""
    return Place.of(world_size=info.world_size, rank=info.rank, ranks=None, env=LaunchEnv.from_env())


def _plain(error: BaseException) -> EthaError:
    """``error`` as it can be told to other ranks."""
    if isinstance(error, EthaError):
        return error
    return TransferError(f"trainer rank 0 failed: {type(error).__name__}: {error}", outcome="unknown")
