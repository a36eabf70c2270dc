"""Where an agent shows its metrics."""

from __future__ import annotations

import pytest

from etha.agent.metrics import own_address


@pytest.mark.parametrize(
    ("wanted", "ordinal", "address"),
    [
        ("127.0.0.1:9464", None, "127.0.0.1:9464"),
        ("127.0.0.1:9464", 0, "127.0.0.1:9465"),
        ("[::1]:9464", 7, "[::1]:9472"),
        ("127.0.0.1:0", 7, "127.0.0.1:0"),
        ("127.0.0.1:65535", 0, "127.0.0.1:65536"),  # taken as one that cannot be listened on
    ],
)
def test_each_device_has_a_port_that_does_not_depend_on_the_others(
    wanted: str, ordinal: int | None, address: str
) -> None:
    assert own_address(wanted, ordinal) == address
