"""What a worker and its agent say to each other, one dataclass a message.

    worker -> agent   Probe InitPair Register AttachShadows AttachSnapshot Supersede Confirm Transfer WaitOffer
                      CloseBatch GetStatus GetEvents LetGo
    agent -> worker   the reply that each one's docstring names
    agent -> worker, unasked   PairLost, BatchLost, Progress

Hello and Welcome stand in ``handshake``; how a message becomes bytes in ``codec``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from etha.bus.codec import Bounds, message
from etha.memory.handles import TensorHandle

#: Tensors one worker may register in one batch.
MAX_TENSORS = 200_000
#: Bytes of a CUDA event's IPC handle.
MARK = 64
#: How much of a transfer is compared at both ends before it is committed.
Verify = Literal["sample", "full"]

Verb = Literal["send", "recv"]


@message("ok")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ok:
    """Reply that carries nothing but that it was done."""


@message("probe")
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Can the agent read and write this worker's own memory at ``address``? -> Probed."""

    address: int
    token: bytes


@message("probed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """``reaches`` tells whether the token was read and echoed; ``text`` why not."""

    reaches: bool
    text: str


@message("init_pair")
@dataclass(frozen=True, slots=True, kw_only=True)
class InitPair:
    """This worker is ``rank`` of ``side``; wait until both sides are complete. -> PairFormed.

    ``run``: torchrun's run id, where ``launch`` is made of it. ``takeover``: also from a launch that lives.
    ``give_up``: do not wait for the next launch of the other side if all of it leaves.
    """

    pair: str
    side: str
    remote: str
    world_size: int
    rank: int
    launch: str | None
    run: str | None = None
    takeover: bool = False
    give_up: bool = False


@message("pair_formed")
@dataclass(frozen=True, slots=True, kw_only=True)
class PairFormed:
    """Both sides are complete; ``epoch`` counts the formings of this pair from 1."""

    epoch: int
    local_world_size: int
    remote_world_size: int


@message("pair_lost")
@dataclass(frozen=True, slots=True, kw_only=True)
class PairLost:
    """Push: the pair's ``epoch`` is over; ``reason`` as in PeerLostError."""

    pair: str
    epoch: int
    reason: str
    text: str


@message("batch_lost")
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLost:
    """Push: registration ``generation`` of a batch is over for all ranks, while its pair stands; ``text`` says why.

    ``pair`` and ``epoch`` are of the batch's primary pair. It comes before every answer that is given for this reason.
    """

    pair: str
    epoch: int
    batch: str
    generation: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One registered tensor.

    ``shape`` is the global shape, None where only all ranks together tell it; ``layout`` indexes
    ``Register.layouts``, ``pair`` indexes ``Register.pairs``. ``of`` is the tensor of which this is one more
    part, by a name of its own: a region may be a list of products. ``tied`` is the first entry that is the
    same elements of the same memory.
    """

    name: str
    pair: int
    layout: int
    shape: tuple[int, ...] | None
    handle: TensorHandle
    of: str | None = None
    tied: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason found by the worker itself; ``target_only`` ones matter only when it receives."""

    code: str
    name: str
    text: str
    target_only: bool


@message("register")
@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Register a batch, collectively over both sides. -> Registered.

    ``seq`` is the highest seq that this client has seen for the batch, so that a number given by an
    agent that died is not given again. ``staged``: why some of its tensors cannot be shown, and are copied through
    memory that can; or nothing.
    """

    batch: str
    epoch: int
    form: Literal["list", "map"]
    pairs: Annotated[tuple[str, ...], Bounds(max=1000)]
    layouts: Annotated[tuple[dict[str, Any], ...], Bounds(max=MAX_TENSORS)]
    entries: Annotated[tuple[Entry, ...], Bounds(max=MAX_TENSORS)]
    refusals: Annotated[tuple[Refusal, ...], Bounds(max=MAX_TENSORS)]
    direction: Literal["send", "recv", "both"] | None
    bucket_size: int | None
    atomic: bool
    verify: Verify | None
    seq: int
    staged: Annotated[str, Bounds(max=500)] = ""


@message("registered")
@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The batch stands. ``shadows``: this worker must receive into shadows (AttachShadows before it receives).

    ``generation`` numbers the registrations of the batch, alike on all ranks.
    ``send`` and ``recv`` tell which verbs can work; ``receives``: some rank has asked for the direction in which
    this one receives. ``summary`` is the plan in short.
    """

    generation: int
    seq: int
    atomic: bool
    shadows: bool
    send: bool
    recv: bool
    receives: bool
    summary: dict[str, Any]


@message("attach_shadows")
@dataclass(frozen=True, slots=True, kw_only=True)
class AttachShadows:
    """Where this worker receives instead of its live tensors, by entry. -> Ok."""

    batch: str
    epoch: int
    handles: Annotated[tuple[TensorHandle, ...], Bounds(max=MAX_TENSORS)]


@message("attach_snapshot")
@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSnapshot:
    """Where this worker sets its tensors aside before it sends them, by entry; once a registration. -> Ok."""

    batch: str
    epoch: int
    handles: Annotated[tuple[TensorHandle, ...], Bounds(max=MAX_TENSORS)]


@message("supersede")
@dataclass(frozen=True, slots=True, kw_only=True)
class Supersede:
    """The snapshot that this worker offers, if it still does, is withdrawn: it takes a newer one. -> Ok."""

    batch: str
    epoch: int


@message("confirm")
@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Do the batches that this worker holds still stand? -> Ok, after PairLost and BatchLost of those that do not."""


@message("transfer")
@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Wait for GO and move. -> Moved. ``slot`` is the call's revocation word.

    ``edition`` names the snapshot that is sent, alike on all ranks of the side; "": what the tensors hold.
    ``mark``: IPC handle of the CUDA event that the call comes after; b"": none.
    """

    batch: str
    epoch: int
    verb: Verb
    version: int | str | None
    slot: int
    progress: bool
    edition: str = ""
    mark: Annotated[bytes, Bounds(max=MARK)] = b""


@message("moved")
@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A transfer that was committed; ``nbytes`` is this worker's payload, ``seconds`` GO to COMMIT."""

    seq: int
    version: int | str | None
    nbytes: int
    seconds: float
    peers: tuple[tuple[str, int], ...]
    peak_staging: int


@message("progress")
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Push under a transfer's id: bytes done and in all, of this worker."""

    done: int
    total: int


@message("wait_offer")
@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOffer:
    """Wait until the other side waits to send. -> Offered."""

    batch: str
    epoch: int


@message("offered")
@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The other side is waiting to send ``nbytes`` (whole batch) under this label."""

    version: int | str | None
    nbytes: int


@message("close_batch")
@dataclass(frozen=True, slots=True, kw_only=True)
class CloseBatch:
    """This worker is done with the batch. -> Ok.

    ``why``: it cannot take part although the batch stands, so nobody can transfer it; all others have been told when
    the answer comes, but for agents that do not answer.
    """

    batch: str
    epoch: int
    why: str = ""


@message("let_go")
@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """Close those of this worker's ``segments`` that no registration here uses. -> Released.

    ``all``: this worker's last request; the answer comes once everything is closed.
    """

    all: bool
    segments: tuple[str, ...] = ()


@message("released")
@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The ``segments`` are not known any more, and unmapped once no transfer runs."""

    segments: tuple[str, ...]


@message("get_status")
@dataclass(frozen=True, slots=True, kw_only=True)
class GetStatus:
    """-> Status."""


@message("status")
@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``report`` is what ``etha status --json`` prints."""

    report: dict[str, Any]


#: Events that one request may ask for.
MAX_EVENTS = 1000


@message("get_events")
@dataclass(frozen=True, slots=True, kw_only=True)
class GetEvents:
    """The last ``count`` events of the namespace that came after the one with id ``after`` ("": all). -> Events."""

    after: Annotated[str, Bounds(max=100)] = ""
    count: int = 100


@message("events")
@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Oldest first; each has its ``id``, its ``kind``, and what fits of pair, side, rank, batch, reason, text."""

    events: Annotated[tuple[dict[str, Any], ...], Bounds(max=MAX_EVENTS)]
