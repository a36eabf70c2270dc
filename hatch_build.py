"""How the package is described where its repository is not at hand: README without relative links and pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)[^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)")


def portable(readme: str) -> str:
    """``readme`` with plain text in place of relative links and pictures, which lead nowhere on a package index."""
    return LINK.sub(r"\1", PICTURE.sub(r"(Picture in the repository. \1.)", readme))


class CustomMetadataHook(MetadataHookInterface):
    """Sets the dynamic field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": portable(text)}
