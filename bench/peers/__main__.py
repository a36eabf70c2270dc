"""``python bench/peers`` as a program. The path begins with ``bench``, so that ``peers.nixl`` hides no ``nixl``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(import_module("peers.run").main())
