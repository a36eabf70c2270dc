"""Publications on disk: a subscriber that writes checkpoints, and a directory of safetensors as the first holder.

``etha publish NAME DIR`` does the latter. What files look like is in ``checkpoint_index`` and ``checkpoint_files``.
"""

from __future__ import annotations

from etha.publishing.checkpointer import AsyncCheckpointer, Checkpoint, Checkpointer

__all__ = ["AsyncCheckpointer", "Checkpoint", "Checkpointer"]
