"""All checks in order. A failing check does not stop the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from etha.config import Settings
from etha.doctor import gpu, hosts, machine
from etha.doctor.finding import Finding, found
from etha.errors import EthaError

CHECKS: tuple[tuple[str, Callable[[Settings], str]], ...] = (
    ("python and torch", machine.check_versions),
    ("device", machine.check_device),
    ("cuda", gpu.check_cuda),
    ("runtime directory", machine.check_runtime_dir),
    ("socket path", machine.check_socket_path),
    ("shared memory", machine.check_shared_memory),
    ("ptrace scope", machine.check_yama),
    ("other processes' memory", machine.check_process_memory),
    ("agents that run here", machine.check_agents_reach),
    ("pidfd", machine.check_pidfd),
    ("process groups", machine.check_native),
    ("Redis", machine.check_redis),
    ("uvloop", machine.check_uvloop),
)


#: If ETHA_LISTEN is set, and hosts are not looked at.
LISTEN: tuple[tuple[str, Callable[[Settings], str]], ...] = (("listen address", hosts.check_listen_here),)
BETWEEN_HOSTS: tuple[tuple[str, Callable[[Settings], str]], ...] = (
    ("Redis from elsewhere", hosts.check_redis_place),
    ("listen address", hosts.check_listen),
)


def examine(
    settings: Settings,
    *,
    between_hosts: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[Finding]:
    """Check this machine and, with ``between_hosts``, whether it reaches the agents that settings.redis_url lists.

    ``progress(done, total, name)`` is called before each check.
    """
    checks = CHECKS + (BETWEEN_HOSTS if between_hosts else LISTEN if settings.listen is not None else ())
    findings: list[Finding] = []
    for name, check in checks:
        progress(len(findings), len(checks) + between_hosts, name)
        findings.append(found(name, lambda check=check: check(settings)))  # type: ignore[misc]
    if between_hosts:
        progress(len(checks), len(checks) + 1, "agents")
        findings += _agents(settings, redis=all(finding.ok for finding in findings if finding.name == "Redis"))
    return findings


def _agents(settings: Settings, *, redis: bool) -> list[Finding]:
    mend = "mend Redis first: it tells where the agents are"
    if not redis:
        return [Finding(name="agents", ok=False, text="not tried: Redis does not list them", mend=mend)]
    try:
        return asyncio.run(hosts.try_agents(settings))
    except EthaError as error:
        return [Finding(name="agents", ok=False, text=error.message, mend=mend)]
