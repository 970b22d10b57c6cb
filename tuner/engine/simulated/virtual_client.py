"""A load on the simulated engine's virtual clock: the counterpart of `tuner.load.running`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tuner.engine.simulated.engine import EngineCounters, SimulatedEngine
from tuner.types import RequestRecord, RequestStatus, ServerCounters

SAMPLE_INTERVAL_S = 0.25
"""From look to look at the gauges, as `tuner.metrics.scrape.MetricsWatcher` looks."""

_MOST_STEPS = 1 << 20


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the load.

    Attributes:
        prompt: token ids, or their number for a prompt like no other.
        output_tokens: asked for as `max_tokens`.
    """

    prompt: Sequence[int] | int
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)


@dataclass(slots=True)
class _Sent:
    """A request in flight; `times_s` are its tokens' arrivals."""

    index: int
    send_s: float
    times_s: list[float]


class VirtualClient:
    """Sends requests, follows them to their ends, and looks at the gauges now and then.

    Args:
        requests: in the order in which they are sent.
        arrivals_s: open loop: when each is sent. None for a closed loop.
        concurrency: of the closed loop.
        timeout_s: a request that takes longer is given up.

    Attributes:
        samples: looks at the counters so far, each with its time.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        requests: Sequence[PlannedRequest],
        *,
        arrivals_s: Sequence[float] | None,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._timeout_s = timeout_s
        self._latency_s = engine.settings.device.front_latency_s
        self._records: list[RequestRecord | None] = [None] * len(requests)
        self._in_flight: dict[str, _Sent] = {}
        # When each is due, rising; a closed loop adds to it as answers end.
        self._due: deque[tuple[float, int]] = deque()
        self._unsent: deque[int] = deque()
        if arrivals_s is None:
            first = min(concurrency, len(requests))
            self._due.extend((0.0, index) for index in range(first))
            self._unsent.extend(range(first, len(requests)))
        else:
            self._due.extend(zip(arrivals_s, range(len(requests)), strict=True))
        self._start = _copy(engine.counters)
        self.samples: list[tuple[float, EngineCounters]] = []
        self._next_sample_s = SAMPLE_INTERVAL_S

    def run(self) -> list[RequestRecord]:
        """Send all and wait for the last; stops early, and returns fewer, if the engine dies."""
        engine = self._engine
        while self._due or self._in_flight:
            self._send_due()
            if not engine.busy:
                if self._due:
                    engine.advance_to(self._due[0][0] + self._latency_s)
                    self._sample()
                continue
            result = engine.step(max_steps=_MOST_STEPS, until_s=self._horizon_s())
            if result.died is not None:
                break
            for request_id in result.emitted:
                self._in_flight[request_id].times_s += result.ends_s
            for request_id, _ in result.finished:
                self._end(self._in_flight.pop(request_id))
            self._give_up_late()
            self._sample()
        return [record for record in self._records if record is not None]

    def counters(self) -> ServerCounters:
        """What /metrics would say of the window."""
        start, end = self._start, self._engine.counters
        seen = [counters for _, counters in self.samples] or [start, end]
        return ServerCounters(
            preemptions=end.preemptions - start.preemptions,
            prompt_tokens=end.prompt_tokens - start.prompt_tokens,
            generation_tokens=end.generation_tokens - start.generation_tokens,
            prefix_cache_queries_tokens=end.prefix_queries_tokens - start.prefix_queries_tokens,
            prefix_cache_hits_tokens=end.prefix_hits_tokens - start.prefix_hits_tokens,
            kv_cache_usage_mean=fmean(sample.kv_usage for sample in seen),
            kv_cache_usage_peak=max(sample.kv_usage for sample in seen),
            running_mean=fmean(sample.running for sample in seen),
            running_peak=float(max(sample.running for sample in seen)),
            waiting_mean=fmean(sample.waiting for sample in seen),
            waiting_peak=float(max(sample.waiting for sample in seen)),
        )

    # --- sending and ending ------------------------------------------------------------

    def _send_due(self) -> None:
        """Queue what has reached the engine by now."""
        now_s = self._engine.now_s
        while self._due and self._due[0][0] + self._latency_s <= now_s:
            send_s, index = self._due.popleft()
            self._send(send_s, index)

    def _send(self, send_s: float, index: int) -> None:
        request = self._requests[index]
        refusal = self._engine.add(str(index), request.prompt, request.output_tokens)
        if refusal is None:
            self._in_flight[str(index)] = _Sent(index, send_s, [])
            return
        end_s = send_s + self._latency_s
        self._records[index] = RequestRecord(
            index,
            RequestStatus.REJECTED,
            send_s,
            end_s,
            error=f"HTTP 400: {refusal.message}",
        )
        self._send_next(end_s)

    def _send_next(self, now_s: float) -> None:
        if self._unsent:
            self._due.append((now_s, self._unsent.popleft()))

    def _end(self, sent: _Sent) -> None:
        request = self._requests[sent.index]
        got, asked = len(sent.times_s), request.output_tokens
        status, error = RequestStatus.OK, ""
        if got < asked:
            status = RequestStatus.REJECTED
            error = (
                f"cut off at {got} of {asked} tokens: a prompt of {request.prompt_tokens} and "
                "its answer exceed the context (max-model-len)"
            )
        self._record(sent, status, sent.times_s[-1], error)

    def _record(self, sent: _Sent, status: RequestStatus, end_s: float, error: str) -> None:
        self._records[sent.index] = RequestRecord(
            index=sent.index,
            status=status,
            send_s=sent.send_s,
            end_s=end_s,
            prompt_tokens=self._requests[sent.index].prompt_tokens,
            output_tokens=len(sent.times_s),
            token_times_s=tuple(sent.times_s),
            error=error,
        )
        self._send_next(end_s)

    def _give_up_late(self) -> None:
        """Drop what took too long; they are in the order of sending."""
        while self._in_flight:
            request_id, sent = next(iter(self._in_flight.items()))
            if sent.send_s + self._timeout_s > self._engine.now_s:
                return
            del self._in_flight[request_id]
            self._engine.abort(request_id)
            self._record(
                sent,
                RequestStatus.TIMEOUT,
                sent.send_s + self._timeout_s,
                f"no complete answer within {self._timeout_s:g} s",
            )

    # --- time --------------------------------------------------------------------------

    def _horizon_s(self) -> float:
        """When something happens besides steps: a sample, an arrival, a time-out."""
        arrival_s = self._due[0][0] + self._latency_s if self._due else math.inf
        oldest = next(iter(self._in_flight.values()), None)
        late_s = math.inf if oldest is None else oldest.send_s + self._timeout_s
        return min(self._next_sample_s, arrival_s, late_s)

    def _sample(self) -> None:
        now_s = self._engine.now_s
        while self._next_sample_s <= now_s:
            self.samples.append((now_s, _copy(self._engine.counters)))
            self._next_sample_s += SAMPLE_INTERVAL_S


def _copy(counters: EngineCounters) -> EngineCounters:
    return EngineCounters(
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        prefix_queries_tokens=counters.prefix_queries_tokens,
        prefix_hits_tokens=counters.prefix_hits_tokens,
        running=counters.running,
        waiting=counters.waiting,
        kv_usage=counters.kv_usage,
    )
