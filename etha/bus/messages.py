"""What a worker and its agent say to each other, one struct a message.

    worker -> agent   Probe InitPair Register AttachShadows AttachSnapshot Supersede Confirm Transfer WaitOffer
                      CloseBatch GetStatus GetEvents LetGo
    agent -> worker   the reply that each one's docstring names
    agent -> worker, unasked   PairLost, BatchLost, Progress

Hello and Welcome stand in ``handshake``; how a message becomes bytes in ``codec``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from etha.bus.codec import message
from etha.bus.schema import Blob, Items, JsonObject, StrictStruct, Text
from etha.memory.handles import TensorHandle

#: Tensors one worker may register in one batch.
MAX_TENSORS = 200_000
#: Bytes of a CUDA event's IPC handle.
MARK = 64
#: How much of a transfer is compared at both ends before it is committed.
Verify = Literal["sample", "full"]

Verb = Literal["send", "recv"]


@message("ok")
class Ok(StrictStruct, frozen=True, kw_only=True):
    """Reply that carries nothing but that it was done."""


@message("probe")
class Probe(StrictStruct, frozen=True, kw_only=True):
    """Can the agent read and write this worker's own memory at ``address``? -> Probed."""

    address: int
    token: Blob


@message("probed")
class Probed(StrictStruct, frozen=True, kw_only=True):
    """``reaches`` tells whether the token was read and echoed; ``text`` why not."""

    reaches: bool
    text: Text


@message("init_pair")
class InitPair(StrictStruct, frozen=True, kw_only=True):
    """This worker is ``rank`` of ``side``; wait until both sides are complete. -> PairFormed.

    ``run``: torchrun's run id, where ``launch`` is made of it. ``takeover``: also from a launch that lives.
    ``give_up``: do not wait for the next launch of the other side if all of it leaves.
    """

    pair: Text
    side: Text
    remote: Text
    world_size: int
    rank: int
    launch: Text | None
    run: Text | None = None
    takeover: bool = False
    give_up: bool = False


@message("pair_formed")
class PairFormed(StrictStruct, frozen=True, kw_only=True):
    """Both sides are complete; ``epoch`` counts the formings of this pair from 1."""

    epoch: int
    local_world_size: int
    remote_world_size: int


@message("pair_lost")
class PairLost(StrictStruct, frozen=True, kw_only=True):
    """Push: the pair's ``epoch`` is over; ``reason`` as in PeerLostError."""

    pair: Text
    epoch: int
    reason: Text
    text: Text


@message("batch_lost")
class BatchLost(StrictStruct, frozen=True, kw_only=True):
    """Push: registration ``generation`` of a batch is over for all ranks, while its pair stands; ``text`` says why.

    ``pair`` and ``epoch`` are of the batch's primary pair. It comes before every answer that is given for this reason.
    """

    pair: Text
    epoch: int
    batch: Text
    generation: int
    reason: Text
    text: Text


class Entry(StrictStruct, frozen=True, kw_only=True, gc=False):
    """One registered tensor.

    ``shape`` is the global shape, None where only all ranks together tell it; ``layout`` indexes
    ``Register.layouts``, ``pair`` indexes ``Register.pairs``. ``of`` is the tensor of which this is one more
    part, by a name of its own: a region may be a list of products. ``tied`` is the first entry that is the
    same elements of the same memory. As in a handle, Python's collector has nothing to find in it.
    """

    name: Text
    pair: int
    layout: int
    shape: Items[int] | None
    handle: TensorHandle
    of: Text | None = None
    tied: Text | None = None


class Refusal(StrictStruct, frozen=True, kw_only=True):
    """A reason found by the worker itself; ``target_only`` ones matter only when it receives."""

    code: Text
    name: Text
    text: Text
    target_only: bool


@message("register")
class Register(StrictStruct, frozen=True, kw_only=True):
    """Register a batch, collectively over both sides. -> Registered.

    ``seq`` is the highest seq that this client has seen for the batch, so that a number given by an
    agent that died is not given again. ``staged``: why some of its tensors cannot be shown, and are copied through
    memory that can; or nothing.
    """

    batch: Text
    epoch: int
    form: Literal["list", "map"]
    pairs: Annotated[tuple[Text, ...], Meta(max_length=1000)]
    layouts: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_TENSORS)]
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_TENSORS)]
    refusals: Annotated[tuple[Refusal, ...], Meta(max_length=MAX_TENSORS)]
    direction: Literal["send", "recv", "both"] | None
    bucket_size: int | None
    atomic: bool
    verify: Verify | None
    seq: int
    staged: Annotated[str, Meta(max_length=500)] = ""


@message("registered")
class Registered(StrictStruct, frozen=True, kw_only=True):
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
    summary: JsonObject


@message("attach_shadows")
class AttachShadows(StrictStruct, frozen=True, kw_only=True):
    """Where this worker receives instead of its live tensors, by entry. -> Ok."""

    batch: Text
    epoch: int
    handles: Annotated[tuple[TensorHandle, ...], Meta(max_length=MAX_TENSORS)]


@message("attach_snapshot")
class AttachSnapshot(StrictStruct, frozen=True, kw_only=True):
    """Where this worker sets its tensors aside before it sends them, by entry; once a registration. -> Ok."""

    batch: Text
    epoch: int
    handles: Annotated[tuple[TensorHandle, ...], Meta(max_length=MAX_TENSORS)]


@message("supersede")
class Supersede(StrictStruct, frozen=True, kw_only=True):
    """The snapshot that this worker offers, if it still does, is withdrawn: it takes a newer one. -> Ok."""

    batch: Text
    epoch: int


@message("confirm")
class Confirm(StrictStruct, frozen=True, kw_only=True):
    """Do the batches that this worker holds still stand? -> Ok, after PairLost and BatchLost of those that do not."""


@message("transfer")
class Transfer(StrictStruct, frozen=True, kw_only=True):
    """Wait for GO and move. -> Moved. ``slot`` is the call's revocation word.

    ``edition`` names the snapshot that is sent, alike on all ranks of the side; "": what the tensors hold.
    ``mark``: IPC handle of the CUDA event that the call comes after; b"": none.
    """

    batch: Text
    epoch: int
    verb: Verb
    version: int | Text | None
    slot: int
    progress: bool
    edition: Text = ""
    mark: Annotated[bytes, Meta(max_length=MARK)] = b""


@message("moved")
class Moved(StrictStruct, frozen=True, kw_only=True):
    """A transfer that was committed; ``nbytes`` is this worker's payload, ``seconds`` GO to COMMIT."""

    seq: int
    version: int | Text | None
    nbytes: int
    seconds: float
    peers: Items[tuple[Text, int]]
    peak_staging: int


@message("progress")
class Progress(StrictStruct, frozen=True, kw_only=True):
    """Push under a transfer's id: bytes done and in all, of this worker."""

    done: int
    total: int


@message("wait_offer")
class WaitOffer(StrictStruct, frozen=True, kw_only=True):
    """Wait until the other side waits to send. -> Offered."""

    batch: Text
    epoch: int


@message("offered")
class Offered(StrictStruct, frozen=True, kw_only=True):
    """The other side is waiting to send ``nbytes`` (whole batch) under this label."""

    version: int | Text | None
    nbytes: int


@message("close_batch")
class CloseBatch(StrictStruct, frozen=True, kw_only=True):
    """This worker is done with the batch. -> Ok.

    ``why``: it cannot take part although the batch stands, so nobody can transfer it; all others have been told when
    the answer comes, but for agents that do not answer.
    """

    batch: Text
    epoch: int
    why: Text = ""


@message("let_go")
class LetGo(StrictStruct, frozen=True, kw_only=True):
    """Close those of this worker's ``segments`` that no registration here uses. -> Released.

    ``all``: this worker's last request; the answer comes once everything is closed.
    """

    all: bool
    segments: Items[Text] = ()


@message("released")
class Released(StrictStruct, frozen=True, kw_only=True):
    """The ``segments`` are not known any more, and unmapped once no transfer runs."""

    segments: Items[Text]


@message("get_status")
class GetStatus(StrictStruct, frozen=True, kw_only=True):
    """-> Status."""


@message("status")
class Status(StrictStruct, frozen=True, kw_only=True):
    """``report`` is what ``etha status --json`` prints."""

    report: JsonObject


#: Events that one request may ask for.
MAX_EVENTS = 1000


@message("get_events")
class GetEvents(StrictStruct, frozen=True, kw_only=True):
    """The last ``count`` events of the namespace that came after the one with id ``after`` ("": all). -> Events."""

    after: Annotated[str, Meta(max_length=100)] = ""
    count: int = 100


@message("events")
class Events(StrictStruct, frozen=True, kw_only=True):
    """Oldest first; each has its ``id``, its ``kind``, and what fits of pair, side, rank, batch, reason, text."""

    events: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_EVENTS)]
