"""Prints how large each distribution of this environment is, the largest first; pip apart."""

from __future__ import annotations

from importlib.metadata import Distribution, distributions
from pathlib import Path


def size(found: Distribution) -> int:
    """Bytes of the files that were installed, without those that Python compiles."""
    files = [Path(str(one.locate())) for one in found.files or () if one.suffix != ".pyc"]
    return sum(path.stat().st_size for path in files if path.is_file())


if __name__ == "__main__":
    sizes = {
        one.metadata["Name"]: size(one) for one in distributions() if one.metadata["Name"] not in ("pip", "setuptools")
    }
    for name, nbytes in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{nbytes / 1e6:8.1f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB  in all, {len(sizes)} distributions")
