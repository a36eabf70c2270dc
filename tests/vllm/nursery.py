"""Processes forked with everything loaded, each with a pipe to its test, a log, and a group of its own."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Seconds that an engine or a trainer may take for one thing on a busy machine.
PATIENCE = 240.0


class Child:
    """``work(pipe, *args)`` in a process of its own, told by ``send``, heard by ``hear``."""

    def __init__(self, work: Callable[..., None], *args: Any, env: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, far = context.Pipe()
        self.log = log
        self._process = context.Process(target=_live, args=(work, far, args, dict(env), str(log)))
        self._process.start()
        far.close()
        self.pid = self._process.pid or 0

    def send(self, *message: Any) -> None:
        self.pipe.send(message)

    def hear(self, timeout: float = PATIENCE) -> Any:
        """The child's next word; its error is raised here, its death is an error with its log."""
        if not self.pipe.poll(timeout):
            raise AssertionError(f"no word in {timeout} s; log:\n{self.tail()}")
        try:
            word = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the process ended; log:\n{self.tail()}") from None
        if isinstance(word, BaseException):
            raise word
        return word

    def ask(self, *message: Any, timeout: float = PATIENCE) -> Any:
        self.send(*message)
        return self.hear(timeout)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ended(self, timeout: float = PATIENCE) -> None:
        """Wait until it has ended by itself."""
        self._process.join(timeout)
        assert not self.alive, f"the process lives; log:\n{self.tail()}"

    def kill(self) -> None:
        """SIGKILL to it and all that it started; returns when they have ended, and their ports are free again."""
        self._process.kill()  # one that was begun just now leads no group yet
        kill_group(self.pid)
        self._process.join()

    def end(self, timeout: float = 30.0) -> None:
        """Let it end by itself, or else by force."""
        with suppress(OSError):
            self.pipe.close()
        self._process.join(timeout)
        self.kill()


def kill_group(leader: int) -> None:
    """SIGKILL to a process group; returns when all its processes have ended."""
    with ExitStack() as stack:
        ended = _group(leader)
        for process in ended:
            stack.callback(os.close, process)
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        for process in ended:  # a forked child has the listening socket of its parent, too
            assert select.select([process], [], [], 60)[0], "a process outlives its SIGKILL"


def _group(leader: int) -> list[int]:
    """A pidfd of every process in the process group of ``leader``."""
    found = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(os.pidfd_open(pid))
    return found


def _live(work: Callable[..., None], pipe: Connection, args: tuple[Any, ...], env: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(out, stream.fileno())
    if (cores := env.get("VLLM_CPU_OMP_THREADS_BIND")) is not None:
        _take_threads(cores)
    work(pipe, *args)


def _take_threads(cores: str) -> None:
    """Compute with as many threads as vLLM gives a worker, one for each of its ``cores``: "0|1" for two workers.

    vLLM tells OpenMP by the environment, which a fork of a process that has loaded OpenMP does not read. Two threads on
    cores that others use, too, wait for each other at the end of each operation, spinning, for as long as the scheduler
    leaves one of them aside.
    """
    import torch

    torch.set_num_threads(len(cores.split("|")[0].split(",")))


def serve(pipe: Connection, answer: Callable[..., Any]) -> None:
    """Answer what comes through the pipe with ``answer(*message)`` or its error, until the test closes it."""
    while True:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            pipe.send(answer(*message))
        except Exception as error:
            pipe.send(_plain(error))


def _plain(error: Exception) -> Exception:
    """An error that can travel: of its own class where that is possible."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
