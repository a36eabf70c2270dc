"""Hooks of MkDocs: pages and files outside docs/ that the docs link to, links between them, and the generated pages.

    README.md --> index.md          docs/NAME --> NAME          anything else that is linked --> repository/PATH

Nothing is copied into the tree: MkDocs gets the text when it builds.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
#: Pages that are in the navigation without a link from another page.
ALSO = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "bench/results")
#: Sections of the page of the Python interface: title -> module, and its names; none: those of its __all__.
API = {
    "Clients": ("etha", "TensorBusClient AsyncTensorBusClient"),
    "What they return": ("etha", "Pair BatchHandle TransferResult TransferFuture Offer"),
    "Publications": (
        "etha",
        "Publication AsyncPublication Subscription AsyncSubscription PublishedVersion Update SubscriberState",
    ),
    "Checkpoints": ("etha.publishing", ""),
    "Memory": ("etha", "empty empty_like share_module"),
    "Inside one job": ("etha", "redistribute"),
    "Errors": ("etha", "*Error Violation"),
    "Planning": ("etha.plan", ""),
    "Process groups": ("etha.groups", ""),
    "Models": ("etha.integrations.fsdp", ""),
    "Tests of your own code": ("etha.testing", ""),
    "vLLM": ("etha.integrations.vllm", ""),
}


def uri_of(path: str) -> str:
    """Where a file of the repository lies in the sources of the site; a folder is its README or a list of its files."""
    if (ROOT / path).is_dir():
        path = f"{path}/README.md" if (ROOT / path / "README.md").exists() else f"{path}/index.md"
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def links_of(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    return {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        for _, link, _ in LINK.findall((ROOT / path).read_text(encoding="utf-8"))
    }


def linked() -> set[str]:
    """Everything outside docs/ that is linked, from page to page."""
    found, new = set[str](), {"README.md", *ALSO, *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))}
    while new:
        path = new.pop()
        if not (ROOT / path).exists():
            raise PluginError(f"{path} is linked and is not there")
        found.add(path)
        folder = ROOT / path
        if folder.is_dir():
            more = {str(one.relative_to(ROOT)) for one in folder.iterdir() if one.suffix in (".md", ".py")}
        else:
            more = links_of(path) if path.endswith(".md") else set()
        new |= more - found
    return {path for path in found if not path.startswith("docs/")}


def content(path: str) -> str:
    """A page outside docs/, or the list of a folder's files."""
    if (ROOT / path).is_dir():
        names = sorted((one.name for one in (ROOT / path).iterdir() if one.suffix in (".md", ".py")), reverse=True)
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names)])
    return (ROOT / path).read_text(encoding="utf-8")


def rewritten(text: str, path: str) -> str:
    """The text of the page ``path`` of the repository with its links as they are in the site."""
    here = posixpath.dirname(uri_of(path)) or "."

    def move(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        if (ROOT / path).is_dir():
            target = f"{path}/{found[2]}"
        return f"{found[1]}{posixpath.relpath(uri_of(target), here)}{found[3]}"

    parts = FENCE.split(text)  # every second part is a block of code
    return "".join(part if number % 2 else LINK.sub(move, part) for number, part in enumerate(parts))


def names_of(module: str) -> list[str]:
    """The __all__ of a module less its constants, or its public functions and classes."""
    tree = syntax(module)
    if named := literal(tree, "__all__"):
        return [str(name) for name in named if name[0] != "_" and not name.isupper()]
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]


def syntax(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def literal(tree: ast.Module, variable: str) -> Any:
    """The value of a variable that a module sets to a literal; None if it sets none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            return ast.literal_eval(node.value)
    return None


def home_of(module: str, name: str) -> str:
    """The full name at which the source defines a public name: modules that load lazily list those."""
    tree = syntax(module)
    for home, names in (literal(tree, "_NAMES") or {}).items():
        if name in names:
            return f"{home}.{name}"
    homes = literal(tree, "_HOME") or {}
    return f"{module}.{homes[name]}.{name}" if name in homes else f"{module}.{name}"


def api() -> str:
    """The page of the Python interface. PluginError if a public name of etha is in no section."""
    lines, placed = ["# Python", "", "Everything public, from its docstrings."], set[str]()
    for title, (module, names) in API.items():
        there = names_of(module)
        wanted = names.split() or there
        chosen = [n for n in there if n in wanted or ("*Error" in wanted and n.endswith("Error"))]
        if missing := set(wanted) - set(there) - {"*Error"}:
            raise PluginError(f"site/hooks.py: {module} has no {', '.join(sorted(missing))}")
        placed |= {f"{module}.{name}" for name in chosen}
        lines += ["", f"## {title}", "", f"`from {module} import ...`"]
        for name in chosen:
            lines += ["", f"::: {home_of(module, name)}"]
    if lost := {f"etha.{name}" for name in names_of("etha")} - placed:
        raise PluginError(f"site/hooks.py: give {', '.join(sorted(lost))} a section in API")
    return "\n".join(lines) + "\n"


def errors() -> str:
    """A list of the error codes with what each means, which leads to its section with cause and cure."""
    text = (ROOT / "docs/debugging.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`\w+`\]\(#\w+\) \|.*$", text, re.MULTILINE)
    if not rows:
        raise PluginError("docs/debugging.md has no table of error codes")
    head = next(
        line for line in text[: text.index(rows[0])].splitlines()[::-1] if line.startswith("| ") and "--" not in line
    )
    line = "|" + "---|" * (head.count("|") - 1)
    table = "\n".join([head, line, *rows]).replace("](#", "](debugging.md#")
    return f"# Errors\n\nEvery code; its section says what causes it and what to do.\n\n{table}\n"


def on_files(files: Files, config: Any) -> Files:
    for uri, path in {uri_of(path): path for path in sorted(linked())}.items():  # a folder and its README are one page
        if uri.endswith(".md"):
            file = File.generated(config, uri, content=rewritten(content(path), path))
        else:
            file = File.generated(config, uri, abs_src_path=str(ROOT / path))
        if path.startswith("bench/results/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    for uri, text in (("api.md", api()), ("errors.md", errors())):
        files.append(File.generated(config, uri, content=text))
    for file in files.documentation_pages():
        if file.src_uri.startswith("adr/") or "quickstart" in file.src_uri:
            file.inclusion = InclusionLevel.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Pages of docs/ are rewritten here, the others when they were made."""
    path = f"docs/{page.file.src_uri}"
    return rewritten(markdown, path) if (ROOT / path).exists() else markdown
