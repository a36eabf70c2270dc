"""What a trainer rank has of the model, as it lies: shards, never gathered. Ranks may hold different names: stages of a
pipeline, some of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource

from etha.errors import ConfigError
from etha.integrations.fsdp import named_tensors
from etha.integrations.names import rename


class EthaSource(WeightSource):
    """A module, or tensors by checkpoint name: DTensors of any layout, or plain tensors that a rank has whole.

    A rank gives what it holds, and only that: what all ranks hold is merged when they meet. ``names``: ordered regex
    replacements from the trainer's names to the checkpoint's. ``buffers``: a module's persistent ones, too, where the
    checkpoint has them. ``iter(source)`` yields what this rank holds, each DTensor as it is.
    """

    def __init__(
        self,
        weights: nn.Module | Mapping[str, torch.Tensor],
        *,
        names: Mapping[str, str] | None = None,
        buffers: bool = False,
    ) -> None:
        self._buffers = buffers
        self._weights = weights
        self._rules: tuple[Mapping[str, str], ...] = () if names is None else (names,)

    @classmethod
    def of(cls, source: WeightSource | None, names: Mapping[str, str] | None) -> EthaSource | Iterated:
        """Read vLLM's own source without the gather that iterating it would be; ConfigError for none.

        Any other source is iterated, which is its own gather, and sends what it holds whole.
        """
        if isinstance(source, EthaSource):
            found = cls(source._weights, names=names, buffers=source._buffers)
            found._rules = source._rules + found._rules
            return found
        if isinstance(source, ModuleSource):
            return cls(source._module, names=names)
        if isinstance(source, WeightSource):
            return Iterated(source, names)
        raise ConfigError(
            f"source={type(source).__name__}: give ModuleSource(model), etha.integrations.vllm.EthaSource of a module "
            f"or a mapping of checkpoint names to this rank's DTensors, or a WeightSource of your own"
        )

    def refresh(self) -> None:
        """Nothing: the tensors are read where they lie."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's tensors by checkpoint name: parameters of a module in the order of its state_dict."""
        if isinstance(self._weights, nn.Module):
            found = named_tensors(self._weights, buffers=self._buffers)
        else:
            found = dict(self._weights)
        for rules in self._rules:
            new = rename(found, rules)
            found = {new[name]: tensor for name, tensor in found.items()}
        return found

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and global shape of every tensor."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors().items()


class Iterated:
    """A source of the user's own class: ``refresh`` iterates it, and keeps the tensors that this rank holds."""

    def __init__(self, source: WeightSource, names: Mapping[str, str] | None) -> None:
        self._source = source
        metas = source.metadata()
        new = {meta.name: meta.name for meta in metas} if names is None else rename([m.name for m in metas], names)
        self._names = new
        self._metas = [ParamMeta(new[meta.name], meta.dtype, tuple(meta.shape)) for meta in metas]
        self._held: dict[str, torch.Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and global shape of every tensor of the model, as the source says."""
        return self._metas

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the tensors as they are now; on every rank, for it is a collective of the source's."""
        metas = {meta.name: meta for meta in self._metas}
        held = self._source.held_names()
        for name, tensor in self._source:
            if tensor is None or (held is not None and name not in held):
                continue
            meta = metas[self._names[name]]
            if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
                raise ConfigError(
                    f"source={type(self._source).__name__} yields {name!r} as {tuple(tensor.shape)}, {tensor.dtype}; "
                    f"its metadata() says {meta.shape}, {meta.dtype}"
                )
            if meta.name not in self._held:
                self._held[meta.name] = torch.empty_like(tensor, requires_grad=False)
            self._held[meta.name].copy_(tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What this rank holds, by checkpoint name, as of the last ``refresh``."""
        return dict(self._held)


def merged(of_ranks: Sequence[Sequence[ParamMeta]]) -> list[ParamMeta]:
    """Every tensor that some rank announces; ConfigError where two ranks announce different ones of one name."""
    found: dict[str, tuple[int, ParamMeta]] = {}
    for rank, metas in enumerate(of_ranks):
        for meta in metas:
            other, known = found.setdefault(meta.name, (rank, meta))
            if known != meta:
                raise ConfigError(
                    f"rank {other} of the trainer announces {meta.name!r} as {known.shape}, {known.dtype}, and rank "
                    f"{rank} as {meta.shape}, {meta.dtype}: they must be one tensor"
                )
    return [meta for _, meta in found.values()]
