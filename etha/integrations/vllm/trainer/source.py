"""A trainer rank's tensors of the model, as shards and never gathered. Ranks may hold different names: stages of a
pipeline, or some of the experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource

from etha.errors import ConfigError
from etha.integrations.fsdp import named_tensors
from etha.integrations.names import rename
from etha.integrations.vllm.trainer.checkpoint import Shown, checkpoint_parts, has_checkpoint
from etha.integrations.vllm.trainer.part import TensorPart, TensorParts
from etha.integrations.vllm.weights.adapter import Adapter


class EthaSource(WeightSource):
    """A module, or tensors by checkpoint name: DTensors of any layout, or plain tensors that a rank holds whole.

    A rank gives only what it holds; the ranks' names are merged when they meet. For a transformers module it gives the
    tensors of its checkpoint, as ``save_pretrained`` writes them. Stacked experts are given one by one, under the
    checkpoint's names, each as a view of the module's memory. ``names``: ordered regex replacements from these names,
    or those of another trainer, to the checkpoint's that the engine reads. ``buffers``: include a module's persistent
    buffers, if the checkpoint has them; the default is to do so for transformers modules. ``iter(source)`` yields what
    this rank holds, each DTensor unchanged.

    ConfigError if transformers would compute what it saves, or if no placements describe a view; and for a tensor of a
    mapping that has an autograd history (parameters, views of them and detached tensors have none).
    """

    def __init__(
        self,
        weights: nn.Module | Mapping[str, torch.Tensor],
        *,
        names: Mapping[str, str] | None = None,
        buffers: bool | None = None,
    ) -> None:
        self._weights = weights
        self._rules: tuple[Mapping[str, str], ...] = () if names is None else (names,)
        if buffers is None:
            buffers = isinstance(weights, nn.Module) and has_checkpoint(weights)
        self._buffers = buffers
        self._parts = TensorParts()
        self._shown: dict[str, Shown] = {}
        self._of: tuple[Any, ...] = ()
        self._announced: dict[str, tuple[Any, ...]] | None = None

    @classmethod
    def of(cls, source: WeightSource | None, names: Mapping[str, str] | None) -> EthaSource | Iterated:
        """Read vLLM's own source without iterating it, because that would gather; ConfigError for no source.

        Any other source is iterated: it gathers by itself, and its tensors are sent whole.
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
        """ConfigError if the tensors are not those that the engine was told of: a layer was replaced, a head untied."""
        now = {meta.name: (meta.dtype, tuple(meta.shape)) for meta in self.metadata()}
        if self._announced is None:
            self._announced = now
        if now != self._announced:
            name = min(
                name for name in now.keys() | self._announced.keys() if now.get(name) != self._announced.get(name)
            )
            was, known = self._announced.get(name, "missing"), now.get(name, "missing")
            raise ConfigError(
                f"{name!r} of the source is {known} now, and was {was} when the engine was told of the weights: make "
                f"another trainer engine"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's tensors by checkpoint name; parameters of a module in the order of its state_dict."""
        own, found = self._own(), {}
        for name, shown in self._checkpoint(own).items():
            tensor = self._parts.of(name, own[shown.source], shown.part)
            if tensor is not None:
                found[name] = tensor
        return found

    def places(self) -> dict[str, tuple[Any, ...]]:
        """Where this rank's tensors lie now, because a trainer may have moved its weights."""
        return {name: memory(tensor) for name, tensor in self._own().items()}

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and global shape of every tensor, including those of which only other ranks hold a part."""
        own = self._own()
        return [
            ParamMeta(name, own[shown.source].dtype, shown.part.sizes) for name, shown in self._checkpoint(own).items()
        ]

    def _own(self) -> dict[str, torch.Tensor]:
        """The tensors by the trainer's own names."""
        if isinstance(self._weights, nn.Module):
            return named_tensors(self._weights, buffers=self._buffers)
        found = dict(self._weights)
        for name, tensor in found.items():
            if _computed(tensor):
                raise ConfigError(
                    f"{name!r} of the source has a history of autograd ({type(tensor.grad_fn).__name__}): each copy_ "
                    f"into it would keep all before it in memory; make it under torch.no_grad(), or give its detach()"
                )
        return found

    def _checkpoint(self, own: Mapping[str, torch.Tensor]) -> dict[str, Shown]:
        """The part of ``own`` that each tensor of the checkpoint is."""
        of = tuple((name, tuple(tensor.shape)) for name, tensor in own.items())
        if self._of != of:
            found = self._unruled(own)
            for rules in self._rules:
                new = rename(found, rules)
                found = {new[name]: shown for name, shown in found.items()}
            self._shown, self._of = found, of
        return self._shown

    def _unruled(self, own: Mapping[str, torch.Tensor]) -> dict[str, Shown]:
        """The same, before ``names`` is applied."""
        if isinstance(self._weights, nn.Module):
            return checkpoint_parts(self._weights, own)
        return {name: Shown(source=name, part=TensorPart.all(tensor.shape)) for name, tensor in own.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors().items()


def _computed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has an autograd history and is not a view of a leaf such as a parameter."""
    if tensor.grad_fn is None:
        return False
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local._base is None or not local._base.is_leaf


def memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Address and layout of a rank's part of a tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)


class AdapterSource(EthaSource):
    """The adapter's tensors of a peft module, or a mapping of them, by the names under which peft saves them.

    No other tensor of the module is sent. ConfigError for a source without adapter tensors.
    """

    def __init__(self, source: EthaSource, adapter: Adapter) -> None:
        super().__init__(source._weights, buffers=False)
        self._rules, self._adapter = source._rules, adapter
        if not self._own():
            raise ConfigError(
                f"the source has no tensors of adapter {adapter.part!r}: give a module of peft, or a mapping with "
                f"names as 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"
            )

    def _own(self) -> dict[str, torch.Tensor]:
        found = super()._own()
        return adapter_tensors(found, self._adapter.part) if isinstance(self._weights, nn.Module) else found

    def _unruled(self, own: Mapping[str, torch.Tensor]) -> dict[str, Shown]:
        return {name: Shown(source=name, part=TensorPart.all(tensor.shape)) for name, tensor in own.items()}


def adapter_tensors(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """A module's tensors of the adapter ``part``, under the names by which peft saves them."""
    own = re.compile(rf"(\.lora_\w+|\.modules_to_save)\.{re.escape(part)}(?=\.|$)")
    found = {}
    for name, tensor in tensors.items():
        if (match := own.search(name)) is not None:
            # A module that is saved whole (vLLM takes classifiers) has its own name in peft's file.
            kept = "" if match[1] == ".modules_to_save" else match[1]
            found[name[: match.start()] + kept + name[match.end() :]] = tensor
    return found


class Iterated:
    """A source of the user's own class. ``refresh`` iterates it, and keeps the tensors that this rank holds."""

    def __init__(self, source: WeightSource, names: Mapping[str, str] | None) -> None:
        self._source = source
        metas = source.metadata()
        new = {meta.name: meta.name for meta in metas} if names is None else rename([m.name for m in metas], names)
        self._names = new
        self._metas = [ParamMeta(new[meta.name], meta.dtype, tuple(meta.shape)) for meta in metas]
        self._held: dict[str, torch.Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and global shape of every tensor of the model, from the source."""
        return self._metas

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the tensors as they are now. Call it on every rank, because the source's iteration is a collective."""
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

    def places(self) -> dict[str, tuple[Any, ...]]:
        """Empty, because this object keeps its tensors."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that this rank holds, by checkpoint name, from the last ``refresh``."""
        return dict(self._held)


def merged(of_ranks: Sequence[Sequence[ParamMeta]]) -> list[ParamMeta]:
    """Every tensor that some rank announces; ConfigError if two ranks announce different tensors under one name."""
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
