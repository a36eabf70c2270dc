"""What a network does to the packets that arrive at the hosts of a test: loses some, lets few through, or none.

with arriving(net, LOSSY.format(percent=5)) as drops:
    ...
    assert drops()              # packets that were dropped so far
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.flow.networks.namespaces import Hosts

#: What every test with such filters is marked with.
MARKS = [pytest.mark.needs("nft")]

_numbers = itertools.count(1)
#: Of whatever comes from others, Redis included.
LOSSY = 'iifname != "lo" numgen random mod 100 < {percent} counter drop'
#: Packets that carry much pass at that rate; what agents say to each other always does.
THROTTLED = 'iifname "direct" meta length > 1000 limit rate over {mbytes} mbytes/second burst 1 mbytes counter drop'
#: Nothing of the other host arrives; what is sent to it does.
DEAF = 'iifname "direct" counter drop'
#: A firewall that has nothing against links, but against what goes to and from these ports.
PORTS = 'iifname "direct" tcp dport {{ {ports} }} counter drop; iifname "direct" tcp sport {{ {ports} }} counter drop'
#: A firewall that begins to refuse these ports: connections that stand are reset, new ones are refused.
REFUSED = 'iifname "direct" tcp dport {{ {ports} }} counter reject with tcp reset'


def nft(host: str, *words: str) -> str:
    """One nft command inside a namespace; its output."""
    done = subprocess.run(["ip", "netns", "exec", host, "nft", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"nft {' '.join(words)}: {done.stderr}")
    return done.stdout


@contextmanager
def arriving(net: Hosts, rules: str, *, at: tuple[str, ...] = ()) -> Iterator[Callable[[], int]]:
    """``rules``, separated by ";", on what arrives ``at`` these namespaces, else at both hosts; while the block runs.

    Yields a function that tells how many packets they have dropped. Blocks may be nested.
    """
    hosts = at or (net.one, net.two)
    name = f"etha-test-{next(_numbers)}"

    def dropped() -> int:
        found = 0
        for host in hosts:
            for item in json.loads(nft(host, "-j", "list", "table", "inet", name))["nftables"]:
                for part in item.get("rule", {}).get("expr", ()):
                    found += part["counter"]["packets"] if "counter" in part else 0
        return found

    try:
        for host in hosts:
            nft(host, f"table inet {name} {{ chain arriving {{ type filter hook input priority 0; {rules}; }}; }}")
        yield dropped
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "exec", host, "nft", "delete", "table", "inet", name], capture_output=True)
