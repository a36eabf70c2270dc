"""Finds torch's own DDP over a group whose members come and go: to refuse it, and to say why calls do not match."""

from __future__ import annotations

import gc
from typing import Any

from torch.nn.parallel import DistributedDataParallel as _TorchDDP

#: What is wrong with it.
_WHY = (
    "it rebuilds its buckets after its first step, so a process that joins later makes other calls than the rest; use "
    "etha.groups.DistributedDataParallel"
)


def plain_ddp_modules(group: Any) -> list[Any]:
    """torch's own DDP modules over a group. Searches all objects of the process, which takes a while."""
    # By type, not by isinstance, which asks proxies for their __class__.
    found = [each for each in gc.get_objects() if issubclass(type(each), _TorchDDP)]
    return [
        each
        for each in found
        if getattr(type(each), "rebuilds_buckets", True) and each.__dict__.get("process_group") is group
    ]


def plain_ddp_hint(group: Any) -> str:
    """What to add to an error of calls that do not match; "" if no plain DDP uses the group."""
    if not any(not module.find_unused_parameters for module in plain_ddp_modules(group)):
        return ""
    return f"torch's DistributedDataParallel uses this group: {_WHY}"


def newcomer_refusal(group: Any) -> str:
    """Why a process may not join others that train already; "" if it may.

    If all gradients fit into one bucket, the calls of the first step have the size of the others', in another order of
    the parameters. Nothing would tell that the sums are of unlike gradients.
    """
    unlike = [
        module
        for module in plain_ddp_modules(group)
        if not (
            module.find_unused_parameters
            or module._has_rebuilt_buckets
            or getattr(module, "_use_python_reducer", False)
        )
    ]
    return f"torch's DistributedDataParallel cannot join members that train already: {_WHY}" if unlike else ""
