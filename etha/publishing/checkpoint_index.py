"""Which files of a directory hold which tensors, as Hugging Face's checkpoints say it; pure.

model.safetensors                                      one file, or any number of files with other tensors each
model-00001-of-00002.safetensors, ...                  several files, and
model.safetensors.index.json                           {"weight_map": {tensor: file}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from etha.errors import ConfigError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"
#: What a file's metadata says of the version that it belongs to.
PUBLICATION, VERSION, SEQ = "etha.publication", "etha.version", "etha.seq"
#: Names that an error lists.
_SHOWN = 5


def file_name(number: int, count: int) -> str:
    """The name of file ``number`` (from 0) of a checkpoint of ``count`` files."""
    return f"model{SUFFIX}" if count == 1 else f"model-{number + 1:05}-of-{count:05}{SUFFIX}"


def read_index(where: str, text: str) -> dict[str, str]:
    """Tensor -> file, from the text of an index. ConfigError says what is wrong with it."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise ConfigError(f'{where} has no "weight_map" that maps names of tensors to files')
    away = sorted({file for file in found.values() if not file.endswith(SUFFIX) or "/" in file})
    if away:
        raise ConfigError(f"{where} names {some(away)}: it must name safetensors files of its own directory")
    return found


def write_index(files: Mapping[str, str], nbytes: int, metadata: Mapping[str, Any]) -> str:
    """The text of an index: the inverse of ``read_index``."""
    index = {"metadata": {"total_size": nbytes, **metadata}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2) + "\n"


def place_tensors(where: str, held: Mapping[str, Iterable[str]], index: Mapping[str, str] | None) -> dict[str, str]:
    """Tensor -> the file to read it from. ``held``: file -> the tensors that are in it.

    ConfigError names what the index names and no file has, and tensors that two files have.
    """
    there = {file: set(names) for file, names in held.items()}
    if index is not None:
        lost = sorted(name for name, file in index.items() if name not in there.get(file, ()))
        if lost:
            raise ConfigError(
                f"{where}: the index names {len(lost)} tensors that their files do not have: {some(lost)}; fetch the "
                f"checkpoint again"
            )
        return dict(index)
    found: dict[str, str] = {}
    for file, names in sorted(there.items()):
        for name in sorted(names):
            if name in found:
                raise ConfigError(
                    f"{where}: tensor {name!r} is in {found[name]} and in {file}: leave the files of one checkpoint in "
                    f"the directory, or give it an index"
                )
            found[name] = file
    if not found:
        raise ConfigError(f"{where}: its safetensors files hold no tensor")
    return found


def read_version(text: str) -> int | str | None:
    """A version's label as ``VERSION`` of the metadata says it; None for anything that is not one."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, int | str) and not isinstance(found, bool) else None


def share_out(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Which of ``count`` files gets which tensors, so that the largest file is small. Equal on all who compute it.

    The largest tensor goes first, always to the file that has least.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        least = min(range(count), key=lambda number: (loads[number], number))
        parts[least].append(name)
        loads[least] += sizes[name]
    return [sorted(part) for part in parts]


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """The directory of a version: ``seq-00000012``, whose number is the version's ``seq``."""

    seq: int

    def __str__(self) -> str:
        return f"seq-{self.seq:08}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """The inverse of ``str``; None for any other name."""
        digits = name.removeprefix("seq-")
        found = cls(int(digits)) if name.startswith("seq-") and digits.isascii() and digits.isdecimal() else None
        return found if found is not None and str(found) == name else None


def some(names: Iterable[str]) -> str:
    """The first of many names."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + more
