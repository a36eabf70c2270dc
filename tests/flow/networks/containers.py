"""Containers of a test: puppets that move into PID, mount and network namespaces of their own, as a runtime makes them.

    trainer = stage.puppet("trainer", 0, 1)
    trainer.do(contain)                     # it is process 1 of its container from now on
    trainer.do(connect)                     # its agent is found, or starts inside

The process forks on the way, because only a child is in the new PID namespace; the test talks to the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Replicate

import etha
from tests.flow.networks.tun import enter

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1
#: Rows of the tensors that move.
SIZE = 3000

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(what: str, where: str, kind: str | None, flags: int = 0) -> None:
    _call("mount", what.encode(), where.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)


def _end_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def contain(me: SimpleNamespace, network: str | None = None, proc: bool = True) -> int:
    """Move into a container; its pid there. ``network``: a network namespace that is there, else a new one with a
    loopback alone. ``proc``: mount /proc of the container."""
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | (0 if network else _CLONE_NEWNET))
    if network is not None:
        enter(network)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    _end_with_parent()
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    if proc:
        _mount("proc", "/proc", "proc")
    if network is None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return os.getpid()


def hide(me: SimpleNamespace, directory: str) -> None:
    """What is in a directory is not in this container: an empty one of its own is there."""
    _mount("none", directory, "tmpfs")
    Path(directory).chmod(0o700)


def freeze(me: SimpleNamespace, directory: str) -> None:
    """The container may only read a directory."""
    _mount(directory, directory, None, _MS_BIND)
    _mount("none", directory, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def unmount(me: SimpleNamespace, place: str) -> None:
    """Nothing is mounted at a place any more."""
    _call("umount2", place.encode(), 2)


def become(me: SimpleNamespace, user: int) -> None:
    """Run as another user from now on."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _end_with_parent()  # the kernel forgets it with the user


def connect(me: SimpleNamespace, **options: Any) -> dict[str, Any]:
    """A client, and what its agent says of itself."""
    me.client = etha.TensorBusClient(timeout=60, **options)
    found: dict[str, Any] = me.client.status()["agent"]
    return found


def meet(me: SimpleNamespace, timeout: float = 60) -> int:
    """``init_pair``; the epoch."""
    me.bond = me.client.init_pair(me.pair, me.side, me.remote, 1, (1,), [Replicate()], rank=0, timeout=timeout)
    epoch: int = me.bond.epoch
    return epoch


def move(me: SimpleNamespace, batch: str, mapped: bool) -> float:
    """Register one tensor (``mapped``: of etha.empty) and send or receive it once; the sum of what it holds then."""
    tensor = etha.empty(SIZE) if mapped else torch.empty(SIZE)
    tensor.copy_(torch.arange(SIZE, dtype=torch.float32)) if me.side == "trainer" else tensor.fill_(-1)
    me.handle = me.client.register_tensors(batch, {"w": tensor}, pair_name=me.pair, timeout=60)
    me.handle.transfer("send" if me.side == "trainer" else "recv", timeout=60)
    return float(tensor.sum())


def seen(me: SimpleNamespace) -> list[str]:
    """How the agent reaches the memory of each of its workers."""
    return [worker["memory"] for worker in me.client.status()["agent"]["workers"]]


def way(me: SimpleNamespace, batch: str) -> str:
    """By which way a batch travels."""
    [found] = [line["transport"] for line in me.client.status()["batches"] if line["batch"] == batch]
    return str(found)
