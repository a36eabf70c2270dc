"""Name a module's tensors as in its checkpoint, ready for ``register_tensors``: FSDP2, FSDP2 x TP, HSDP, plain.

    client.register_tensors("model", named_tensors(model), pair_name="weights")

It only reads the module: no collective, no gather, no copy. DTensors keep their own layouts, over any mesh, and
registration takes their local shards, without the padding of FSDP2's storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

from etha.errors import ConfigError
from etha.integrations.names import rename

#: Names of the attributes by which a wrapper holds its module: torch.compile, activation checkpointing, FSDP1.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def named_tensors(
    module: nn.Module, *, names: Mapping[str, str] | None = None, buffers: bool = True
) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each tensor once, in the order of ``module.state_dict()``.

    - **Always sharded.** For a parameter that FSDP2 holds unsharded now, after a forward without reshard, this returns
      the sharded one, which the optimizer steps and later forwards gather from. Nothing is resharded. (A module that
      *receives* needs ``reshard()`` before the next forward, because an unsharded parameter is not gathered again and
      would still hold the old values.)
    - **Tied weights once**, under the name that comes first in that order, which is the same on every rank. Weights are
      tied if modules share one Parameter; their memory does not count, because an empty shard has none. If the
      receiver uses the other name, map it in ``names``.
    - **Names without wrappers**: the prefixes of ``torch.compile``, DistributedDataParallel, activation checkpointing
      and FSDP1 are left out, inside the module as well as around it.
    - ``names``: ordered regex replacements, see :func:`etha.integrations.names.rename`.
    - ``buffers``: persistent buffers, as in a checkpoint; False for parameters only. A plain buffer counts as equal on
      all ranks. A buffer that differs between ranks (unsynchronised batch norm statistics) arrives as a mixture of the
      ranks' values, because replicas share the sending of a large tensor. Synchronise such buffers before sending, or
      register those of one rank only.

    Plain tensors are returned unchanged: parameters of a module that nothing shards, those that FSDP2 or tensor
    parallelism ignores, most buffers. Their layout is the pair's default (``init_pair(..., device_mesh=(world,),
    placements=[Replicate()])``) or ``register_tensors(..., placements=...)``.

    ConfigError: not a module; FSDP1 that shards, whose flat parameters have no layout; a rule of ``names`` that matches
    nothing; two tensors with one name.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"named_tensors needs a torch.nn.Module, not a {type(module).__name__}")
    sharded = _sharded_parameters()
    first: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    unused: list[str] = []
    for name, tensor, wanted in _tensors(module, buffers):
        tensor = sharded.get(id(tensor), tensor)
        if not wanted or id(tensor) in first:
            unused.append(name)
            continue
        if name in found:
            raise ConfigError(f"two tensors of the module are called {name!r} once the prefixes of wrappers are gone")
        first[id(tensor)] = name
        found[name] = tensor
    new = rename(found, names, unused=unused)
    return {new[name]: tensor for name, tensor in found.items()}


def _tensors(module: nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every name of the module, including tied ones. The last value says whether ``named_tensors`` returns its kind."""
    for prefix, owner in walk(module):
        _check(owner, prefix)
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter, True
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield prefix + name, buffer, buffers and name not in owner._non_persistent_buffers_set


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with the prefix of its tensors' names. A wrapper has the prefix of its wrapped module, and comes
    first."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, prefix if _wraps(module, name) else f"{prefix}{name}.")


def _wraps(module: nn.Module, child: str) -> bool:
    # A model may use the name "module" itself, so the class decides there.
    data_parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return child in _WRAPPED or (child == "module" and isinstance(module, data_parallel))


def _check(module: nn.Module, prefix: str) -> None:
    if isinstance(module, FullyShardedDataParallel):
        whole = module.sharding_strategy == ShardingStrategy.NO_SHARD and module._use_orig_params
        if not whole:
            raise ConfigError(
                f"module {prefix.rstrip('.') or '(root)'!r} is sharded by FullyShardedDataParallel (FSDP1), whose "
                f"flat parameters have no layout that could be registered; shard it with "
                f"torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    elif isinstance(module, FSDPModule) and _groups(_states().get(module)) is None:
        raise ConfigError(
            f"torch {torch.__version__} does not tell the sharded parameters of FSDP2 module "
            f"{prefix.rstrip('.') or '(root)'!r}; call reshard() on it and register dict(model.named_parameters())"
        )


def _sharded_parameters() -> dict[int, torch.Tensor]:
    """id of each tensor that FSDP2 has put into a module for a sharded parameter -> that sharded parameter.

    It covers all modules of the process, because the FSDP2 module of a parameter may lie above the given module.
    """
    found: dict[int, torch.Tensor] = {}
    for state in list(_states().values()):
        for group in _groups(state) or ():
            for held in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    if (parameter := getattr(held, name, None)) is not None:
                        found[id(parameter)] = held.sharded_param
    return found


def _states() -> Mapping[Any, Any]:
    """PyTorch's registry of module states, weak on both ends. It has no public one."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return {}
    return _module_state_mapping


def _groups(state: Any) -> list[Any] | None:
    """FSDP2's parameter groups of a module's state (earlier releases have one); None if the state has none."""
    state = state() if callable(state) else state
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        return None
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
