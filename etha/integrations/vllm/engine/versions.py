"""The backend's name, and the releases of vLLM that it supports."""

from __future__ import annotations

#: The backend's name in ``WeightTransferConfig(backend=...)``.
NAME = "etha"
#: The releases of vLLM that the backend supports. It uses internals that change between releases.
SUPPORTED = ("0.32",)


def unsupported(version: str) -> str | None:
    """Why the backend does not work with vLLM ``version``; None if it does."""
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return None
    return f"vLLM {version} is installed; the backend {NAME!r} of sub-etha supports {', '.join(SUPPORTED)}.*"
