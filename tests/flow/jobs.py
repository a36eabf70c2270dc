"""Real workers for flow tests: processes from a fork server that has torch loaded, told what to do by name.

    with Job(env) as job:
        a = job.start(trainer, 0, rank=0)       # a module-level function of the test's module
        ...
        assert a.result() == ...

A worker's exception is raised again by ``result`` (EthaErrors as themselves, others as WorkerFailed with
the worker's traceback). Workers talk to the test through ``tell`` and ``wait_for``: nothing sleeps.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.flow import nursery
from tests.processes import CONTEXT, preload, send_signal

preload(
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "etha.agent.__main__",
    "etha.client.sync",
    "etha.redistribute",
    "pytest_asyncio",
    "redis.asyncio",
    "rich.console",
    "typer",
    # What imports no test; the rest of this folder is loaded with it.
    "tests.flow.conftest",
    "tests.flow.sides",
    "tests.fakes.cuda",
)

_link: Any = None


class WorkerFailed(AssertionError):
    """A worker ended with an exception that is not Etha's, or died."""


def tell(word: str, value: Any = None) -> None:
    """In a worker: tell the test that it has come this far."""
    _link.send(("told", word, value))


def wait_for(word: str) -> Any:
    """In a worker: wait until the test says ``go(word)``."""
    while True:
        said, value = _link.recv()
        if said == word:
            return value


def _main(
    link: Any, env: dict[str, str], agents: str | None, function: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    global _link
    _link = link
    nursery.use(agents)
    for name in [name for name in os.environ if name.startswith("ETHA_") or name in ("RANK", "WORLD_SIZE")]:
        del os.environ[name]
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    try:
        link.send(("done", function(*args, **kwargs), None))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            link.send(("failed", error, text))
        except Exception:
            link.send(("failed", RuntimeError(repr(error)), text))
    finally:
        link.close()


class Worker:
    """One worker process; ``pid`` for kills."""

    def __init__(self, env: dict[str, str], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.name = f"{function.__name__}{args}{kwargs}"
        self._link, child = CONTEXT.Pipe()
        work = (child, env, nursery.address(), function, args, kwargs)
        self._process = CONTEXT.Process(target=_main, args=work, daemon=True)
        self._process.start()
        child.close()
        self.pid = self._process.pid
        self._told: list[tuple[str, Any]] = []
        self._end: tuple[str, Any, Any] | None = None

    def _next(self, timeout: float) -> None:
        ready = multiprocessing.connection.wait([self._link, self._process.sentinel], timeout)
        if not ready:
            raise TimeoutError(f"{self.name} said nothing for {timeout} s; so far {self._told}")
        if self._link in ready:
            try:
                kind, a, b = self._link.recv()
            except EOFError:
                self._end = self._end or ("failed", WorkerFailed(f"{self.name} died"), "")
                return
            if kind == "told":
                self._told.append((a, b))
            else:
                self._end = (kind, a, b)
        else:
            self._end = self._end or ("failed", WorkerFailed(f"{self.name} died"), "")

    def expect(self, word: str, timeout: float = 60.0) -> Any:
        """Wait until the worker has told ``word``; its value."""
        while True:
            for i, (said, value) in enumerate(self._told):
                if said == word:
                    del self._told[i]
                    return value
            if self._end is not None:
                raise WorkerFailed(f"{self.name} ended without {word!r}: {self._end[1]!r}\n{self._end[2]}")
            self._next(timeout)

    def has_told(self, word: str) -> bool:
        """Whether the worker has told ``word`` by now."""
        while self._end is None and self._link.poll():
            self._next(0)
        return any(said == word for said, _ in self._told)

    def go(self, word: str, value: Any = None) -> None:
        """Let the worker's ``wait_for(word)`` return."""
        self._link.send((word, value))

    def result(self, timeout: float = 90.0) -> Any:
        """What the function returned, or what it raised."""
        from etha.errors import EthaError

        while self._end is None:
            self._next(timeout)
        kind, value, text = self._end
        self._process.join(timeout)
        if kind == "done":
            return value
        if isinstance(value, EthaError | WorkerFailed):
            raise value
        raise WorkerFailed(f"{self.name}: {value!r}\n{text}")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to this worker alone."""
        with contextlib.suppress(ProcessLookupError):
            send_signal(self.pid, how)

    def end(self) -> None:
        """Make sure that it is gone."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self._process.kill()
        self._process.join()
        self._link.close()
        self._process.close()


class Job:
    """Workers that share an environment, or have that of their side and rank; all are gone when the block ends."""

    def __init__(self, env: dict[str, str] | Callable[[str, int], dict[str, str]]) -> None:
        self.env = env
        self.workers: list[Worker] = []

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        at: tuple[str, int] | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Worker:
        """Run ``function(*args, **kwargs)`` in a new process; ``at``: the side and rank whose environment it gets."""
        if callable(self.env):
            assert at is not None, "where it lives depends on its side and rank"
            own = self.env(*at)
        else:
            own = self.env
        worker = Worker({**own, **(env or {})}, function, args, kwargs)
        self.workers.append(worker)
        return worker

    def side(self, name: str, function: Callable[..., Any], world: int, *args: Any, **kwargs: Any) -> list[Worker]:
        """``world`` workers of side ``name``: ``function(rank, world, ...)``."""
        return [self.start(function, rank, world, *args, at=(name, rank), **kwargs) for rank in range(world)]

    def results(self, workers: list[Worker], timeout: float = 90.0) -> list[Any]:
        """The results of all, the first error raised after all have ended."""
        first: BaseException | None = None
        found = []
        for worker in workers:
            try:
                found.append(worker.result(timeout))
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
        return found

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Make sure that all are gone."""
        while self.workers:
            self.workers.pop().end()


def wait_gone(pid: int, timeout: float = 20.0) -> None:
    """Wait for the end of a process that is not our child, by its pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except (ProcessLookupError, FileNotFoundError):  # the latter from Linux 6.16 on, while it ends
        return
    try:
        if not multiprocessing.connection.wait([fd], timeout):
            raise TimeoutError(f"process {pid} is still there after {timeout} s")
    finally:
        os.close(fd)


def threads_alive() -> list[str]:
    """Threads of this process, for leak checks."""
    return [t.name for t in threading.enumerate() if t is not threading.main_thread()]


def monotonic() -> float:
    """Seconds, for measuring how long a call took."""
    return time.monotonic()
