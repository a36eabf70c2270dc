"""Reads a directory of safetensors without copying it, and writes one so that it is there whole or not at all.

Nothing here knows a client. The package safetensors is imported when a file is read or written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etha.errors import ConfigError
from etha.publishing.checkpoint_index import (
    INDEX,
    INDEX_SUFFIX,
    SUFFIX,
    VERSION,
    CheckpointName,
    file_name,
    place_tensors,
    read_index,
    read_version,
    some,
    write_index,
)

#: The link to the newest checkpoint of a directory.
LATEST = "latest"


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


def check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    """ConfigError that names the tensors whose dtype a safetensors file cannot hold."""
    with safetensors_errors(Path()):
        from safetensors.torch import save
    refused = set()
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        try:
            save({"": torch.empty(0, dtype=dtype)})
        except Exception:  # its releases have other dtypes, and refuse others by other errors
            refused.add(dtype)
    if refused:
        names = some(name for name, tensor in tensors.items() if tensor.dtype in refused)
        raise ConfigError(f"safetensors files cannot hold {', '.join(sorted(map(str, refused)))}, the dtype of {names}")


class CheckpointDirectory:
    """A directory of checkpoints, of which the newest ``keep`` stay (None: all).

    ``.seq-00000012.2`` is a checkpoint of two files that is being written: each file appears in it when it is on disk,
    and the directory gets its name when all are there.
    """

    def __init__(self, path: Path, *, keep: int | None) -> None:
        self.path, self._keep = path, keep

    def prepare(self) -> None:
        """Make the directory, and remove what a launch before has not finished. Call it while nobody writes."""
        self.path.mkdir(parents=True, exist_ok=True)
        for _, path in self._unfinished():
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> int:
        """``seq`` of the newest checkpoint, 0 if there is none."""
        return max((name.seq for name in self._complete()), default=0)

    def write(
        self,
        name: CheckpointName,
        parts: Sequence[Sequence[str]],
        number: int,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str],
        nbytes: int,
    ) -> bool:
        """Write file ``number`` of ``parts``, which holds ``tensors``. True if the checkpoint is there thereby.

        ``nbytes``: of all files. When this returns, the file is on disk.
        """
        work = self.path / f".{name}.{len(parts)}"
        work.mkdir(exist_ok=True)
        files = [file_name(one, len(parts)) for one in range(len(parts))]
        draft = work / f".{files[number]}"
        _save(draft, tensors, {"format": "pt", **metadata})
        # The package lets nobody else read the file, unlike what a user writes in any other way.
        draft.chmod(work.stat().st_mode & 0o666)
        _flush(draft)
        draft.replace(work / files[number])
        _flush(work)
        return self._finish(name, work, files, parts, number, metadata, nbytes)

    # ---- inside -------------------------------------------------------------------------------

    def _finish(
        self,
        name: CheckpointName,
        work: Path,
        files: Sequence[str],
        parts: Sequence[Sequence[str]],
        number: int,
        metadata: Mapping[str, str],
        nbytes: int,
    ) -> bool:
        """Give the directory its name if all files are there. Two ranks may find that at once: one of them does it."""
        if not all((work / file).exists() for file in files):
            return False
        place = self.path / str(name)
        draft = f".{number}.{INDEX}"
        try:
            if len(files) > 1:
                index = {tensor: files[one] for one, part in enumerate(parts) for tensor in part}
                (work / draft).write_text(write_index(index, nbytes, metadata), encoding="utf-8")
                _flush(work / draft)
                (work / draft).replace(work / INDEX)
                _flush(work)
            work.rename(place)
        except FileNotFoundError:  # the other one has done it
            (place / draft).unlink(missing_ok=True)
            return False
        _flush(self.path)
        self._tidy(name)
        return True

    def _tidy(self, name: CheckpointName) -> None:
        link = self.path / f".{LATEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(str(name))
        link.replace(self.path / LATEST)
        complete = sorted(self._complete())
        for old in complete[: -self._keep] if self._keep is not None else ():
            # It loses its name first, so that nobody reads half of it.
            removed = self.path / f".{old}.old"
            with contextlib.suppress(FileNotFoundError):
                (self.path / str(old)).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        for older, path in self._unfinished():
            if older < name:  # a rank could not write its file
                shutil.rmtree(path, ignore_errors=True)
        _flush(self.path)

    def _complete(self) -> list[CheckpointName]:
        found = [CheckpointName.parse(one.name) for one in self.path.iterdir() if one.is_dir()]
        return [name for name in found if name is not None]

    def _unfinished(self) -> list[tuple[CheckpointName, Path]]:
        found = [(CheckpointName.parse(one.name[1:].partition(".")[0]), one) for one in self.path.glob(".seq-*")]
        return [(name, path) for name, path in found if name is not None]


def _save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file. OSError if the disk does not take it, which the package tells in a text."""
    with safetensors_errors(path) as safetensors:
        from safetensors.torch import save_file

        try:
            save_file(dict(tensors), path, dict(metadata))
        except safetensors.SafetensorError as error:
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
            raise ConfigError(f"{path} cannot be written: {error}") from error


def _flush(path: Path) -> None:
    """Have the kernel put a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
