"""What the agents of a batch say to each other while they agree on a transfer.

    participant -> coordinator   Ready Unready Booked Recall Done Failed Committed Declined
    coordinator -> participant   Offer Stood Refused Book Unbook Go Abort Commit
    participant -> participant   Question Answer (their coordinator is lost)

The coordinator of a direction is the agent of source rank 0. Every message belongs to one batch
generation of one pair epoch; the link carries that beside it. Order on a link is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from etha.errors import EthaError

T = TypeVar("T")

Verb = Literal["send", "recv"]
Version = int | str | None
#: Whose booking comes first, the smaller the sooner: (start in ns, coordinator's agent, batch).
Ticket = tuple[int, str, str]
#: What an agent says of a transfer: its end, or that it will take no COMMIT any more.
Known = Literal["committed", "aborted", "fenced"]

#: Message class -> the name of its operation, as it travels.
OPS: dict[type, str] = {}


def message(op: str) -> Callable[[type[T]], type[T]]:
    """Give the decorated dataclass the operation ``op``, which travels; the class can be renamed, ``op`` cannot."""

    def register(cls: type[T]) -> type[T]:
        if op in OPS.values():
            raise TypeError(f"operation {op!r} belongs to another message already")
        OPS[cls] = op
        return cls

    return register


@message("ready")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """All of my ranks of ``side`` wait with ``verb``; ``digest`` is the plan's in that direction.

    ``edition`` names the snapshot that they send, "" what their tensors hold; only equal ones go together.
    ``lane``: what this needs of me was free and is booked already, as young as can be; see ``held_number``.
    """

    side: str
    verb: Verb
    attempt: int
    version: Version
    digest: str
    edition: str = ""
    lane: bool = False

    @property
    def held_number(self) -> int:
        """What the booking that comes with READY is called: below all that a coordinator gives."""
        return -1 - 2 * self.attempt - (self.verb == "send")


@message("unready")
@dataclass(frozen=True, slots=True, kw_only=True)
class Unready:
    """Take READY ``attempt`` of ``side`` back; answered by Stood, or overtaken by Go."""

    side: str
    attempt: int


@message("stood")
@dataclass(frozen=True, slots=True, kw_only=True)
class Stood:
    """The withdrawal of ``attempt`` stands; ``missing`` are the ranks that were not ready, by side."""

    side: str
    attempt: int
    missing: tuple[tuple[str, int], ...]


@message("refused")
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The coordinator cannot let these calls meet (both sides send, labels or plans disagree)."""

    side: str
    attempt: int
    error: EthaError


@message("offer")
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All source ranks of ``side`` wait to send (``standing``), or no longer do."""

    side: str
    standing: bool
    version: Version


@message("book")
@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """All of the direction from ``side`` are ready: book what it needs of you. ``number`` is never used twice."""

    side: str
    number: int
    ticket: Ticket


@message("booked")
@dataclass(frozen=True, slots=True, kw_only=True)
class Booked:
    """It is booked until Go and the end of its transfer, or Unbook."""

    side: str
    number: int


@message("recall")
@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """An older ticket wants what is booked here: give it back, unless you have said GO."""

    side: str
    number: int


@message("unbook")
@dataclass(frozen=True, slots=True, kw_only=True)
class Unbook:
    """I want what is booked under ``number`` no longer."""

    side: str
    number: int


@message("go")
@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Transfer ``seq`` from ``side``: take each rank's oldest waiting call and move.

    ``snapshot``: out of the snapshots that the source ranks have taken, not out of their tensors.
    ``attempts`` names the READYs it consumes, (agent, side, attempt) each, so that the other
    direction's coordinator can forget just these.
    """

    seq: int
    side: str
    version: Version
    snapshot: bool = False
    attempts: tuple[tuple[str, str, int], ...]


@message("done")
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """My part of ``seq`` is moved: my vote to commit."""

    seq: int


@message("failed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """My part of ``seq`` cannot be finished, or one of my workers wants it ended."""

    seq: int
    cause: EthaError


@message("abort")
@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """``seq`` ends without a result for anybody; ``cause`` is the first one."""

    seq: int
    cause: EthaError


@message("commit")
@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Everybody's part of ``seq`` is done: the result stands."""

    seq: int


@message("committed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """I know that ``seq`` is committed."""

    seq: int


@message("declined")
@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """I take no COMMIT of ``seq``, now or later: survivors have asked, or it has ended here."""

    seq: int
    cause: EthaError


@message("question")
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """I am fenced: I lost the coordinator of ``seq`` after my vote, or was asked this. What do you know?"""

    seq: int


@message("answer")
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What I know of ``seq``; "fenced": I have voted, know no more, and take no COMMIT from now on."""

    seq: int
    verdict: Known


Message = (
    Ready
    | Unready
    | Stood
    | Refused
    | Offer
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
    | Answer
)
