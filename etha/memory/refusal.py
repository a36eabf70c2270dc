"""Why the kernel does not let this process reach another one's memory, in words for a user.

The kernel answers EPERM to a filter, another user and a missing capability alike. What /proc shows of both processes
tells them apart. The checks come in the kernel's own order; the last one is a guess.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")
_YAMA = "sys/kernel/yama/ptrace_scope"
#: Bit of CAP_SYS_PTRACE in the masks of /proc/PID/status.
_SYS_PTRACE = 1 << 19
CURE = "or take the tensors from etha.empty / etha.share_module, which need no such right"


def why_refused(pid: int, *, itself: bool, proc: Path = _PROC) -> str:
    """Which right this process lacks to reach the memory of ``pid``, and what to do.

    ``itself``: whether the same system call works on this process's own memory, which the kernel always allows.
    """
    try:
        here, there = _status(proc / "self"), _status(proc / str(pid))
        return f"{_reason(pid, here, there, itself, proc)}, {CURE}"
    except OSError:
        return f"/proc does not show process {pid}: run both in one PID namespace, {CURE}"


def _reason(pid: int, here: Mapping[str, str], there: Mapping[str, str], itself: bool, proc: Path) -> str:
    if not itself:
        return (
            "a seccomp filter of this agent's container forbids process_vm_readv: let it pass, "
            "or give the container CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
        )
    capable = bool(int(here["CapEff"], 16) & _SYS_PTRACE)
    for kind in ("Uid", "Gid"):
        own, real = here[kind].split()[1], set(there[kind].split()[:3])
        if real != {own} and not capable:
            return (
                f"process {pid} runs with {kind.lower()} {'/'.join(sorted(real))}, this agent with {own}: "
                f"run both as one user and group, or give the agent CAP_SYS_PTRACE"
            )
    more = int(there["CapPrm"], 16) & ~int(here["CapPrm"], 16)
    if more and not capable:
        return (
            f"process {pid} has capabilities that this agent lacks (mask {more:x}), so the agent needs CAP_SYS_PTRACE: "
            f"give its container that (docker run --cap-add SYS_PTRACE; capabilities: add: [SYS_PTRACE]), or start "
            f"both with the same capabilities"
        )
    if _users(proc / "self") != _users(proc / str(pid)):
        return f"process {pid} lives in another user namespace: give this agent CAP_SYS_PTRACE there, or share one"
    scope = _read(proc / _YAMA)
    if scope in ("2", "3"):
        return f"kernel.yama.ptrace_scope is {scope}: set it to 1 or 0 (sysctl kernel.yama.ptrace_scope=1)"
    try:
        if str(os.stat(proc / str(pid)).st_uid) != there["Uid"].split()[1] and not capable:  # noqa: PTH116
            return f"process {pid} is not dumpable (prctl PR_SET_DUMPABLE): make it dumpable"
    except OSError:
        pass
    return (
        "a security module (AppArmor, SELinux) forbids to trace processes here, see the kernel's log: allow ptrace in "
        "its profile"
    )


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}


def _users(process: Path) -> str:
    """The map of a process's user namespace, as this process sees it: equal for one namespace."""
    return " ".join(_read(process / "uid_map").split())


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
