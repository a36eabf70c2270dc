"""Hosts that share nothing but a network: two namespaces joined by a veth pair, their Redis in a third."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.flow.commands.test_demo import demo, left
from tests.flow.networks.namespaces import MARKS, hosts

pytestmark = [pytest.mark.timeout(300), *MARKS]

#: Prints one field of a hash, in a namespace where this process is not.
READ = "import redis, sys; print(redis.Redis(host=sys.argv[1], decode_responses=True).hget(sys.argv[2], sys.argv[3]))"


def test_the_demo_runs_with_one_job_on_each_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary: Path = tmp_path_factory.mktemp("n")
    with hosts(temporary) as net:
        words = ["--redis", net.url, "--trainer", f"{net.one},10.211.1.1", "--inference", f"{net.two},10.211.1.2"]
        with demo(temporary, "--steps", "2", "--every", "1", *words) as process:
            out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        assert "3 versions, every element equal" in out
        words = ["-c", READ, "10.211.2.3", "etha:{default}:batch:weights:model", "transport"]
        batch = net.run(net.one, sys.executable, *words)
        assert batch.strip() == "tcp"
        assert not left(temporary)
