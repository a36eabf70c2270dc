"""Received: the memory of one worker for a version, which an agent fills, and how the version gets into the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Protocol

import torch
from torch import nn

from etha.client.memory.tensors import empty as mapped
from etha.errors import ConfigError, TransferError
from etha.integrations.vllm.weights.compare import Comparison, unequal
from etha.integrations.vllm.weights.cut import RegionCut
from etha.integrations.vllm.weights.direct import live_views
from etha.integrations.vllm.weights.keep import KeptPart, Meta, Recorded, nothing
from etha.integrations.vllm.weights.loading import Reload, record
from etha.integrations.vllm.weights.quantized import cast_refused, refuse_quantized
from etha.integrations.vllm.weights.standin import StandIn
from etha.integrations.vllm.weights.trace import Region, Trace, whole

Dtypes = dict[str, torch.dtype]
#: From this worker's dtypes by checkpoint name to the dtypes in which all workers of the engine receive.
Agree = Callable[[Dtypes], Dtypes]


def agreed(kept: Mapping[str, KeptPart], agree: Agree) -> dict[str, KeptPart]:
    """``kept`` at the dtypes that all workers use, one for each tensor.

    A worker whose loaders only copy a tensor can receive it in its parameter's dtype. One that computes with it cannot.
    """
    dtypes = agree({name: item.dtype for name, item in kept.items() if not nothing(item)})
    return {name: replace(item, dtype=dtypes.get(name, item.dtype)) for name, item in kept.items()}


def widest(of_workers: Iterable[Dtypes]) -> Dtypes:
    """For each tensor, a dtype that holds what every worker needs of it."""
    found: Dtypes = {}
    for dtypes in of_workers:
        for name, dtype in dtypes.items():
            found[name] = torch.promote_types(found.get(name, dtype), dtype)
    return found


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(slots=True)
class _Replay:
    """The tap of a stand-in whose bytes have arrived."""

    cut: RegionCut
    changed: torch.Tensor | None = None

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        if self.changed is not None and trace is not None:
            return RegionCut(self.changed, whole(self.changed.shape)).read(trace)
        if self.changed is not None:
            return self.changed.as_strided(seen.shape, seen.stride(), int(seen.storage_offset()))
        if trace is None:  # such a read keeps the whole tensor
            return self.cut.dense.as_strided(
                seen.shape, seen.stride(), self.cut.dense.storage_offset() + int(seen.storage_offset())
            )
        return self.cut.read(trace)

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        into.copy_(self.read(trace, seen))

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        into.copy_(value)

    def change(self) -> torch.Tensor:
        if self.changed is None:
            self.changed = self.cut.dense.clone()
        return self.changed


@dataclass(slots=True)
class _Rehearsal:
    """The tap of a stand-in in a rehearsal: checks the reads and copies of a replay without moving bytes."""

    replay: _Replay
    device: torch.device

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(self.replay.read(trace, seen), device=self.device)

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        self.replay.read(trace, seen).expand(into.shape)

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        value.expand(into.shape)

    def change(self) -> torch.Tensor:
        return torch.empty_like(self.replay.change(), device=self.device)


class RegionMemory(Protocol):
    """Memory that a version is received into."""

    kept: dict[str, KeptPart]
    regions: dict[str, Region]
    shapes: dict[str, tuple[int, ...]]

    def room(self) -> dict[str, torch.Tensor]:
        """The kept region of each tensor."""
        ...


def refuse_recorded(recorded: Recorded, metas: Sequence[Meta]) -> None:
    """ConfigError for tensors, of ``metas``, that the model does not take."""
    if recorded.refused:
        name, why = next(iter(recorded.refused.items()))
        shape = next(tuple(meta.shape) for meta in metas if meta.name == name)
        raise ConfigError(
            f"the engine's model does not take {len(recorded.refused)} of the trainer's {len(metas)} tensors, "
            f"{name!r} of shape {shape} first: {why}; names and shapes must be those of the engine's checkpoint: name "
            f"tensors as it does (names=), compare both models' configurations, or leave tensors out (EthaSource)"
        )
    for cast in recorded.casts:
        raise ConfigError(cast_refused(*cast))


def _refuse_hook(model: nn.Module) -> None:
    """ConfigError for a model that makes something of all its weights when a first load is over. No reload repeats
    that."""
    if callable(getattr(model, "process_weights_after_loading", None)):
        raise ConfigError(
            f"the engine's model {type(model).__name__} makes something of its weights when all are loaded "
            f"(process_weights_after_loading), which is not repeated for a live model: this model is not supported"
        )


def room_of(item: KeptPart, memory: torch.device) -> torch.Tensor:
    """New memory for a kept region."""
    if memory.type == "cpu" and not nothing(item):
        return mapped(item.shape, dtype=item.dtype)
    return torch.empty(item.shape, dtype=item.dtype, device=memory)


def stand_in_of(item: KeptPart, dense: torch.Tensor, device: torch.device) -> tuple[str, torch.Tensor]:
    """A tensor as loaders expect it, whose kept region is ``dense``."""
    tap = _Replay(RegionCut(dense.to(device), item.region))
    return item.meta.name, StandIn.of(item.meta.shape, item.dtype, device, tap)


class Received:
    """A version on its way into ``model``. Register ``room()`` and ``regions``; ``apply`` brings the version in.

    Make it between two steps of the engine, because it puts the live parameters aside for a moment. It allocates no
    memory before ``room`` is called, in any thread.

    ``direct``: write parameters that need no change without the loaders. ``atomic``: these, too, change only in
    ``apply``; otherwise the live parameters themselves are registered, and are half-written while bytes arrive.
    ``memory``: the device of the room; None takes the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        metas: list[Meta],
        device: torch.device,
        *,
        direct: bool,
        atomic: bool,
        agree: Agree = lambda dtypes: dtypes,
        memory: torch.device | None = None,
    ) -> None:
        self._model, self._config, self._device = model, model_config, device
        self._memory = device if memory is None else memory
        refuse_quantized(model)
        _refuse_hook(model)
        # First, because tied parameters are several while they are created.
        live = {name for name, _ in model.named_parameters()}
        recorded = record(model, model_config, metas, device)
        refuse_recorded(recorded, metas)
        self.kept = agreed(recorded.kept, agree)
        self._unfilled = sorted(live.intersection(recorded.unfilled))
        self._atomic = atomic
        self._live = live_views(model, self.kept) if direct else {}
        self._written = {} if atomic else self._live
        self._written_modules = {
            (copy.param or "").rpartition(".")[0] for name in self._live for copy in self.kept[name].copies or ()
        }
        #: Whether bytes go into live parameters as they arrive.
        self.in_place = bool(self._written)
        self._reload = Reload(model, model_config, device)
        rest = self._rest()
        if rest:
            self._reload.rehearse([self._rehearsed(item) for item in rest], recorded.writes)
        self._partial = self._reload.partial
        self._tensors: dict[str, torch.Tensor] = {}
        self._taking = Lock()
        self.regions = {name: item.region for name, item in self.kept.items()}
        self.shapes = {name: item.meta.shape for name, item in self.kept.items()}

    def room(self) -> dict[str, torch.Tensor]:
        """Memory for the kept region of each tensor; allocated once."""
        with self._taking:
            if not self._tensors:
                self._tensors = {name: self._room(item) for name, item in self.kept.items()}
            return self._tensors

    def _room(self, item: KeptPart) -> torch.Tensor:
        if item.meta.name in self._written:
            return self._written[item.meta.name]
        return room_of(item, self._memory)

    def take_room(self, other: RegionMemory) -> None:
        """Use the memory of ``other``, which is registered; ConfigError if it keeps something else."""
        mine, theirs = (
            {name: (item.region, item.dtype) for name, item in received.kept.items()} for received in (self, other)
        )
        if differ := [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]:
            raise ConfigError(
                f"the engine's loaders keep something else of {len(differ)} tensors, {min(differ)!r} first, than "
                f"before the model was wrapped: this model is not supported"
            )
        self._tensors = other.room()

    def moved(self) -> list[str]:
        """Names of registered live parameters whose memory has changed, because it was unmapped for a while."""
        self._look()
        return [name for name, view in self._written.items() if _place(view) != _place(self._tensors.get(name, view))]

    def renew(self) -> None:
        """Prepare ``room`` to be registered again, with live parameters where they are now."""
        self._look()
        with self._taking:
            self._tensors = {**self._tensors, **self._written} if self._tensors else {}

    def _look(self) -> None:
        """Look up where the directly written live parameters are now, because an engine may have slept."""
        now = live_views(self._model, self.kept) if self._live else {}
        missing = [name for name in self._live if name not in now]
        if missing:
            raise TransferError(
                f"{missing[0]!r} and {len(missing) - 1} more of the engine's parameters are not what they were when "
                f"the trainer was met: call shutdown() on the trainer engine and make another"
            )
        self._live = {name: now[name] for name in self._live}
        self._written = {} if self._atomic else self._live

    def _rest(self) -> list[KeptPart]:
        """The tensors that go through loaders."""
        return [item for name, item in self.kept.items() if name not in self._live and not nothing(item)]

    def apply(self) -> None:
        """Bring what was received into the live model; between two steps of the engine."""
        self._look()
        for name, view in self._live.items():
            if name not in self._written:
                view.copy_(self._tensors[name])
        done = {self._model.get_submodule(path) for path in self._written_modules}
        rest = self._rest()
        if rest:
            done |= self._reload.run(self._stand_in(item, self._tensors[item.meta.name]) for item in rest)
        self._reload.settle(done)

    def compare(self) -> Comparison:
        """Compare the live model with what ``apply`` would make of the received tensors; between two steps of the
        engine."""
        self._look()
        found = Comparison()
        for name, view in self._live.items():
            if name not in self._written:
                found.add(name, unequal(view, self._tensors[name]))
        found.extend(self._reload.compare_computed(self._model.get_submodule(path) for path in self._written_modules))
        rest = self._rest()
        if rest:
            found.extend(self._reload.compare(self._stand_in(item, self._tensors[item.meta.name]) for item in rest))
        return found

    def _stand_in(self, item: KeptPart, dense: torch.Tensor) -> tuple[str, torch.Tensor]:
        return stand_in_of(item, dense, self._device)

    def _rehearsed(self, item: KeptPart) -> tuple[str, torch.Tensor]:
        blank = RegionCut(torch.empty(item.shape, dtype=item.dtype, device="meta"), item.region)
        tap = _Rehearsal(_Replay(blank), self._device)
        return item.meta.name, StandIn.of(item.meta.shape, item.dtype, self._device, tap)

    def report(self) -> Mapping[str, Any]:
        """How each tensor comes in, and bytes: those of the checkpoint as it is received, and those kept here.

        ``partial``, ``unfilled``: parameters that the trainer's tensors fill in part or not at all; the rest is
        undefined, or unchanged. ``whole``: tensors that could not be recorded, with the reason and their bytes.
        """
        whole = {name: item for name, item in self.kept.items() if item.why is not None}
        return {
            "tensors": len(self.kept),
            "direct": sorted(self._live),
            "left_out": sorted(name for name, item in self.kept.items() if nothing(item)),
            "partial": self._partial,
            "unfilled": self._unfilled,
            "whole": {name: {"why": item.why, "bytes": item.nbytes} for name, item in whole.items()},
            "bytes": sum(item.nbytes for item in self.kept.values()),
            "checkpoint_bytes": sum(torch.Size(k.meta.shape).numel() * k.dtype.itemsize for k in self.kept.values()),
        }
