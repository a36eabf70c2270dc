"""Rename tensors by ordered regex replacements, given as plain data: ``{"regex": "replacement"}``.

Computes. A JSON or YAML file can hold the rules. For example, from a training framework's names to a checkpoint's:
``{r"^decoder\\.": "model.", r"\\.mlp\\.fc1\\.": ".mlp.up_proj."}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from etha.client.manifest import check_tensor_name
from etha.errors import ConfigError


def rename(names: Iterable[str], rules: Mapping[str, str] | None, *, unused: Iterable[str] = ()) -> dict[str, str]:
    """``names`` -> new names, in the same order. Every rule is a ``re.sub`` on the result of the rules before it.

    A rule matches anywhere in a name unless it is anchored (``^``, ``$``), replaces every match, and may use groups
    (``\\1``, ``\\g<layer>``). A rule may also match only names in ``unused``, which are not renamed.

    ConfigError names a rule that is not a regex, whose replacement does not fit it, or that matches no name, and names
    that become equal, empty, or longer than a tensor's name may be.
    """
    names, spare = list(names), list(unused)
    mapped = [*names, *spare]
    for rule, replacement in _checked(rules):
        found = [rule.subn(replacement, name) for name in mapped]
        if not any(count for _, count in found):
            raise ConfigError(
                f"names: the rule {rule.pattern!r} -> {replacement!r} matches none of {_few(mapped)}; remove it or "
                f"correct it (rules apply in the order given, each to what those before it left)"
            )
        mapped = [name for name, _ in found]
    renamed = dict(zip(names, mapped, strict=False))
    origin: dict[str, str] = {}
    for old, new in renamed.items():
        if not new:
            raise ConfigError(f"names: the rules leave nothing of {old!r}")
        check_tensor_name(new)
        if new in origin:
            raise ConfigError(f"names: {origin[new]!r} and {old!r} both become {new!r}; make the rules tell them apart")
        origin[new] = old
    return renamed


def _checked(rules: Mapping[str, str] | None) -> list[tuple[re.Pattern[str], str]]:
    if rules is None:
        return []
    if not isinstance(rules, Mapping):
        raise ConfigError(f"names={rules!r:.80} is not a mapping of regex to replacement")
    checked = []
    for pattern, replacement in rules.items():
        if not isinstance(pattern, str) or not isinstance(replacement, str):
            raise ConfigError(f"names: the rule {pattern!r} -> {replacement!r} is not text to text")
        try:
            rule = re.compile(pattern)
            rule.sub(replacement, "")  # parses the replacement even if nothing matches
        except (re.error, IndexError) as error:
            raise ConfigError(f"names: the rule {pattern!r} -> {replacement!r} cannot be used: {error}") from None
        checked.append((rule, replacement))
    return checked


def _few(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"the {len(names)} names ({shown}{', ...' if len(names) > 3 else ''})" if names else "no names at all"
