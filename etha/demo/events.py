"""What a job reports to the launcher: one JSON object per line, written to a pipe by its rank 0.

This channel is outside the bus: it carries losses and hashes, never tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TextIO

#: kind -> what it reports. The launcher refuses other kinds.
KINDS = {
    "ready": "the job's process group stands and its model is built",
    "progress": "step and steps, or bytes and total, of what the job is doing now",
    "version": "number, loss, hashes, bytes, seconds, sample, source of one version",
    "note": "text of something that the launcher has done",
    "done": "the job has closed its client",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of one job. ``fields`` are those that ``KINDS`` names."""

    job: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"event kind {self.kind!r} is none of {sorted(KINDS)}")

    def to_line(self) -> str:
        """The event as one line of JSON, newline included."""
        return json.dumps({"job": self.job, "kind": self.kind, **self.fields}) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Event:
        """The inverse of ``to_line``. ValueError for anything else."""
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError(f"an event is an object, not {line!r}")
        return cls(job=str(fields.pop("job")), kind=str(fields.pop("kind")), fields=fields)


class Reporter:
    """Writes events of one job. Silent on ranks without a pipe."""

    def __init__(self, job: str, pipe: TextIO | None) -> None:
        self.job = job
        self._pipe = pipe

    @property
    def speaks(self) -> bool:
        """Whether this rank's events reach the launcher."""
        return self._pipe is not None

    def tell(self, kind: str, **fields: Any) -> None:
        """Write one event at once."""
        if self._pipe is not None:
            self._pipe.write(Event(job=self.job, kind=kind, fields=fields).to_line())
            self._pipe.flush()
