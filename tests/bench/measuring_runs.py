"""Loads on the simulated engine and virtual time, as a judge would have seen them meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.engine.simulated.engine import EngineCounters, SimulatedEngine
from tuner.engine.simulated.memory import MemoryPlan, plan_memory
from tuner.engine.simulated.profiles import DEVICES, MODELS
from tuner.engine.simulated.settings import EngineSettings, settings_from
from tuner.engine.simulated.virtual_client import PlannedRequest, VirtualClient
from tuner.load.workload import planned_lengths, schedule
from tuner.measuring.ending import ending, worse_than
from tuner.measuring.finished import CUT_OFF, Finished, figures
from tuner.measuring.judges import ScoreJudge
from tuner.measuring.lookout import Seen
from tuner.measuring.session import LOOK_S
from tuner.metrics.page import (
    GENERATION_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    RUNNING,
    WAITING,
    Snapshot,
    counters,
)
from tuner.objective import score
from tuner.types import (
    DeviceUse,
    Interval,
    JsonValue,
    MeasureEnd,
    MeasureSpec,
    MemoryFacts,
    ObjectiveSpec,
    RequestRecord,
    WorkloadSpec,
)

DRIFT = 0.03
"""Standard deviation of the slow part of a step's duration: a machine's pace wanders."""

LONG = 4
"""How many times as long a load is that tells the truth; several of them are averaged."""

DRIFT_STEPS = 100.0
"""Over how many steps it wanders; one to five seconds on these devices."""


@dataclass(frozen=True)
class Case:
    """A server under a load.

    Attributes:
        args: flags of the server.
    """

    name: str
    device: str
    model: str
    args: Mapping[str, JsonValue]
    workload: WorkloadSpec
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)


@dataclass(frozen=True)
class Load:
    """A load from its first to its last request; times are virtual seconds from its begin.

    Attributes:
        records: as they ended.
        sends_s: rising.
    """

    case: Case
    records: Sequence[RequestRecord]
    sends_s: Sequence[float]
    samples: Sequence[Snapshot]

    @property
    def length_s(self) -> float:
        """Until the last answer."""
        return self.records[-1].end_s


@dataclass(frozen=True)
class Result:
    """A measurement as it would be told to the search.

    Attributes:
        took_s: until its figures were known, requests in flight included that it waits for.
    """

    end: MeasureEnd
    score: float
    interval: Interval | None
    took_s: float

    def covers(self, score: float) -> bool:
        """Whether a score lies in its interval."""
        return self.interval is not None and self.interval.low <= score <= self.interval.high


@dataclass(frozen=True)
class Judged:
    """One load, measured to its end and only until it is precise.

    Attributes:
        given_up: each second until then: when, and the lowest score of an incumbent for which
            it would have been given up.
    """

    full: Result
    precise: Result
    given_up: Sequence[tuple[float, float]]

    def given_up_s(self, incumbent: float) -> float | None:
        """When it would be given up for a score's low end; None if it never is."""
        return next((at_s for at_s, score in self.given_up if score <= incumbent), None)


class _Wandering:
    """A machine's noise: independent from step to step, and a part that lasts (AR(1))."""

    def __init__(self, step_noise: float, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 7])
        self._step_noise = step_noise
        self._keep = float(np.exp(-1 / DRIFT_STEPS))
        self._drift = DRIFT * float(self._rng.standard_normal())
        self._drawn: list[tuple[float, float]] = []
        self.memory_jitter = 0.5

    def factor(self) -> float:
        """Of the next step."""
        if not self._drawn:
            self._drawn = self._rng.standard_normal((1024, 2)).tolist()
        step, drift = self._drawn.pop()
        self._drift = self._keep * self._drift + DRIFT * (1 - self._keep**2) ** 0.5 * drift
        return max(0.1, 1.0 + self._drift + self._step_noise * step)


def play(case: Case, seed: int, requests: int | None = None) -> Load:
    """Run a load to its end.

    Args:
        seed: of the machine's noise and of the traffic.
        requests: instead of the workload's.
    """
    settings, plan = _server(case)
    engine = SimulatedEngine(settings, plan, seed=seed)
    # How much launches differ is no part of one measurement's interval.
    engine._noise = _Wandering(settings.device.step_noise, seed)  # type: ignore[assignment]
    workload = replace(case.workload, seed=seed, requests=requests or case.workload.requests)
    client = VirtualClient(
        engine,
        [PlannedRequest(*lengths) for lengths in planned_lengths(workload)],
        arrivals_s=schedule(workload),
        concurrency=workload.concurrency or 1,
        timeout_s=workload.request_timeout_s,
    )
    records = client.run()
    looks = [(0.0, EngineCounters()), *client.samples, (engine.now_s, engine.counters)]
    return Load(
        case,
        sorted(records, key=lambda record: record.end_s),
        sorted(record.send_s for record in records),
        [_snapshot(at_s, seen) for at_s, seen in looks],
    )


def judged(load: Load) -> Judged:
    """What the tuner would have made of it, asked every second."""
    spec, ends_s = MeasureSpec(), [record.end_s for record in load.records]
    judge = ScoreJudge(spec, load.case.objective, load.case.workload.concurrency, None)
    times_s = [sample.at_s for sample in load.samples]
    given_up, now_s, end = [], LOOK_S, None
    while now_s < load.sends_s[-1]:
        seen = Seen(
            now_s,
            now_s,
            bisect_right(load.sends_s, now_s),
            load.records[: bisect_right(ends_s, now_s)],
            load.samples[: bisect_right(times_s, now_s)],
        )
        look = judge.look(seen)
        given_up.append((now_s, worse_than(look)))
        if (end := ending(look, spec, None)) is not None:
            break
        now_s += LOOK_S
    full = _result(load, MeasureEnd.COMPLETE, now_s)
    return Judged(full, full if end is None else _result(load, end, now_s), given_up)


def truth(case: Case, seed: int) -> float:
    """The score in the long run: of a load that is `LONG` times as long."""
    load = play(case, seed, requests=LONG * case.workload.requests)
    return _result(load, MeasureEnd.COMPLETE, load.length_s).score


def _result(load: Load, end: MeasureEnd, now_s: float) -> Result:
    if end is MeasureEnd.COMPLETE:
        records, until_s = load.records, load.length_s
    elif end in CUT_OFF:
        records, until_s = [r for r in load.records if r.end_s <= now_s], now_s
    else:
        records = [r for r in load.records if r.send_s <= now_s]
        until_s = records[-1].end_s
    samples = [sample for sample in load.samples if sample.at_s <= until_s]
    stopped_s = max(sample.at_s for sample in load.samples if sample.at_s <= now_s)
    whole = counters(samples[0], samples[1:-1], samples[-1])
    case = load.case
    found, _ = figures(
        Finished(records, samples, whole, end, None if end is MeasureEnd.COMPLETE else stopped_s),
        case.workload,
        case.objective,
        MeasureSpec(),
        MemoryFacts(),
        DeviceUse(),
    )
    return Result(end, score(found, case.objective), found.interval, until_s)


def _server(case: Case) -> tuple[EngineSettings, MemoryPlan]:
    settings = settings_from(case.args, {}, MODELS[case.model], DEVICES[case.device])
    assert isinstance(settings, EngineSettings), settings
    plan = plan_memory(settings)
    assert isinstance(plan, MemoryPlan), plan
    return settings, plan


def _snapshot(at_s: float, seen: EngineCounters) -> Snapshot:
    values = {
        PREEMPTIONS[0]: seen.preemptions,
        GENERATION_TOKENS[0]: seen.generation_tokens,
        PROMPT_TOKENS[0]: seen.prompt_tokens,
        RUNNING[0]: seen.running,
        WAITING[0]: seen.waiting,
    }
    return Snapshot({name: {(): float(value)} for name, value in values.items()}, at_s)
