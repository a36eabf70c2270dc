"""Every error that Etha raises, and how one crosses a socket.

EthaError
+-- ConfigError             config              an argument or a setting is wrong
+-- AgentUnavailableError   agent_unavailable   no agent answers, none could be started
+-- AgentLostError          agent_lost          the agent died, or the client is closed to it; .outcome .torn .quiesced
+-- RendezvousTimeoutError  rendezvous_timeout  .missing: {side: (rank, ...)}
+-- LayoutError             layout              a tensor without layout, a malformed layout
+-- RegistrationError       registration        .violations
+-- PlanError               plan                .violations; only from check() and simulate()
+-- TransferError           transfer            .outcome .torn .quiesced
|   +-- PeerLostError         peer_lost         .reason: "relaunched", "closed", "died"
|   +-- TransferTimeoutError  transfer_timeout
|   +-- TransferAbortedError  transfer_aborted
+-- ProtocolError           protocol            the two ends do not speak the same language
+-- RedisUnavailableError   redis_unavailable
+-- GroupError              group               also a RuntimeError: a call to a process group that cannot be right
    +-- GroupLostError        group_lost        .ranks .reason .epoch
    +-- GroupTimeoutError     group_timeout     .waiting_for; also a TimeoutError
    +-- GroupMismatchError    group_mismatch    .calls
    +-- GroupAbortedError     group_aborted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from etha.phases import Phases

#: Part of the error of ``init_pair`` for a rank that another client of the same process has.
HELD_HERE = "is held by another client of this process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One reason why a batch or a plan cannot work.

    ``code`` is stable: ``unknown_name``, ``missing_name``, ``shape_mismatch``, ``uncovered``, ``target_partial``,
    ``double_write``, ``dtype``, ``plan_mismatch``, ``layout``, ``alias``, ``out_of_source``, ``unsupported``, ``form``,
    ``pair``, ``shared_memory``. ``side`` is a side's name if names are known (registration), otherwise ``"source"`` or
    ``"target"``. ``rank`` is the rank in it; None means the whole side.
    """

    code: str
    name: str
    side: str
    rank: int | None
    text: str

    def __str__(self) -> str:
        where = self.side if self.rank is None else f"{self.side} rank {self.rank}"
        return f"[{self.code}] {self.name!r} on {where}: {self.text}"


class EthaError(Exception):
    """Base of all errors of Etha. ``code`` is a stable string; the message says what to do."""

    code: ClassVar[str] = "etha"
    remote_traceback: str | None = None

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self._set(data)

    def _set(self, data: Mapping[str, Any]) -> None:
        """Take the extra fields that this class knows. Subclasses with fields override it."""
        if data:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(data)}")

    def data(self) -> dict[str, Any]:
        """The extra fields as plain data, the inverse of the constructor's keywords."""
        return {}

    def to_wire(self) -> dict[str, Any]:
        """code, text and data, for msgpack."""
        return {"code": self.code, "text": self.message, "data": self.data()}

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (self.to_wire(),))


class ConfigError(EthaError):
    """An argument, an environment variable or a combination of them is wrong."""

    code = "config"


class AgentUnavailableError(EthaError):
    """No agent answers at the address, and none was or could be started."""

    code = "agent_unavailable"


class AgentLostError(EthaError):
    """The agent that served this client is gone. Its pairs and batches must be formed again.

    When a transfer raises it, it carries ``outcome``, ``torn``, ``quiesced`` and ``phases`` as TransferError does,
    because nobody can say any more whether the others got a result. Of the phases only this worker's ``copy_in`` is
    known, because the agent measured the others. None if the call had not asked the agent yet.
    """

    code = "agent_lost"
    outcome: str
    torn: bool
    quiesced: bool
    phases: Phases | None

    def _set(self, data: Mapping[str, Any]) -> None:
        self.outcome = str(data.get("outcome", "unknown"))
        self.torn = bool(data.get("torn", False))
        self.quiesced = bool(data.get("quiesced", True))
        self.phases = _phases(data)

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = {"outcome": self.outcome, "torn": self.torn, "quiesced": self.quiesced}
        return found if self.phases is None else {**found, "phases": dict(self.phases)}


def _phases(data: Mapping[str, Any]) -> Phases | None:
    phases = data.get("phases")
    return Phases(**{name: float(phases[name]) for name in phases}) if isinstance(phases, Mapping) else None


class RendezvousTimeoutError(EthaError):
    """Not everybody came. ``missing`` maps each side to the ranks that were not there."""

    code = "rendezvous_timeout"
    missing: dict[str, tuple[int, ...]]

    def _set(self, data: Mapping[str, Any]) -> None:
        self.missing = {str(s): tuple(r) for s, r in data.get("missing", {}).items()}

    def data(self) -> dict[str, Any]:
        return {"missing": {s: list(r) for s, r in self.missing.items()}}


class LayoutError(EthaError):
    """A tensor has no layout, or a layout is malformed."""

    code = "layout"


class _ViolationError(EthaError):
    violations: tuple[Violation, ...]

    def _set(self, data: Mapping[str, Any]) -> None:
        found = data.get("violations", ())
        self.violations = tuple(v if isinstance(v, Violation) else Violation(**v) for v in found)

    def data(self) -> dict[str, Any]:
        return {"violations": [asdict(v) for v in self.violations]}


class RegistrationError(_ViolationError):
    """What was registered cannot work. ``violations`` holds every reason."""

    code = "registration"


class PlanError(_ViolationError):
    """A plan is wrong. Only ``check()`` and ``simulate()`` raise it."""

    code = "plan"


class TransferError(EthaError):
    """A transfer failed.

    ``outcome`` is ``"aborted"`` (nobody got a result), ``"unknown"`` (this worker's agent or link died after its vote),
    ``"withdrawn"`` (the call ended before GO and consumed nothing) or ``"committed"`` (this worker's tensors hold the
    new version as all others' do, but its ``on_commit`` did not return by the deadline). ``torn``: this worker's target
    may be half-written. ``quiesced`` False: a frozen agent could not confirm that it will not write any more.
    ``culprits`` are the (side, rank) that ended or held up the transfer, as far as is known. ``phases`` are the seconds
    of the phases that it reached here; None if no agent heard of the call.
    """

    code = "transfer"
    outcome: str
    torn: bool
    quiesced: bool
    culprits: tuple[tuple[str, int], ...]
    phases: Phases | None

    def _set(self, data: Mapping[str, Any]) -> None:
        self.outcome = str(data.get("outcome", "aborted"))
        self.torn = bool(data.get("torn", False))
        self.quiesced = bool(data.get("quiesced", True))
        self.culprits = tuple((str(side), int(rank)) for side, rank in data.get("culprits", ()))
        self.phases = _phases(data)

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = {"outcome": self.outcome, "torn": self.torn, "quiesced": self.quiesced}
        if self.culprits:
            found["culprits"] = [list(member) for member in self.culprits]
        if self.phases is not None:
            found["phases"] = dict(self.phases)
        return found


class PeerLostError(TransferError):
    """A worker or agent of the pair is gone. ``reason`` is "relaunched", "closed" or "died"."""

    code = "peer_lost"
    reason: str

    def _set(self, data: Mapping[str, Any]) -> None:
        super()._set(data)
        self.reason = str(data.get("reason", "died"))

    def data(self) -> dict[str, Any]:
        return {**super().data(), "reason": self.reason}


def withdrawn(error: PeerLostError) -> PeerLostError:
    """The error of a call that came, or waited, when ``error`` had ended what it needs."""
    return PeerLostError(error.message, reason=error.reason, outcome="withdrawn", culprits=error.culprits)


class TransferTimeoutError(TransferError):
    """The deadline of a transfer passed. The message says who was not ready."""

    code = "transfer_timeout"


class TransferAbortedError(TransferError):
    """Somebody cancelled or failed after GO. The message carries the first cause."""

    code = "transfer_aborted"


class ProtocolError(EthaError):
    """The other end of a socket speaks another version, or broke the rules."""

    code = "protocol"


class RedisUnavailableError(EthaError):
    """Redis could not be reached within the call's deadline."""

    code = "redis_unavailable"


class GroupError(EthaError, RuntimeError):
    """A call to a process group of ``etha.groups`` that cannot be right: bad arguments, or a group not configured.

    Base of the errors of process groups. It is a RuntimeError too, because torch's own process groups raise that.
    """

    code = "group"


class GroupLostError(GroupError):
    """The group has lost members. Every call fails until the next ``configure``.

    ``ranks`` are the members that were lost, as ranks in the group. ``reason`` says what happened to them. ``epoch`` is
    the epoch (torchft: quorum) of the group; None if it was configured without one.
    """

    code = "group_lost"
    ranks: tuple[int, ...]
    reason: str
    epoch: int | None

    def _set(self, data: Mapping[str, Any]) -> None:
        self.ranks = tuple(int(rank) for rank in data.get("ranks", ()))
        self.reason = str(data.get("reason", "died"))
        epoch = data.get("epoch")
        self.epoch = None if epoch is None else int(epoch)

    def data(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "reason": self.reason, "epoch": self.epoch}


class GroupTimeoutError(GroupError, TimeoutError):
    """The deadline of a call passed. ``waiting_for`` are the ranks that had not come, as far as is known."""

    code = "group_timeout"
    waiting_for: tuple[int, ...]

    def _set(self, data: Mapping[str, Any]) -> None:
        self.waiting_for = tuple(int(rank) for rank in data.get("waiting_for", ()))

    def data(self) -> dict[str, Any]:
        return {"waiting_for": list(self.waiting_for)}


class GroupMismatchError(GroupError):
    """The members called different things. ``calls`` maps ranks to what each of them called, in words."""

    code = "group_mismatch"
    calls: dict[int, str]

    def _set(self, data: Mapping[str, Any]) -> None:
        calls = data.get("calls", {})
        pairs = calls.items() if isinstance(calls, Mapping) else calls
        self.calls = {int(rank): str(call) for rank, call in pairs}

    def data(self) -> dict[str, Any]:
        return {"calls": [[rank, call] for rank, call in self.calls.items()]}


class GroupAbortedError(GroupError):
    """This process ended the group: by ``abort()``, ``shutdown()``, an interrupt, or ``configure`` during a call."""

    code = "group_aborted"


def _walk(cls: type[EthaError]) -> Sequence[type[EthaError]]:
    return [cls, *(c for sub in cls.__subclasses__() for c in _walk(sub))]


_BY_CODE: dict[str, type[EthaError]] = {c.code: c for c in _walk(EthaError) if not c.__name__.startswith("_")}


#: The codes of all errors.
CODES = tuple(sorted(_BY_CODE))


def from_wire(wire: Mapping[str, Any], traceback: str | None = None) -> EthaError:
    """The error that ``to_wire`` described. An unknown code becomes a ProtocolError that says so."""
    code, text = str(wire.get("code")), str(wire.get("text"))
    cls = _BY_CODE.get(code)
    if cls is None:
        return ProtocolError(f"unknown error code {code!r} from the other end: {text}")
    error = cls(text, **wire.get("data", {}))
    error.remote_traceback = traceback
    return error


#: What a worker does after it has lost its pair or its agent.
AGAIN = "call init_pair and register_tensors again"


def with_again(text: str) -> str:
    """``text`` with what to do after a loss at its end, unless it says so already."""
    return text if AGAIN in text else f"{text}; {AGAIN}"


#: What a note of a log begins with.
_LOG = "log of the agent: "


def note_of_log(log: str, host: str = "") -> str:
    """Where an agent logs, for the end of a message. ``log``: the file, "-" if it is none, "" if it is not known.

    ``host``: name of the agent's host, if the reader may be on another one.
    """
    if not log:
        return ""
    return f"{_LOG}{'its terminal or its service' if log == '-' else log}{f' on {host}' if host else ''}"


def with_note(text: str, note: str) -> str:
    """``text`` with a note of a log at its end, unless it has one: the first one names the agent that knows most."""
    return text if not note or _LOG in text else f"{text}; {note}"


def noted(error: EthaError, note: str) -> EthaError:
    """``error`` itself, or the same error with the note in its message."""
    if (text := with_note(error.message, note)) == error.message:
        return error
    found = from_wire({**error.to_wire(), "text": text}, error.remote_traceback)
    found.__cause__ = error.__cause__
    return found


def first_of(errors: BaseExceptionGroup[EthaError]) -> EthaError:
    """The first error of several that failed side by side."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, EthaError)
    return found
