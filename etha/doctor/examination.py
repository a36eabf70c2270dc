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
    ("pidfd", machine.check_pidfd),
    ("Redis", machine.check_redis),
    ("uvloop", machine.check_uvloop),
)


def examine(settings: Settings, *, between_hosts: bool = False) -> list[Finding]:
    """Check this machine and, with ``between_hosts``, whether it reaches the agents that settings.redis_url lists."""
    findings = [found(name, lambda check=check: check(settings)) for name, check in CHECKS]  # type: ignore[misc]
    if between_hosts:
        findings.append(found("Redis from elsewhere", lambda: hosts.check_redis_place(settings)))
        findings.append(found("listen address", lambda: hosts.check_listen(settings)))
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
