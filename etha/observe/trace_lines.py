"""The lines of a trace's file, as ``etha trace`` reads them; pure. ``trace`` writes them, and says what each is.

Files come from other hosts and may be of a process that was killed, of a later version, or damaged. So each line is
checked whole before any of it is used: one that does not fit is None, and whoever reads counts it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from etha.decoders import made_alone

FORMAT = 1
#: Nanoseconds, so that sums of several stay in 64 bits.
Ns = Annotated[int, msgspec.Meta(ge=-(1 << 61), le=1 << 61)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class TraceHead(msgspec.Struct, kw_only=True):
    """Whose file it is: its first line, and what the process noted about itself later."""

    host: str
    role: str
    pid: int
    clock: str
    monotonic_ns: Ns
    realtime_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    host_name: str = ""
    namespace: str = ""
    device: str = ""
    version: str = ""
    agent: str = ""
    label: str = ""

    def note(self, more: TraceNote) -> None:
        """Take over what was noted."""
        self.agent, self.device, self.label = (
            more.agent or self.agent,
            more.device or self.device,
            more.label or self.label,
        )


class TraceNote(msgspec.Struct, frozen=True):
    """What a process notes about itself."""

    agent: str = ""
    device: str = ""
    label: str = ""


class SpanLine(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """It took so long. ``number`` is that of its ``BegunLine``, if it had one."""

    track: str
    name: str
    begun: Ns
    ns: Ns
    args: dict[str, Any]
    parts: tuple[tuple[str, Ns, Ns], ...]
    number: Number


class BegunLine(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """It has begun."""

    number: Number
    track: str
    name: str
    begun: Ns
    args: dict[str, Any]


class NoteLine(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """More about the process."""

    about: TraceNote


class KeyLine(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """What streams call by this key."""

    key: str
    about: dict[str, Any]


class ReturnedLine(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """A beat to ``agent`` is back."""

    agent: str
    number: int
    sent: Ns
    back: Ns


class AnsweredLine(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A beat of ``agent`` was sent back."""

    agent: str
    number: int
    came: Ns
    went: Ns


class DroppedLine(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Lines that the process dropped."""

    count: Count


Line = SpanLine | BegunLine | NoteLine | KeyLine | ReturnedLine | AnsweredLine | DroppedLine

_decode = made_alone(lambda: msgspec.json.Decoder(Line)).decode
_decode_head = made_alone(lambda: msgspec.json.Decoder(TraceHead)).decode
_plain = msgspec.json.Decoder().decode
#: What a line raises that is none: no JSON, another shape, or nested too deeply.
UNREADABLE = (ValueError, RecursionError)


def line_of(data: bytes) -> Line | None:
    """The line, or None if it cannot be read."""
    try:
        line: Line = _decode(data)
    except UNREADABLE:
        return None
    return line


def head_of(data: bytes) -> TraceHead | str:
    """The first line of a file, or why it is none of a trace."""
    try:
        head = _plain(data)
    except UNREADABLE:
        head = None
    if not isinstance(head, dict) or "etha_trace" not in head:
        return "no trace of Etha"
    if head["etha_trace"] != FORMAT:
        return f"a trace in format {head['etha_trace']!r:.40}, this version of etha reads {FORMAT}"
    for name in TraceHead.__struct_fields__[:6]:
        if name not in head:
            return f"its head has no {name}"
    try:
        found: TraceHead = _decode_head(data)
        return found
    except UNREADABLE as error:
        return f"its head cannot be read: {error}"


def members(args: dict[str, Any], name: str) -> list[tuple[str, int]]:
    """The (side, rank) of a span's argument; none if it is not a list of such."""
    try:
        return msgspec.convert(args.get(name, ()), list[tuple[str, int]])
    except UNREADABLE:
        return []


def seq_of(args: dict[str, Any]) -> int | None:
    """The number of the transfer that a span is about."""
    seq = args.get("seq")
    return seq if isinstance(seq, int) and not isinstance(seq, bool) and 0 <= seq < 1 << 62 else None
