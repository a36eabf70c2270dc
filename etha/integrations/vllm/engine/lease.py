"""The pause that a trainer makes is a lease: an engine whose trainer has died goes on by itself, with what it has.

    trainer              EngineCore                                    worker
    claim(holder)   -->  Lease.claim
    pause           -->  Lease.paused: it is the holder's
    release(holder) -->  Lease.released: resume_scheduler, unless somebody else has paused the engine, too
    SIGKILL              Lease.holder_lost  <---------- news ---------  its pair is lost: says so, and of which holder
                         ... seconds pass: Lease.due, resume_scheduler

The pause lies in EngineCore's process, so the lease does, too; ``keep_leases`` has its calls tell the lease of them.
Everything of a lease happens on EngineCore's own thread: news and time come as requests of its queue. A pause that
nobody has claimed is somebody else's, and stays; so does that of an engine whose model may be of two versions.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from etha.errors import ConfigError

#: Seconds for which an engine stays paused when its trainer has gone.
SECONDS = 10.0
# Under vLLM's own root: what an engine prints is what is logged there.
log = logging.getLogger("vllm.etha")


@dataclass(slots=True)
class Lease:
    """Whose an engine's pause is, and whether it may end without them. (computes)"""

    holder: str | None = None
    seconds: float = SECONDS
    mode: str = ""
    others: bool = False
    torn: bool = False
    _claimed: str | None = None
    _in_place: bool = False
    _gone: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def claim(self, holder: str, *, seconds: float, in_place: bool) -> None:
        """The next pause is that of ``holder``; ``in_place``: what it sends goes into the live model as it comes."""
        self._claimed, self.seconds, self._in_place = holder, seconds, in_place

    def paused(self, mode: str, *, already: bool) -> None:
        """The engine was told to pause, which it was ``already`` or was not."""
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
        """The engine goes on, whoever told it."""
        self.holder, self.others = None, False

    def released(self, holder: str) -> bool:
        """``holder`` needs its pause no more; whether the engine goes on: not if somebody else has paused it, too."""
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
        """An update was brought into the model, whole or not."""
        self.torn = not whole

    def holder_lost(self, holder: str) -> bool:
        """``holder`` has died, or left; whether its pause is now to end in ``seconds``, or may yet come until then."""
        self._gone.append(holder)
        return holder in (self.holder, self._claimed)

    def late(self, holder: str) -> bool:
        """``holder`` has been gone for ``seconds``; whether there is a pause of its, else none will be taken for it."""
        if self._claimed == holder:
            self._claimed = None
        return self.holder == holder

    @property
    def due(self) -> bool:
        """Whether the pause is one that nobody will end."""
        return self.holder in self._gone and not self.others and not self.torn


class News:
    """Where workers of this host say that a trainer has gone; ``heard`` is called with its name, on a thread."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.name = f"etha-lease-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket.bind("\0" + self.name)
        threading.Thread(target=self._read, args=(heard,), name="etha-lease", daemon=True).start()

    def _read(self, heard: Callable[[str], None]) -> None:
        while True:
            heard(self._socket.recv(200).decode(errors="replace"))


def say_gone(name: str, holder: str) -> None:
    """Tell the engine that listens as ``name``; one on another host is told by its own workers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
        try:
            speaker.sendto(holder.encode(), "\0" + name)
        except OSError as error:
            log.debug("nobody hears that the trainer has gone: %s", error)


class _Due:
    """What a lease puts into EngineCore's queue: the trainer ``holder`` has gone, or it has for as long as it may."""

    def __init__(self, holder: str, *, late: bool) -> None:
        self.holder, self.late = holder, late


def keep_leases(executor: Any, wanted: Callable[[Any], bool]) -> None:
    """Have engines that ``wanted`` says so of keep leases. Once.

    An engine makes an executor, of a subclass of ``executor``, before it is asked anything: then its classes are there.
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
        lease = _lease(self)
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
            lease = _lease(self)
            lease.paused(mode, already=self.is_scheduler_paused())
            if lease.others and lease.holder is not None and self.scheduler.pause_state.name == "PAUSED_ALL":
                mode = "keep"  # what somebody else has frozen stays so
            if lease.due:
                _later(self, lease, lease.holder or "")
        return pause(self, mode, clear_cache)

    @wraps(resume)
    def resume_scheduler(self: Any) -> None:
        if not (wanted(self) and self.model_executor.is_sleeping):  # waking up the rest of it resumes it
            resume(self)
        if wanted(self) and hasattr(self, "input_queue"):
            _lease(self).resumed()

    @wraps(handle)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if not isinstance(request_type, _Due):
            handle(self, request_type, request)
            return
        lease = _lease(self)
        if not request_type.late:
            if lease.holder_lost(request_type.holder):
                _later(self, lease, request_type.holder)
        elif lease.late(request_type.holder) and self.is_scheduler_paused():
            _end(self, lease)

    collective_rpc.keeps_leases = True  # type: ignore[attr-defined]
    core.collective_rpc, core.resume_scheduler = collective_rpc, resume_scheduler
    process.pause_scheduler, process._handle_client_request = pause_scheduler, _handle_client_request


def _refuse_asleep(engine: Any, method: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError for what needs the weights of an engine that sleeps: on a GPU there is no memory behind them."""
    needs = ("init_weight_transfer_engine", "start_weight_update", "finish_weight_update")
    info = kwargs.get("update_info") or {}
    if "weights" not in engine.model_executor.sleeping_tags:
        return
    if method in needs or (method == "update_weights" and not {"claim", "release", "cancel"}.intersection(info)):
        raise ConfigError(
            "the engine sleeps, and its weights are not there to be written: wake them up first, with "
            "wake_up(tags=['weights']) or POST /wake_up?tags=weights"
        )


def _lease(engine: Any) -> Lease:
    """The lease of an engine, and its ear for news."""
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
