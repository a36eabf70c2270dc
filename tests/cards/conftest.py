"""Played GPUs: a runtime directory of its own for each test, as flow tests have it."""

from __future__ import annotations

from tests.flow.conftest import runtime as runtime
