"""The messages between a worker and its agent, one struct each.

    worker -> agent   Probe InitPair Register AttachShadows AttachSnapshot Supersede Confirm Transfer
                      WaitOffer CloseBatch GetStatus GetEvents GetRecords GetPicture LetGo
                      EnterGroup DepartGroup GroupProgress PutValues GetValues AddValue SwapValue
                      Publish BeginPut FinishPut WaitHeld WaitHolders GetSubscribers ClosePublication
                      DescribePublication Subscribe ClaimVersion EndHop CloseSubscription LeavePair
    worker -> agent, unasked   Pulled Streamed
    agent -> worker   the reply that each docstring names
    agent -> worker, unasked   PairLost BatchLost Progress Pull MoveStream GroupChanging AskGroupProgress Announced
                      ClaimLost

``handshake`` has Hello and Welcome; ``codec`` turns messages into bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from etha.bus.codec import make_decoders, message
from etha.bus.schema import MAX_ITEMS, Blob, Items, JsonObject, StrictStruct, Text
from etha.memory.handles import TensorHandle
from etha.phases import NO_PHASES, Phases

#: Tensors one worker may register in one batch.
MAX_TENSORS = 200_000
#: Bytes of a CUDA event's IPC handle.
MARK = 64
#: How many chunks are compared at both ends before a transfer is committed.
Verify = Literal["sample", "full"]

Verb = Literal["send", "recv"]


@message("ok")
class Ok(StrictStruct, frozen=True, kw_only=True):
    """A reply without content: the request was carried out."""


@message("probe")
class Probe(StrictStruct, frozen=True, kw_only=True):
    """Can the agent read and write this worker's own memory at ``address``? -> Probed."""

    address: int
    token: Blob


@message("probed")
class Probed(StrictStruct, frozen=True, kw_only=True):
    """``reaches``: whether the agent read the token and echoed it; otherwise ``text`` says why not."""

    reaches: bool
    text: Text


@message("init_pair")
class InitPair(StrictStruct, frozen=True, kw_only=True):
    """This worker is ``rank`` of ``side``; wait until both sides are complete. -> PairFormed.

    ``run``: torchrun's run id, if ``launch`` is made of it. ``takeover``: replace a launch even if it lives.
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
    """Both sides are complete. ``epoch`` counts how often this pair was formed, from 1."""

    epoch: int
    local_world_size: int
    remote_world_size: int


@message("pair_lost")
class PairLost(StrictStruct, frozen=True, kw_only=True):
    """Push: the pair's ``epoch`` is over; ``reason`` and ``culprits`` as in PeerLostError."""

    pair: Text
    epoch: int
    reason: Text
    text: Text
    culprits: Items[tuple[Text, int]] = ()


@message("batch_lost")
class BatchLost(StrictStruct, frozen=True, kw_only=True):
    """Push: registration ``generation`` of a batch is over for all ranks, but its pair is not. ``text`` says why.

    ``pair`` and ``epoch`` are those of the batch's primary pair. The push comes before every answer that has the same
    cause.
    """

    pair: Text
    epoch: int
    batch: Text
    generation: int
    reason: Text
    text: Text


class Entry(StrictStruct, frozen=True, kw_only=True, gc=False):
    """One registered tensor.

    ``shape`` is the global shape, None if it follows only from all ranks together. ``layout`` indexes
    ``Register.layouts``, ``pair`` indexes ``Register.pairs``. ``of``: the tensor of which this entry is one more part,
    because a region may be a list of products. ``tied``: the first entry with the same elements of the same memory. The
    collector does not track entries, as it does not track handles.
    """

    name: Text
    pair: int
    layout: int
    shape: Items[int] | None
    handle: TensorHandle
    of: Text | None = None
    tied: Text | None = None


class Refusal(StrictStruct, frozen=True, kw_only=True):
    """A reason against a batch that the worker itself found. A ``target_only`` one matters only if the worker
    receives."""

    code: Text
    name: Text
    text: Text
    target_only: bool


@message("register")
class Register(StrictStruct, frozen=True, kw_only=True):
    """Register a batch, collectively over both sides. -> Registered.

    ``seq`` is the highest seq that this client has seen for the batch, so that a number from an agent that died is not
    used again. ``staged``: why some tensors cannot be shared directly and are copied through memory that can, or "".
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
    """The batch is registered. ``shadows``: this worker must receive into shadows (and send AttachShadows first).

    ``generation`` numbers the registrations of the batch and is equal on all ranks. ``send`` and ``recv``: which verbs
    can work. ``receives``: some rank has asked for the direction in which this one receives. ``summary``: a summary of
    the plan.
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
    """The memory into which this worker receives instead of its live tensors, by entry. -> Ok."""

    batch: Text
    epoch: int
    handles: Annotated[tuple[TensorHandle, ...], Meta(max_length=MAX_TENSORS)]


@message("exchange_segments")
class ExchangeSegments(StrictStruct, frozen=True, kw_only=True):
    """This worker has exchanged the segments of tensors with those of their shadows, pair by pair: exchange what this
    agent has mapped, too. -> Ok; or an error, and nothing has changed."""

    batch: Text
    epoch: int
    segments: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=MAX_TENSORS)]


@message("attach_snapshot")
class AttachSnapshot(StrictStruct, frozen=True, kw_only=True):
    """The memory in which this worker keeps a snapshot, by entry; sent once for each registration. -> Ok."""

    batch: Text
    epoch: int
    handles: Annotated[tuple[TensorHandle, ...], Meta(max_length=MAX_TENSORS)]


@message("supersede")
class Supersede(StrictStruct, frozen=True, kw_only=True):
    """Withdraw the snapshot that this worker offers, if it still does, because it takes a newer one. -> Ok."""

    batch: Text
    epoch: int


@message("confirm")
class Confirm(StrictStruct, frozen=True, kw_only=True):
    """Are the batches that this worker holds still registered? -> Ok, after PairLost and BatchLost for those that are
    not."""


@message("transfer")
class Transfer(StrictStruct, frozen=True, kw_only=True):
    """Wait for GO and move. -> Moved. ``slot`` is the index of the call's slot in the revocation page.

    ``edition`` names the snapshot that is sent and is equal on all ranks of the side; "" sends the tensors themselves.
    ``mark``: IPC handle of the CUDA event that must come before the call; b"" for none. ``trace_id``: that of the
    call's OpenTelemetry span, for the agent's trace; "" for none. ``blocks``: the caller's thread is blocked, so the
    worker's processors are free to move its bytes themselves. ``expects``: a recv takes only what is sent under this
    version.
    """

    batch: Text
    epoch: int
    verb: Verb
    version: int | Text | None
    slot: int
    progress: bool
    edition: Text = ""
    mark: Annotated[bytes, Meta(max_length=MARK)] = b""
    trace_id: Annotated[str, Meta(max_length=32)] = ""
    blocks: bool = False
    expects: int | None = None


@message("pull")
class Pull(StrictStruct, frozen=True, kw_only=True):
    """Push under the id of a ``recv``: copy what a table says into this worker's tensors, on ``threads`` threads.

    The worker says Pulled until the last of them is ``over``. ``table`` numbers the table within the
    registration; its content (``memory.pull.PullTable``: ``processes`` and ``blobs``) comes with the first push only.
    """

    seq: int
    table: int
    threads: int
    processes: Items[tuple[int, int]] = ()
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=6)] = ()


@message("pulled")
class Pulled(StrictStruct, frozen=True, kw_only=True):
    """How far this worker has come with a Pull: ``done`` bytes. It is not answered.

    ``over``: nothing is being copied any more; everything was copied if ``kind`` is "", otherwise ``kind``, ``text``,
    ``pid`` and ``address`` are those of a ReachError.
    """

    batch: Text
    epoch: int
    seq: int
    done: int
    over: bool = False
    kind: Text = ""
    text: Text = ""
    pid: int = 0
    address: int = 0


@message("move_stream")
class MoveStream(StrictStruct, frozen=True, kw_only=True):
    """Push under the id of a transfer, with descriptors: send rows of this worker's tensors over a stream, or receive
    into them.

    The first descriptor is the agent's socket, connected and at the right place. The worker says Streamed until
    the last of them is ``over``. ``table`` numbers the rows within the registration; a second
    descriptor, of a memfd, brings them the first time (``memory.worker_stream.StreamRows``).
    """

    seq: int
    table: int
    sends: bool


@message("streamed")
class Streamed(StrictStruct, frozen=True, kw_only=True):
    """How far this worker has come with a MoveStream: ``done`` bytes. It is not answered.

    ``over``: it does not use the socket any more, and has moved everything if ``kind`` is "". Otherwise ``kind`` is
    "lost" for a connection that has failed with errno ``code`` (-1: it was closed), or that of a ReachError; "access":
    it has moved nothing, and the agent has to.
    """

    batch: Text
    epoch: int
    seq: int
    table: int
    done: int
    over: bool = False
    kind: Text = ""
    text: Text = ""
    code: int = 0


@message("moved")
class Moved(StrictStruct, frozen=True, kw_only=True):
    """A committed transfer. ``nbytes``: this worker's payload. ``seconds``: from GO to COMMIT.

    ``phases``: those of the agent; the worker adds its own. ``wired``: bytes that have come over streams, for all
    workers of this agent.
    """

    seq: int
    version: int | Text | None
    nbytes: int
    seconds: float
    peers: Items[tuple[Text, int]]
    peak_staging: int
    phases: Phases = NO_PHASES
    wired: int = 0


@message("progress")
class Progress(StrictStruct, frozen=True, kw_only=True):
    """Push under a transfer's id: bytes of this worker that are done, and their total."""

    done: int
    total: int


@message("wait_offer")
class WaitOffer(StrictStruct, frozen=True, kw_only=True):
    """Wait until the other side waits to send. -> Offered."""

    batch: Text
    epoch: int


@message("offered")
class Offered(StrictStruct, frozen=True, kw_only=True):
    """The other side waits to send ``nbytes`` (the whole batch) under this label."""

    version: int | Text | None
    nbytes: int


@message("close_batch")
class CloseBatch(StrictStruct, frozen=True, kw_only=True):
    """This worker is done with the batch. -> Ok.

    ``why``: it cannot take part although the batch is registered, so nobody can transfer it. When the answer comes, all
    other agents that answer have been informed.
    """

    batch: Text
    epoch: int
    why: Text = ""


@message("let_go")
class LetGo(StrictStruct, frozen=True, kw_only=True):
    """Close those of this worker's ``segments`` that no registration here uses. -> Released.

    ``all``: this is the worker's last request, which is answered once everything is closed.
    """

    all: bool
    segments: Items[Text] = ()


@message("released")
class Released(StrictStruct, frozen=True, kw_only=True):
    """The agent has forgotten the ``segments``, and unmaps each once no transfer uses it."""

    segments: Items[Text]


@message("enter_group")
class EnterGroup(StrictStruct, frozen=True, kw_only=True):
    """This worker is ``rank`` of a replica of an elastic group; wait until it is in the next epoch. -> GroupFormed.

    Without ``wants`` it only says that it is there, and is answered at once, by GroupNoted. ``epoch`` is the last one
    it was admitted to, ``last`` the last one whose state it has. ``launch``: None if this life of the replica has no
    name yet. ``patience`` and ``grace``: seconds that an epoch waits for a member whose agent answers, and for others.
    ``suspects``: replicas that others have waited for in vain; ``unmet``: those that it could not reach. ``asked`` is a
    token of the call.
    """

    group: Text
    replica: Text
    rank: int
    world: int
    wants: bool
    launch: Text | None = None
    epoch: int = 0
    last: int = 0
    step: int = 0
    committed: int = 0
    least: int = 1
    patience: float = 60.0
    grace: float = 3.0
    suspects: Items[Text] = ()
    unmet: Items[Text] = ()
    asked: Text = ""


class GroupSeat(StrictStruct, frozen=True, kw_only=True):
    """One replica of an epoch. ``counts``: it is as far as the first, so it takes part in the steps.

    ``last``: the last epoch whose state it has.
    """

    replica: Text
    last: int
    step: int
    committed: int
    counts: bool


@message("group_formed")
class GroupFormed(StrictStruct, frozen=True, kw_only=True):
    """The epoch to which a worker is admitted; ``seats`` in the order of their ranks."""

    epoch: int
    launch: Text
    seats: Items[GroupSeat]


@message("group_noted")
class GroupNoted(StrictStruct, frozen=True, kw_only=True):
    """The member is in ``epoch``; ``changing`` if that is over, or somebody waits for the next one."""

    epoch: int
    launch: Text
    changing: bool


@message("group_changing")
class GroupChanging(StrictStruct, frozen=True, kw_only=True):
    """Push: somebody waits for the epoch after ``epoch``, or an epoch has formed without this worker.

    ``broken``: a replica of that epoch has left or died, so nobody can go on in it.
    """

    group: Text
    epoch: int
    broken: bool


@message("ask_group_progress")
class AskGroupProgress(StrictStruct, frozen=True, kw_only=True):
    """Push: somebody looks at the status. The worker says with GroupProgress how far it is."""

    group: Text


@message("group_progress")
class GroupProgress(StrictStruct, frozen=True, kw_only=True):
    """How many steps this worker has committed, as a member of ``epoch``. -> Ok."""

    group: Text
    replica: Text
    rank: int
    epoch: int
    step: int


@message("depart_group")
class DepartGroup(StrictStruct, frozen=True, kw_only=True):
    """This worker leaves a group, and its replica with it. -> Ok."""

    group: Text
    replica: Text
    rank: int


@message("put_values")
class PutValues(StrictStruct, frozen=True, kw_only=True):
    """Write values for the other members of an epoch. -> Ok."""

    group: Text
    epoch: int
    values: Annotated[dict[Text, Blob], Meta(max_length=1000)]


@message("get_values")
class GetValues(StrictStruct, frozen=True, kw_only=True):
    """Values of an epoch; ``wait`` until all are there. -> Values, without those that are not."""

    group: Text
    epoch: int
    names: Annotated[tuple[Text, ...], Meta(max_length=1000)]
    wait: bool = True


@message("values")
class Values(StrictStruct, frozen=True, kw_only=True):
    """Values of an epoch, by name."""

    values: Annotated[dict[Text, Blob], Meta(max_length=1000)]


@message("add_value")
class AddValue(StrictStruct, frozen=True, kw_only=True):
    """Add ``amount`` to a number of an epoch, which begins with 0. -> Values, with the sum as decimal text."""

    group: Text
    epoch: int
    name: Text
    amount: int


@message("swap_value")
class SwapValue(StrictStruct, frozen=True, kw_only=True):
    """Set a value of an epoch to ``desired`` if it is ``expected`` (b"": if there is none). -> Values, after that."""

    group: Text
    epoch: int
    name: Text
    expected: Blob
    desired: Blob


Handles = Annotated[tuple[TensorHandle, ...], Meta(max_length=MAX_TENSORS)]


@message("publish")
class Publish(StrictStruct, frozen=True, kw_only=True):
    """This worker is ``rank`` of a publisher; wait until all its ranks have come. -> Published.

    ``slots``: for each slot, where the tensors lie, by entry; entries name the first. The segments were given to the
    agent before.
    """

    publication: Text
    publisher: Text
    world_size: int
    rank: int
    launch: Text | None
    layouts: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_TENSORS)]
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_TENSORS)]
    refusals: Annotated[tuple[Refusal, ...], Meta(max_length=MAX_TENSORS)]
    slots: Annotated[tuple[Handles, ...], Meta(max_length=16)]
    fan_out: int | None = None
    #: Bytes per second that the agent may send of it; above 0.
    max_rate: float | None = None
    #: torchrun's run id, if ``launch`` is made of it, and whether it replaces a launch that lives; as of ``init_pair``.
    run: Text | None = None
    takeover: bool = False


@message("published")
class Published(StrictStruct, frozen=True, kw_only=True):
    """All ranks of the publisher have come, or this rank's put is done. ``seq``: that of the newest version of any
    launch, 0 if there is none; or of the version that was put."""

    seq: int


@message("begin_put")
class BeginPut(StrictStruct, frozen=True, kw_only=True):
    """Give me a slot for put number ``number`` of this launch, from 1. -> SlotGiven.

    ``grace``: seconds for which transfers of the only slot are waited for.
    """

    publication: Text
    number: int
    grace: float


@message("slot_given")
class SlotGiven(StrictStruct, frozen=True, kw_only=True):
    """Nobody reads ``slot``: copy the tensors there. The version will be ``seq``."""

    slot: int
    seq: int


@message("finish_put")
class FinishPut(StrictStruct, frozen=True, kw_only=True):
    """The tensors lie in the slot. The version is announced once all ranks have said so. -> Published, with its seq."""

    publication: Text
    number: int
    version: int | Text | None


@message("wait_held")
class WaitHeld(StrictStruct, frozen=True, kw_only=True):
    """Wait until ``count`` subscribers have received version ``seq`` or a newer one, and maybe left since. -> Ok."""

    publication: Text
    seq: int
    count: int


@message("wait_holders")
class WaitHolders(StrictStruct, frozen=True, kw_only=True):
    """Which subscribers hold version ``seq`` or a newer one? Wait until they are others than ``known``. -> Holders.

    ``left``: also those that have received it and have left since.
    """

    publication: Text
    seq: int
    known: Items[Text]
    left: bool = False


@message("holders")
class Holders(StrictStruct, frozen=True, kw_only=True):
    """Names of subscribers, in order."""

    subscribers: Items[Text]


@message("get_subscribers")
class GetSubscribers(StrictStruct, frozen=True, kw_only=True):
    """Who follows a publication? -> Subscribers."""

    publication: Text


@message("subscribers")
class Subscribers(StrictStruct, frozen=True, kw_only=True):
    """One object for each subscriber, with the fields of ``SubscriberState``."""

    subscribers: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_ITEMS)]


@message("close_publication")
class ClosePublication(StrictStruct, frozen=True, kw_only=True):
    """This worker publishes no more. -> Ok, once nobody reads its slots."""

    publication: Text


@message("describe_publication")
class DescribePublication(StrictStruct, frozen=True, kw_only=True):
    """Which tensors are published? Waits until a publisher has said it. -> PublicationDescribed."""

    publication: Text


@message("publication_described")
class PublicationDescribed(StrictStruct, frozen=True, kw_only=True):
    """One object for each tensor, in the order of their names: name, dtype without "torch.", global shape."""

    tensors: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_TENSORS)]


@message("subscribe")
class Subscribe(StrictStruct, frozen=True, kw_only=True):
    """This worker is ``rank`` of a subscriber; wait until all its ranks have come. -> Subscribed.

    ``serves``: where the tensors lie that other subscribers may be fed from, by entry; None for a side that serves
    nobody. The segments were given to the agent before.
    """

    publication: Text
    subscriber: Text
    world_size: int
    rank: int
    launch: Text | None
    layouts: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_TENSORS)]
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_TENSORS)]
    refusals: Annotated[tuple[Refusal, ...], Meta(max_length=MAX_TENSORS)]
    serves: Handles | None
    #: torchrun's run id, if ``launch`` is made of it, and whether it replaces a launch that lives; as of ``init_pair``.
    run: Text | None = None
    takeover: bool = False


@message("subscribed")
class Subscribed(StrictStruct, frozen=True, kw_only=True):
    """All ranks of the subscriber have come. ``seq``: the newest version's; 0 if there is none yet.

    ``turn``: the last one of this launch.
    """

    seq: int
    turn: int


@message("claim_version")
class ClaimVersion(StrictStruct, frozen=True, kw_only=True):
    """Collective over the subscriber's ranks: wait for a version newer than ``newer_than``, or for the one with the
    label ``version``, and for a holder that can send it now. -> VersionClaimed.

    ``turn`` numbers these requests of a subscription, equally on all ranks. What the subscriber serves is not served
    any more once the answer comes. ``avoid``: claims whose sources have just failed.
    """

    publication: Text
    subscriber: Text
    turn: int
    newer_than: int
    version: int | Text | None = None
    avoid: Items[int] = ()


@message("version_claimed")
class VersionClaimed(StrictStruct, frozen=True, kw_only=True):
    """Receive version ``seq`` from side ``source``, over ``pair`` as batch ``batch``; its label is ``version``.

    ``claim`` numbers the claims of the publication. ``turn`` is the one that it answers, which may be a later one than
    was asked for.
    """

    claim: int
    turn: int
    source: Text
    pair: Text
    batch: Text
    seq: int
    version: int | Text | None


@message("end_hop")
class EndHop(StrictStruct, frozen=True, kw_only=True):
    """A hop has ended for this rank. ``error`` is "" if the tensors hold the version. -> Ok."""

    publication: Text
    subscriber: Text
    claim: int
    error: Text


@message("close_subscription")
class CloseSubscription(StrictStruct, frozen=True, kw_only=True):
    """This worker follows the publication no more. -> Ok, once nobody reads what it serves."""

    publication: Text
    subscriber: Text


@message("announced")
class Announced(StrictStruct, frozen=True, kw_only=True):
    """Push: version ``seq`` is the newest of a publication that this worker follows."""

    publication: Text
    seq: int


@message("claim_lost")
class ClaimLost(StrictStruct, frozen=True, kw_only=True):
    """Push: the source of a claim cannot send, so nobody need wait for it any more."""

    publication: Text
    subscriber: Text
    claim: int
    text: Text


@message("leave_pair")
class LeavePair(StrictStruct, frozen=True, kw_only=True):
    """This worker gives up its rank in a pair, whose batches it has closed. -> Ok."""

    pair: Text


@message("get_status")
class GetStatus(StrictStruct, frozen=True, kw_only=True):
    """-> Status."""


@message("status")
class Status(StrictStruct, frozen=True, kw_only=True):
    """``report`` is what ``etha status --json`` prints."""

    report: JsonObject


@message("get_picture")
class GetPicture(StrictStruct, frozen=True, kw_only=True):
    """What a registered batch moves, for a picture. ``source``: the side that sends; "" as in the last transfer.
    -> Picture."""

    pair: Text
    batch: Text
    source: Text = ""


@message("picture")
class Picture(StrictStruct, frozen=True, kw_only=True):
    """``picture`` is an ``etha.picture.PlanPicture`` as plain data."""

    picture: JsonObject


#: Events that one request may ask for.
MAX_EVENTS = 1000


@message("get_events")
class GetEvents(StrictStruct, frozen=True, kw_only=True):
    """The last ``count`` events of the namespace after the one with id ``after`` ("": from the first). -> Events.

    ``wait``: answer once there is one.
    """

    after: Annotated[str, Meta(max_length=100)] = ""
    count: int = 100
    wait: bool = False


@message("events")
class Events(StrictStruct, frozen=True, kw_only=True):
    """Oldest first. Each has its ``id``, its ``kind``, and those of pair, side, rank, batch, reason, text that
    apply."""

    events: Annotated[tuple[JsonObject, ...], Meta(max_length=MAX_EVENTS)]


@message("get_records")
class GetRecords(StrictStruct, frozen=True, kw_only=True):
    """What the files of other agents say since ``since`` (seconds since 1970). -> Records.

    ``failed``: only what somebody should look at.
    """

    since: float
    failed: bool = False


@message("records")
class Records(StrictStruct, frozen=True, kw_only=True):
    """One entry for each agent that Redis knows: ``agent``, ``host``, ``device``, ``name``, and ``lines``, or ``why``
    it told nothing. The agent that answers is the first; its lines are in its files."""

    agents: Items[JsonObject]


make_decoders()
