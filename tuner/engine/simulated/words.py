"""What vLLM 0.32 writes into its log, so that `tuner.engine.logs` reads back what is meant."""

from __future__ import annotations

from datetime import datetime

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.log_format import LogEntry, LogWriter, Pids, Point
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.profiles import Platform
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.words_failure import Root, root_of
from tuner.engine.simulated.words_start import VERSION, write_banner, write_start
from tuner.types import FailureCause, Stage

__all__ = ["VERSION", "LogEntry", "Pids", "lines_of", "start_lines"]

_PIDS = Pids()
_BEGUN = datetime(2026, 1, 1)

_SERVING = (Stage.READY, Stage.LOAD)

_PARSER_EXIT = 2

_USAGE = (
    "usage: vllm [-h] [-v]\n"
    "            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,"
    "run-batch,snapshot}\n"
    "            ..."
)

_LAST_POINT = {
    Stage.LAUNCH: Point.ENGINE,
    Stage.LOADING: Point.LOADING,
    Stage.COMPILING: Point.COMPILING,
    Stage.PROFILING: Point.COMPILED,
    Stage.KV_ALLOCATION: Point.ALLOCATED,
    Stage.GRAPH_CAPTURE: Point.CAPTURING,
    Stage.WARMUP: Point.CAPTURED,
}
"""The last lines of a start that fails at a stage."""

_BEFORE_ALLOCATION = (FailureCause.KV_NO_BLOCKS, FailureCause.KV_TOO_SMALL)
_BEFORE_THE_ENGINE = (
    FailureCause.BAD_CONFIG,
    FailureCause.PORT_IN_USE,
    FailureCause.MODEL_NOT_FOUND,
    FailureCause.MODEL_ACCESS,
)


def start_lines(
    settings: EngineSettings,
    plan: MemoryPlan,
    *,
    port: int = 8000,
    pids: Pids = _PIDS,
    begun: datetime = _BEGUN,
) -> list[LogEntry]:
    """The log of a start that succeeds, up to `Application startup complete.`

    Args:
        begun: the launch, for the lines' dates.
    """
    log = _writer(settings, pids, begun)
    write_start(log, settings, plan, port)
    return [entry for _, entry in log.entries]


def lines_of(
    failure: StartFailure,
    *,
    port: int = 8000,
    pids: Pids = _PIDS,
    begun: datetime = _BEGUN,
) -> list[LogEntry]:
    """The whole log of a start that fails; at the stages READY and LOAD, only what comes then.

    Read by `tuner.engine.logs.LogReader`, it gives the failure's cause and numbers, and its
    stage (READY instead of LOAD). A HANG while starting, and a process that is killed, end
    without a word of their own: the exit code, or its absence, tells.
    """
    settings = failure.settings
    log = _writer(settings, pids, begun)
    if failure.stage not in _SERVING:
        if failure.exit_code == _PARSER_EXIT:
            log.plain(f"{_USAGE}\n{failure.message or _UNKNOWN_FLAG}")
            return [entry for _, entry in log.entries]
        _write_until(log, failure, port)
    _write_end(log, failure)
    return [entry for _, entry in log.entries]


_UNKNOWN_FLAG = "vllm: error: unrecognized arguments: --swap-space 4"


def _writer(settings: EngineSettings | None, pids: Pids, begun: datetime) -> LogWriter:
    if settings is None or settings.device.platform is Platform.CPU:
        worker = f"(Worker pid={pids.worker})"
    elif settings.tensor_parallel_size > 1:
        worker = f"(Worker_TP0 pid={pids.worker})"
    else:
        worker = f"(EngineCore pid={pids.engine})"  # one GPU: one process
    return LogWriter(pids, begun, worker)


def _write_until(log: LogWriter, failure: StartFailure, port: int) -> None:
    """The lines of a healthy start up to where this one fails."""
    if failure.settings is None or failure.plan is None:
        write_banner(log, "")
        return
    write_start(log, failure.settings, failure.plan, port)
    log.cut(_last_point(failure))


def _last_point(failure: StartFailure) -> Point:
    if failure.stage is Stage.LAUNCH and failure.cause in _BEFORE_THE_ENGINE:
        return Point.ENGINE if "utilization" in failure.numbers else Point.FLAGS
    if failure.stage is Stage.KV_ALLOCATION and failure.cause in _BEFORE_ALLOCATION:
        return Point.SIZED
    settings = failure.settings
    if failure.stage is Stage.WARMUP and settings and not settings.cudagraph_capture_sizes:
        return Point.WARMED_UP  # without graphs, the first line that tells of the stage
    return _LAST_POINT[failure.stage]


# --- the end ---------------------------------------------------------------------------


def _write_end(log: LogWriter, failure: StartFailure) -> None:
    root = root_of(failure)
    serving = failure.stage in _SERVING
    if root.by == "nobody":
        _write_silent_end(log, failure, serving)
    elif root.by == "api":
        log.plain(_traceback(root))
    elif serving:
        _write_death(log, root)
    else:
        _write_failed_start(log, failure, root)


def _write_silent_end(log: LogWriter, failure: StartFailure, serving: bool) -> None:
    """A process that was killed, or that hangs: what those say that wait for it."""
    if failure.cause is not FailureCause.HOST_OOM or failure.exit_code < 0:
        return
    if serving:
        log.say(
            "engine",
            "multiproc_executor.py:315",
            "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
            level="ERROR",
        )
        _write_death(log, Root("RuntimeError: cancelled"))
        return
    log.plain(f"Traceback (most recent call last):\n{_core_failed(-9)}")


def _write_failed_start(log: LogWriter, failure: StartFailure, root: Root) -> None:
    if root.announced:
        log.say("worker", "gpu_model_runner.py:5147", root.announced, level="ERROR")
    own_worker = not _one_process(failure) and root.by == "worker"
    ending = _traceback(root)
    if own_worker:
        log.say(
            "worker", "multiproc_executor.py:1063", "WorkerProc hit an exception.", level="ERROR"
        )
        log.say("worker", "multiproc_executor.py:1063", ending, level="ERROR")
        said = (root.then or root.lines).partition(": ")[2]
        ending = _traceback(
            Root(
                f"RuntimeError: Worker failed with error '{said}', please check the stack trace "
                "above for the root cause"
            )
        )
    log.say("engine", "core.py:1510", "EngineCore failed to start.", level="ERROR")
    log.say("engine", "core.py:1510", ending, level="ERROR")
    if own_worker:
        log.say(
            "engine",
            "multiproc_executor.py:315",
            "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",
            level="ERROR",
        )
    log.plain("Process EngineCore:")
    log.plain(ending)
    log.plain(f"Traceback (most recent call last):\n{_core_failed(1)}")


def _write_death(log: LogWriter, root: Root) -> None:
    """A server that has served: it ends, with exit code 0, when its engine is dead."""
    log.say("engine", "core.py:1523", "EngineCore encountered a fatal error.", level="ERROR")
    log.say("engine", "core.py:1523", _traceback(root), level="ERROR")
    log.say(
        "api",
        "async_llm.py:792",
        "AsyncLLM output_handler failed.\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
        "trace (above) for the root cause.",
        level="ERROR",
    )
    log.say(
        "api",
        "core_client.py:640",
        "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
        level="ERROR",
    )


def _core_failed(code: int) -> str:
    return (
        "RuntimeError: Engine core initialization failed. See root cause above. "
        f"Failed core proc(s): {{'EngineCore': {code}}}"
    )


def _traceback(root: Root) -> str:
    lines = ["Traceback (most recent call last):"]
    for file, function in root.frames:
        lines += [f'  File "/venv/lib/python3.11/site-packages/{file}", line 1, in {function}']
        lines += [f"    {function}()"]
    lines.append(root.lines)
    if root.then:
        lines += [
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Traceback (most recent call last):",
            root.then,
        ]
    return "\n".join(lines)


def _one_process(failure: StartFailure) -> bool:
    """Whether engine and worker are one process: a single GPU."""
    settings = failure.settings
    if settings is None:
        return True
    return settings.device.platform is Platform.CUDA and settings.tensor_parallel_size == 1
