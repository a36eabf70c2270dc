"""What a link costs that the simulation does not run: ZeroMQ, CURVE, the kernel. Prints the constants of ``Costs``.

    PYTHONPATH=bench python -m simulation.link_cost [--links 64] [--messages 200]

One real hub opens links to many others in this process, and then sends to each. All processor time of the process,
including ZeroMQ's threads, is divided by the number of ends. What ``encode`` and ``decode`` take is subtracted, because
the simulation runs both.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from contextlib import AsyncExitStack

import harness
import uvloop

from etha.peer.hub import Hub
from etha.peer.introductions import Met
from etha.peer.keys import Keys
from etha.peer.wire import Said, Scope, decode, encode

_SCOPE = Scope(pair="scale", epoch=1)


def spent() -> complex:
    """Seconds of processor time so far: of the loop's thread, and (imaginary) of ZeroMQ's threads beside it."""
    loop = time.thread_time()
    return complex(loop, time.process_time() - loop)


async def measure(links: int, messages: int) -> tuple[complex, complex, complex]:
    """``spent`` by one end: for opening a link, for a message, and for a message's codec alone."""
    known: dict[str, str] = {}
    heard, wanted = 0, asyncio.Event()

    def hear(agent: str, scope: Scope, message: Said) -> None:
        nonlocal heard
        heard += 1
        if heard == links * messages:
            wanted.set()

    async with AsyncExitStack() as stack:
        hubs = []
        for number in range(links + 1):
            keys = Keys.fresh()
            known[keys.public] = f"agent{number}"
            hub = Hub("127.0.0.1:0", keys, known=known.get, on_message=hear, on_agent_lost=lambda *_: None, beat=1e3)
            hubs.append(await stack.enter_async_context(hub))
        first, others = hubs[0], hubs[1:]
        before = spent()
        # An agent opens a link to whoever opens one to it, so each pair has two.
        await asyncio.gather(
            *(first.open(f"agent{i}", hub.address, hub.keys.public, 30.0) for i, hub in enumerate(others, 1)),
            *(hub.open("agent0", first.address, first.keys.public, 30.0) for hub in others),
        )
        link = (spent() - before) / (4 * links)
        before = spent()
        for _ in range(messages):
            for number in range(1, links + 1):
                first.send(f"agent{number}", _SCOPE, Met(reads=False))
            await asyncio.sleep(0)
        await wanted.wait()
        message = (spent() - before) / (2 * links * messages)
    before = spent()
    for _ in range(messages):
        decode(encode(_SCOPE, Met(reads=False)))
    return link, message, (spent() - before) / (2 * messages)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=64)
    parser.add_argument("--messages", type=int, default=200)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # hubs say that the others have left
    print(harness.machine())
    link, message, codec = uvloop.run(measure(options.links, options.messages))
    message -= codec
    print("\nms of CPU of one end on the loop's thread, and beside it")
    print(f"link      {link.real * 1e3:.3f}  {link.imag * 1e3:.3f}")
    print(f"message   {message.real * 1e3:.4f} {message.imag * 1e3:.4f}")


if __name__ == "__main__":
    main()
