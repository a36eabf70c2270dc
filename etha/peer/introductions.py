"""What agents say to each other around transfers; pure. Scopes: a pair's epoch, or one of its batches.

Meet  -->  here I am in this epoch; find this token in my memory if you can
<--  Met   I hold this epoch too, and I can (or cannot) read your host's processes
Exhibits   where a worker of mine has its tensors, for you to copy from
AskTokens, GiveTokens: what opens data connections
Forsaken   a worker of mine cannot take part in the batch after all   -->   Noted, once my workers have been told
Copied, Sums: how far a copy is, and what was copied or sent, for who verifies it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from etha.bus.schema import Bounds
from etha.memory.handles import TensorHandle
from etha.peer.messages import message

#: Data connections that are asked for at once.
MAX_TOKENS = 64
#: Tensors in one Exhibits: some 1.5 MB.
MAX_TENSORS = 8192
#: Checksums in one Sums: a megabyte.
MAX_SUMS = 1 << 17


@message("meet")
@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Process ``pid``, started at tick ``started``, has ``token`` at ``address``: see ``transport.host.Claim``.

    ``certificate``: SHA-256 of the one that its data port shows; b"": data connections are not encrypted.
    """

    pid: int
    started: int
    address: int
    token: Annotated[bytes, Bounds(max=256)]
    certificate: Annotated[bytes, Bounds(max=32)] = b""


@message("met")
@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The answer to Meet: this epoch stands here as well; ``reads``: the token was found and echoed."""

    reads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSegment:
    """A mapped segment of a worker: see ``transport.copy.host.SegmentClaim``."""

    id: Annotated[str, Bounds(max=64)]
    nbytes: int
    device: int = 0
    inode: int = 0
    gpu: Annotated[str, Bounds(max=64)] = ""
    handle: Annotated[str, Bounds(max=128)] = ""


@message("exhibits")
@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibits:
    """Tensors of ``side`` ``rank``, whose worker is process ``pid``; ``last`` of all ranks of the sender.

    ``pid`` 0: this rank's worker cannot be shown, its memory is to be sent. A rank may come in several parts.
    ``snapshot``: where this one rank sets them aside, shown when it first does; ``last`` of its parts.
    """

    side: Annotated[str, Bounds(max=100)]
    rank: int
    pid: int
    started: int
    segments: tuple[ShownSegment, ...]
    names: Annotated[tuple[str, ...], Bounds(max=MAX_TENSORS)]
    handles: Annotated[tuple[TensorHandle, ...], Bounds(max=MAX_TENSORS)]
    last: bool
    snapshot: bool = False


@message("ask_tokens")
@dataclass(frozen=True, slots=True, kw_only=True)
class AskTokens:
    """Give me ``count`` tokens for your data port; ``request`` comes back with them."""

    request: int
    count: int


@message("give_tokens")
@dataclass(frozen=True, slots=True, kw_only=True)
class GiveTokens:
    """The tokens of ``request``."""

    request: int
    tokens: Annotated[tuple[bytes, ...], Bounds(max=MAX_TOKENS)]


@message("copied")
@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Of what I do in transfer ``seq``, which copies from your workers too, this share (0.0 to 1.0) is done."""

    seq: int
    share: float


@message("sums")
@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Checksums ``first``, first + 1, ... of the chunks that I have given you in transfer ``seq``, 8 bytes each.

    Little-endian, in the order of ``transport.checks``; several messages where there are many.
    """

    seq: int
    first: int
    sums: Annotated[bytes, Bounds(max=8 * MAX_SUMS)]


@message("unique_id")
@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueId:
    """The id of the NCCL communicator that runs after failed transfer ``edition``, of the agent that makes them."""

    edition: int
    id: Annotated[bytes, Bounds(max=128)]


@message("ask_missing")
@dataclass(frozen=True, slots=True, kw_only=True)
class AskMissing:
    """Who is not ready for a transfer from side ``source``, which you coordinate?"""

    request: int
    source: Annotated[str, Bounds(max=100)]


@message("tell_missing")
@dataclass(frozen=True, slots=True, kw_only=True)
class TellMissing:
    """(side, rank) of those whose agent has not said READY as this direction needs it."""

    request: int
    missing: tuple[tuple[str, int], ...]


@message("forsaken")
@dataclass(frozen=True, slots=True, kw_only=True)
class Forsaken:
    """A worker of mine cannot take part in this batch, which stands; ``text`` says who and why. -> Noted."""

    request: int
    text: Annotated[str, Bounds(max=4096)]


@message("noted")
@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The answer to Forsaken: the registration is over here, and what was said to my workers says so first."""

    request: int


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
    | UniqueId
    | AskMissing
    | TellMissing
)
