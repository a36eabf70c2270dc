"""Reads a directory of safetensors without copying it, and writes one so that it is there whole or not at all.

Nothing here knows a client. The package safetensors is imported when a file is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etha.errors import ConfigError
from etha.publishing.checkpoint_index import (
    INDEX_SUFFIX,
    SUFFIX,
    VERSION,
    place_tensors,
    read_index,
    read_version,
    some,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedCheckpoint:
    """The tensors of a directory. They lie in the mapped files, so memory is taken when their bytes are read.

    ``version``: the label that the files' metadata gives, None if they give none or not the same one.
    """

    directory: Path
    tensors: dict[str, torch.Tensor]
    files: int
    version: int | str | None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())


@contextmanager
def safetensors_errors(path: Path) -> Iterator[Any]:
    """Yields the package; ConfigError if it is not installed, or a file is not as it wants it."""
    try:
        import safetensors
    except ImportError:
        raise ConfigError(
            "checkpoints need the package safetensors: pip install 'sub-etha[safetensors]', or pip install safetensors"
        ) from None
    try:
        yield safetensors
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is no safetensors file that can be read: {error}") from None


def map_checkpoint(directory: Path) -> MappedCheckpoint:
    """Map the files of a directory. ConfigError says what is missing, or is there twice."""
    if not directory.is_dir():
        kind = "is a file" if directory.exists() else "is not there"
        raise ConfigError(f"{directory} {kind}: give a directory with safetensors files")
    there = {path.name: path for path in directory.iterdir() if path.name.endswith(SUFFIX)}
    indexes = sorted(path for path in directory.iterdir() if path.name.endswith(INDEX_SUFFIX))
    if len(indexes) > 1:
        names = some(path.name for path in indexes)
        raise ConfigError(f"{directory} has several indexes, {names}: leave the files of one checkpoint in it")
    index = None
    if indexes:
        index = read_index(str(indexes[0]), indexes[0].read_text(encoding="utf-8", errors="replace"))
        if lost := sorted(set(index.values()) - there.keys()):
            raise ConfigError(f"{indexes[0]} names files that are not there: {some(lost)}; fetch the checkpoint again")
        there = {name: there[name] for name in set(index.values())}
    if not there:
        raise ConfigError(f"{directory} has no file that ends in {SUFFIX}: save the model as safetensors")
    held: dict[str, Any] = {}
    labels = set[str]()
    for name, path in sorted(there.items()):
        with safetensors_errors(path) as safetensors:
            held[name] = safetensors.safe_open(str(path), framework="pt", device="cpu")
            labels.add((held[name].metadata() or {}).get(VERSION, ""))
    places = place_tensors(str(directory), {name: file.keys() for name, file in held.items()}, index)
    tensors = {}
    for tensor, file in sorted(places.items()):
        with safetensors_errors(there[file]):
            tensors[tensor] = held[file].get_tensor(tensor)
    version = read_version(labels.pop()) if len(labels) == 1 else None
    return MappedCheckpoint(directory=directory, tensors=tensors, files=len(there), version=version)
