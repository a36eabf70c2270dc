"""Strict reading of what Redis holds, field by field; pure.

Redis is shared with people and other programs, so nothing in it is trusted. A value that does not match the key table
raises ProtocolError with the key and the field. Sizes are bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from etha.config import NAME
from etha.errors import ProtocolError

#: Most bytes of one field. More are a mistake.
MAX_FIELD = 64 << 10
_MAX_INT = (1 << 63) - 1


class FieldReader:
    """One hash, or one JSON object inside it, read field by field. ProtocolError names what is wrong."""

    def __init__(self, key: str, values: Mapping[str, Any]) -> None:
        self.key, self.values = key, values

    def wrong(self, name: str, expected: str) -> ProtocolError:
        """The error to raise about field ``name``."""
        found = repr(self.values.get(name))
        found = found if len(found) <= 80 else found[:77] + "..."
        return ProtocolError(f"Redis key {self.key!r}: field {name!r} is {found}, expected {expected}")

    def text(self, name: str, *, most: int = MAX_FIELD, default: str | None = None) -> str:
        """Text of at most ``most`` characters."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise self.wrong(name, f"text of at most {most} characters")
        return value

    def name(self, name: str) -> str:
        """A name in the alphabet of namespaces, sides, pairs and batches."""
        value = self.text(name)
        if NAME.fullmatch(value) is None:
            raise self.wrong(name, "1 to 100 of A-Z a-z 0-9 . _ -")
        return value

    def integer(self, name: str, *, least: int = 0, most: int = _MAX_INT, default: int | None = None) -> int:
        """A whole number, possibly as decimal text."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def seconds(self, name: str, *, default: float | None = None) -> float:
        """A finite number of seconds, not negative."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        try:
            number = float(self.text(name, most=40))
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise self.wrong(name, "a number of seconds")
        return number

    def one_of(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        value = self.values.get(name, default)
        if value not in choices:
            raise self.wrong(name, "one of " + ", ".join(map(repr, choices)))
        return str(value)

    def json(self, name: str, default: str) -> Any:
        """The field's JSON value."""
        try:
            return json.loads(self.text(name, default=default))
        except (ValueError, RecursionError):  # RecursionError: thousands of brackets
            raise self.wrong(name, "JSON") from None

    def json_object(self, name: str) -> FieldReader:
        """A reader of the JSON object in the field."""
        value = self.json(name, "{}")
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return FieldReader(f"{self.key} {name}", value)
