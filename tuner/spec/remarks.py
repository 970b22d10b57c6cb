"""What is odd about a space file but no error."""

from __future__ import annotations

from collections.abc import Iterator

from tuner.space import Space
from tuner.spec.reading import parse_with_remarks
from tuner.spec.values import SHARES
from tuner.types import ENV_PREFIX, Choice, Knob, Metric, StudySpec

HIGH_UTILIZATION = 0.99
"""From here on next to nothing is left for memory that vLLM's profiling does not see."""

STAND_IN_SPEED = "SIMULATED_SPEED"
"""Of the stand-in for vLLM: how many times faster than life it computes."""


def warnings(spec: StudySpec) -> list[str]:
    """Remarks for people, one sentence each; none if there is nothing to say."""
    remarks = parse_with_remarks(spec.text, spec.path)[1]
    return [
        *remarks,
        *_on_utilization(spec),
        *_on_workload(spec),
        *_on_slo(spec),
        *_on_stand_in(spec),
        *_on_reference(spec),
    ]


def _on_utilization(spec: StudySpec) -> Iterator[str]:
    for knob in spec.search_space:
        if knob.name in SHARES and (top := _highest(knob)) >= HIGH_UTILIZATION:
            yield (
                f"`{knob.name}` goes up to {top}, which leaves next to nothing for memory that "
                "vLLM does not profile: such trials may run out of memory under load"
            )


def _on_workload(spec: StudySpec) -> Iterator[str]:
    workload = spec.workload
    if workload.concurrency is None:
        yield from _on_open_loop(spec)
        return
    highest = max((workload.concurrency, *map(int, workload.levels)))
    if highest > workload.requests:
        yield f"concurrency {highest} is never reached with {workload.requests} requests"
    if spec.objective.maximize is Metric.MAX_RATE:
        return  # how many are in flight is what is searched
    for knob in spec.search_space:
        in_flight = min(highest, workload.requests)
        if knob.name == "max-num-seqs" and _highest(knob) > 4 * in_flight:
            yield (
                f"`max-num-seqs` goes up to {_highest(knob)}, but only {in_flight} requests are "
                "in flight at a time: values above that make no difference to this workload"
            )


def _on_open_loop(spec: StudySpec) -> Iterator[str]:
    if spec.objective.maximize in (Metric.GOODPUT, Metric.MAX_RATE):
        return
    rate = spec.workload.request_rate_per_s
    offer = "the open loop" if rate is None else f"`request_rate: {rate:g}`"
    yield (
        f"{offer} offers its rate and no more: every configuration that keeps up has the same "
        "throughput, and the score does not see latency. To find what is fastest, use "
        "`concurrency`, or maximize goodput or max_rate under an `slo`"
    )


def _on_slo(spec: StudySpec) -> Iterator[str]:
    if spec.objective.slo and spec.objective.maximize not in (Metric.GOODPUT, Metric.MAX_RATE):
        yield (
            f"the `slo` is only told: {spec.objective.maximize} does not count it. Maximize "
            "goodput or max_rate to search for what meets it"
        )


def _on_stand_in(spec: StudySpec) -> Iterator[str]:
    """Arrivals and limits are in the client's time, which nobody makes faster."""
    try:
        speed = float(spec.server.env.get(STAND_IN_SPEED, "1"))
    except ValueError:
        return  # which the stand-in refuses itself
    if speed <= 1:
        return
    timed = [
        *(["arrivals"] if spec.workload.concurrency is None else []),
        *(["the `slo`"] if spec.objective.slo else []),
    ]
    if timed:
        verb = "is" if timed == ["the `slo`"] else "are"
        yield (
            f"with `{STAND_IN_SPEED}: {speed:g}` the server is {speed:g} times faster than life, "
            f"but {' and '.join(timed)} {verb} in real time: it meets what the device that it "
            f"plays would not. Set {STAND_IN_SPEED} to 1 (starts alone may be faster: "
            "SIMULATED_START_SPEED)"
        )


def _on_reference(spec: StudySpec) -> Iterator[str]:
    space = Space(spec)
    params, _ = space.reference()
    fixed = {*spec.server.args, *(ENV_PREFIX + name for name in spec.server.env)}
    for name, value in spec.reference.items():
        if value is not None and name not in space.knobs and name not in fixed:
            home, short = "server.args", name
            if name.startswith(ENV_PREFIX):
                home, short = "server.env", name.removeprefix(ENV_PREFIX)
            yield (
                f"the reference sets `{name}`, which no trial will have: put `{short}` into "
                f"`{home}`, too, or search it"
            )
    for name, value in params.items():
        if not space.contains(name, value):
            yield f"the reference's `{name}: {value}` is not a value that the search can take"
    if (constraint := space.violated(params)) is not None:
        yield f"the reference does not satisfy the constraint `{constraint.text}`"


def _highest(knob: Knob) -> float:
    """The largest number that it can take; minus infinity if it has none."""
    if not isinstance(knob, Choice):
        return knob.high
    numbers = [v for v in knob.choices if isinstance(v, int | float) and not isinstance(v, bool)]
    return max(numbers, default=float("-inf"))
