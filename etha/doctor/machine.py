"""Tries what this machine must be able to do for Etha.

Each check is a function that returns what it found, or raises Failing with the cure.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from etha import native
from etha.addresses import redact
from etha.agent_session import look
from etha.bus.process import Credentials, is_stopped
from etha.config import Settings, native_allowed
from etha.doctor.finding import Failing, Noteworthy
from etha.errors import ConfigError, EthaError, GroupError
from etha.memory.pages import sealed_memfd
from etha.memory.process import ProcessMemory, allow_reading, start_time
from etha.memory.reach import ReachError
from etha.printable import one_line
from etha.store.embedded import embedded_path, embedded_url, find_binary
from etha.store.registry import identify

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
REDIS_SECONDS, AGENT_SECONDS = 5.0, 5.0


def check_versions(settings: Settings) -> str:
    """Python 3.11 to 3.13 and torch of at least 2.11."""
    text = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 11):
        raise Failing(text, "Etha needs torch 2.11 or later: pip install --upgrade torch")
    return text


def check_device(settings: Settings) -> str:
    """The device that an agent without ``--device`` would own, and the cores for its lanes."""
    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} visible), {cores} cores"
    return f"cpu, {cores} cores (no CUDA device is visible)"


def check_runtime_dir(settings: Settings) -> str:
    """Whether the directory of sockets and locks can be made, is ours, and is closed to others."""
    try:
        path = settings.ensure_runtime_dir()
    except OSError as error:
        raise Failing(str(error), "set ETHA_RUNTIME_DIR to a directory that you may write to") from None
    return f"{path}, mode 700"


def check_socket_path(settings: Settings) -> str:
    """Whether the paths of the longest sockets fit into an AF_UNIX address."""
    path = settings.socket_path("cuda-GPU-00000000-0000-0000-0000-000000000000")
    return f"{len(os.fsencode(path))} of 107 bytes with the longest device name"


def check_shared_memory(settings: Settings) -> str:
    """Whether a memfd can be made, sealed against shrinking, and opened again through /proc, as an agent does."""
    descriptor = sealed_memfd("etha-doctor", 1 << 20)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise Failing(
                f"a memfd took no seals (got {seals:#x})", "the kernel needs memfd_create with sealing (3.17+)"
            )
        again = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR)
        try:
            if os.fstat(again).st_ino != os.fstat(descriptor).st_ino:
                raise Failing("/proc/PID/fd opens another file", "mount /proc of this PID namespace")
        finally:
            os.close(again)
    finally:
        os.close(descriptor)
    return "memfd with seals, opened through /proc/PID/fd"


def check_yama(settings: Settings) -> str:
    """What the kernel allows about reading other processes. Scopes 2 and 3 forbid it altogether."""
    if not YAMA.exists():
        return "no Yama in this kernel: processes of one user may read each other"
    scope = int(YAMA.read_text())
    if scope >= 2:
        raise Failing(
            f"kernel.yama.ptrace_scope is {scope}: no process may read another's memory",
            "sysctl kernel.yama.ptrace_scope=1, or take tensors from etha.empty / etha.share_module, which are mapped",
        )
    return f"ptrace_scope {scope}" + (": workers allow their agent by prctl" if scope == 1 else "")


def check_process_memory(settings: Settings) -> str:
    """Whether another process, which is not this one's ancestor, can read this process's memory, as an agent would."""
    allow_reading()
    secret = os.urandom(4096)
    buffer = ctypes.create_string_buffer(secret, len(secret))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_read_parent,
        args=(theirs.send_bytes, os.getpid(), start_time(os.getpid()), ctypes.addressof(buffer), len(secret)),
    )
    child.start()
    theirs.close()
    try:
        answer = ours.recv_bytes()
    except EOFError:
        answer = b"the reading process died"
    finally:
        child.join()
        ours.close()
    if answer != secret:
        raise Failing(
            f"process_vm_readv between two processes of this user failed: {answer.decode(errors='replace')}",
            "give the container SYS_PTRACE or one PID namespace, or take tensors from etha.empty / etha.share_module",
        )
    return "process_vm_readv works between two processes of this user"


def check_agents_reach(settings: Settings) -> str:
    """Whether the agents that run here read their workers' memory, whatever this process may."""
    silent = list[str]()
    reports = [one["agent"] for one in asyncio.run(look(settings, timeout=AGENT_SECONDS, silent=silent))]
    if silent:
        raise Failing("; ".join(silent), "let it go on, or end it: the message says how")
    staged = [
        f"worker {worker['pid']} of the agent of {report['device']} (process {report['pid']}) is {worker['memory']}"
        for report in reports
        for worker in report["workers"]
        if worker["memory"].startswith("staged")
    ]
    if staged:
        raise Failing(
            one_line("; ".join(staged)),
            "it works, at the cost of a second copy: give the agent that runs what the text says, start it again, or "
            "take tensors from etha.empty / etha.share_module",
        )
    workers = sum(len(report["workers"]) for report in reports)
    return f"agents running here: {len(reports)}, workers: {workers}, none of them staged"


def _read_parent(answer: Callable[[bytes], None], pid: int, started: int, address: int, size: int) -> None:
    # A buffer of its own, because in a forked child the parent's buffer has the same address.
    mine = np.zeros(size, dtype=np.uint8)
    local = np.array([[mine.ctypes.data, size]], dtype=np.uint64)
    try:
        memory = ProcessMemory(pid, started)
        memory.read(local, np.array([[address, size]], dtype=np.uint64))
    except ReachError as error:
        answer(str(error).encode())
        return
    answer(mine.tobytes())


def check_native(settings: Settings) -> str:
    """Which library carries out the calls of process groups: the compiled one, or Python, and why."""
    why = native.why_python()
    if not why:
        return "compiled"
    text, mend = f"Python, which is slower: {why}", "run python -m etha.native.build on a machine with a C compiler"
    try:
        native.PythonLibrary()
    except GroupError as error:
        raise Failing(f"{error.message}; {why}", mend) from None
    if not native_allowed():
        return text
    raise Noteworthy(text, mend)


def check_pidfd(settings: Settings) -> str:
    """Whether the kernel reports a process's death through a descriptor."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise Failing(
            f"pidfd_open: {error}", "Etha needs Linux 5.4 or later, with pidfd_open allowed by seccomp"
        ) from None
    return "pidfd_open works"


def check_redis(settings: Settings) -> str:
    """Whether the server of ETHA_REDIS_URL answers, or there is a binary for the embedded one."""
    if settings.redis_url is None:
        return f"embedded server from {find_binary()}, {_embedded(settings)}"
    shown = redact(settings.redis_url)
    try:
        asyncio.run(identify(settings.redis_url, settings.namespace, timeout=REDIS_SECONDS))
    except ConfigError as error:
        raise Failing(error.message, f"correct the URL {shown}: redis://HOST:PORT or unix:///PATH") from None
    except EthaError as error:
        raise Failing(
            error.message,
            f"start the server at {shown}, correct the URL, or unset ETHA_REDIS_URL for the embedded one",
        ) from None
    return f"{shown} answers"


def _embedded(settings: Settings) -> str:
    """Whether this runtime directory's server runs. Failing if it does and does not answer."""
    path = embedded_path(settings)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as trial:
            trial.connect(os.fspath(path))
            pid = Credentials.of_socket(trial).pid
    except OSError:
        return "which the first agent starts: none runs now"
    try:
        asyncio.run(identify(embedded_url(settings), settings.namespace, timeout=REDIS_SECONDS))
    except EthaError as error:
        how = f"it is stopped: `kill -CONT {pid}`" if is_stopped(pid) else "look at what it does, or end it"
        raise Failing(
            f"the embedded server that runs at {path}, process {pid}, does not answer: {error.message}",
            f"{how}; agents start another once it has ended",
        ) from None
    return f"process {pid}, answers"


def check_uvloop(settings: Settings) -> str:
    """Whether uvloop, on which agents run, is installed."""
    if importlib.util.find_spec("uvloop") is None:
        raise Failing("uvloop is not installed", "pip install uvloop")
    return f"uvloop {importlib.metadata.version('uvloop')}"
