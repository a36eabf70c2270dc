"""``etha agent --device all``: one agent process for each GPU, restarted when its GPU's context is lost.

    fleet --+-- agent of cuda:0 (links on PORT, data on PORT+1)
            +-- agent of cuda:1 (PORT+2, PORT+3) ...

Each has a process of its own, because a lost context ends the process that has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etha.addresses import Advertised, format_address, parse_address
from etha.config import CUDA_AGENT
from etha.cuda.driver import Device, Driver
from etha.errors import AgentUnavailableError, ConfigError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

#: Exit status of an agent that only a new process can replace.
CONTEXT_LOST = 75
#: How often in a row one agent is restarted, and after how many seconds the count starts again.
RETRIES, SERVED = 3, 60.0


@dataclass(slots=True)
class Fleet:
    """``command(device)`` gives the command line of one agent. ``run`` returns once all have ended; ``stop`` ends
    them."""

    command: Callable[[Device], Sequence[str]]
    devices: Sequence[Device]
    _running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _stopping: bool = False

    def stop(self) -> None:
        """Send SIGTERM to all agents; idempotent."""
        self._stopping = True
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def run(self) -> None:
        """Serve until all agents have ended. AgentUnavailableError names those that failed, after the others have
        left."""
        failed = [text for text in await asyncio.gather(*map(self._serve, self.devices)) if text]
        if failed:
            raise AgentUnavailableError("; ".join(failed))

    async def _serve(self, device: Device) -> str:
        """Run one GPU's agents, one after the other. Returns the last one's error, or ""."""
        loop = asyncio.get_running_loop()
        tries = 0
        while tries <= RETRIES:
            began = loop.time()
            process = await asyncio.create_subprocess_exec(*self.command(device))
            self._running[device.uuid] = process
            if self._stopping:
                self.stop()
            code = await process.wait()
            del self._running[device.uuid]
            if self._stopping or code == 0:
                return ""
            if code != CONTEXT_LOST:
                self.stop()  # a fleet that lacks a GPU must not go unnoticed
                return f"the agent of cuda:{device.ordinal} ({device.uuid}) ended with status {code}: its log says why"
            tries = 1 if loop.time() - began > SERVED else tries + 1
            log.error("the agent of cuda:%d (%s) is started again", device.ordinal, device.uuid)
        self.stop()
        return f"the agent of cuda:{device.ordinal} ({device.uuid}) lost its context {tries} times in a row"


def leave_with_parent() -> None:
    """Make this agent receive SIGTERM when its parent, the fleet, is killed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise ConfigError("whoever started this agent has ended")


async def serve_all(
    driver: Driver,
    arguments: Sequence[str],
    listen: str | None,
    advertise: str | None = None,
    metrics: str | None = None,
) -> None:
    """Run agents of all GPUs until SIGTERM or SIGINT. ``arguments``: those of one agent except its device and
    addresses."""
    # Here, because it imports torch, which an agent does only when workers can connect.
    from etha.agent.runtime.device import cards

    devices = cards(driver)
    host, port = ("", 0) if listen is None else parse_address(listen)
    if port and port + 2 * len(devices) > 65536:
        raise ConfigError(f"--listen {listen}: {len(devices)} agents need {2 * len(devices)} ports from {port} on")
    measured = None if metrics is None else parse_address(metrics, 65535, what="--metrics ")
    if measured is not None and measured[1] + len(devices) > 65536:
        raise ConfigError(f"--metrics {metrics}: {len(devices)} agents need as many ports from {measured[1]} on")
    shown = None if advertise is None else Advertised.parse(advertise)

    def command(device: Device) -> list[str]:
        own = port + 2 * devices.index(device) if port else 0
        place = [] if listen is None else ["--listen", format_address(host, own)]
        if shown is not None:  # ports are mapped in order
            place += ["--advertise", shown.after(2 * devices.index(device))]
        if measured is not None:
            host_, first = measured
            place += ["--metrics", format_address(host_, first + devices.index(device) if first else 0)]
        one = [sys.executable, "-m", "etha.agent", "--owned", "--device", f"{CUDA_AGENT}{device.uuid}"]
        return [*one, *place, *arguments]

    fleet = Fleet(command, devices)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, fleet.stop)
    await fleet.run()
