"""What the agents of a batch say to each other while they agree on a transfer.

    participant -> coordinator   Ready Unready Booked Recall Done Failed Committed Declined
    coordinator -> participant   PeerOffer WithdrawAcknowledged Refused Book Unbook Go Abort Commit
    participant -> participant   Question VerdictAnswer (their coordinator is lost)

The coordinator of a direction is the agent of source rank 0. Every message belongs to one batch generation of one pair
epoch; the link carries these beside it. A link keeps the order of messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from etha.bus.schema import Items, StrictStruct, Text
from etha.errors import EthaError

T = TypeVar("T")

Verb = Literal["send", "recv"]
Version = int | Text | None
#: Decides whose booking comes first: the smaller ticket. (start in ns, coordinator's agent, batch).
Ticket = tuple[int, Text, Text]
#: What an agent says of a transfer: its end, or that it will take no COMMIT any more.
Known = Literal["committed", "aborted", "fenced"]

#: Message class -> the name of its operation on the wire.
OPS: dict[type, str] = {}


def message(op: str) -> Callable[[type[T]], type[T]]:
    """Give the decorated ``StrictStruct`` the wire operation ``op``, which stays when the class is renamed."""

    def register(cls: type[T]) -> type[T]:
        if not issubclass(cls, StrictStruct):
            raise TypeError(f"{cls.__name__} is no StrictStruct: it would take fields that it does not have")
        if op in OPS.values():
            raise TypeError(f"operation {op!r} belongs to another message already")
        OPS[cls] = op
        return cls

    return register


@message("ready")
class Ready(StrictStruct, frozen=True, kw_only=True):
    """All of my ranks of ``side`` wait with ``verb``. ``digest`` is that of the plan in that direction.

    ``edition`` names the snapshot that they send, "" for their tensors; only equal editions go together. ``lane``: what
    this transfer needs of me was free, and is booked already with the youngest ticket (see ``held_number``).
    ``expects``: my ranks receive only what is sent under this version.
    """

    side: Text
    verb: Verb
    attempt: int
    version: Version
    digest: Text
    edition: Text = ""
    lane: bool = False
    expects: int | None = None

    @property
    def held_number(self) -> int:
        """The number of the booking that comes with READY, below all numbers that a coordinator gives."""
        return -1 - 2 * self.attempt - (self.verb == "send")


@message("unready")
class Unready(StrictStruct, frozen=True, kw_only=True):
    """Take back READY ``attempt`` of ``side``. Answered by WithdrawAcknowledged, or overtaken by Go."""

    side: Text
    attempt: int


@message("stood")
class WithdrawAcknowledged(StrictStruct, frozen=True, kw_only=True):
    """``attempt`` is withdrawn; ``missing`` are the ranks that were not ready, by side."""

    side: Text
    attempt: int
    missing: Items[tuple[Text, int]]


@message("refused")
class Refused(StrictStruct, frozen=True, kw_only=True):
    """The coordinator cannot let these calls meet (both sides send, or labels or plans disagree)."""

    side: Text
    attempt: int
    error: EthaError


@message("offer")
class PeerOffer(StrictStruct, frozen=True, kw_only=True):
    """All source ranks of ``side`` wait to send (``standing``), or no longer do."""

    side: Text
    standing: bool
    version: Version


@message("book")
class Book(StrictStruct, frozen=True, kw_only=True):
    """All ranks of the direction from ``side`` are ready: book what it needs of you. ``number`` is never used twice."""

    side: Text
    number: int
    ticket: Ticket


@message("booked")
class Booked(StrictStruct, frozen=True, kw_only=True):
    """It is booked until Go and the end of its transfer, or until Unbook."""

    side: Text
    number: int


@message("recall")
class Recall(StrictStruct, frozen=True, kw_only=True):
    """An older ticket wants what is booked here: give it back, unless you have said GO."""

    side: Text
    number: int


@message("unbook")
class Unbook(StrictStruct, frozen=True, kw_only=True):
    """I no longer want what is booked under ``number``."""

    side: Text
    number: int


@message("go")
class Go(StrictStruct, frozen=True, kw_only=True):
    """Transfer ``seq`` from ``side``: take each rank's oldest waiting call and move.

    ``snapshot``: read the snapshots that the source ranks have taken instead of their tensors. ``attempts`` names the
    READYs that it consumes, (agent, side, attempt) each, so that the other direction's coordinator can forget exactly
    these; to agents that coordinate nothing it is empty. ``booking``: seconds that it took to book.
    """

    seq: int
    side: Text
    version: Version
    snapshot: bool = False
    booking: float = 0.0
    attempts: Items[tuple[Text, Text, int]]


@message("done")
class Done(StrictStruct, frozen=True, kw_only=True):
    """My part of ``seq`` has moved: my vote to commit."""

    seq: int


@message("failed")
class Failed(StrictStruct, frozen=True, kw_only=True):
    """My part of ``seq`` cannot be finished, or one of my workers wants to end it."""

    seq: int
    cause: EthaError


@message("abort")
class Abort(StrictStruct, frozen=True, kw_only=True):
    """``seq`` ends without a result for anybody. ``cause`` is the first one."""

    seq: int
    cause: EthaError


@message("commit")
class Commit(StrictStruct, frozen=True, kw_only=True):
    """Everybody's part of ``seq`` is done: the result is valid."""

    seq: int


@message("committed")
class Committed(StrictStruct, frozen=True, kw_only=True):
    """I know that ``seq`` is committed."""

    seq: int


@message("declined")
class Declined(StrictStruct, frozen=True, kw_only=True):
    """I take no COMMIT of ``seq``, now or later, because survivors have asked, or because it has ended here."""

    seq: int
    cause: EthaError


@message("question")
class Question(StrictStruct, frozen=True, kw_only=True):
    """I am fenced: I lost the coordinator of ``seq`` after my vote, or was asked this. What do you know?"""

    seq: int


@message("answer")
class VerdictAnswer(StrictStruct, frozen=True, kw_only=True):
    """What I know of ``seq``. "fenced": I have voted, know nothing more, and take no COMMIT from now on."""

    seq: int
    verdict: Known


Message = (
    Ready
    | Unready
    | WithdrawAcknowledged
    | Refused
    | PeerOffer
    | Book
    | Booked
    | Recall
    | Unbook
    | Go
    | Done
    | Failed
    | Abort
    | Commit
    | Committed
    | Declined
    | Question
    | VerdictAnswer
)
