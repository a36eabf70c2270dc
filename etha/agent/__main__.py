"""``python -m etha.agent``: one agent process, as ``etha agent`` and autostart run it."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import logging
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from etha.addresses import Advertised, check_redis_url, parse_address
from etha.agent.early_service import EarlyService
from etha.agent.fleet import CONTEXT_LOST, leave_with_parent, serve_all
from etha.agent.greeting import Greeting
from etha.agent.runtime.gc_scheduler import settle
from etha.agent.startup import Startup
from etha.bus.server import BusServer
from etha.config import LogSettings, Settings, check_device, check_name, parse_staging
from etha.cuda.driver import DeviceError
from etha.cuda.select import driver
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError
from etha.memory.reach import ReachError
from etha.memory.room import check_staging
from etha.observe import trace
from etha.observe.logs import AgentLog, LogSource, levels, shown_log
from etha.observe.recorder import WarningRecords
from etha.store.embedded import ensure_embedded
from etha.store.registry import Store

if TYPE_CHECKING:
    from etha.agent.runtime.device import GpuDevice
    from etha.agent.server import Agent

log = logging.getLogger(__name__)

#: Seconds that a starting agent gives Redis, whatever the deadline of its starter.
START = 30.0


async def serve(
    settings: Settings,
    *,
    device: str = "cpu",
    redis_url: str | None = None,
    startup: Startup | None = None,
    idle: float | None = None,
    patient: bool = True,
    stop: asyncio.Event | None = None,
    metrics: str | None = None,
) -> None:
    """Run one agent until SIGTERM or SIGINT (or ``idle`` seconds without a worker); raises EthaError.

    ``startup`` is informed of reasons for a delay, and once workers can connect. That is before torch is imported, if
    nothing that comes after can refuse to start. If not ``patient``, a Redis that
    refuses connections or whose name is unknown is an error at once. ``stop`` replaces the signals, for several agents
    in one process. ``metrics``: HOST:PORT of its metrics, instead of ETHA_METRICS.
    """
    startup = startup or Startup()
    settings.ensure_runtime_dir()
    raise_descriptor_limit()
    url = settings.redis_of(redis_url)
    lost: list[str] = []
    stopped, hurry = stop or asyncio.Event(), asyncio.Event()

    def leave() -> None:
        if stopped.is_set():  # the second time: do not wait for transfers
            hurry.set()
        stopped.set()

    if stop is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, leave)

    def spoilt(text: str) -> None:
        lost.append(text)
        log.error("the context of this agent's GPU is lost and only a new process gets another: %s", text)
        stopped.set()

    # A starter has to hear what only the rest of the agent can refuse: a GPU, addresses, encryption.
    early = device == "cpu" and settings.listen is None and settings.advertise is None and not settings.encrypt
    if not early:
        await import_agent()
    card = None
    if device != "cpu":
        from etha.agent.runtime.device import GpuDevice, find

        card = GpuDevice(driver(), find(driver(), device), spoilt)
        device = card.agent

    async def revive() -> None:
        await ensure_embedded(settings, timeout=START)

    path = settings.socket_path(device)
    source = _own_log(path.with_suffix(".log"), device)
    address = url if url is not None else await ensure_embedded(settings, timeout=START)
    store = await Store.open(
        address,
        settings.namespace,
        timeout=START,
        revive=revive if url is None else None,
        patient=patient or url is None,
        on_trouble=startup.busy,
    )
    async with store:
        trace.start(settings, "agent", device)
        greeting = Greeting(
            settings, device, redis=url, store=store.url, temporary=idle is not None, log_file=shown_log()
        )
        service = EarlyService(greeting)
        async with BusServer(path, service) as bus:
            if early:
                startup.ready()
                with _refusing(bus, service):
                    await import_agent()
            from etha.agent.runtime.lane import Lane
            from etha.agent.server import Agent

            lane = Lane() if card is None else Lane(workspaces=card.workspaces)
            agent = Agent(
                settings=settings, device=device, greeting=greeting, store=store, lane=lane, idle=idle, card=card
            )
            source.agent = agent.id
            if trace.active is not None:
                trace.active.note(agent=agent.id)
            warnings = WarningRecords(agent.recorder)
            logging.getLogger("etha").addHandler(warnings)
            async with agent.links, _leaves(bus), _metrics(agent, settings, metrics, card):
                with _refusing(bus, service):
                    async with asyncio.TaskGroup() as group:
                        running = group.create_task(agent.run(group))
                        stopping = group.create_task(stopped.wait())
                        hurrying = group.create_task(hurry.wait())
                        hurrying.add_done_callback(lambda _: agent.hurry())
                        await agent.started.wait()
                        bus.service = agent
                        service.hand_over(agent)
                        reached = agent.links.reached_at
                        log.info("agent %s serves %s at %s, %s, Redis %s", agent.id, device, path, reached, store.url)
                        startup.ready()
                        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                        await agent.drain()
                        hurrying.cancel()
                        running.cancel()
                        stopping.cancel()
            logging.getLogger("etha").removeHandler(warnings)
    if card is not None:
        card.close()
    if lost:
        raise ContextLost(f"the context of {device} is lost ({lost[0]}): start the agent again")


async def import_agent() -> None:
    """Import torch and what moves tensors, on a thread beside the loop. That takes most of an agent's start."""
    enabled = gc.isenabled()
    # An import makes no garbage worth a collection, and each collection walks all that was imported before.
    gc.disable()
    try:
        await asyncio.to_thread(importlib.import_module, "etha.agent.server")
    finally:
        if enabled:
            gc.enable()
    settle()


@contextmanager
def _refusing(bus: BusServer, service: EarlyService) -> Iterator[None]:
    """Give what ends the agent in this context to the workers that wait for it, if they have not been handed over."""
    try:
        yield
    except BaseException as error:
        if bus.service is service:
            service.fail(_cause(error))
        raise


@asynccontextmanager
async def _leaves(bus: BusServer) -> AsyncIterator[None]:
    """Say goodbye to all workers when this context ends, while other agents are still linked."""
    try:
        yield
    finally:
        await bus.close("the agent leaves")


@asynccontextmanager
async def _metrics(agent: Agent, settings: Settings, given: str | None, card: GpuDevice | None) -> AsyncIterator[None]:
    """Show metrics in this context, if that is wanted: at ``given``, else where ETHA_METRICS says."""
    wanted = settings.metrics
    if given is None and wanted is None:
        yield
        return
    # imported here, because only an agent that has metrics needs Prometheus' client
    from etha.agent.metrics import AgentMetrics, own_address

    address = given or own_address(wanted or "", None if card is None else card.device.ordinal)
    async with AgentMetrics(agent, address):
        yield


def _own_log(path: Path, device: str) -> LogSource:
    """Name the device in this process's lines, and keep the file at ``path`` small if they go there."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, AgentLog):
            handler.own(path)
            handler.source.device = device
            return handler.source
    return LogSource()  # another program has configured logging


class ContextLost(AgentLostError):
    """A GPU's context is lost. Only a new process gets another."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one: each worker needs three descriptors, and one more for each segment in
    transit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cause(raised: BaseException) -> EthaError:
    """The error that ended the agent, for its starter; unpacks the exception groups in which tasks fail."""
    leaves: list[BaseException] = [raised]
    while groups := [leaf for leaf in leaves if isinstance(leaf, BaseExceptionGroup)]:
        leaves = [leaf for leaf in leaves if leaf not in groups] + [e for group in groups for e in group.exceptions]
    for error in leaves:
        if isinstance(error, EthaError):
            return error
    for error in leaves:
        if isinstance(error, DeviceError | ReachError):
            return ConfigError(f"the card of this agent: {error}")
    for error in leaves:
        if isinstance(error, OSError):  # not a bug but this machine: permissions, a full disk, descriptors
            return AgentUnavailableError(f"the agent cannot run: {error}")
    log.error("the agent failed", exc_info=raised)
    return EthaError(f"the agent failed, a bug of Etha: {leaves[0]!r}")


def _configure(wanted: LogSettings, device: str, verbose: bool) -> None:
    """Log as ``wanted``, in place of what a command has configured before."""
    root, own = levels("debug" if verbose else wanted.level)
    logging.basicConfig(level=root, handlers=[AgentLog(wanted.format, LogSource(device))], force=True)
    logging.getLogger("etha").setLevel(own)


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, run, and report errors to a waiting parent."""
    parser = argparse.ArgumentParser(prog="python -m etha.agent")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--namespace")
    parser.add_argument("--redis")
    parser.add_argument("--listen", help="HOST:PORT")
    parser.add_argument("--advertise", help="HOST:PORT[,DATAPORT]")
    parser.add_argument("--staging", help="bytes, or with a suffix KiB, MiB, GiB")
    parser.add_argument("--metrics", help="HOST:PORT")
    parser.add_argument("--autostarted", action="store_true")
    parser.add_argument("--owned", action="store_true", help="leave when the process that started this one ends")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--start-lock", type=int, help="descriptor of the start lock, held until workers can connect")
    parser.add_argument("--verbose", action="store_true", help="log debug lines, whatever ETHA_LOG says")
    parser.add_argument("--patient", action="store_true", help="wait for a Redis that refuses connections")
    args = parser.parse_args(argv)
    startup = Startup(args.ready_fd, args.start_lock)
    _configure(LogSettings(), args.device, args.verbose)
    settle()
    try:
        _configure(LogSettings.from_env(), args.device, args.verbose)
        if args.device != "all":
            check_device(args.device)
        settings = Settings.from_env()
        if args.namespace:
            settings = replace(settings, namespace=check_name("namespace", args.namespace))
        if args.listen:
            parse_address(args.listen, what="--listen ")
            settings = replace(settings, listen=args.listen)
        if args.advertise:
            Advertised.parse(args.advertise, what="--advertise ")
            settings = replace(settings, advertise=args.advertise)
        if args.metrics:
            parse_address(args.metrics, 65535, what="--metrics ")
        if args.staging:
            settings = replace(settings, staging=parse_staging("--staging", args.staging))
        if args.redis:
            check_redis_url("--redis", args.redis)
        settings.check_agent()
        if args.device == "cpu":
            check_staging(settings)
        if args.owned:
            leave_with_parent()
        if args.device == "all":
            given = {"--namespace": args.namespace, "--redis": args.redis, "--staging": args.staging}
            rest = [word for option, value in given.items() if value for word in (option, value)]
            rest += ["--verbose"] if args.verbose else []
            uvloop.run(serve_all(driver(), rest, args.listen, args.advertise or settings.advertise, args.metrics))
            return 0
        uvloop.run(
            serve(
                settings,
                device=args.device,
                redis_url=args.redis,
                startup=startup,
                idle=settings.idle if args.autostarted else None,
                patient=args.patient or not args.autostarted,
                metrics=args.metrics,
            )
        )
    except Exception as raised:
        error = _cause(raised)
        log.error("%s", error)
        startup.failed(error)
        return CONTEXT_LOST if isinstance(error, ContextLost) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
