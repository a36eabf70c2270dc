"""Finds torch's own DDP over a group whose members come and go, to say why calls do not match."""

from __future__ import annotations

import gc
from typing import Any

from torch.nn.parallel import DistributedDataParallel as _TorchDDP


def plain_ddp_modules(group: Any) -> list[Any]:
    """torch's own DDP modules over a group. Searches all objects of the process: for the text of an error only."""
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
    return (
        "torch's DistributedDataParallel uses this group: it rebuilds its buckets after its first step, so a process "
        "that joins later makes other calls than the rest; use etha.groups.DistributedDataParallel"
    )
