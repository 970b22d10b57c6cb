"""The engine on a virtual clock: requests in, steps of tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.engine.simulated import memory_needs as needs
from tuner.engine.simulated.counters import EngineCounters, FinishReason
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.noise import Noise
from tuner.engine.simulated.requests import LiveRequest
from tuner.engine.simulated.scheduler import Batch, Scheduler
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.sizes import out_of_memory_numbers
from tuner.engine.simulated.step_time import StepTimes
from tuner.types import FailureCause, Stage
from tuner.units import GIB

__all__ = ["EngineCounters", "FinishReason", "Refusal", "SimulatedEngine", "StepResult"]

_SPIKE_SHARE = 0.5
"""How much more than the profile run's kind of step a real one may take at worst, for the
fragments of an allocator that has served many shapes. Assumed; public reports have servers that
profile well and die at the first full batch with some hundred MiB missing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that vLLM answers with a 400.

    Attributes:
        message: vLLM 0.32's `error.message`.
    """

    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """One engine step, or several in which the batch did not change.

    Attributes:
        begin_s: on the engine's clock.
        ends_s: end of each step; its tokens are out then. Rising; empty if there was nothing
            to do or the engine is dead.
        emitted: requests that got one token at the end of each of these steps.
        finished: of the last step's end, with the reason; each is also in `emitted`.
        preempted: requests that lost their blocks, in the first of these steps.
        admitted: requests that began (or began again) to run in the first of these steps.
        died: the engine ran out of memory in this step and is dead; none of the step's tokens
            are out.
    """

    begin_s: float
    ends_s: Sequence[float]
    emitted: Sequence[str]
    finished: Sequence[tuple[str, FinishReason]] = ()
    preempted: Sequence[str] = ()
    admitted: Sequence[str] = ()
    died: StartFailure | None = None


class SimulatedEngine:
    """vLLM's engine core: a scheduler and a model whose steps only take (virtual) time.

    Args:
        seed: of the noise; another launch of the same study takes another one. Several
            integers count together.
        noise: off for exact figures.

    Attributes:
        now_s: the clock; only `step` and `advance_to` move it.
        counters: see `EngineCounters`; read, not written, by others.
        dead: why the engine is dead, None while it lives.
    """

    def __init__(
        self,
        settings: EngineSettings,
        plan: MemoryPlan,
        *,
        seed: int | Sequence[int],
        noise: bool = True,
    ) -> None:
        self.settings = settings
        self.plan = plan
        self.now_s = 0.0
        self.counters = EngineCounters()
        self.dead: StartFailure | None = None
        self._scheduler = Scheduler(
            settings,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            host_blocks=plan.host_blocks,
        )
        self._times = StepTimes(settings)
        seeds = (seed,) if isinstance(seed, int) else seed
        self._noise = Noise(settings.device, seeds, on=noise)
        self._spike = 1.0 + _SPIKE_SHARE * self._noise.memory_jitter
        # Of most starts no step can run out of memory: then none is looked at.
        self._tight = self._spike * needs.activation_bytes(settings) > plan.headroom_gib * GIB
        self._requests: dict[str, LiveRequest] = {}
        self._numbered = 0

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._requests)

    # --- requests ----------------------------------------------------------------------

    def refuse(self, prompt_tokens: int, max_tokens: int | None) -> Refusal | None:
        """Whether vLLM 0.32 answers such a request with a 400, and in which words.

        A prompt that leaves less room than `max_tokens` is not refused: the answer is cut off
        where the context ends.
        """
        limit = self.plan.max_model_len
        if max_tokens is not None and max_tokens > limit:
            return Refusal(
                f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. Please "
                f"request fewer output tokens. (parameter=max_tokens, value={max_tokens})"
            )
        if prompt_tokens > limit:
            at_least = "at least " if prompt_tokens == limit + 1 else ""
            return Refusal(
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains {at_least}{prompt_tokens} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={prompt_tokens})"
            )
        if prompt_tokens == limit:
            return Refusal(
                f"The decoder prompt (length {prompt_tokens}) plus the number of requested output "
                f"tokens (at least 1) is longer than the maximum model length of {limit}. Make "
                "sure that `max_model_len` is no smaller than the number of text tokens (prompt + "
                "requested output tokens)."
            )
        return Refusal("The decoder prompt cannot be empty") if prompt_tokens == 0 else None

    def add(
        self, request_id: str, prompt: Sequence[int] | int, max_tokens: int | None
    ) -> Refusal | None:
        """Queue a request; it counts from the next step on.

        Args:
            request_id: of no other live request.
            prompt: token ids; or only their number, for a prompt like no other.
            max_tokens: at least 1; None is as many as the context holds.

        Returns:
            None, or why it is refused; it is not queued then.
        """
        prompt_tokens = prompt if isinstance(prompt, int) else len(prompt)
        refusal = self.refuse(prompt_tokens, max_tokens)
        if refusal is not None:
            return refusal
        last = self.plan.max_model_len
        if max_tokens is not None:
            last = min(last, prompt_tokens + max_tokens)
        request = LiveRequest(
            request_id,
            prompt,
            last=last,
            block_size=self.settings.block_size,
            number=self._numbered,
        )
        self._numbered += 1
        self._requests[request_id] = request
        self._scheduler.add(request)
        self.counters.waiting = len(self._scheduler.waiting)
        return None

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if there is none of that id any more."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.remove(request)
        self._count_finished(FinishReason.ABORT, 1)
        self._gauge()
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False (and nothing happens) while requests hold blocks."""
        if not self._scheduler.pool.reset():
            return False
        self._scheduler.host.clear()
        return True

    # --- time --------------------------------------------------------------------------

    def advance_to(self, now_s: float) -> None:
        """Let an idle engine's clock go on (never back)."""
        self.now_s = max(self.now_s, now_s)

    def step(self, *, max_steps: int = 1, until_s: float = float("inf")) -> StepResult:
        """Run one step, or up to `max_steps` at once while the batch stays the same.

        Several steps at once give exactly what as many single ones give. Stops early, after
        a step, when the clock passes `until_s`: what arrives then takes part in the next step.
        An idle or dead engine does nothing and its clock stays.
        """
        if not self._requests or self.dead is not None:
            return StepResult(self.now_s, (), ())
        steps = self._scheduler.decode_horizon(max_steps)
        return self._decode(steps, until_s) if steps > 0 else self._one_step()

    def _one_step(self) -> StepResult:
        scheduler, begin_s = self._scheduler, self.now_s
        batch = scheduler.schedule()
        preempted = [request.request_id for request in batch.preempted]
        admitted = [request.request_id for request in batch.admitted]
        self._count_batch(batch)
        if self._tight and self._dies(batch.tokens, len(batch.requests)):
            return StepResult(
                begin_s, (), (), preempted=preempted, admitted=admitted, died=self.dead
            )
        self.now_s += self._times.of(batch) * self._noise.factor()
        emitted, finished = scheduler.complete(batch)
        for request in emitted:
            if request.tokens == request.prompt_tokens + 1:
                self.counters.prompt_tokens += request.prompt_tokens
                self.counters.iteration_tokens += request.prompt_tokens
        self._count_steps(1, len(emitted))
        return StepResult(
            begin_s,
            (self.now_s,),
            [request.request_id for request in emitted],
            self._forget(finished),
            preempted,
            admitted,
        )

    def _decode(self, steps: int, until_s: float) -> StepResult:
        scheduler, begin_s = self._scheduler, self.now_s
        running = scheduler.running
        count = len(running)
        if self._tight and self._dies(count, count):
            return StepResult(begin_s, (), (), died=self.dead)
        emitted = [request.request_id for request in running]
        context = sum([request.tokens for request in running])
        now_s, factor = begin_s, self._noise.factor
        ends_s = []
        for duration_s in self._times.of_decodes(count, context, steps):
            now_s += duration_s * factor()
            ends_s.append(now_s)
            if now_s > until_s:
                break
        self.now_s = now_s
        finished = scheduler.decode(len(ends_s))
        self._count_steps(len(ends_s), count * len(ends_s))
        return StepResult(begin_s, ends_s, emitted, self._forget(finished))

    def _dies(self, tokens: int, sequences: int) -> bool:
        """Whether a step of that size finds no memory for its tensors; then it is the last."""
        settings = self.settings
        needed = self._spike * max(
            needs.forward_bytes(settings, tokens), needs.sampler_bytes(settings, sequences)
        )
        headroom = self.plan.headroom_gib * GIB
        if needed <= headroom:
            return False
        widest = 2 * tokens * settings.model.intermediate * settings.model.dtype_bytes
        tried = max(widest // settings.tensor_parallel_size, sequences * settings.model.vocab * 4)
        self.dead = StartFailure(
            FailureCause.OOM_RUNTIME,
            Stage.LOAD,
            exit_code=0,
            numbers=out_of_memory_numbers(
                tried, min(headroom / self._spike, tried * 0.9), settings.device.total_gib * GIB
            ),
            settings=settings,
            plan=self.plan,
        )
        return True

    # --- counting ----------------------------------------------------------------------

    def _count_batch(self, batch: Batch) -> None:
        counters = self.counters
        counters.preemptions += len(batch.preempted)
        counters.prefix_queries_tokens += batch.queries_tokens
        counters.prefix_hits_tokens += batch.hits_tokens
        counters.host_queries_tokens += batch.host_queries_tokens
        counters.host_hits_tokens += batch.host_hits_tokens

    def _count_steps(self, steps: int, tokens: int) -> None:
        self.counters.iterations += steps
        self.counters.generation_tokens += tokens
        self.counters.iteration_tokens += tokens
        self._gauge()

    def _gauge(self) -> None:
        self.counters.running = len(self._scheduler.running)
        self.counters.waiting = len(self._scheduler.waiting)
        self.counters.kv_usage = self._scheduler.pool.usage

    def _forget(self, finished: Sequence[LiveRequest]) -> list[tuple[str, FinishReason]]:
        for request in finished:
            del self._requests[request.request_id]
        if finished:
            self._count_finished(FinishReason.LENGTH, len(finished))
        return [(request.request_id, FinishReason.LENGTH) for request in finished]

    def _count_finished(self, reason: FinishReason, count: int) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + count
