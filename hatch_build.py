"""How the package is built: README without relative links and pictures, and the compiled library of etha/native.

Without a C compiler the wheel is one for every platform, and Python does the library's work.
"""

from __future__ import annotations

import re
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)[^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def portable(readme: str) -> str:
    """``readme`` with plain text in place of relative links and pictures, which lead nowhere on a package index."""
    return LINK.sub(r"\1", PICTURE.sub(r"(Picture in the repository. \1.)", readme))


class CustomMetadataHook(MetadataHookInterface):
    """Sets the dynamic field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": portable(text)}


class CustomBuildHook(BuildHookInterface[Any]):
    """Compiles etha/native/executor.c: into the wheel, or beside the source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = runpy.run_path(str(Path(self.root) / "etha" / "native" / "build.py"))
        self.made = tempfile.TemporaryDirectory(prefix="etha-wheel-")
        editable = version == "editable"
        library: Path = builder["LIBRARY"] if editable else Path(self.made.name) / builder["LIBRARY"].name
        try:
            found = builder["build"](library)
        except (builder["BuildError"], OSError) as error:
            found = False
            self.app.display_warning(f"executor.c was not compiled, groups will do its work in Python: {error}")
        if found and not editable:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
            build_data["force_include"][str(library)] = f"etha/native/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.made.cleanup()
