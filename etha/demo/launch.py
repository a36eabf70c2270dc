"""The launcher: starts both jobs in a private runtime directory, hands on their events, ends all it started.

launcher (subreaper) --+-- trainer job ---- 4 ranks        each job: own session, own process group,
                       +-- inference job -- 2 ranks        own log, own pipe for events
                       +-- agent, embedded server (adopted when the jobs end)
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from etha.demo.events import Event
from etha.demo.hosts import DemoHosts
from etha.demo.options import RANKS, Options
from etha.demo.process import adopting, children, command, describe, end

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Both jobs on this host, in their own runtime directory, with its embedded server.
HERE = DemoHosts()
#: A drained agent has 30 s for running transfers; the demo leaves none running.
AGENT_SECONDS = 20.0
OTHERS_SECONDS = 5.0
TAIL_LINES = 30
#: Variables that a surrounding launcher or shell may have set for its own jobs.
_FOREIGN = ("ETHA_", "TORCHELASTIC_", "MASTER_", "GROUP_", "LOCAL_")
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"}


class DemoError(Exception):
    """The demo could not be run to its end. The message carries the ends of the logs."""


async def run(options: Options, tell: Callable[[Event], None], places: DemoHosts = HERE) -> None:
    """Run both jobs to their end, each in its place. Calls ``tell`` with each event; DemoError if a job fails.

    Nothing that was started is left when this returns, whatever happens.
    """
    with private_directory() as directory, adopting() as before:
        failures: list[str] = []
        try:
            async with asyncio.TaskGroup() as jobs:
                for job in RANKS:
                    jobs.create_task(run_job(job, options, directory, tell, places))
        except* JobFailed as group:
            failures = [str(failure) for failure in group.exceptions]
        finally:
            stop(before)
        if failures:
            raise DemoError("\n".join([*failures, *tails(directory)]))


class JobFailed(Exception):
    """One job ended with an error."""


async def run_job(
    job: str,
    options: Options,
    directory: Path,
    hear: Callable[[Event], None],
    places: DemoHosts = HERE,
    *,
    release: int = -1,
    store: str = "",
    started: Callable[[asyncio.subprocess.Process], None] = lambda process: None,
) -> None:
    """Start one job and follow it to its end. JobFailed unless it ends with status 0. Cancelling kills it.

    ``release``: the read end of a pipe whose end tells the job to end. ``store``: the file of its process group, by
    default the job's name. ``started`` gets its process.
    """
    pipe_out, pipe_in = os.pipe()
    words, passed = ((), (pipe_in,)) if release < 0 else (("--release", str(release)), (pipe_in, release))
    with (directory / f"{job}.log").open("ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *places.prefix(job), sys.executable, "-m", "etha.demo.job", job, options.to_json(),
                "--store", str(directory / (store or f"{job}.store")), "--report", str(pipe_in), *words,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment(directory, os.environ, job, places), pass_fds=passed, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(pipe_in)
    started(process)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(follow(pipe_out, hear))
            status = await process.wait()
            if status != 0:
                raise JobFailed(f"the {job} job {describe(status)}")
    except* JobFailed as group:
        raise group.exceptions[0] from None
    finally:
        if process.returncode is None:
            process.kill()  # its ranks die with it
            await process.wait()


async def follow(pipe: int, hear: Callable[[Event], None]) -> None:
    """Pass on events from the read end ``pipe`` until the job reports that it is done, or closes the pipe."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb"))
    try:
        while line := await reader.readline():
            event = Event.from_line(line)
            hear(event)
            if event.kind == "done":
                return
    finally:
        transport.close()


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory of mode 0700, removed with its content. Its name is short, because socket paths fit few bytes."""
    directory = Path(tempfile.mkdtemp(prefix="etha-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def environment(directory: Path, base: Mapping[str, str], job: str = "", places: DemoHosts = HERE) -> dict[str, str]:
    """The environment of a job: ``base`` without other launchers' variables, one thread per process, gloo on loopback.

    Temporary files go to ``directory``, too, because torch's compiler makes a cache there as soon as it is imported.
    """
    kept = {k: v for k, v in base.items() if not k.startswith(_FOREIGN) and k not in _FOREIGN_NAMES}
    folder = directory / places.folder(job)
    return (
        kept
        | places.environment(job)
        | {
            "ETHA_RUNTIME_DIR": str(folder),
            "TMPDIR": str(directory),
            "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
    )


def stop(before: set[int]) -> None:
    """End what the jobs left to this process: first agents, which still need the embedded server, then the rest."""
    end({pid for pid in children() - before if "etha.agent" in command(pid)}, seconds=AGENT_SECONDS)
    while others := children() - before:
        end(others, seconds=OTHERS_SECONDS)


def tails(directory: Path) -> list[str]:
    """The ends of all logs in ``directory``, each under a line with its name."""
    found = []
    for path in sorted(directory.rglob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        if lines:
            found += [f"--- {path.name}", *lines]
    return found


async def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, cancelled by SIGTERM as by Ctrl-C, so that both leave nothing behind."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
