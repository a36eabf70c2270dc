"""What agents say to each other around transfers; pure. The scope is a pair's epoch, or one of its batches.

Meet  -->  I am in this epoch; find this token in my memory if you can
<--  Met   I am in this epoch, too, and I can (or cannot) read your host's processes
Exhibits   where a worker of mine has its tensors, for you to copy from
AskTokens, GiveTokens: tokens that open data connections
Relay      what one agent says to another through a hub, because the two have no link
LostPeer   a hub tells everybody of an epoch that it has lost one of its agents
Forsaken   a worker of mine cannot take part in the batch after all   -->   Noted, once my workers know
AskRecords, TellRecords: lines of the other agent's files, for `etha events`
HeldBase: what a worker of mine has, before it receives the next version of a publication
Copied, Sums: how far a copy is, and checksums of what was copied or sent, for verification
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from etha.bus.schema import Blob, Items, StrictStruct, Text
from etha.memory.handles import TensorHandle
from etha.peer.messages import message

#: Most data connections that are asked for at once.
MAX_TOKENS = 64
#: Most tensors in one Exhibits, about 1.5 MB.
MAX_TENSORS = 8192
#: Most checksums in one Sums, a megabyte.
SUMS_PER_MESSAGE = 1 << 17


@message("meet")
class Meet(StrictStruct, frozen=True, kw_only=True):
    """Process ``pid``, started at tick ``started``, has ``token`` at ``address``: see ``transport.copy.host.Claim``.

    ``certificate`` is the SHA-256 of the one that its data port shows; b"": data connections are not encrypted.
    """

    pid: int
    started: int
    address: int
    token: Annotated[bytes, Meta(max_length=256)]
    certificate: Annotated[bytes, Meta(max_length=32)] = b""


@message("met")
class Met(StrictStruct, frozen=True, kw_only=True):
    """The answer to Meet: the sender is in this epoch, too. ``reads``: it found the token and echoed it."""

    reads: bool


class ShownSegment(StrictStruct, frozen=True, kw_only=True):
    """A mapped segment of a worker: see ``transport.copy.host.SegmentClaim``."""

    id: Annotated[str, Meta(max_length=64)]
    nbytes: int
    device: int = 0
    inode: int = 0
    gpu: Annotated[str, Meta(max_length=64)] = ""
    handle: Annotated[str, Meta(max_length=128)] = ""


@message("exhibits")
class Exhibits(StrictStruct, frozen=True, kw_only=True):
    """Tensors of rank ``rank`` of ``side``, whose worker is process ``pid``. ``last`` of all ranks of the sender.

    ``pid`` 0: this rank's worker cannot be read, so its data must be sent. A rank may come in several parts.
    ``snapshot``: where this one rank keeps its snapshot, sent when it takes the first one; ``last`` of its parts.
    """

    side: Annotated[str, Meta(max_length=100)]
    rank: int
    pid: int
    started: int
    segments: Items[ShownSegment]
    names: Annotated[tuple[Text, ...], Meta(max_length=MAX_TENSORS)]
    handles: Annotated[tuple[TensorHandle, ...], Meta(max_length=MAX_TENSORS)]
    last: bool
    snapshot: bool = False


@message("relay")
class Relay(StrictStruct, frozen=True, kw_only=True):
    """``message`` is one of ``origin`` for ``to``, as on a link between the two. The scope is their epoch."""

    origin: Text
    to: Text
    message: Annotated[bytes, Meta(max_length=1 << 23)]


@message("lost_peer")
class LostPeer(StrictStruct, frozen=True, kw_only=True):
    """I have lost the link to ``agent``, who is in this epoch; ``text`` says why."""

    agent: Text
    text: Annotated[str, Meta(max_length=4096)]


@message("ask_tokens")
class AskTokens(StrictStruct, frozen=True, kw_only=True):
    """Give me ``count`` tokens for your data port. ``request`` comes back with them."""

    request: int
    count: int


@message("give_tokens")
class GiveTokens(StrictStruct, frozen=True, kw_only=True):
    request: int
    tokens: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TOKENS)]


@message("copied")
class Copied(StrictStruct, frozen=True, kw_only=True):
    """The share (0.0 to 1.0) that is done of my part in transfer ``seq``, which copies from your workers, too."""

    seq: int
    share: float


@message("sums")
class Sums(StrictStruct, frozen=True, kw_only=True):
    """Checksums ``first``, first + 1, ... of the chunks that I gave you in transfer ``seq``, 8 bytes each.

    They are little-endian, in the order of ``transport.verify.chunks``. Many checksums take several messages.
    """

    seq: int
    first: int
    sums: Annotated[bytes, Meta(max_length=8 * SUMS_PER_MESSAGE)]


@message("held_base")
class HeldBase(StrictStruct, frozen=True, kw_only=True):
    """In the hop of claim ``claim``, target rank ``rank`` of mine holds version ``seq`` whole: you may send it the
    difference."""

    claim: int
    rank: int
    seq: int


@message("held_part")
class HeldPart(StrictStruct, frozen=True, kw_only=True):
    """In the hop of claim ``claim``: an earlier hop has brought a part of the version to my targets; ask which."""

    claim: int


@message("unique_id")
class UniqueId(StrictStruct, frozen=True, kw_only=True):
    """The id of the NCCL communicator to use after failed transfer ``edition``, from the agent that makes the ids."""

    edition: int
    id: Annotated[bytes, Meta(max_length=128)]


@message("ask_missing")
class AskMissing(StrictStruct, frozen=True, kw_only=True):
    """Who is not ready for a transfer from side ``source``, which you coordinate?"""

    request: int
    source: Annotated[str, Meta(max_length=100)]


@message("tell_missing")
class TellMissing(StrictStruct, frozen=True, kw_only=True):
    """The (side, rank) of those whose agent has not said READY as this direction needs it."""

    request: int
    missing: Items[tuple[Text, int]]


@message("forsaken")
class Forsaken(StrictStruct, frozen=True, kw_only=True):
    """A worker of mine cannot take part in this batch, which is registered; ``text`` says who and why. -> Noted.

    ``closed``: it has closed its handle. Then the others keep theirs until they close them, and no transfer begins.
    """

    request: int
    text: Annotated[str, Meta(max_length=4096)]
    closed: bool = False


@message("noted")
class Noted(StrictStruct, frozen=True, kw_only=True):
    """The answer to Forsaken: the registration is over here, and my workers will learn this before anything else."""

    request: int


@message("ask_records")
class AskRecords(StrictStruct, frozen=True, kw_only=True):
    """What do the files of your directory say since ``since`` (seconds since 1970)? ``failed``: failures only."""

    request: int
    since: float
    failed: bool = False


@message("tell_records")
class TellRecords(StrictStruct, frozen=True, kw_only=True):
    """Lines of JSON, oldest first. ``left_out``: how many there was no room for, what went well and is old first."""

    request: int
    lines: Annotated[bytes, Meta(max_length=1 << 22)]
    left_out: int = 0


Introduction = (
    Meet
    | Met
    | Exhibits
    | Forsaken
    | Noted
    | AskTokens
    | GiveTokens
    | Copied
    | Sums
    | HeldBase
    | HeldPart
    | UniqueId
    | AskMissing
    | TellMissing
    | AskRecords
    | TellRecords
    | Relay
    | LostPeer
)
