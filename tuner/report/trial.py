"""`tuner show`: one trial on a page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from tuner.engine.arguments import shell_line
from tuner.records import TrialRecord
from tuner.report.console import duration, shown_params, shown_value
from tuner.report.simulated import trial_note
from tuner.types import Failure, Measurement, MemoryFacts, Percentiles

_LABEL_WIDTH = 16


def print_trial(console: Console, trial: TrialRecord) -> None:
    """Parameters, command line, measurement or failure, memory facts, where its log is."""
    console.print(_title(trial), highlight=False)
    if (note := trial_note(trial)) is not None:
        console.print(note, style="bold yellow", highlight=False, soft_wrap=True)
    for label, value in _rows(trial):
        # Not a table: a command line must come out as one line that can be pasted.
        line = Text(f"{label:<{_LABEL_WIDTH}}", "dim").append(value, "not dim")
        console.print(line, highlight=False, soft_wrap=True)


def _title(trial: TrialRecord) -> Text:
    took = f", {duration(trial.duration_s)}" if trial.duration_s else ""
    score = f", score {trial.score:.2f}" if trial.score is not None else ""
    return Text(f"trial {trial.number}: {trial.state.value}{score}{took}", "bold")


def _rows(trial: TrialRecord) -> Iterator[tuple[str, str]]:
    yield "parameters", shown_params(trial.params, is_reference=trial.is_reference)
    if trial.effective:
        values = (f"{name}={shown_value(name, value)}" for name, value in trial.effective.items())
        yield "in effect", " ".join(values)
    if trial.command:
        yield "command", shell_line(trial.command, trial.config.env if trial.config else None)
    match trial.outcome:
        case Measurement() as measured:
            yield from _measurement_rows(measured)
            yield from _memory_rows(measured.memory)
        case Failure() as failure:
            yield from _failure_rows(failure)
            yield from _memory_rows(failure.memory)
    if trial.constraints:
        yield "constraints", " ".join(f"{k}={v:.3f}" for k, v in trial.constraints.items())
    if trial.directory is not None:
        yield "server log", str(trial.directory / "server.log")
        yield "launch record", str(trial.directory / "launch.json")


def _measurement_rows(measured: Measurement) -> Iterator[tuple[str, str]]:
    yield (
        "requests",
        f"{measured.served} served, {measured.rejected} rejected, {measured.failed} failed "
        f"of {measured.offered} in {measured.window_s:.1f} s",
    )
    if measured.first_error:
        yield "first error", measured.first_error
    yield (
        "throughput",
        f"{measured.output_throughput_tokens_per_s:.1f} output tokens/s, "
        f"{measured.input_throughput_tokens_per_s:.1f} input tokens/s, "
        f"{measured.request_throughput_per_s:.2f} requests/s",
    )
    latencies = [
        ("TTFT", measured.ttft_s),
        ("TPOT", measured.tpot_s),
        ("ITL", measured.itl_s),
        ("E2E latency", measured.e2e_s),
    ]
    for name, latency in latencies:
        if latency is not None:
            yield name, _latency(latency)
    counters = measured.counters
    yield "preemptions", str(counters.preemptions)
    yield (
        "KV cache usage",
        f"mean {counters.kv_cache_usage_mean:.0%}, peak {counters.kv_cache_usage_peak:.0%}",
    )
    yield (
        "scheduler",
        f"running mean {counters.running_mean:.1f}, peak {counters.running_peak:.0f}; "
        f"waiting mean {counters.waiting_mean:.1f}, peak {counters.waiting_peak:.0f}",
    )
    if counters.prefix_cache_queries_tokens:
        hits = counters.prefix_cache_hits_tokens / counters.prefix_cache_queries_tokens
        yield "prefix cache", f"{hits:.0%} of prompt tokens hit"
    for name, total_gib, peak_gib in zip(
        measured.device.device_names,
        measured.device.device_total_gib,
        measured.device.device_peak_gib,
        strict=True,
    ):
        yield "device memory", f"{name}: peak {peak_gib:.2f} of {total_gib:.2f} GiB"
    if measured.device.host_peak_gib is not None:
        yield "host memory", f"peak {measured.device.host_peak_gib:.2f} GiB"


def _latency(latency: Percentiles) -> str:
    parts = (("mean", latency.mean), ("p50", latency.p50), ("p90", latency.p90))
    values = [f"{name} {seconds * 1000:.1f}" for name, seconds in parts]
    return ", ".join([*values, f"p99 {latency.p99 * 1000:.1f} ms"])


def _failure_rows(failure: Failure) -> Iterator[tuple[str, str]]:
    yield "failure", f"{failure.cause.value} while {failure.stage.value}"
    yield "line", failure.line
    if failure.numbers:
        yield "numbers", ", ".join(f"{name}={value:g}" for name, value in failure.numbers.items())
    if failure.exit_code is not None:
        yield "exit code", str(failure.exit_code)
    if failure.excerpt:
        yield "log", failure.excerpt


def _memory_rows(memory: MemoryFacts) -> Iterator[tuple[str, str]]:
    facts = [
        ("vLLM", memory.vllm_version, ""),
        ("weights", memory.weights_gib, " GiB"),
        ("KV cache", memory.kv_cache_gib, " GiB"),
        ("KV cache tokens", memory.kv_cache_tokens, ""),
        ("max. concurrency", memory.max_concurrency, "x"),
        ("max-model-len", memory.max_model_len_tokens, " tokens"),
        ("CUDA graphs", memory.graph_gib, " GiB"),
        ("start-up", memory.startup_s, " s"),
    ]
    known = [f"{name} {_fact(value)}{unit}" for name, value, unit in facts if value is not None]
    if known:
        yield "server", ", ".join(known)


def _fact(value: str | float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
