"""What one rank registered, as stored in Redis for every agent to read; pure.

A ``Record`` is short, and each rank has one. The tensors are in a manifest, which is stored once by digest and shared
by all ranks that registered the same. Everything read here is checked, because other processes wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from etha.bus.messages import Refusal, Register, Verify
from etha.errors import LayoutError, ProtocolError
from etha.plan import Layout
from etha.plan.layouts import dtypes

Direction = Literal["send", "recv", "both"]
_MAX_INT = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One tensor on one rank. ``shape`` is global (None: unknown), ``local`` the real local shape.

    ``of`` is the tensor of which this is a further part (a region of several products); None for tensors.
    """

    pair: str
    dtype: str
    layout: Layout
    shape: tuple[int, ...] | None
    local: tuple[int, ...] | None
    of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Tensors and refusals of one rank. A tensor's ``local`` is None if it follows from the layout.

    ``ties``: name of a tensor -> the first name of the same memory.
    """

    tensors: Mapping[str, Described]
    refusals: tuple[Refusal, ...]
    ties: Mapping[str, str] = field(default_factory=dict)

    def region(self, name: str) -> str:
        """The name that stands for a tensor's memory: the first name that the memory has."""
        return self.ties.get(name, name)

    @classmethod
    def of(cls, register: Register, rank: int) -> Manifest:
        """From the message of ``rank``. LayoutError and ProtocolError for what no client of ours sends."""
        layouts = [Layout.from_plain(plain) for plain in register.layouts]
        tensors: dict[str, Described] = {}
        predicted: dict[tuple[int, tuple[int, ...] | None], tuple[int, ...] | None] = {}
        for entry in register.entries:
            if entry.layout >= len(layouts) or entry.pair >= len(register.pairs) or min(entry.layout, entry.pair) < 0:
                raise ProtocolError(f"tensor {entry.name!r} refers to a layout or pair that was not sent")
            if entry.name in tensors:
                raise ProtocolError(f"tensor {entry.name!r} is registered twice")
            dtypes.from_name(entry.handle.dtype)
            key = (entry.layout, entry.shape)
            if key not in predicted:
                predicted[key] = _predict(layouts[entry.layout], entry.shape, rank)
            tensors[entry.name] = Described(
                pair=register.pairs[entry.pair],
                dtype=entry.handle.dtype,
                layout=layouts[entry.layout],
                shape=entry.shape,
                local=None if entry.handle.shape == predicted[key] else entry.handle.shape,
                of=entry.of,
            )
        ties = {entry.name: entry.tied for entry in register.entries if entry.tied is not None}
        _check_parts(tensors)
        _check_ties(ties, tensors)
        return cls(tensors=tensors, refusals=register.refusals, ties=ties)

    def layouts(self) -> dict[str, str]:
        """digest -> JSON of every layout that the fields refer to."""
        found = {d.layout.digest(): d.layout for d in self.tensors.values()}
        return {digest: json.dumps(layout.to_plain(), separators=(",", ":")) for digest, layout in found.items()}

    def fields(self) -> dict[str, str]:
        """The manifest as a hash.

        ``t:NAME`` -> [pair, dtype, layout, shape, local(, of)], ``m:NAME`` -> the first name of the same memory,
        ``r:I`` -> refusal.
        """
        out = {
            f"t:{name}": json.dumps(
                [d.pair, d.dtype, d.layout.digest(), d.shape, d.local, *([] if d.of is None else [d.of])],
                separators=(",", ":"),
            )
            for name, d in self.tensors.items()
        }
        for name, first in self.ties.items():
            out[f"m:{name}"] = json.dumps(first)
        for i, r in enumerate(self.refusals):
            out[f"r:{i}"] = json.dumps([r.code, r.name, r.text, r.target_only], separators=(",", ":"))
        return out

    @classmethod
    def from_fields(cls, fields: Mapping[str, str], layouts: Mapping[str, Layout]) -> Manifest:
        """The inverse of ``fields``. ProtocolError names the field that is wrong."""
        tensors: dict[str, Described] = {}
        refusals: dict[int, Refusal] = {}
        ties: dict[str, str] = {}
        for key, text in fields.items():
            kind, _, name = key.partition(":")
            match kind, _json(key, text):
                case "t", [str(pair), str(dtype), str(digest), shape, local, *of] if digest in layouts and _part(of):
                    tensors[name] = Described(
                        pair=pair,
                        dtype=dtype,
                        layout=layouts[digest],
                        shape=_shape(key, shape),
                        local=_shape(key, local),
                        of=of[0] if of else None,
                    )
                case "m", str(first):
                    ties[name] = first
                case "r", [str(code), str(tensor), str(why), bool(target_only)] if name.isdecimal():
                    refusals[int(name)] = Refusal(code=code, name=tensor, text=why, target_only=target_only)
                case _:
                    _wrong(key, text)
        _check_parts(tensors)
        _check_ties(ties, tensors)
        return cls(tensors=tensors, refusals=tuple(refusals[i] for i in sorted(refusals)), ties=ties)

    @staticmethod
    def layout_digests(fields: Mapping[str, str]) -> set[str]:
        """Digests of the layouts that the fields refer to."""
        found = set()
        for key, text in fields.items():
            if key.startswith("t:"):
                match _json(key, text):
                    case [_, _, str(digest), _, _, *_]:
                        found.add(digest)
                    case _:
                        _wrong(key, text)
        return found


def digest_of(fields: Mapping[str, str]) -> str:
    """Hex digest of a manifest's fields, whatever their order."""
    body = json.dumps(sorted(fields.items()), separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One rank's registration in short. ``seq`` is the highest number that its worker has seen."""

    manifest: str
    form: Literal["list", "map"]
    pairs: tuple[str, ...]
    direction: Direction | None
    bucket_size: int | None
    atomic: bool
    verify: Verify | None
    seq: int

    @classmethod
    def of(cls, register: Register, manifest: str) -> Record:
        """The record of a worker's message, whose manifest has this digest."""
        return cls(
            manifest=manifest,
            form=register.form,
            pairs=register.pairs,
            direction=register.direction,
            bucket_size=register.bucket_size,
            atomic=register.atomic,
            verify=register.verify,
            seq=register.seq,
        )

    def to_json(self) -> str:
        """Short JSON, readable in ``redis-cli``."""
        options = [self.direction, self.bucket_size, self.atomic, self.verify]
        return json.dumps([self.manifest, self.form, self.pairs, *options, self.seq], separators=(",", ":"))

    @classmethod
    def from_json(cls, key: str, text: str) -> Record:
        """The inverse of ``to_json``. ProtocolError names the key."""
        match _json(key, text):
            case [
                str(manifest),
                "list" | "map" as form,
                [*pairs],
                None | "send" | "recv" | "both" as direction,
                None | int() as bucket,
                bool(atomic),
                None | "sample" | "full" as verify,
                int(seq),
            ] if all(isinstance(pair, str) for pair in pairs) and 0 <= seq <= _MAX_INT and _size(bucket):
                return cls(
                    manifest=manifest,
                    form=form,
                    pairs=tuple(pairs),
                    direction=direction,
                    bucket_size=bucket,
                    atomic=atomic,
                    verify=verify,
                    seq=seq,
                )
        _wrong(key, text)


def _predict(layout: Layout, shape: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    """The local shape that the layout gives ``rank``; None if it gives none."""
    if shape is None:
        return None
    try:
        return layout.local_shape(shape, rank)
    except LayoutError:
        return None


def _part(of: list[Any]) -> bool:
    return not of or (len(of) == 1 and isinstance(of[0], str))


def _check_parts(tensors: Mapping[str, Described]) -> None:
    """Raise ProtocolError for a part of a tensor that the rank does not register."""
    for name, d in tensors.items():
        if d.of is not None and (d.of not in tensors or tensors[d.of].of is not None):
            raise ProtocolError(
                f"{name[:200]!r} is told to be a part of {d.of[:200]!r}, which is no tensor of its rank"
            )


def _check_ties(ties: Mapping[str, str], tensors: Mapping[str, Described]) -> None:
    """Raise ProtocolError for ties to what the rank does not register, or not to the first name of a memory."""
    for name, first in ties.items():
        if name not in tensors or first not in tensors or first in ties:
            raise ProtocolError(
                f"{name[:200]!r} is told to be one memory with {first[:200]!r}, which is not its first name"
            )


def _size(value: Any) -> bool:
    return value is None or (type(value) is int and 0 < value <= _MAX_INT)


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        _wrong(key, text)


def _shape(key: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        _wrong(key, str(value))
    return tuple(value)


def _wrong(key: str, text: str) -> NoReturn:
    raise ProtocolError(f"Redis: field {key!r} of a registration is not what an agent writes: {text[:120]!r}")
