"""Manifests and layouts by digest: published once, fetched once, shared by every batch that names them.

It also keeps the evaluations of equal registrations.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable

from etha.agent.protocol.evaluation import EvaluationCache
from etha.agent.protocol.records import Manifest, digest_of
from etha.errors import LayoutError, ProtocolError
from etha.plan import Layout
from etha.store.registry import Store

#: Manifests kept in memory; the oldest are dropped first.
_KEPT = 256


class ManifestCache:
    """A cache in front of the store. Layouts are interned, so that equal ones are one object."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.evaluations = EvaluationCache()
        self._layouts: dict[str, Layout] = {}
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        #: Manifests that this agent has published: content -> digest and fields.
        self._published: OrderedDict[object, tuple[str, dict[str, str]]] = OrderedDict()

    async def publish(self, manifest: Manifest, *, timeout: float) -> str:
        """Store a manifest and its layouts; returns its digest."""
        layouts = manifest.layouts()
        digest, fields = self._fields(manifest)
        # Leases end, so they are written again even if this agent has written them before.
        await self._store.batches.put_layouts(layouts, timeout=timeout)
        await self._store.batches.put_manifest(digest, fields, timeout=timeout)
        if digest not in self._manifests:
            self._layouts |= {d: Layout.from_plain(json.loads(t)) for d, t in layouts.items() if d not in self._layouts}
            self._keep(digest, Manifest.from_fields(fields, self._layouts))
        return digest

    async def fetch(self, digests: Iterable[str]) -> dict[str, Manifest]:
        """The manifests, read from Redis if this agent does not have them; ProtocolError for invalid ones."""
        out: dict[str, Manifest] = {}
        for digest in sorted(digests):
            if digest not in self._manifests:
                fields = await self._store.batches.manifest(digest)
                if digest_of(fields) != digest:
                    raise ProtocolError(f"Redis: manifest {digest} is missing or not what its digest says")
                missing = Manifest.layout_digests(fields) - self._layouts.keys()
                for name, text in (await self._store.batches.layouts(missing)).items():
                    self._layouts[name] = _layout(name, text)
                self._keep(digest, Manifest.from_fields(fields, self._layouts))
            out[digest] = self._manifests[digest]
            self._manifests.move_to_end(digest)
        return out

    def _fields(self, manifest: Manifest) -> tuple[str, dict[str, str]]:
        """The digest and the fields of a manifest, cached because a relaunch registers the same manifest again."""
        content = (
            tuple((n, d.pair, d.dtype, d.layout.digest(), d.shape, d.local, d.of) for n, d in manifest.tensors.items()),
            manifest.refusals,
            tuple(manifest.ties.items()),
        )
        found = self._published.pop(content, None)
        if found is None:
            fields = manifest.fields()
            found = digest_of(fields), fields
        self._published[content] = found
        while len(self._published) > _KEPT:
            self._published.popitem(last=False)
        return found

    def _keep(self, digest: str, manifest: Manifest) -> None:
        self._manifests[digest] = manifest
        while len(self._manifests) > _KEPT:
            self._manifests.popitem(last=False)


def _layout(digest: str, text: str) -> Layout:
    """The layout that Redis holds under a digest; ProtocolError if it is missing or another one."""
    try:
        layout = Layout.from_plain(json.loads(text))
    except (ValueError, RecursionError, LayoutError):
        layout = None
    if layout is None or layout.digest() != digest:
        raise ProtocolError(f"Redis: layout {digest} is not what its digest says: {text[:120]!r}")
    return layout
