"""Publications on disk: a directory of safetensors as the first holder, and a subscriber that writes checkpoints.

``etha publish NAME DIR`` does the first. What files look like is in ``checkpoint_index`` and ``checkpoint_files``.
"""

from __future__ import annotations
