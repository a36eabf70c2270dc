"""What the jobs of ``etha demo --replicas`` have reported, and whether it is right: every element of every version.

Pure; the table is data for rich. Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from etha.demo.events import Event
from etha.demo.options import Options, layout_of
from etha.demo.report import compare_hashes


@dataclass(slots=True, kw_only=True)
class ReplicaRecord:
    """One replica: the versions that it has reported in this life, with their hashes, and who sent the last one.

    ``before``: versions of its lives before, each with its hashes.
    """

    versions: dict[int, dict[str, str]] = field(default_factory=dict)
    source: str = ""
    lives: int = 1
    before: list[tuple[int, dict[str, str]]] = field(default_factory=list)

    @property
    def held(self) -> int | None:
        """The version that it has reported last."""
        return next(reversed(self.versions), None)


class FleetReport:
    """Collects events. ``sent``: the trainer's versions, with their hashes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.sent: dict[int, dict[str, str]] = {}
        self.replicas: dict[str, ReplicaRecord] = {}

    def take(self, event: Event) -> None:
        """Take an event of any job."""
        if event.kind != "version":
            return
        number, hashes = int(event.fields["number"]), dict(event.fields["hashes"])
        if event.job == "trainer":
            self.sent[number] = hashes
            return
        replica = self.replicas.setdefault(event.job, ReplicaRecord())
        replica.versions[number], replica.source = hashes, str(event.fields["source"])

    def lost(self, job: str) -> None:
        """A replica was killed, and starts again with nothing."""
        replica = self.replicas.setdefault(job, ReplicaRecord())
        replica.before += replica.versions.items()
        replica.versions, replica.source = {}, ""
        replica.lives += 1

    def held(self, job: str) -> int | None:
        """The version that a replica has reported last; None before the first."""
        return self.replicas[job].held if job in self.replicas else None

    def finished(self, jobs: Iterable[str]) -> bool:
        """Whether all of these hold the last version, and the trainer has reported it, too."""
        last = self.options.versions[-1]
        return last in self.sent and all(self.held(job) == last for job in jobs)

    def problems_of(self, job: str) -> list[str]:
        """Every element that was wrong in a version of a replica, and a last version that is not there."""
        replica = self.replicas.get(job, ReplicaRecord())
        found = []
        for number, hashes in (*replica.before, *replica.versions.items()):
            wrong = compare_hashes(self.sent.get(number, {}), hashes)
            found += [f"version {number}: {problem}" for problem in wrong]
        if replica.held != self.options.versions[-1]:
            found.append(f"holds version {replica.held}, not {self.options.versions[-1]}")
        return found

    def verdict(self) -> list[str]:
        """Every reason why the run as a whole failed, after all jobs have ended."""
        jobs = [f"replica-{number}" for number in range(self.options.replicas)]
        return [f"{job}: {problem}" for job in jobs for problem in self.problems_of(job)]


def fleet_table(report: FleetReport) -> Table:
    """A line for each replica: its layout, what it holds, and whether that equals the trainer's newest version."""
    shown = Table(expand=False)
    shown.add_column("replica")
    shown.add_column("layout")
    for heading in ("started", "versions taken", "version held"):
        shown.add_column(heading, justify="right")
    shown.add_column("from")
    shown.add_column("elements")
    for number in range(report.options.replicas):
        job = f"replica-{number}"
        layout, replica, problems = layout_of(job), report.replicas.get(job, ReplicaRecord()), report.problems_of(job)
        equal = Text(f"{len(report.sent.get(replica.held or 0, {}))} tensors equal", "green")
        shown.add_row(
            job,
            f"{layout.name} over {layout.ranks}",
            "once" if replica.lives == 1 else f"{replica.lives} times",
            str(len(replica.before) + len(replica.versions)),
            str(replica.held),
            replica.source,
            Text(problems[0], "red") if problems else equal,
        )
    return shown
