"""Performs what an EngineFollower decides, in the process of EngineCore.

    worker                         EngineCore
    (a version has arrived) news   ---> follower.reported: ask all workers
                                        follower.collected: pause the engine as its option says
                                        follower.paused: start, update and finish, as a trainer's calls do; resume
    begin   <------------------------- follower.brought_in: receive the next one

Everything runs on EngineCore's own thread, because news and timeouts arrive as requests in its queue. The pause is
claimed from the lease (``lease.py``), so an engine that somebody else has paused takes versions and stays paused. Each
EngineCore of a data-parallel engine does the same; vLLM lets none of them compute before all have gone on.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import wraps
from typing import Any, NoReturn

from etha.errors import ConfigError, TransferError
from etha.integrations.vllm.engine.follow_options import FollowOptions, follow_options
from etha.integrations.vllm.engine.follower import (
    Collect,
    EngineFollower,
    FollowerEffect,
    InstallVersion,
    Pause,
    Receive,
    Retry,
    WorkerOutcome,
)
from etha.integrations.vllm.engine.lease import lease_of
from etha.integrations.vllm.engine.news import News

# Under vLLM's own root, so that vLLM's handlers print it.
log = logging.getLogger("vllm.etha")
#: The follower's name in claims of a pause. Trainers have random ones.
_HOLDER = "follower"


class _Event:
    """A follower's entry in EngineCore's queue: what ``handle`` makes of the follower."""

    def __init__(self, handle: Callable[[EngineFollowing], Iterable[FollowerEffect]]) -> None:
        self.handle = handle


class EngineFollowing:
    """One EngineCore that follows a publication, and the state of that."""

    def __init__(self, engine: Any, options: FollowOptions) -> None:
        self._engine, self._options = engine, options
        self.follower = EngineFollower()
        self._news = News(lambda text: self._put(lambda own: own.follower.reported(int(text))))
        #: Whether a version waits until the weights are awake.
        self._asleep = False

    def start(self) -> None:
        """All workers have loaded the first version: tell its name, and begin to receive the next one."""
        held: list[WorkerOutcome] = self._engine.collective_rpc(_held)
        if len(set(held)) != 1:
            raise TransferError(f"the workers of this engine have loaded versions {sorted({one.seq for one in held})}")
        self._engine.set_weight_version(held[0].version)
        log.info("the engine follows publication %s from version %s on", self._options.publication, held[0].version)
        self.perform(self.follower.start(held))

    def handle(self, event: _Event) -> None:
        """An event from EngineCore's queue. An engine that ends takes no version any more."""
        if self._engine.is_running():
            self.perform(event.handle(self))

    def awake(self) -> None:
        """Weights that slept are awake."""
        if self._asleep:
            self._asleep = False
            self._put(lambda own: own.follower.paused(ours=False))

    def perform(self, effects: Iterable[FollowerEffect]) -> None:
        """Perform what the follower has decided, and what it decides meanwhile."""
        left = deque(effects)
        while left:
            match left.popleft():
                case Receive(turn=turn, newer_than=newer_than, renew=renew):
                    self._engine.collective_rpc(_begin, args=(turn, newer_than, renew, self._news.name))
                case Collect():
                    left += self.follower.collected(self._engine.collective_rpc(_outcome))
                case Pause():
                    self._pause()
                case InstallVersion(version=version):
                    self._bring_in(version)
                    left += self.follower.brought_in()
                case Retry(turn=turn, seconds=seconds, why=why):
                    log.warning(
                        "publication %s: no version was received, and the engine goes on with the one that it has; "
                        "again in %g s: %s",
                        self._options.publication, seconds, why,
                    )  # fmt: skip
                    timer = threading.Timer(seconds, self._put, (lambda own, turn=turn: own.follower.due(turn),))
                    timer.daemon = True
                    timer.start()

    def _pause(self) -> None:
        if "weights" in self._engine.model_executor.sleeping_tags:
            self._asleep = True
            return
        # Nothing is written before the update is brought in, between two steps.
        lease_of(self._engine).claim(_HOLDER, seconds=0.0, in_place=False)
        paused: Future[Any] | None = self._engine.pause_scheduler(self._options.pause, True)
        if paused is None:
            self._put(_paused)
        else:
            paused.add_done_callback(self._on_paused)

    def _on_paused(self, paused: Future[Any]) -> None:
        error = paused.exception()
        self._put(_paused if error is None else lambda _: _raise(error))

    def _bring_in(self, version: str) -> None:
        """An error ends the engine: its model may be of two versions, and a new start takes the newest one whole."""
        engine = self._engine
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": {}})
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version(version)
        if lease_of(engine).released(_HOLDER):
            engine.resume_scheduler()
        else:
            log.warning("the engine has taken version %s and stays paused: somebody else has paused it, too", version)

    @property
    def holds_pause(self) -> bool:
        """Whether nobody has let the engine go on since the follower has paused it."""
        return lease_of(self._engine).holder == _HOLDER and bool(self._engine.is_scheduler_paused())

    def _put(self, handle: Callable[[EngineFollowing], Iterable[FollowerEffect]]) -> None:
        self._engine.input_queue.put_nowait((_Event(handle), None))


def _raise(error: BaseException) -> NoReturn:
    """vLLM could not clear its caches, so answers would be of two versions: the engine ends."""
    raise error


def _paused(own: EngineFollowing) -> list[FollowerEffect]:
    return own.follower.paused(ours=own.holds_pause)


# ---- in each worker ----------------------------------------------------------------------------------


def _subscriber(worker: Any) -> Any:
    return worker.weight_transfer_engine.subscriber


def _held(worker: Any) -> WorkerOutcome:
    held: WorkerOutcome = _subscriber(worker).held
    return held


def _begin(worker: Any, turn: int, newer_than: int, renew: bool, news: str) -> None:
    _subscriber(worker).begin(turn, newer_than, renew=renew, news=news)


def _outcome(worker: Any) -> WorkerOutcome:
    outcome: WorkerOutcome = _subscriber(worker).outcome()
    return outcome


# ---- vLLM's classes ----------------------------------------------------------------------------------


def follow_publications(executor: Any) -> None:
    """Make engines that were told to follow a publication do so. Once.

    Options are checked when vLLM chooses the executor, in the process that the user has started. ``executor``'s
    constructor is wrapped, because an engine makes an executor before it gets any request, and the engine's classes are
    loaded by then.
    """
    made, asked = executor.__init__, executor.get_class
    if hasattr(made, "follows_publications"):
        return

    @wraps(asked)
    def get_class(vllm_config: Any) -> Any:
        if follow_options(vllm_config) is not None and (client := sys.modules.get("vllm.v1.engine.core_client")):
            _refuse_in_process(client.InprocClient)
        return asked(vllm_config)

    @wraps(made)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        follows = follow_options(vllm_config) is not None
        engine = sys.modules.get("vllm.v1.engine.core")
        if follows and engine is not None:
            _follow(engine)
        made(self, vllm_config, *args, **kwargs)

    __init__.follows_publications = True  # type: ignore[attr-defined]
    executor.__init__, executor.get_class = __init__, staticmethod(get_class)


def _refuse_in_process(client: Any) -> None:
    """An engine in the process that calls it has no queue in which a version could wait for its turn."""
    made = client.__init__
    if hasattr(made, "follows_publications"):
        return

    @wraps(made)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if follow_options(vllm_config) is not None:
            raise ConfigError(
                "--load-format etha: this engine would compute in the process that calls it, where no version could "
                "come in: leave VLLM_ENABLE_V1_MULTIPROCESSING at 1"
            )
        made(self, vllm_config, *args, **kwargs)

    __init__.follows_publications = True  # type: ignore[attr-defined]
    client.__init__ = __init__


def _follow(engine: Any) -> None:
    core, process, parallel = engine.EngineCore, engine.EngineCoreProc, engine.DPEngineCoreProc
    if hasattr(core.wake_up, "follows_publications"):
        return
    sleep, wake_up, handle = core.sleep, core.wake_up, process._handle_client_request

    @wraps(sleep)
    def sleep_(self: Any, level: int = 1, mode: Any = "abort") -> Any:
        if level > 1 and following_of(self) is not None:
            raise ConfigError(
                f"sleep at level {level} drops the weights, and this engine, which follows a publication, would answer "
                f"without any until the next version: sleep at level 1"
            )
        return sleep(self, level, mode)

    @wraps(wake_up)
    def wake(self: Any, tags: Any = None) -> Any:
        found = wake_up(self, tags)
        if (following := following_of(self)) is not None and "weights" not in self.model_executor.sleeping_tags:
            following.awake()
        return found

    @wraps(handle)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if isinstance(request_type, _Event):
            following = following_of(self)
            assert following is not None
            following.handle(request_type)
        else:
            handle(self, request_type, request)

    wake.follows_publications = True  # type: ignore[attr-defined]
    core.sleep, core.wake_up = sleep_, wake
    process._handle_client_request = _handle_client_request
    for one in (process, parallel):
        one.run_busy_loop = _begins(one.run_busy_loop)


def _begins(loop: Any) -> Any:
    @wraps(loop)
    def run_busy_loop(self: Any) -> Any:
        options = follow_options(self.vllm_config)
        if options is not None and following_of(self) is None:
            self._etha_following = EngineFollowing(self, options)
            self._etha_following.start()
        return loop(self)

    return run_busy_loop


def following_of(engine: Any) -> EngineFollowing | None:
    """How an engine follows a publication; None if it does not, or not yet."""
    return getattr(engine, "_etha_following", None)
