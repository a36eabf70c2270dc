"""Autostart: if no agent listens, start one for this device as a daemon; exactly one, however many clients ask.

    probe -> start lock (flock on cpu.start) -> probe again -> spawn, with the lock -> "ready" on a pipe -> unlock

All of it blocks, so it runs in a daemon thread. The starter and the agent share the start lock: it is free once the
agent listens or has ended, even if the starter is gone. So if an agent starts more slowly than its caller's deadline
allows, the next caller finds it, and nobody starts a second one meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from etha.bus.channel import listens
from etha.config import MAX_LOG, Settings
from etha.errors import AgentUnavailableError, ConfigError, EthaError, from_wire, note_of_log

#: How many bytes of the log an error shows.
_TAIL = 2000
#: Variables by which a launcher describes this worker's job, and thread counts for it. They are not for the agent.
_FOREIGN = ("RANK", "WORLD_SIZE", "ETHA_AGENT", "ETHA_LAUNCH_ID", "ETHA_REDIS_URL", "MKL_NUM_THREADS")
#: A job's settings for its own GPUs. An agent uses all GPUs of the host, and launches from a thread that must not wait.
_FOREIGN_CUDA = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
_FOREIGN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_", "KMP_", "GOMP_")
#: Codes of errors that the user must fix. They reach the user unchanged.
_TOLD = ("config", "redis_unavailable", "protocol")
# The agent must not be a child: its death would leave a zombie, and launchers kill their workers' children.
_DETACH = "import os, sys\nif os.fork() == 0: os.execv(sys.argv[1], sys.argv[1:])\nos._exit(0)"

#: Most bytes that the start lock's file holds about a start.
_MAX_NOTE = 4200
#: Start locks that threads of this process hold. A forked child closes its copies, which would keep the locks taken.
_locks: set[int] = set()


def _forget_locks() -> None:
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


async def ensure_agent(
    settings: Settings,
    device: str,
    *,
    redis_url: str | None,
    namespace: str,
    timeout: float,
    patient: bool = False,
    module: str = "etha.agent",
) -> Path:
    """Return the socket path of the agent of ``device``, and start that agent if it does not listen.

    ``redis_url`` None: a new agent uses the embedded server. ``patient``: a new agent waits for a Redis that refuses
    connections. If the agent does not listen within ``timeout`` seconds, raises AgentUnavailableError with the end of
    its log, or the error that the agent has reported. It may still start later, for the next call.
    """
    settings = replace(settings, namespace=namespace)
    path = settings.socket_path(device)
    if listens(path):
        return path
    settings.ensure_runtime_dir()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[EthaError | None] = loop.create_future()
    start = _Start(
        settings=settings,
        path=path,
        device=device,
        redis_url=redis_url,
        module=module,
        patient=patient,
    )

    start.remember()

    def settle(error: EthaError | None) -> None:
        if not done.done():
            done.set_result(error)

    def work() -> None:
        try:
            error = start.run()
        except OSError as failed:
            error = _unstarted(device, settings, failed)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, name=f"etha-start-{device}", daemon=True).start()
    try:
        async with asyncio.timeout(timeout if timeout < threading.TIMEOUT_MAX else None):
            error = await done
    except TimeoutError:
        error = start.late()
    finally:
        start.abandoned = True
    if error is not None:
        raise error
    return path


def _unstarted(device: str, settings: Settings, failed: OSError) -> EthaError:
    """The error of a start that the system did not allow. A directory that cannot be written is the user's to mend."""
    text = f"no agent of {device} could be started: {failed}"
    if failed.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ConfigError(
            f"{text}. The agent needs to write to {settings.runtime_dir}: mount it writable, start the agent where it "
            f"is, or set ETHA_RUNTIME_DIR to another directory"
        )
    return AgentUnavailableError(text)


@dataclass(slots=True, kw_only=True)
class _Start:
    """One attempt. ``run`` is called on the thread, which finishes even if the caller has ``abandoned`` it."""

    settings: Settings
    path: Path
    device: str
    redis_url: str | None
    module: str
    patient: bool
    abandoned: bool = False
    _spawned: bool = field(default=False, init=False)
    _log_from: int = field(default=0, init=False)
    #: How the previous start failed, for the text of ``late``.
    _before: str = field(default="", init=False)

    @property
    def log(self) -> Path:
        return self.path.with_suffix(".log")

    def remember(self) -> None:
        """Read how the previous start of the same agent failed, so that a caller with little time gets that much."""
        with contextlib.suppress(OSError):
            if (said := self._failure(self._lock.read_bytes()[:_MAX_NOTE])) is not None:
                self._before = f". The one before it did not start: {self._failed(said).message}"

    def run(self) -> EthaError | None:
        """None if an agent listens at the end, otherwise the reason why not."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _locks.add(lock)
        try:
            waited = self._take(lock)
            if self.abandoned or listens(self.path):
                return None
            if waited and (said := self._failure(os.pread(lock, _MAX_NOTE, 0))) is not None:
                return self._failed(said)  # the start that this one waited for; another try would fail in the same way
            os.ftruncate(lock, 0)
            said = self._spawn(lock)
            if said == "ready" or listens(self.path):  # the second: somebody else started one meanwhile
                return None
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"failed {self._wanted()} {said}\n".encode(errors="replace")[:_MAX_NOTE], 0)
            return self._failed(said)
        finally:
            # Unlock and not only close, because a child that was forked meanwhile shares the descriptor.
            fcntl.flock(lock, fcntl.LOCK_UN)
            _locks.discard(lock)
            os.close(lock)

    def late(self) -> EthaError:
        """The error for a caller whose time is up."""
        starting, kept = self._starting()
        ended = f"no agent of {self.device} listened at {self.path} in time"
        if kept is not None:
            return from_wire(
                {"code": kept.code, "text": f"{ended}; {starting or 'it'} is kept by this: {kept.message}"}
            )
        stage = (
            "the one that was started"
            if self._spawned
            else "another client, of this or another process, that starts one"
        )
        who = ", ".join([*filter(None, [starting]), note_of_log(str(self.log))])
        return AgentUnavailableError(
            f"{ended}; waited for {stage} ({who}). It goes on: once it listens, the next call finds it, and if it "
            f"fails, that log says why{self._before}. Give more time, or start one by `etha agent`"
            f"{self._tail() if self._spawned else ''}"
        )

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".start")

    def _take(self, lock: int) -> bool:
        """Wait for the start lock; True if somebody else held it."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return True
        return False

    def _wanted(self) -> str:
        """A hash of the agent that is asked for, because the failure of another agent says nothing about it."""
        own = {name: value for name, value in os.environ.items() if name.startswith("ETHA_")}
        env = environment(own, self.settings, self.redis_url)
        return hashlib.sha256(repr((sorted(env.items()), self.patient)).encode()).hexdigest()[:16]

    def _failure(self, note: bytes) -> str | None:
        """The failure that the lock's file records for this agent; None if there is none (it was killed)."""
        kind, _, rest = note.decode(errors="replace").rstrip("\n").partition(" ")
        wanted, _, said = rest.partition(" ")
        return said if kind == "failed" and wanted == self._wanted() and said else None

    def _starting(self) -> tuple[str, EthaError | None]:
        """The process that is starting and the reason why it takes long, if it has written them to the lock's file."""
        try:
            first, _, second = self._lock.read_text(errors="replace").partition("\n")
        except OSError:
            return "", None
        kind, _, pid = first.partition(" ")
        busy, code, text = (*second.rstrip("\n").split(" ", 2), "", "", "")[:3]
        kept = from_wire({"code": code, "text": text}) if busy == "busy" else None
        return (f"process {pid}", kept) if kind == "starting" else ("", None)

    def _failed(self, said: str) -> EthaError:
        _, code, why = (*said.split(" ", 2), "", "")[:3]
        if code in _TOLD:
            return from_wire({"code": code, "text": f"the agent of {self.device} did not start: {why}"})
        why = said.removeprefix("error ") or "it ended without a word"
        tail = self._tail() or f"; {note_of_log(str(self.log))}"
        return AgentUnavailableError(f"the agent of {self.device} did not start: {why}{tail}")

    def _spawn(self, lock: int) -> str:
        """The last line that the new agent wrote about its start; "" if it ended without one."""
        if not sys.executable:
            return "error this process does not know its Python interpreter: start one by `etha agent`"
        self._spawned = True
        log = self._open_log()
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            command = [sys.executable, "-m", self.module, "--device", self.device]
            command += ["--namespace", self.settings.namespace, "--autostarted", "--ready-fd", str(theirs)]
            command += ["--start-lock", str(lock), *(["--patient"] if self.patient else [])]
            # The URL goes by the environment, because it may hold a password and command lines are public.
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _DETACH, *command],
                env=environment(dict(os.environ), self.settings, self.redis_url),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                umask=0o077,
                start_new_session=True,
                pass_fds=[theirs, lock],
                check=False,
            )
            os.close(theirs)
            theirs = -1
            with os.fdopen(ours, errors="replace", closefd=False) as said:
                return said.readline().rstrip("\n")
        finally:
            os.close(log)
            os.close(ours)
            if theirs >= 0:
                os.close(theirs)

    def _open_log(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > MAX_LOG:
                self.log.replace(self.log.with_suffix(".log.1"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(self.log, flags, 0o600)
        self._log_from = os.fstat(log).st_size
        return log

    def _tail(self) -> str:
        """The end of this agent's log."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_from, size - _TAIL))
                text = log.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return f"\n{note_of_log(str(self.log))}, which ends:\n{text}" if text and self._log_from < size else ""


def environment(own: dict[str, str], settings: Settings, redis_url: str | None) -> dict[str, str]:
    """The agent's environment: the worker's ``own`` without the variables of its job, plus ``settings``."""
    env = {
        name: value for name, value in own.items() if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    if "MIG-" not in env.get("CUDA_VISIBLE_DEVICES", ""):  # a process with MIG slices sees none without this variable
        env = {name: value for name, value in env.items() if name not in _FOREIGN_CUDA}
    env |= {
        "ETHA_RUNTIME_DIR": str(settings.runtime_dir),
        "ETHA_NAMESPACE": settings.namespace,
        "ETHA_HOST_ID": settings.host_id,
    }
    env |= settings.wishes
    if redis_url is not None:
        env["ETHA_REDIS_URL"] = redis_url
    # The agent has another working directory, so a clone that was imported from here must be on its path.
    root = Path(__file__).resolve().parents[2]
    paths = [str(Path(entry).absolute()) for entry in own.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if root.name not in ("site-packages", "dist-packages") and str(root) not in paths:
        paths.append(str(root))
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env
