"""What a server is worth under the workload: one load, several in turn, or the highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.engine.base import Server
from tuner.load.client import LoadClient
from tuner.measuring.highest import at_load, highest_load
from tuner.measuring.session import Asked, Prepare, Run, Session
from tuner.types import Measurement, Metric, ProgressSink, WorkloadSpec


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement, and each load that it was made of."""

    measurement: Measurement
    runs: Sequence[Run]


async def measure(
    server: Server, asked: Asked, prepare: Prepare, on_progress: ProgressSink
) -> Measured:
    """Warm the server up and measure it.

    Raises:
        ClientTooSlow: the load generator could not drive the load.
        CounterReset, ScrapeError, Stalled: see `tuner.metrics.scrape`.
        TokenizeError: the server broke while the prompts were made.
        WrongLength: answers or prompts are not as long as was asked for.
    """
    workload = asked.workload
    timeout_s = workload.request_timeout_s
    async with LoadClient(server.base_url, server.model_name, timeout_s) as client:
        session = Session(server, asked, prepare, client, on_progress)
        async with session.watcher:
            await session.warm_up()
            found = await _figures(session, workload)
    return Measured(found, tuple(session.runs))


async def _figures(session: Session, workload: WorkloadSpec) -> Measurement:
    if session.asked.objective.maximize is Metric.MAX_RATE:
        return await highest_load(session, workload)
    if not workload.levels:
        return (await session.measure(workload)).measurement
    levels = []
    for level in workload.levels:
        levels.append((await session.measure(at_load(workload, level))).measurement)
        await session.settle()
    return replace(levels[-1], levels=tuple(levels))
