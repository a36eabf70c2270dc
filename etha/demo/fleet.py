"""The launcher of ``etha demo --replicas``: a trainer, and replicas that join late, are killed and come back.

launcher --+-- trainer ---- 4 ranks      stays until all replicas hold the last version
           +-- replica-0 -- 2 ranks      killed in the middle, started again
           +-- replica-1 -- 1 rank
           +-- replica-2, replica-3      started once half of the versions are out

What a job reports goes through its own pipe. A second pipe, which the launcher closes, tells all jobs to end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from etha.demo.events import Event
from etha.demo.fleet_report import FleetReport
from etha.demo.hosts import DemoHosts
from etha.demo.launch import HERE, DemoError, JobFailed, private_directory, run_job, stop, tails
from etha.demo.options import Options
from etha.demo.process import adopting

#: Replicas that join late.
LATE = 2


async def run_fleet(options: Options, tell: Callable[[Event], None], places: DemoHosts = HERE) -> FleetReport:
    """Run the fleet to its end. DemoError if a job fails that was not killed.

    Nothing that was started is left when this returns, whatever happens.
    """
    report = FleetReport(options)
    with private_directory() as directory, adopting() as before:
        failures: list[str] = []
        try:
            await DemoFleet(options, report, tell, directory, places).run()
        except* JobFailed as group:
            failures = [str(failure) for failure in group.exceptions]
        finally:
            stop(before)
        if failures:
            raise DemoError("\n".join([*failures, *tails(directory)]))
    return report


class DemoFleet:
    """The jobs of one run, and when each starts, is killed and ends."""

    def __init__(
        self,
        options: Options,
        report: FleetReport,
        tell: Callable[[Event], None],
        directory: Path,
        places: DemoHosts,
    ) -> None:
        self._options, self._report, self._tell = options, report, tell
        self._directory, self._places = directory, places
        self._changed = asyncio.Event()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._killed: set[str] = set()

    async def run(self) -> None:
        """Start, join late, kill, wait for the last version, end."""
        replicas = [f"replica-{number}" for number in range(self._options.replicas)]
        first = max(1, len(replicas) - LATE)
        early, late = replicas[:first], replicas[first:]
        versions, report = self._options.versions, self._report
        release_out, release_in = os.pipe()
        try:
            async with asyncio.TaskGroup() as jobs:
                jobs.create_task(self._live("trainer", release_out))
                for job in early:
                    jobs.create_task(self._live(job, release_out))
                await self._until(lambda: len(report.sent) > len(versions) // 2 and all(map(report.held, early)))
                self._note(f"{early[0]} is killed: it holds version {report.held(early[0])}")
                self._killed.add(early[0])
                self._processes[early[0]].kill()  # its ranks die with it
                for job in late:
                    self._note(f"{job} joins late: version {max(report.sent)} is the newest")
                    jobs.create_task(self._live(job, release_out))
                await self._until(lambda: report.finished(replicas))
                os.close(release_in)
                release_in = -1
        finally:
            os.close(release_out)
            if release_in >= 0:
                os.close(release_in)

    async def _live(self, job: str, release: int) -> None:
        """Run a job, and once more if it was killed here."""
        life = 1
        while True:
            try:
                await run_job(
                    job,
                    self._options,
                    self._directory,
                    self._hear,
                    self._places,
                    release=release,
                    store=f"{job}.{life}.store",
                    started=lambda process: self._processes.update({job: process}),
                )
                return
            except JobFailed:
                if job not in self._killed:
                    raise
            self._killed.discard(job)
            life += 1
            self._report.lost(job)
            self._note(f"{job} starts again")

    def _hear(self, event: Event) -> None:
        self._report.take(event)
        self._tell(event)
        self._changed.set()

    def _note(self, text: str) -> None:
        self._tell(Event(job="launcher", kind="note", fields={"text": text}))

    async def _until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition()``, which depends on what jobs report."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()
