"""What an engine says when it takes no version, in words that the trainer's side knows it by."""

from __future__ import annotations

#: What an engine says whose live parameters, which it has registered, are in other memory since.
MOVED = "registered parameters of the engine are in other memory now"
#: What an engine says that has never been told of a trainer.
STRANGER = "has met no trainer"
