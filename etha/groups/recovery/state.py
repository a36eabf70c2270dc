"""What a newcomer must have before its first step: model, optimizer, and whatever the program adds. No communication.

    source      take() -> frame and tensors        the tensors go by the agents, each name to the same name
    newcomer    expect(frame) -> Landing           memory for each of them, in the newcomer's own sharding
    newcomer    load(landing)                      only after everything has arrived; until then nothing changes

A DTensor travels as the tensor that it is a part of, so both replicas may shard it differently, or one of them not at
all. A tensor that is plain at both is each rank's own, such as buffers and the states of random generators.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from etha.decoders import decoder
from etha.errors import ConfigError, ProtocolError
from etha.groups.recovery.values import TensorCollector, put_together
from etha.memory.handles import is_expanded

#: Most bytes of a frame.
MOST_BYTES = 1 << 30


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a state as its source describes it. ``shape``: of the whole tensor, if ``sharded``."""

    name: str
    dtype: str
    shape: list[int]
    sharded: bool
    device: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Part:
        """The description of a tensor."""
        return cls(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            sharded=isinstance(tensor, DTensor),
            device=tensor.device.type,
        )

    def __str__(self) -> str:
        return f"torch.{self.dtype} of {self.shape}"


class StateFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a state but the bytes of its tensors. ``values``: see ``values.py``. ``optimizer``: the name of its
    class. ``refusal``: why there is no state, if that is not empty."""

    values: Any
    parts: list[Part]
    step: int
    batches_committed: int
    optimizer: str = ""
    refusal: str = ""

    def packed(self) -> bytes:
        """As bytes, with a checksum."""
        data = msgspec.msgpack.encode(self)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"members.state: {len(data)} bytes of plain values, at most {MOST_BYTES} are possible")
        return zlib.crc32(data).to_bytes(4, "little") + data

    @classmethod
    def unpacked(cls, data: bytes) -> StateFrame:
        """The inverse of ``packed``. ProtocolError if they are not the bytes that were sent."""
        if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
            raise ProtocolError("the plain values of a state did not arrive as they were sent: their checksum differs")
        try:
            frame: StateFrame = _frame_decoder.decode(data[4:])
            return frame
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the plain values of a state cannot be read: {error}") from None


_frame_decoder = decoder(StateFrame)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a state arrives. ``tensors``: memory that nothing else uses yet, by name."""

    frame: StateFrame
    tensors: dict[str, Tensor]

    @property
    def sharded(self) -> list[str]:
        """The names of what is a DTensor here."""
        return [name for name, tensor in self.tensors.items() if isinstance(tensor, DTensor)]


class MemberState:
    """``extra``: (get, set); ``get()`` returns numbers, text, bytes, tensors, and lists, tuples and dicts of these."""

    def __init__(
        self, model: Any, optimizer: Any, extra: tuple[Callable[[], Any], Callable[[Any], None]] | None
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ConfigError(f"members.state(model): a torch.nn.Module is needed, not {type(model).__name__}")
        if optimizer is not None and not hasattr(optimizer, "load_state_dict"):
            raise ConfigError("members.state(optimizer=...): it has no load_state_dict")
        if extra is not None and not (
            isinstance(extra, tuple | list) and len(extra) == 2 and all(map(callable, extra))
        ):
            raise ConfigError("members.state(extra=...): two functions are needed, (get, set)")
        self._model, self._optimizer, self._extra = model, optimizer, extra

    def check(self) -> None:
        """Raise ConfigError for what can never be handed over, and what the program's ``get`` raises."""
        self.take(0, 0)[0].packed()

    def take(self, step: int, batches_committed: int) -> tuple[StateFrame, dict[str, Tensor]]:
        """The state as it is: a frame, and the tensors themselves, which are not copied."""
        collector = TensorCollector()
        values = {
            "model": collector.take_apart(self._of_model(), "model"),
            "optimizer": collector.take_apart(
                None if self._optimizer is None else self._optimizer.state_dict(), "optimizer"
            ),
            "extra": collector.take_apart(None if self._extra is None else self._extra[0](), "extra"),
        }
        parts = [Part.of(name, tensor) for name, tensor in collector.found.items()]
        frame = StateFrame(
            values=values,
            parts=parts,
            step=step,
            batches_committed=batches_committed,
            optimizer=_class_of(self._optimizer),
        )
        return frame, {name: tensor.detach() for name, tensor in collector.found.items()}

    def expect(self, frame: StateFrame) -> Landing:
        """Memory for every tensor of the state, as this replica shards it. ConfigError names what does not fit."""
        places = self._places(frame)
        tensors = {part.name: _memory(part, places.get(part.name)) for part in frame.parts}
        return Landing(frame=frame, tensors=tensors)

    def load(self, landing: Landing) -> None:
        """Let model, optimizer and program have what has arrived."""
        whole = {name: put_together(value, landing.tensors) for name, value in landing.frame.values.items()}
        with torch.no_grad():
            if self._model is not None:
                _into(self._model, self._of_model() or {}, whole["model"])
            if self._optimizer is not None:
                self._optimizer.load_state_dict(whole["optimizer"])
        if self._extra is not None:
            self._extra[1](whole["extra"])

    def _of_model(self) -> dict[str, Any] | None:
        # The parameters themselves, so that those that are tied are seen to be.
        found = None if self._model is None else self._model.state_dict(keep_vars=True)
        for name, value in (found or {}).items():
            local = _local(value) if isinstance(value, Tensor) else None
            if local is not None and is_expanded(local.shape, local.stride()):
                raise ConfigError(
                    f"members.state cannot hand over model/{name}: it was expanded, so its elements share memory, and "
                    f"a newcomer could not write them: register a clone() of it"
                )
        return found

    def _places(self, frame: StateFrame) -> dict[str, Tensor]:
        """The tensors here that are laid out like those of the state, as far as there are any, by name."""
        given: dict[str, Any] = frame.values
        found: dict[str, Tensor] = {}
        if (self._model is None) != (given["model"] is None) or (self._optimizer is None) != (
            given["optimizer"] is None
        ):
            raise ConfigError("members.state: one replica names a model or an optimizer and another does not")
        if self._model is not None:
            mine, theirs = self._of_model() or {}, put_together(given["model"], _Names())
            if mine.keys() != theirs.keys():
                differ = sorted(mine.keys() ^ theirs.keys())[:10]
                raise ConfigError(f"members.state: the models of the replicas differ: {differ}")
            found |= {theirs[key]: value for key, value in mine.items() if isinstance(value, Tensor)}
        if self._optimizer is not None:
            found |= self._places_of_optimizer(put_together(given["optimizer"], _Names()), frame)
        wanted = {part.name: part for part in frame.parts if part.name.startswith("extra/")}
        if self._extra is not None and wanted:
            collector = TensorCollector()
            collector.take_apart(self._extra[0](), "extra")
            for name, tensor in collector.found.items():
                part = wanted.get(name)
                # A plain tensor may have any shape here, because nobody gave it one before.
                if part is not None and (part.sharded or isinstance(tensor, DTensor)):
                    found.setdefault(name, tensor)
        return found

    def _places_of_optimizer(self, state: dict[str, Any], frame: StateFrame) -> dict[str, Tensor]:
        """What has the shape of its parameter is laid out like that; anything else like what is here already."""
        if (mine := _class_of(self._optimizer)) != frame.optimizer:
            raise ConfigError(
                f"members.state: the optimizer is {mine} here and {frame.optimizer} at the replica that it is loaded "
                f"from"
            )
        if (here := len(self._optimizer.param_groups)) != (there := len(state["param_groups"])):
            raise ConfigError(
                f"members.state: the optimizer has {here} groups of parameters here and {there} at the replica that it "
                f"is loaded from"
            )
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if len(parameters) != len(numbers):
            raise ConfigError(
                f"members.state: the optimizer has {len(parameters)} parameters here and {len(numbers)} at the replica "
                f"that it is loaded from"
            )
        shapes = {part.name: part.shape for part in frame.parts}
        found: dict[str, Tensor] = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            here = self._optimizer.state.get(parameter, {})
            for key, name in _flat(state["state"].get(number, {})):
                if shapes[name] == list(parameter.shape) and parameter.ndim:
                    found[name] = parameter
                elif isinstance(here.get(key), Tensor) and shapes[name] == list(here[key].shape):
                    found[name] = here[key]
        return found


def _class_of(optimizer: Any) -> str:
    """The name of an optimizer's class; of the wrapped one, if it is `etha.groups.Optimizer`."""
    inner = optimizer.optimizer if hasattr(optimizer, "members") and hasattr(optimizer, "optimizer") else optimizer
    return "" if inner is None else type(inner).__name__


class _Name(str):
    """The name of a tensor of a frame, in its place."""


class _Names(dict[str, Any]):
    """Stands for the tensors of a frame: each is its own name."""

    def __missing__(self, name: str) -> _Name:
        return _Name(name)


def _flat(state: dict[str, Any]) -> list[tuple[str, str]]:
    """The entries of one parameter's state that are tensors: key, and name of the tensor."""
    return [(key, value) for key, value in state.items() if isinstance(value, _Name)]


def _memory(part: Part, like: Tensor | None) -> Tensor:
    """Memory for a tensor, laid out as ``like`` is."""
    dtype = getattr(torch, part.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"members.state: {part.name} has the dtype {part.dtype}, which is unknown here")
    if like is None:
        if part.sharded:
            raise ConfigError(
                f"members.state: {part.name} is a DTensor of {part.shape} at the replica that it is loaded from, and "
                f"nothing here says how it is sharded: create it before the first begin()"
            )
        device = part.device if part.device == "cpu" or torch.cuda.is_available() else "cpu"
        return torch.empty(part.shape, dtype=dtype, device=device)
    is_model = part.name.startswith("model/")
    if list(like.shape) != part.shape or (is_model and like.dtype != dtype):
        raise ConfigError(
            f"members.state: {part.name.removeprefix('model/')} is {like.dtype} of {list(like.shape)} here and {part} "
            f"at the replica that it is loaded from"
        )
    if not isinstance(like, DTensor):
        return torch.empty(part.shape, dtype=dtype, device=like.device)
    local = torch.empty_like(like.to_local(), dtype=dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local.detach(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _into(model: torch.nn.Module, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Copy a module's tensors in place, and give each submodule its extra state."""
    for name, value in mine.items():
        if isinstance(value, Tensor):
            _local(value).copy_(_local(theirs[name]))
        elif name.rpartition(".")[2] == "_extra_state":
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(theirs[name])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
