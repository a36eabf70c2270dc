"""Texts by which an engine refuses a version, and by which the trainer's side recognizes the reason."""

from __future__ import annotations

#: The engine's registered live parameters have other memory now.
MOVED = "registered parameters of the engine are in other memory now"
#: The engine has not been told to meet a trainer.
STRANGER = "has met no trainer"
#: Experts change their places while the engine computes (``enable_eplb``).
REBALANCED = (
    "this engine moves its experts from worker to worker while it computes (--enable-eplb), and its loaders fill the "
    "places that they had first: start it without that option"
)
