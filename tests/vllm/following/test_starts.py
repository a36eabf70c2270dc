"""An engine that cannot start with a version of its publication ends, and its log says why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.vllm.engines import Server
from tests.vllm.publishers import Publisher

Checkpoints = Callable[[str, int], Path]
Env = dict[str, str]


def test_engines_that_cannot_start_end_and_say_why(checkpoints: Checkpoints, env: Env, logs: Path) -> None:
    """Together, because each takes its time."""
    model = checkpoints("qwen3", 0)
    with ExitStack() as ends:
        for name, how in (("shapes", {"cut": "model.norm.weight"}), ("gaps", {"without": "model.norm.weight"})):
            publisher = Publisher(model, env, logs / f"{name}-publisher.log", name=name, **how)
            ends.callback(publisher.kill)
            publisher.put(model)

        def start(name: str, follows: dict[str, Any], *options: str) -> Server:
            server = Server(model, 1, env, logs / f"{name}.log", follows=follows, options=options)
            ends.callback(server.kill)
            return server

        cases = {
            "shapes": (start("shapes", {"publication": "shapes"}), "'model.norm.weight'"),
            "gaps": (start("gaps", {"publication": "gaps"}), "has nothing, or a part, of the model's parameters"),
            "nothing": (
                start("nothing", {"publication": "nobody", "timeout": 3}),
                "nobody has published 'nobody' by the deadline",
            ),
            "key": (start("key", {"publication": "p", "pauze": "keep"}), "no option 'pauze': do you mean 'pause'"),
            "executor": (
                start("executor", {"publication": "p"}, "--weight-transfer-config", '{"backend": "nccl"}'),
                "needs --weight-transfer-config",
            ),
        }
        for name, (server, reason) in cases.items():
            server.child.ended()
            log = server.child.log.read_text(errors="replace")
            assert reason in log, f"{name}:\n{log[-3000:]}"
