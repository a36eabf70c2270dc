"""One engine on the trainer's ranks: meets it, sends a version, verifies it; each rank's part in that.

    rank 0    start_weight_update  say "send"   send   pause  update  finish_weight_update  resume   say "done"
    others                         hear         send                                                 hear

If tensors have other memory, rank 0 tells the engine before start and says "register", and all register again. Any
error on rank 0 is raised on all ranks (team.py). Both sides may be relaunched at any time, with other world sizes: the
pair forms again with the next version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient

from etha import AsyncTensorBusClient, TransferResult
from etha.client.aio import AsyncBatchHandle
from etha.client.arguments.world import RankInfo
from etha.client.results import AsyncPair
from etha.config import LaunchEnv
from etha.errors import (
    ConfigError,
    EthaError,
    PeerLostError,
    RegistrationError,
    RendezvousTimeoutError,
    TransferError,
    TransferTimeoutError,
)
from etha.integrations.vllm.engine.refusals import MOVED, STRANGER
from etha.integrations.vllm.trainer.control import Control, call_engine, unreachable
from etha.integrations.vllm.trainer.init_info import EthaTrainerInitInfo
from etha.integrations.vllm.trainer.source import EthaSource, Iterated
from etha.integrations.vllm.trainer.team import Team, one_engine

log = logging.getLogger(__name__)
#: Seconds between two attempts to reach an engine that does not answer.
AGAIN = 0.5
#: Seconds within which agents report that a worker has died, even with its host.
_NEWS = 5.0
#: Calls to the engine that bring a version in: start, pause, update, finish, resume.
_CALLS = 5


class Replica:
    """This rank's part in bringing ``weights`` into the engine behind ``client``. Runs on the loop of ``bus``."""

    def __init__(
        self,
        info: EthaTrainerInitInfo,
        client: VLLMWeightSyncClient,
        bus: AsyncTensorBusClient,
        weights: EthaSource | Iterated,
    ) -> None:
        self.info, self.client, self._bus, self._weights = info, client, bus, weights
        in_place = info.direct and not info.atomic
        self._control = Control(client, info.pause, lease=info.lease, in_place=in_place)
        self._team = Team(
            bus, info.pair, info.local_name, rank=info.rank, world=place_of(info).world_size, timeout=info.timeout
        )
        self.pair: AsyncPair | None = None
        # Deadline of calls to the engine, by the loop's clock; None: the client has a limit of its own.
        self._until: float | None = None
        self._metas: Sequence[ParamMeta] = ()
        self._spread = False
        # Whether the engine's model may be of two versions: then it must not compute.
        self._torn = False
        self._batch: AsyncBatchHandle | None = None
        # Where the registered tensors lay at registration.
        self._lay: dict[str, tuple[Any, ...]] = {}

    @property
    def stands(self) -> bool:
        """Whether the engine was met and has not been lost since."""
        return self.pair is not None and not self.pair.lost.is_set()

    def announce(self, metas: Sequence[ParamMeta], *, spread: bool) -> None:
        """Set what the engine is told. ``metas``: those of all ranks. ``spread``: no rank has all of them."""
        self._metas, self._spread = metas, spread

    async def begin(self) -> None:
        """Meet the other ranks and the engine."""
        await self.together(self.form)

    async def send(self, version: int | str | None) -> TransferResult:
        """Send the weights to the engine as ``version``."""
        return await self.transfer(partial(self._send, version), version)

    async def verify(self) -> TransferResult:
        """Prove that the engine computes with the weights."""
        return await self.transfer(self.verified)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Calls to the engine inside are given up after ``seconds``: TransferTimeoutError."""
        self._until = asyncio.get_running_loop().time() + seconds
        try:
            yield
        finally:
            self._until = None

    # ---- one outcome for all ranks -------------------------------------------------------------

    async def together(
        self, work: Callable[[], Coroutine[Any, Any, TransferResult | None]], version: int | str | None = None
    ) -> TransferResult | None:
        """One call of all ranks. ``work`` is rank 0's; the others follow its messages, and have its outcome."""
        if self.info.is_sender:
            return await self._lead(work())
        return await self._follow(version)

    async def transfer(
        self, work: Callable[[], Coroutine[Any, Any, TransferResult]], version: int | str | None = None
    ) -> TransferResult:
        """``together`` for work that ends in a transfer."""
        result = await self.together(work, version)
        assert result is not None
        return result

    async def _lead(self, work: Coroutine[Any, Any, TransferResult | None]) -> TransferResult | None:
        """Rank 0's part. All ranks have its outcome."""
        try:
            await self._team.meet()
            result = await work
        except BaseException as error:
            work.close()
            with suppress(EthaError):  # the first error is reported
                await self._team.say(plain(error), self.info.timeout if isinstance(error, Exception) else _NEWS)
            raise
        await self._team.say("done", self.info.timeout)
        return result

    async def _follow(self, version: int | str | None) -> TransferResult | None:
        """Every other rank's part: follow rank 0, and fail as it does."""
        await self._team.meet()
        result: TransferResult | None = None
        failed: EthaError | None = None
        while (word := await self._team.hear(self._patience())) != "done":
            failed = None
            try:
                if word == "join":
                    self.pair = await self._join()
                elif word == "register":
                    await self._register_again()
                elif (name := self._moved()) is not None:
                    failed = RegistrationError(
                        f"{name!r} of this rank's source has other memory, shape or dtype since it was registered, and "
                        f"rank 0's has not: move it on all ranks, or make another trainer engine"
                    )
                else:
                    result = await self._bus.transfer(self.info.batch, "send", version=version)
            except EthaError as error:
                failed = error  # rank 0 fails, too, and reports it; if not, the error is this rank's own
        if failed is not None:
            raise failed
        return result

    def _patience(self) -> float:
        """Seconds that rank 0 may take between two messages: for the meeting, or the calls that bring a version in."""
        return self.info.timeout + _CALLS * float(getattr(self.client, "timeout", self.info.timeout))

    async def form(self) -> None:
        """Rank 0's part of forming the pair. The engine comes first, because it may still wait for a trainer that has
        died."""
        self.pair = None
        await self._engine_joins()
        await self.meet()

    async def meet(self) -> None:
        """Rank 0's part: all ranks meet the engine, which was told to meet them."""
        await self._team.say("join", self.info.timeout)
        try:
            self.pair = await self._join()
        except RendezvousTimeoutError as error:
            if set(error.missing) != {self.info.remote_name}:
                raise
            text = f"{error}{await self._engines_word()}"
            raise RendezvousTimeoutError(text, missing=error.missing) from None

    async def _engines_word(self) -> str:
        """The engine's own error for not having come, which it gives when it is asked to receive."""
        import requests

        try:
            await self._ask(call_engine, self.client.start_weight_update)
        except requests.HTTPError as error:
            return f"; the engine says: {error}"
        except Exception as error:
            return f"; nobody answers for the engine: {error}"
        await self._cancel()
        return ""

    async def _join(self) -> AsyncPair:
        info = self.info
        place = place_of(self.info)
        # Either every rank has all plain tensors, or each has some of them; then each is a replica by itself.
        mesh: Any = (place.world_size,)
        if self._spread:
            mesh = torch.tensor([info.rank if place.ranks is None else dist.get_rank()])
        with one_engine(info.pair):
            pair = await self._bus.init_pair(
                info.pair, info.local_name, info.remote_name, place.world_size, mesh, [Replicate()], rank=info.rank
            )
        await self._register()
        return pair

    async def _register(self) -> None:
        lay = self._weights.places()
        self._batch = await self._bus.register_tensors(
            self.info.batch, self._weights.tensors(), pair_name=self.info.pair, direction="send",
            timeout=self.info.timeout,
        )  # fmt: skip
        self._lay = lay

    async def _register_again(self) -> None:
        """Register again with the engine, whose tensors have other memory."""
        if self._batch is not None:
            await self._batch.close()
        await self._register()

    def _moved(self) -> str | None:
        """A tensor of this rank whose memory has changed since registration, because trainers offload their weights."""
        now = self._weights.places() if self._lay else {}
        return next((name for name, lay in self._lay.items() if now.get(name) != lay), None)

    async def _renew(self, whose: str) -> None:
        """Rank 0's part: all ranks register again. The engine comes first, and registers beside its steps."""
        log.info("pair %s: %s in other memory: registering again", self.info.pair, whose)
        try:
            await self._ask(call_engine, self.client.init_weight_transfer_engine, {**self._plan(), "again": True})
            await self._team.say("register", self.info.timeout)
            await self._register_again()
        except BaseException:
            self.pair = None  # the next call forms it again
            raise

    async def _engine_joins(self) -> None:
        last: Exception | None = None
        try:
            async with asyncio.timeout(self.info.timeout):
                while True:
                    last = await self.ask_to_join(last)
                    if last is None:
                        return
                    await asyncio.sleep(AGAIN)
        except TimeoutError:
            text = f"pair {self.info.pair!r}: no engine has answered in {self.info.timeout:g} s: {last}"
            raise RendezvousTimeoutError(text, missing={self.info.remote_name: (0,)}) from last

    def _plan(self) -> dict[str, Any]:
        """The message to the engine about the trainer."""
        info, metas = self.info, self._metas
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
        if info.adapter is not None:
            plan["adapter"] = info.adapter.to_wire()
        return plan | {key: value for key in ("redis_url", "namespace") if (value := getattr(info, key)) is not None}

    async def ask_to_join(self, before: Exception | None = None) -> Exception | None:
        """Tell the engine to meet this trainer. Returns the error if nobody answers; ``before`` is the previous one."""
        import requests
        from requests import exceptions

        self._control.holder = uuid4().hex
        try:
            # A trainer that was killed may have left the engine waiting.
            await self._ask(self._control.recover)
            await self._ask(call_engine, self.client.init_weight_transfer_engine, self._plan())
        except requests.HTTPError as error:
            raise ConfigError(f"pair {self.info.pair!r}: the engine refuses this trainer: {error}") from error
        except (exceptions.MissingSchema, exceptions.InvalidSchema, exceptions.InvalidURL) as error:
            text = f"pair {self.info.pair!r}: {error}: give the client an address such as http://127.0.0.1:8000"
            raise ConfigError(text) from error
        except Exception as error:
            if not unreachable(error):
                raise
            level = logging.WARNING if before is None else logging.DEBUG
            log.log(level, "pair %s: no engine yet: %s", self.info.pair, error)
            return error
        return None

    async def _send(self, version: int | str | None) -> TransferResult:
        fresh = not self.stands
        if fresh:
            await self.form()
        try:
            return await self.round(version)
        except PeerLostError as error:
            if fresh or error.outcome != "withdrawn":  # bytes have moved, so the caller must know
                raise
            log.info("pair %s was lost: forming it again", self.info.pair)
        await self.form()
        return await self.round(version)

    async def round(self, version: int | str | None, label: str | None = None) -> TransferResult:
        """Rank 0's part of a version, with an engine that was met. ``label``: the engine's name for the version."""
        try:
            async with self._documented(version):
                result = await self._bring_in(version, label)
        except BaseException:
            if not self._torn:
                with suppress(Exception):  # the first error is reported
                    await self._ask(self._control.resume)
            raise
        async with self._documented(version):
            await self._ask(self._control.resume)
        return result

    @asynccontextmanager
    async def _documented(self, version: int | str | None) -> AsyncIterator[None]:
        """Turn the client's errors into Etha's: an engine that does not answer has died, one that answers has
        refused."""
        import requests

        try:
            yield
        except Exception as error:
            if isinstance(error, EthaError):
                raise
            pair, which = self.info.pair, "the version" if version is None else f"version {version}"
            if unreachable(error):
                await self._engine_left(_NEWS)
                text = f"pair {pair!r}: the engine has left while {which} was brought in: {error}"
                raise PeerLostError(text, reason="died", outcome="unknown") from error
            if isinstance(error, requests.RequestException):
                raise TransferError(f"pair {pair!r}: the engine did not bring in {which}: {error}") from error
            raise

    async def _bring_in(self, version: int | str | None, label: str | None) -> TransferResult:
        live = self.info.direct and not self.info.atomic  # bytes go into the live parameters
        if live:
            await self._ask(self._control.pause)
        await self._start()
        try:
            await self._team.say("send", self.info.timeout)
            result = await self._bus.transfer(self.info.batch, "send", version=version)
        except BaseException:
            await self._cancel()
            raise
        if not live:
            await self._ask(self._control.pause)
        await self._ask(call_engine, self.client.update_weights, {})
        await self._finish(label or str(result.seq if version is None else version))
        return result

    async def verified(self) -> TransferResult:
        """Rank 0's part of ``verify``."""
        if not self.stands:
            await self.form()
        async with self._documented(None):
            await self._start()
            try:
                await self._team.say("send", self.info.timeout)
                result = await self._bus.transfer(self.info.batch, "send")
            except BaseException:
                await self._cancel()
                raise
            try:
                await self._ask(call_engine, self.client.update_weights, {"verify": True})
            except Exception as error:
                if absent(error):
                    raise
                text = f"pair {self.info.pair!r}: the engine does not compute with the trainer's weights: {error}"
                raise TransferError(text) from error
            await self._ask(call_engine, self.client.finish_weight_update)
        return result

    async def _finish(self, version: str) -> None:
        try:
            await self._ask(call_engine, self.client.finish_weight_update, version)
        except Exception as error:
            if unreachable(error) or isinstance(error, PeerLostError):
                raise
            self._torn = True
            raise TransferError(
                f"pair {self.info.pair!r}: the engine has received version {version} and could not bring it into "
                f"its model: {error}; it stays paused until it has taken a version whole (pause=None: see to it)",
                torn=True,
            ) from error
        self._torn = False

    async def _start(self) -> None:
        if (name := self._moved()) is not None:
            await self._renew(f"the trainer has {name!r}")
        try:
            await self._ask(call_engine, self.client.start_weight_update)
        except TransferTimeoutError:
            raise
        except Exception as error:
            other = STRANGER in str(error)
            if await self._engine_left(_NEWS if unreachable(error) or other else 0.0):
                text = f"pair {self.info.pair!r}: the engine has left"
                raise PeerLostError(text, reason="died", outcome="withdrawn") from None
            if unreachable(error):
                text = f"pair {self.info.pair!r}: nobody answers for the engine: {error}"
                raise PeerLostError(text, reason="died", outcome="withdrawn") from error
            if other:
                raise TransferError(
                    f"pair {self.info.pair!r}: the engine that answers now is not the one that was met, whose workers "
                    f"still live (a vllm serve that is killed can leave them behind): end those processes, and the "
                    f"next call meets this engine",
                    outcome="withdrawn",
                ) from error
            # An earlier trainer may have left an update open, or memory may have been unmapped for a while.
            await self._cancel()
            if MOVED in str(error):
                await self._renew("the engine has parameters")
            await self._ask(call_engine, self.client.start_weight_update)

    async def settle(self) -> None:
        """End what was begun with an engine that answers, and its pause; raises errors for which ``absent`` is true."""
        await self._ask_whether_it_answers(self.client.update_weights, {"cancel": True})
        if not self._torn:
            await self._ask_whether_it_answers(self._control.resume)

    async def _ask_whether_it_answers(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            await self._ask(call, *arguments)
        except Exception as error:
            if absent(error):
                raise

    async def _ask(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call to the engine, in a thread of its own.

        PeerLostError if it has not returned a while after the pair was lost: when one of several engines behind a URL
        dies, vLLM does not answer running calls. TransferTimeoutError if the time of ``within`` is over.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        silent = f"pair {self.info.pair!r}: the engine has not answered in {self.info.timeout:g} s"
        if self._until is not None and loop.time() >= self._until:
            raise TransferTimeoutError(silent, outcome="unknown")

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
            with suppress(RuntimeError):  # nobody waits any more, because the loop has ended
                loop.call_soon_threadsafe(end, failed)

        Thread(target=make, name="etha-engine-call", daemon=True).start()
        limit = asyncio.timeout_at(self._until)
        try:
            async with limit:
                await self._heard(answer)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TransferTimeoutError(silent, outcome="unknown") from error

    async def _heard(self, answer: asyncio.Future[None]) -> None:
        """Wait for ``answer``; not for long once the pair is lost."""
        if self.pair is not None:
            async with asyncio.TaskGroup() as waiting:
                lost = waiting.create_task(self.pair.lost.wait())
                either: list[asyncio.Future[Any]] = [answer, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    await asyncio.wait({answer}, timeout=_NEWS)
                lost.cancel()
            if not answer.done():
                text = f"pair {self.info.pair!r} was lost and the engine answers no more: {self.pair.lost.text}"
                raise PeerLostError(text, reason="died", outcome="unknown")
        await answer

    async def _engine_left(self, seconds: float) -> bool:
        """Whether the pair is lost or will be in a moment, because the death of its workers is reported by another
        way."""
        if self.pair is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.pair.lost
        return self.pair.lost.is_set()

    async def _cancel(self) -> None:
        with suppress(Exception):  # it always raises, because vLLM ends an update by an error
            await self._ask(self.client.update_weights, {"cancel": True})


def place_of(info: EthaTrainerInitInfo) -> RankInfo:
    """This process's rank in the trainer."""
    return RankInfo.of(world_size=info.world_size, rank=info.rank, ranks=None, env=LaunchEnv.from_env())


def absent(error: BaseException) -> bool:
    """Whether an engine has not answered a call. Otherwise it has answered, and refuses."""
    import requests

    lost = (PeerLostError, TransferTimeoutError, RendezvousTimeoutError, TimeoutError, requests.Timeout)
    return isinstance(error, lost) or unreachable(error)


def plain(error: BaseException) -> EthaError:
    """``error`` in a form that can be sent to other ranks."""
    if isinstance(error, EthaError):
        return error
    return TransferError(f"trainer rank 0 failed: {type(error).__name__}: {error}", outcome="unknown")
