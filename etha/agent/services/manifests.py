"""Manifests and layouts by digest: published once, fetched once, shared by every batch that names them.

It also keeps the evaluations of equal registrations.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from etha.agent.protocol.evaluation import EvaluationCache
from etha.agent.protocol.records import Manifest, digest_of
from etha.errors import LayoutError, ProtocolError
from etha.plan import Layout
from etha.store.registry import Store

#: Manifests kept in memory, and the tensors that they may name together; the least recently used are dropped first.
KEPT, KEPT_TENSORS = 256, 1 << 15

K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The most recently used entries. The last one stays however many tensors it names."""

    def __init__(self) -> None:
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._tensors = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The entry, which is the most recently used one then."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, tensors: int) -> None:
        """An entry that is not there, with the number of tensors that it names."""
        self._entries[key] = value, tensors
        self._tensors += tensors
        while len(self._entries) > KEPT or (self._tensors > KEPT_TENSORS and len(self._entries) > 1):
            _, (_, fewer) = self._entries.popitem(last=False)
            self._tensors -= fewer


class ManifestCache:
    """A cache in front of the store. Layouts are interned, so that equal ones are one object."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.evaluations = EvaluationCache()
        self._layouts: dict[str, Layout] = {}
        self._manifests = _Recent[str, Manifest]()
        #: Manifests that this agent has published: content -> digest and fields.
        self._published = _Recent[object, tuple[str, dict[str, str]]]()

    async def publish(self, manifest: Manifest, *, timeout: float) -> str:
        """Store a manifest and its layouts; returns its digest."""
        layouts = manifest.layouts()
        digest, fields = self._fields(manifest)
        # Leases end, so they are written again even if this agent has written them before.
        await self._store.batches.put_layouts(layouts, timeout=timeout)
        await self._store.batches.put_manifest(digest, fields, timeout=timeout)
        if digest not in self._manifests:
            self._layouts |= {d: Layout.from_plain(json.loads(t)) for d, t in layouts.items() if d not in self._layouts}
            self._keep(digest, fields)
        return digest

    async def fetch(self, digests: Iterable[str]) -> dict[str, Manifest]:
        """The manifests, read from Redis if this agent does not have them; ProtocolError for invalid ones."""
        out: dict[str, Manifest] = {}
        for digest in sorted(digests):
            manifest = self._manifests.get(digest)
            if manifest is None:
                fields = await self._store.batches.manifest(digest)
                if digest_of(fields) != digest:
                    raise ProtocolError(f"Redis: manifest {digest} is missing or not what its digest says")
                missing = Manifest.layout_digests(fields) - self._layouts.keys()
                for name, text in (await self._store.batches.layouts(missing)).items():
                    self._layouts[name] = _layout(name, text)
                manifest = self._keep(digest, fields)
            out[digest] = manifest
        return out

    def _fields(self, manifest: Manifest) -> tuple[str, dict[str, str]]:
        """The digest and the fields of a manifest, cached because a relaunch registers the same manifest again."""
        content = (
            tuple((n, d.pair, d.dtype, d.layout.digest(), d.shape, d.local, d.of) for n, d in manifest.tensors.items()),
            manifest.refusals,
            tuple(manifest.ties.items()),
        )
        found = self._published.get(content)
        if found is None:
            fields = manifest.fields()
            found = digest_of(fields), fields
            self._published.put(content, found, len(manifest.tensors))
        return found

    def _keep(self, digest: str, fields: dict[str, str]) -> Manifest:
        manifest = Manifest.from_fields(fields, self._layouts)
        if digest not in self._manifests:  # it may have come while Redis was asked
            self._manifests.put(digest, manifest, len(manifest.tensors))
        return manifest


def _layout(digest: str, text: str) -> Layout:
    """The layout that Redis holds under a digest; ProtocolError if it is missing or another one."""
    try:
        layout = Layout.from_plain(json.loads(text))
    except (ValueError, RecursionError, LayoutError):
        layout = None
    if layout is None or layout.digest() != digest:
        raise ProtocolError(f"Redis: layout {digest} is not what its digest says: {text[:120]!r}")
    return layout
