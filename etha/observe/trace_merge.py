"""Merges the files of ETHA_TRACE directories, of several hosts, into one for Perfetto (Chrome's JSON trace format).

    heads, names, beats of all files --> one clock --> each file, line by line --> trace.json

Files are read twice and never held, because a trace may have gigabytes. Every process is a process there, and every
track a thread. Spans of one track that overlap, as calls of several batches do, get rows of their own.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from etha.errors import ConfigError
from etha.observe.trace import Part
from etha.observe.trace_clocks import NO_SHIFT, Clocks, Sample, Shift, by_real_time
from etha.observe.trace_lines import (
    AnsweredLine,
    BegunLine,
    DroppedLine,
    KeyLine,
    NoteLine,
    ReturnedLine,
    SpanLine,
    TraceHead,
    head_of,
    line_of,
    members,
    seq_of,
)

#: What each line needs to be read in the first pass, by how it begins.
_SMALL = (b'["q"', b'["r"', b'["n"', b'["k"', b'["d"')
#: Numbers of threads, away from those of processes, because Perfetto takes a thread of its process's number for the
#: main one.
_FIRST_THREAD = 100_000
#: Bytes of a line that is read. A trace's lines have some hundred; an error in one, some thousand.
_LONGEST = 4 << 20
#: Transfers of a batch that are counted in one number's bits.
_BLOCK = 1024

_encode = msgspec.json.Encoder().encode
#: What ends the kind of a device: "cuda:0" and "cuda-GPU-..." are both cuda.
_KIND = re.compile("[^a-z]")


@dataclass(slots=True, eq=False)
class TraceFile:
    """One process's file. ``about`` is its head and what it noted later."""

    path: Path
    about: TraceHead
    process: int = 0
    shift: Shift = NO_SHIFT
    #: Lines that the process dropped, and lines that cannot be read: the last one of a process that was killed.
    dropped: int = 0
    torn: int = 0

    @property
    def is_agent(self) -> bool:
        """Whether it is an agent's, else a worker's."""
        return self.about.role == "agent"

    @property
    def host(self) -> str:
        """The host's name for people."""
        return self.about.host_name or self.about.host

    @property
    def name(self) -> str:
        """The process's name in the picture."""
        what = self.about.device if self.is_agent else self.about.label
        return f"{self.host}: {self.about.role}{f' {what}' if what else ''}"

    @property
    def clock(self) -> str:
        return self.about.clock

    @property
    def place(self) -> tuple[str, str, str]:
        """Host, namespace and kind of device: a worker's agent has the same."""
        return self.about.host, self.about.namespace, _KIND.split(self.about.device, maxsplit=1)[0]


@dataclass(slots=True, kw_only=True)
class Merged:
    """What was merged. ``strangers`` are files that are no traces, with the reason. ``unlinked`` are hosts whose clock
    no
    link joins to the first host's. ``clock_error`` is the largest one, in seconds."""

    files: list[TraceFile]
    strangers: list[tuple[Path, str]]
    hosts: tuple[str, ...] = ()
    unlinked: tuple[str, ...] = ()
    clock_error: float = 0.0
    transfers: int = 0
    spans: int = 0
    unfinished: int = 0
    begun: datetime | None = None
    #: (host, device) of agents and the ids of those with which they exchanged bytes.
    peers: set[tuple[str, str]] = field(default_factory=set)

    @property
    def workers(self) -> int:
        """How many workers' processes there are."""
        return sum(not file.is_agent for file in self.files)

    @property
    def agents(self) -> int:
        """How many agents there are."""
        return len(self.files) - self.workers

    @property
    def text(self) -> str:
        """What was merged, for people."""
        error = f"{self.clock_error * 1e6:.0f} us" if self.clock_error else "none, they share one"
        begun = "" if self.begun is None else f", from {self.begun:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"{_count(len(self.hosts), 'host')} ({', '.join(self.hosts)}), {_count(self.workers, 'worker')}, "
            f"{_count(self.agents, 'agent')}, {_count(self.transfers, 'transfer')}, {_count(self.spans, 'span')}"
            f"{begun}; largest error of the clocks: {error}"
        )

    @property
    def warnings(self) -> list[str]:
        """What is missing in it."""
        found = [*self._missing_agents()]
        if self.unlinked:
            found.append(
                f"no agent with a trace on {', '.join(self.unlinked)} has a link to one on {self.hosts[0]}: their "
                f"times are those of the hosts' own clocks, which may be off by seconds"
            )
        for file in self.files:
            if file.dropped:
                found.append(
                    f"{file.path}: {_count(file.dropped, 'line')} dropped, because the disk was full or too slow"
                )
            if file.torn:
                found.append(f"{file.path}: {_count(file.torn, 'line')} cannot be read")
        if self.unfinished:
            found.append(f"{_count(self.unfinished, 'call')} had not ended: see spans with unfinished=true")
        return found

    def _missing_agents(self) -> Iterator[str]:
        """Agents that served these workers, or exchanged bytes with these agents, and have no file here."""
        known = {file.place for file in self.files if file.is_agent}
        served: dict[tuple[str, str], int] = defaultdict(int)
        for file in self.files:
            if not file.is_agent and file.place not in known:
                served[file.host, file.about.device] += 1
        for (host, device), workers in served.items():
            yield (
                f"no file of the agent {device} on {host}, which served {_count(workers, 'worker')}: its file is not "
                f"among these, or it ran without ETHA_TRACE"
            )
        ids = {file.about.agent for file in self.files}
        for name, peer in sorted(self.peers):
            if peer not in ids:
                yield (
                    f"no file of agent {peer}, with which {name} exchanged bytes: add the directory of its host, "
                    f"or set ETHA_TRACE there"
                )


def merge(places: Sequence[Path], output: Path, progress: Callable[[int, int], None] = lambda *_: None) -> Merged:
    """Merge all files of these directories into ``output``, gzipped if its name ends in ".gz".

    ``progress`` is called with the files that are done, and their number. ConfigError if there is no trace in them.
    """
    merged = Merged(files=[], strangers=[])
    for path in _paths(places, output):
        found = _head(path)
        if isinstance(found, TraceFile):
            merged.files.append(found)
        else:
            merged.strangers.append((path, found))
    if not merged.files:
        listed = "".join(f"\n  {path}: {why}" for path, why in merged.strangers[:20])
        raise ConfigError(f"no trace in {', '.join(map(str, places))}: set ETHA_TRACE for jobs and agents{listed}")
    # Workers above the agent that serves them, host by host.
    merged.files.sort(key=lambda file: (file.host, file.is_agent, file.about.pid))
    for number, file in enumerate(merged.files, 1):
        file.process = number
    keys, clocks = _first_pass(merged.files)
    _set_clocks(merged, clocks)
    merged.hosts = tuple(dict.fromkeys(file.host for file in merged.files))
    part = output.with_name(f"{output.name}.part")
    try:
        with _opened(part, output.suffix == ".gz") as out:
            _Writer(merged, keys, out).write(progress)
        part.replace(output)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return merged


def _paths(places: Sequence[Path], output: Path) -> Iterator[Path]:
    seen = {output.resolve()}
    for place in places:
        for path in sorted(place.iterdir()) if place.is_dir() else [place]:
            if path.resolve() not in seen and (path.is_file() or path == place):
                seen.add(path.resolve())
                yield path


def _opened(path: Path, zipped: bool) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "wb", compresslevel=5)) if zipped else path.open("wb", buffering=1 << 20)


def _head(path: Path) -> TraceFile | str:
    """The file, or why it is no trace."""
    try:
        with path.open("rb") as lines:
            first = lines.readline(1 << 16)
    except OSError as error:
        return error.strerror or str(error)
    head = head_of(first)
    return head if isinstance(head, str) else TraceFile(path, head)


def _lines(file: TraceFile) -> Iterator[bytes]:
    """The lines behind the head. The last line of a process that was killed may be half of one. One that is too long
    comes in parts, of which none can be read."""
    with file.path.open("rb", buffering=1 << 20) as lines:
        lines.readline(_LONGEST)
        while line := lines.readline(_LONGEST):
            if line.endswith(b"\n") or len(line) == _LONGEST:
                yield line


def _first_pass(files: Iterable[TraceFile]) -> tuple[dict[str, dict[str, Any]], Clocks]:
    """What streams' keys stand for, and the clocks; completes what is known of each file."""
    keys: dict[str, dict[str, Any]] = {}
    returned: dict[tuple[str, str, int], tuple[str, int, int]] = {}
    answered: dict[tuple[str, str, int], tuple[str, int, int]] = {}
    for file in files:
        for line in _lines(file):
            if not line.startswith(_SMALL):
                continue
            me = file.about.agent
            match line_of(line):
                case NoteLine(about):
                    file.about.note(about)
                case KeyLine(key, about):
                    keys[key] = about
                case DroppedLine(count):
                    file.dropped += count
                case ReturnedLine(other, number, sent, back):
                    returned[me, other, number] = (file.clock, sent, back)
                case AnsweredLine(other, number, came, went):
                    answered[other, me, number] = (file.clock, came, went)
                case _:
                    file.torn += 1
    clocks = Clocks()
    for beat in returned.keys() & answered.keys():
        (clock, sent, back), (other_clock, came, went) = returned[beat], answered[beat]
        clocks.measured(clock, other_clock, Sample.of(sent, came, went, back))
    return keys, clocks


def _set_clocks(merged: Merged, clocks: Clocks) -> None:
    """Give every file what turns its times into the first file's."""
    first = merged.files[0].about
    left = list(dict.fromkeys(file.clock for file in merged.files))
    unlinked: list[str] = []
    while left:
        root = left[0]
        found = clocks.shifts(root)
        heads = [file.about for file in merged.files if file.clock == root]
        base = by_real_time(heads[0].monotonic_ns, heads[0].realtime_ns, first.monotonic_ns, first.realtime_ns)
        aside = 0 if root == first.clock else base.by[0]
        for file in merged.files:
            shift = found.get(file.clock)
            if shift is None or file.clock not in left:
                continue
            file.shift = Shift(shift.at, tuple(by + aside for by in shift.by), shift.error)
            merged.clock_error = max(merged.clock_error, shift.error / 1e9)
            if root != first.clock:
                unlinked.append(file.host)
        left = [clock for clock in left if clock not in found]
    merged.unlinked = tuple(dict.fromkeys(unlinked))


class _Writer:
    """The second pass: writes events, file by file."""

    def __init__(self, merged: Merged, keys: Mapping[str, Mapping[str, Any]], out: BinaryIO) -> None:
        self._merged, self._keys, self._out = merged, keys, out
        heads = [(file, file.about.monotonic_ns) for file in merged.files]
        first, self._base = min(((f, at + f.shift(at)) for f, at in heads), key=lambda found: found[1])
        merged.begun = datetime.fromtimestamp(first.about.realtime_ns / 1e9, UTC)
        self._names = {f.about.agent: f"{f.host} {f.about.device}" for f in merged.files if f.about.agent}
        self._threads = 0
        self._separator = b"\n"
        #: For each registration of a batch, one bit for each seq that some agent has moved, _BLOCK to a number.
        self._moved: dict[tuple[str, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def write(self, progress: Callable[[int, int], None]) -> None:
        """Write all files."""
        self._out.write(b'{"displayTimeUnit":"ns","traceEvents":[')
        for done, file in enumerate(self._merged.files, 1):
            self._name_process(file)
            _FileWriter(self, file).write()
            progress(done, len(self._merged.files))
        begun = self._merged.begun
        about = {
            "begun": "" if begun is None else begun.isoformat(),
            "hosts": self._merged.hosts,
            "clock_error_s": self._merged.clock_error,
            "unlinked_hosts": self._merged.unlinked,
        }
        self._out.write(b'\n],"otherData":' + _encode(about) + b"}\n")
        self._merged.transfers = sum(bits.bit_count() for some in self._moved.values() for bits in some.values())

    def event(self, text: bytes) -> None:
        """Write one event."""
        self._out.write(self._separator + text)
        self._separator = b",\n"

    def at(self, file: TraceFile, time: int) -> bytes:
        """A time of a file as microseconds."""
        return _microseconds(max(0, time + file.shift(time) - self._base))

    def thread(self, file: TraceFile, track: str, row: int) -> int:
        """A new thread for a row of a track."""
        self._threads += 1
        number = _FIRST_THREAD + self._threads
        self._meta(file, "thread_name", {"name": self._shown(track) + (f" ({row + 1})" if row else "")}, number)
        self._meta(file, "thread_sort_index", {"sort_index": _ORDER.get(track.split(" ")[0], 9)}, number)
        return number

    def about_key(self, key: str) -> Mapping[str, Any]:
        """What a stream's key stands for."""
        return self._keys.get(key, {})

    def count(self, args: dict[str, Any]) -> None:
        """Count a transfer, which several agents may have seen."""
        if (seq := seq_of(args)) is not None:
            some = self._moved[str(args.get("pair")), str(args.get("epoch")), str(args.get("batch"))]
            some[seq // _BLOCK] |= 1 << seq % _BLOCK

    def _shown(self, track: str) -> str:
        """A track's name, with a peer's host in place of the agent's id."""
        return " ".join(self._names.get(word, word) for word in track.split(" "))

    def _name_process(self, file: TraceFile) -> None:
        about = file.about
        self._meta(file, "process_name", {"name": f"{file.name} (pid {about.pid})"})
        self._meta(file, "process_labels", {"labels": ", ".join(filter(None, (about.device, about.version)))})
        self._meta(file, "process_sort_index", {"sort_index": file.process})

    def _meta(self, file: TraceFile, name: str, args: Mapping[str, Any], thread: int = 0) -> None:
        event = {"ph": "M", "pid": file.process, "tid": thread or file.process, "name": name, "args": args}
        self.event(_encode(event))


#: Which tracks of a process come first.
_ORDER = {"calls": 0, "transfers": 0, "lane": 1, "loop": 2, "nccl": 3, "send": 4, "receive": 5}


class _FileWriter:
    """One file's events."""

    def __init__(self, writer: _Writer, file: TraceFile) -> None:
        self._writer, self._file = writer, file
        #: For each track, when the last span of each of its rows ends.
        self._rows: dict[str, list[int]] = defaultdict(list)
        self._threads: dict[tuple[str, int], int] = {}
        self._open: dict[int, BegunLine] = {}
        self._last = 0

    def write(self) -> None:
        for line in _lines(self._file):
            if line.startswith(_SMALL):
                continue
            match line_of(line):
                case SpanLine() as span:
                    self._open.pop(span.number, None)
                    try:
                        self._span(span.track, span.name, span.begun, max(0, span.ns), span.args, span.parts)
                    except RecursionError:  # nested just as deeply as can be read, but not written
                        self._file.torn += 1
                case BegunLine() as begun:
                    self._open[begun.number] = begun
                    self._last = max(self._last, begun.begun)
                case _:
                    self._file.torn += line != b"\n"
        for left in self._open.values():
            self._writer._merged.unfinished += 1
            args = {**left.args, "unfinished": True}
            self._span(left.track, left.name, left.begun, self._last - left.begun, args, ())

    def _span(self, track: str, name: str, begun: int, ns: int, args: dict[str, Any], parts: Iterable[Part]) -> None:
        ended = begun + ns
        self._last = max(self._last, ended)
        self._writer._merged.spans += 1
        thread = self._thread(track, begun, ended)
        if isinstance(key := args.get("key"), str):
            args = {**self._writer.about_key(key), **args}
        self._slice(thread, name, begun, ns, args)
        for part, at, took in parts:
            at = min(max(at, begun), ended)
            self._slice(thread, part, at, max(0, min(took, ended - at)), {})
        for flow, outgoing in _flows(track, name, args, self._file.about.agent):
            self._flow(thread, flow, begun if outgoing == "first" else ended - 1 if ns else begun, outgoing)
        if track == "transfers" and not args.get("error"):
            self._writer.count(args)

    def _thread(self, track: str, begun: int, ended: int) -> int:
        rows = self._rows[track]
        row = next((row for row, end in enumerate(rows) if end <= begun), len(rows))
        if row == len(rows):
            rows.append(ended)
        rows[row] = ended
        thread = self._threads.get((track, row))
        if thread is None:
            thread = self._threads[track, row] = self._writer.thread(self._file, track, row)
            if peer := _peer(track):
                self._writer._merged.peers.add((f"{self._file.host} {self._file.about.device}", peer))
        return thread

    def _slice(self, thread: int, name: str, begun: int, ns: int, args: Mapping[str, Any]) -> None:
        self._writer.event(
            b'{"ph":"X","pid":%d,"tid":%d,"ts":%b,"dur":%b,"name":%b,"cat":"etha","args":%b}'
            % (
                self._file.process,
                thread,
                self._writer.at(self._file, begun),
                _microseconds(ns),
                _encode(name),
                _encode(args),
            )
        )

    def _flow(self, thread: int, flow: str, at: int, outgoing: str) -> None:
        """One end of an arrow."""
        number = int.from_bytes(blake2b(flow.encode(), digest_size=6).digest(), "big")
        kind = b'"s"' if outgoing else b'"f","bp":"e"'
        self._writer.event(
            b'{"ph":%b,"pid":%d,"tid":%d,"ts":%b,"id":%d,"name":"bytes","cat":"etha"}'
            % (kind, self._file.process, thread, self._writer.at(self._file, at), number)
        )


def _peer(track: str) -> str:
    """The agent at the other end of a stream's track; "" for other tracks."""
    kind, _, rest = track.partition(" ")
    return rest.partition(" ")[0] if kind in ("send", "receive") else ""


def _flows(track: str, name: str, args: dict[str, Any], agent: str) -> Iterator[tuple[str, str]]:
    """The arrows that begin or end at a span: (what both ends call it, how it goes out: "first" | "last" | "")."""
    kind = track.partition(" ")[0]
    if peer := _peer(track):
        ends = (agent, peer) if kind == "send" else (peer, agent)
        yield f"stream {args.get('key')} {args.get('seq')} {args.get('lane')} {ends}", "first" if kind == "send" else ""
        return
    if name != "transfer" or not args.get("seq"):
        return
    what = f"{args.get('pair')} {args.get('epoch')} {args.get('batch')} {args['seq']}"
    if kind == "calls":
        member = f"{args.get('side')} {args.get('rank')}"
        yield (f"call {what} {member}", "first") if args.get("verb") == "send" else (f"result {what} {member}", "")
    elif kind == "transfers":
        for side, rank in members(args, "sources"):
            yield f"call {what} {side} {rank}", ""
        for side, rank in members(args, "targets"):
            yield f"result {what} {side} {rank}", "last"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _microseconds(ns: int) -> bytes:
    return b"%d.%03d" % (ns // 1000, ns % 1000)
