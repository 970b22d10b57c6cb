"""One process of a load that is spread over several: `python -m tuner.load.worker`.

Reads its order from stdin and tells on stdout what came of it a few times a second. It ends
with its load, or with its parent: the end of stdin means that nobody wants the load any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from tuner.errors import EnvironmentProblem
from tuner.load.client import LoadClient
from tuner.load.running import Pace, RunningLoad
from tuner.load.wire import PackedRequests, frame, receive, row_of

TELL_S = 0.25
"""From one word to the next."""


async def work(output: int) -> None:
    """Drive this process's share of a load.

    Args:
        output: descriptor of the pipe to the parent.
    """
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    pipe, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(output, "wb", 0)
    )
    pipe.set_write_buffer_limits(0)  # so that `drain` is to the last byte
    parent = asyncio.StreamWriter(pipe, protocol, None, loop)
    target, packed, concurrency, due_s = await receive(orders)
    async with LoadClient(*target) as client:
        load = RunningLoad(client, PackedRequests(packed), Pace(concurrency, due_s))
        parent.write(frame("ready"))
        load.start_s = await receive(orders)
        async with load:
            stopping = asyncio.create_task(_stop_when_told(orders, load))
            try:
                await _tell(load, parent)
            except EnvironmentProblem as problem:
                parent.write(frame((problem.message, problem.hint)))
                await parent.drain()
            stopping.cancel()


async def _tell(load: RunningLoad, parent: asyncio.StreamWriter) -> None:
    """Tell what is new, to the end; never waits for the parent to listen before that."""
    records, lags = 0, 0
    is_done = False
    while not is_done:
        is_done = await load.ended(TELL_S)
        rows = [row_of(record) for record in load.records[records:]]
        lags_s = load.watch.lags_s[lags:]
        records, lags = records + len(rows), lags + len(lags_s)
        parent.write(frame((load.sent, rows, lags_s, load.watch.busy_share, is_done)))
    await parent.drain()


async def _stop_when_told(orders: asyncio.StreamReader, load: RunningLoad) -> None:
    try:
        await receive(orders)
        load.stop()
        await receive(orders)
    except asyncio.IncompleteReadError:
        os._exit(0)  # the parent is gone: so is the wish for this load


def main() -> None:
    """Run until the load, or the parent, has ended."""
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints, it is no word to parent
    with contextlib.suppress(asyncio.IncompleteReadError):  # the parent ended before the load
        asyncio.run(work(output))


if __name__ == "__main__":
    main()
