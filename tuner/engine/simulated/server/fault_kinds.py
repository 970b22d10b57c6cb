"""What can go wrong on demand: names, options and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tuner.types import FailureCause, Stage

Option: TypeAlias = float | str

COMMON: Mapping[str, Option] = {"when": "", "once": "", "first": 1.0, "skip": 0.0}
"""Options of every fault: which launches have it.

`when` is an expression on flags (`when='max-num-seqs > 64'`). `once=FILE` counts launches in a
file: the first one has the fault; with `first=N` the first N, after `skip=N` without it.
"""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        text: what it does, for the help.
        options: besides `COMMON`, with their defaults; a number takes a number.
    """

    text: str
    options: Mapping[str, Option] = field(default_factory=dict)


_USUALLY_AFTER = 8.0


def _at(stage: Stage) -> FaultKind:
    text = "the start fails" if stage is not Stage.LOAD else "the engine dies under load"
    return FaultKind(text, {"stage": stage.value, "after": _USUALLY_AFTER, "exit": ""})


CAUSES: Mapping[FailureCause, FaultKind] = {
    FailureCause.OOM_LOAD: _at(Stage.LOADING),
    FailureCause.OOM_PROFILE: _at(Stage.PROFILING),
    FailureCause.OOM_KV_ALLOC: _at(Stage.KV_ALLOCATION),
    FailureCause.OOM_WARMUP: _at(Stage.WARMUP),
    FailureCause.OOM_GRAPH_CAPTURE: _at(Stage.GRAPH_CAPTURE),
    FailureCause.OOM_RUNTIME: _at(Stage.LOAD),
    FailureCause.HOST_OOM: _at(Stage.LOADING),
    FailureCause.KV_NO_BLOCKS: _at(Stage.KV_ALLOCATION),
    FailureCause.KV_TOO_SMALL: _at(Stage.KV_ALLOCATION),
    FailureCause.STATE_BLOCKS: _at(Stage.KV_ALLOCATION),
    FailureCause.DEVICE_BUSY: _at(Stage.LAUNCH),
    FailureCause.MEMORY_BASELINE_MOVED: _at(Stage.PROFILING),
    FailureCause.STARTUP_TIMEOUT: _at(Stage.LOADING),
    FailureCause.HANG: _at(Stage.LOAD),
    FailureCause.CRASH: _at(Stage.PROFILING),
    FailureCause.NCCL: _at(Stage.LAUNCH),
    FailureCause.PORT_IN_USE: _at(Stage.LAUNCH),
    FailureCause.MODEL_NOT_FOUND: _at(Stage.LAUNCH),
    FailureCause.MODEL_ACCESS: _at(Stage.LAUNCH),
    FailureCause.BAD_CONFIG: _at(Stage.LAUNCH),
    FailureCause.UNSUPPORTED: _at(Stage.KV_ALLOCATION),
    FailureCause.COMPILE_CACHE: _at(Stage.COMPILING),
    FailureCause.DISK_FULL: _at(Stage.LOADING),
    FailureCause.UNKNOWN: _at(Stage.LOADING),
}
"""vLLM's own ways of failing, by cause: its words, its exit code, at the usual stage.

`stage=STAGE` moves one to another stage of the start, `stage=load` until `after` completions
are answered; `exit=CODE` changes the exit code (negative: a signal).
"""

_AFTER: Mapping[str, Option] = {"after": _USUALLY_AFTER}
_KILL: Mapping[str, Option] = {"stage": Stage.LOAD.value, **_AFTER}
_SOME: Mapping[str, Option] = {"after": 3.0, "every": 1.0}

BEHAVIOUR: Mapping[str, FaultKind] = {
    # Starting.
    "slow_start": FaultKind(
        "the start takes longer", {"seconds": 2.0, "stage": Stage.LOADING.value}
    ),
    "hang_start": FaultKind("the start never ends", {"stage": Stage.LOADING.value}),
    "not_yet": FaultKind("completions get a 500 for a while after the start", {"seconds": 0.7}),
    "other_server": FaultKind(
        "another process answers on the port; the server finds it taken", {"seconds": 1.0}
    ),
    "replay": FaultKind("prints a file instead of serving and exits", {"file": "", "exit": 1.0}),
    # Under load.
    "hang_load": FaultKind("the engine computes no more; /health stays 200", _AFTER),
    # Under load, or with stage=STAGE at the end of that stage of the start.
    "engine_killed": FaultKind("the engine process is killed", _KILL),
    "worker_killed": FaultKind("a worker of the engine's is killed", _KILL),
    "server_killed": FaultKind("the API process is killed; the engine lives on", _KILL),
    "all_killed": FaultKind("both processes are killed", _KILL),
    "group_killed": FaultKind("all its processes are killed, the smallest too", _KILL),
    "engine_dead": FaultKind("the engine dies and the API process stays: /health is 503", _AFTER),
    # Ending.
    "ignore_term": FaultKind("SIGTERM and SIGINT have no effect"),
    "leave_engine": FaultKind("the engine process outlives the API process and SIGTERM"),
    # Answers: those to completions after the first `after`, every `every`-th of them.
    "http_500": FaultKind("completions are answered with a 500", _SOME),
    "http_429": FaultKind("completions are answered with a 429", _SOME),
    "cut_stream": FaultKind("streams break off in the middle", _SOME),
    "no_usage": FaultKind("answers have no usage", _SOME),
    "wrong_usage": FaultKind("answers have a usage of nonsense", _SOME),
    # What it says of itself.
    "garbage_log": FaultKind("the log has bytes that are no text"),
    "huge_log": FaultKind("the log has so many MiB of noise", {"mib": 100.0}),
    "bad_metrics": FaultKind("/metrics is malformed", {"after": 0.0}),
    "no_metrics": FaultKind("/metrics is 404"),
    "counters_reset": FaultKind("counters begin again at 0, as after a restart", _AFTER),
}

KILLS = ("engine_killed", "worker_killed", "server_killed", "all_killed", "group_killed")

KINDS: Mapping[str, FaultKind] = {**{c.value: kind for c, kind in CAUSES.items()}, **BEHAVIOUR}


def help_text() -> str:
    """All faults with their options, for `--help`."""
    stages: dict[str, list[str]] = {}
    for cause, kind in CAUSES.items():
        stages.setdefault(str(kind.options["stage"]), []).append(cause.value)
    return "\n".join(
        [
            "faults: `NAME [OPTION=VALUE ...]`, several of them separated by `;`",
            "  vLLM's own failures, in its words and with its exit codes; stage=STAGE moves one,",
            "  stage=load [after=8] until so many completions are answered, exit=CODE (negative:",
            "  a signal). Where they come otherwise:",
            *(f"    {stage:<14} {', '.join(names)}" for stage, names in stages.items()),
            *(_line(name, kind) for name, kind in BEHAVIOUR.items()),
            "  options of all: when='EXPRESSION ON FLAGS'; once=FILE [first=1] [skip=0]: only the",
            "  first launches, after some without the fault, counted in that file",
        ]
    )


def _line(name: str, kind: FaultKind) -> str:
    shown = " ".join(f"{key}={_shown(value)}" for key, value in kind.options.items())
    return f"  {name:<15} {kind.text}" + (f" [{shown}]" if shown else "")


def _shown(value: Option) -> str:
    return f"{value:g}" if isinstance(value, float) else value
