"""What an agent records: how each transfer ended, and what else went wrong or changed; pure.

A record is one line of JSON in the agent's ring (``observe.ring``) and one value for metrics. It holds no tensor, view
or exception, so it may be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from etha.decoders import made_alone
from etha.phases import NO_PHASES, Phases

Outcome = Literal["committed", "aborted", "unknown", "withdrawn"]


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent moves in every transfer of one direction.

    ``sent`` and ``received``: payload of its workers, in bytes. ``ways``: bytes that it copies ("mapped", "process_vm",
    "device") or exchanges ("tcp", "nccl"). ``staged``: a worker copies some of its tensors through shared memory.
    ``whole``: bytes of the whole batch, for all agents.
    """

    sent: int = 0
    received: int = 0
    ways: Mapping[str, int] = {}
    staged: bool = False
    whole: int = 0


NO_PAYLOAD = Payload()


class Culprit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who ended or held up something, as far as is known. ``host`` is the name, ``pid`` the worker's."""

    side: str = ""
    rank: int | None = None
    agent: str = ""
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        who = "an agent" if self.rank is None else f"{self.side} rank {self.rank}"
        where = [f"host {self.host}"] if self.host else []
        where += [f"process {self.pid}"] if self.pid else []
        return f"{who} ({', '.join(where)})" if where else who


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="transfer", omit_defaults=True):
    """One transfer, or one call that ended before GO, as one agent saw it.

    ``at``: seconds since 1970 of its end. ``pairs``: the primary one first. ``seq`` is None if the call ended before
    GO. ``ranks``: (side, rank) of this agent's workers in it. ``outcome``: see TransferError. ``code``, ``reason``:
    those of the error; "" if committed. ``seconds``: from GO to the end. ``phases``: those of the rank here that called
    first. ``ended_in``: the phase in which it ended, if it was not committed. ``last``: the rank here that called last,
    ``late`` seconds after the first; None below a millisecond. ``superseded``: the call ended because its worker took a
    newer snapshot, or because nobody wanted the publisher's version any more, which is no failure. ``agent``: id of the
    agent that wrote the line; "" before.
    """

    at: float
    pairs: tuple[str, ...]
    batch: str
    outcome: Outcome
    seq: int | None = None
    version: int | str | None = None
    source: str = ""
    target: str = ""
    ranks: tuple[tuple[str, int], ...] = ()
    payload: Payload = NO_PAYLOAD
    torn: bool = False
    code: str = ""
    reason: str = ""
    culprits: tuple[Culprit, ...] = ()
    seconds: float = 0.0
    phases: Phases = NO_PHASES
    ended_in: str = ""
    last: tuple[str, int] | None = None
    late: float = 0.0
    superseded: bool = False
    agent: str = ""

    @property
    def failed(self) -> bool:
        """Whether somebody should look at it."""
        return self.outcome != "committed" and not self.superseded


#: Kinds of incidents that are lines of the agent's log.
WARNING, ERROR = "warning", "error"


class Incident(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="incident", omit_defaults=True):
    """What else an agent records: it came or left, a link was refused or lost, a rendezvous or registration failed.

    ``what`` is one word of a fixed set ("started", "left", "link_refused", ...), ``reason`` a sentence. ``failed``:
    somebody should look at it. ``agent``: id of the agent that wrote the line; "" before.
    """

    at: float
    what: str
    reason: str
    pair: str = ""
    batch: str = ""
    code: str = ""
    culprits: tuple[Culprit, ...] = ()
    failed: bool = True
    agent: str = ""


Record = TransferRecord | Incident

#: Seconds since 1970 of the end of 9998, which can be shown in every time zone.
_END = 253_370_764_800.0

_encoder = msgspec.json.Encoder()
_decoder = made_alone(lambda: msgspec.json.Decoder(Record))


def is_time(at: float) -> bool:
    """Whether these seconds since 1970 can be shown as a date. NaN cannot."""
    return 0 <= at <= _END


def to_line(record: Record, agent: str = "") -> bytes:
    """One line of JSON with its newline, as written by ``agent``: an id of letters and digits."""
    line = _encoder.encode(record)
    if agent and not record.agent:  # without a copy of the record
        line = b'%b,"agent":"%b"}' % (line[:-1], agent.encode())
    return line + b"\n"


def from_line(line: bytes) -> Record:
    """The record in one line. ValueError if it is none."""
    record: Record = _decoder.decode(line)
    if not is_time(record.at):
        raise ValueError("a record without a time")
    return record
