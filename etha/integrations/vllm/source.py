"""What a trainer rank has of the model, as it lies: shards, never gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource

from etha.errors import ConfigError
from etha.integrations.fsdp import named_tensors
from etha.integrations.names import rename


class EthaSource(WeightSource):
    """A module, or tensors by checkpoint name: DTensors of any layout, or plain tensors that every rank has whole.

    ``names``: ordered regex replacements from the trainer's names to the checkpoint's. ``buffers``: a module's
    persistent ones, too, where the checkpoint has them. ``iter(source)`` yields what this rank holds, each DTensor as
    it is.
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
    def of(cls, source: WeightSource | None, names: Mapping[str, str] | None) -> EthaSource:
        """Read vLLM's own source without the gather that iterating it would be.

        ConfigError for a source that can only be iterated, or none.
        """
        if isinstance(source, EthaSource):
            found = cls(source._weights, names=names, buffers=source._buffers)
            found._rules = source._rules + found._rules
            return found
        if isinstance(source, ModuleSource):
            return cls(source._module, names=names)
        raise ConfigError(
            f"source={type(source).__name__}: give ModuleSource(model), or etha.integrations.vllm.EthaSource with a "
            f"module or a mapping of checkpoint names to this rank's DTensors; any other source can only be gathered"
        )

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
