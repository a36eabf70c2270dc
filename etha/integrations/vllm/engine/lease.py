"""A trainer's pause is a lease: if the trainer dies, the engine resumes by itself, with the version that it has.

    trainer              EngineCore                                    worker
    claim(holder)   -->  Lease.claim
    pause           -->  Lease.paused: it is the holder's
    release(holder) -->  Lease.released: resume_scheduler, unless somebody else has paused the engine, too
    SIGKILL              Lease.holder_lost  <---------- news ---------  its pair is lost: reports it, and which holder
                         ... seconds pass: Lease.due, resume_scheduler

The pause lies in EngineCore's process, and so does the lease. ``keep_leases`` makes its calls update the lease.
Everything runs on EngineCore's own thread, because news and timeouts arrive as requests in its queue. A pause that was
not claimed is somebody else's and stays. So does the pause of an engine whose model may be of two versions.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from etha.errors import ConfigError
from etha.integrations.vllm.engine.news import News

#: Seconds for which an engine stays paused after its trainer has died.
SECONDS = 10.0
# Under vLLM's own root, so that vLLM's handlers print it.
log = logging.getLogger("vllm.etha")


@dataclass(slots=True)
class Lease:
    """The holder of an engine's pause, and whether the pause may end without the holder. (computes)"""

    holder: str | None = None
    seconds: float = SECONDS
    mode: str = ""
    others: bool = False
    torn: bool = False
    _claimed: str | None = None
    _in_place: bool = False
    _gone: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def claim(self, holder: str, *, seconds: float, in_place: bool) -> None:
        """The next pause is that of ``holder``. ``in_place``: its update writes into the live model while it
        arrives."""
        self._claimed, self.seconds, self._in_place = holder, seconds, in_place

    def paused(self, mode: str, *, already: bool) -> None:
        """The engine was told to pause. ``already``: it was paused before."""
        holder, self._claimed = self._claimed, None
        if not already:
            self.resumed()
        elif self.holder is None:
            self.others = True
        if holder is None:
            self.others = True
            return
        self.holder, self.mode = holder, mode

    def resumed(self) -> None:
        """The engine resumes, whoever told it."""
        self.holder, self.others = None, False

    def released(self, holder: str) -> bool:
        """``holder`` does not need its pause any more. Returns whether the engine resumes: not if somebody else has
        paused it, too."""
        if self._claimed == holder:
            self._claimed = None
        if self.holder != holder:
            return False
        self.holder = None
        return not self.others

    def started(self) -> None:
        """An update has begun to come in."""
        self.torn = self.torn or (self._in_place and self.holder is not None)

    def finished(self, whole: bool) -> None:
        """An update was brought into the model, ``whole`` or not."""
        self.torn = not whole

    def holder_lost(self, holder: str) -> bool:
        """``holder`` has died or left. Returns whether a pause of it must end in ``seconds``, or may still begin until
        then."""
        self._gone.append(holder)
        return holder in (self.holder, self._claimed)

    def late(self, holder: str) -> bool:
        """``holder`` has been gone for ``seconds``. Returns whether it has a pause; if not, none will be accepted from
        it."""
        if self._claimed == holder:
            self._claimed = None
        return self.holder == holder

    @property
    def due(self) -> bool:
        """Whether nobody will end the pause."""
        return self.holder in self._gone and not self.others and not self.torn


class _Due:
    """A lease's entry in EngineCore's queue: the trainer ``holder`` has gone, or its time is over."""

    def __init__(self, holder: str, *, late: bool) -> None:
        self.holder, self.late = holder, late


def keep_leases(executor: Any, wanted: Callable[[Any], bool]) -> None:
    """Make engines for which ``wanted`` is true keep leases. Once.

    Wraps the constructor of executors (subclasses of ``executor``), because an engine makes one before it gets any
    request, and the engine's classes are loaded by then.
    """
    made = executor.__init__
    if hasattr(made, "keeps_leases"):  # vLLM has wrappers of its own
        return

    @wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        engine = sys.modules.get("vllm.v1.engine.core")
        if engine is not None and wanted(self):
            _keep_leases(engine.EngineCore, engine.EngineCoreProc, wanted)

    __init__.keeps_leases = True  # type: ignore[attr-defined]
    executor.__init__ = __init__


def _keep_leases(core: Any, process: Any, wanted: Callable[[Any], bool]) -> None:
    if hasattr(core.collective_rpc, "keeps_leases"):
        return
    rpc, pause, resume, handle = (
        core.collective_rpc,
        process.pause_scheduler,
        core.resume_scheduler,
        process._handle_client_request,
    )

    @wraps(rpc)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(method, str) and wanted(self):
            _refuse_asleep(self, method, kwargs or {})
        if not isinstance(method, str) or not wanted(self) or not hasattr(self, "input_queue"):
            return rpc(self, method, timeout, args, kwargs)
        lease = lease_of(self)
        if method == "init_weight_transfer_engine" and kwargs and "init_info" in kwargs:
            kwargs = {**kwargs, "init_info": {**kwargs["init_info"], "news": self._etha_news.name}}
        if method == "update_weights" and kwargs and "claim" in (info := kwargs.get("update_info") or {}):
            lease.claim(info["claim"], seconds=float(info["seconds"]), in_place=bool(info["in_place"]))
            return []
        if method == "update_weights" and kwargs and "release" in (info := kwargs.get("update_info") or {}):
            if lease.released(info["release"]):
                self.resume_scheduler()
            elif lease.others:
                log.warning("the engine has taken a version and stays paused: somebody else has paused it, too")
            return []
        if method == "start_weight_update":
            lease.started()
        if method != "finish_weight_update":
            return rpc(self, method, timeout, args, kwargs)
        lease.finished(False)
        found = rpc(self, method, timeout, args, kwargs)
        lease.finished(True)
        return found

    @wraps(pause)
    def pause_scheduler(self: Any, mode: Any = "abort", clear_cache: bool = True) -> Any:
        if wanted(self):
            lease = lease_of(self)
            lease.paused(mode, already=self.is_scheduler_paused())
            if lease.others and lease.holder is not None and self.scheduler.pause_state.name == "PAUSED_ALL":
                mode = "keep"  # a pause of somebody else that freezes requests stays so
            if lease.due:
                _later(self, lease, lease.holder or "")
        return pause(self, mode, clear_cache)

    @wraps(resume)
    def resume_scheduler(self: Any) -> None:
        if not (wanted(self) and self.model_executor.is_sleeping):  # waking up the rest of the engine resumes it
            resume(self)
        if wanted(self) and hasattr(self, "input_queue"):
            lease_of(self).resumed()

    @wraps(handle)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if not isinstance(request_type, _Due):
            handle(self, request_type, request)
            return
        lease = lease_of(self)
        if not request_type.late:
            if lease.holder_lost(request_type.holder):
                _later(self, lease, request_type.holder)
        elif lease.late(request_type.holder) and self.is_scheduler_paused():
            _end(self, lease)

    collective_rpc.keeps_leases = True  # type: ignore[attr-defined]
    core.collective_rpc, core.resume_scheduler = collective_rpc, resume_scheduler
    process.pause_scheduler, process._handle_client_request = pause_scheduler, _handle_client_request


def _refuse_asleep(engine: Any, method: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError for a call that needs the weights of a sleeping engine, because on a GPU they have no memory."""
    needs = ("init_weight_transfer_engine", "start_weight_update", "finish_weight_update")
    info = kwargs.get("update_info")
    words = set(info) if isinstance(info, Mapping) else set()  # vLLM also takes a list, with one for each worker
    if "weights" not in engine.model_executor.sleeping_tags:
        return
    if method in needs or (method == "update_weights" and not words & {"claim", "release", "cancel"}):
        raise ConfigError(
            "the engine sleeps, and its weights are not there to be written: wake them up first, with "
            "wake_up(tags=['weights']) or POST /wake_up?tags=weights"
        )


def lease_of(engine: Any) -> Lease:
    """The lease of an engine, which listens for news."""
    if not hasattr(engine, "_etha_lease"):
        queue = engine.input_queue
        engine._etha_lease = Lease()
        engine._etha_news = News(lambda holder: queue.put_nowait((_Due(holder, late=False), None)))
    lease: Lease = engine._etha_lease
    return lease


def _later(engine: Any, lease: Lease, holder: str) -> None:
    log.warning("the trainer that has paused this engine is gone: its pause ends in %g s", lease.seconds)
    due = (_Due(holder, late=True), None)
    timer = threading.Timer(lease.seconds, engine.input_queue.put_nowait, (due,))
    timer.daemon = True
    timer.start()


def _end(engine: Any, lease: Lease) -> None:
    if not lease.due:
        log.warning(
            "the trainer that has paused this engine is gone, and the engine stays paused: %s",
            "somebody else has paused it, too"
            if lease.others
            else "its model may be of two versions until it has taken one whole",
        )
        return
    if lease.mode == "keep":  # their keys and values may be of another version
        engine.reset_prefix_cache(reset_running_requests=True)
    engine.resume_scheduler()
    log.warning("the engine goes on without the trainer that has paused it")
