"""Configurations of the tiny model on the real CPU engine, one server life each, by the tuner's
own code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import prepare_vllm
import yaml

from tuner import spec as spec_file
from tuner.engine.base import LaunchObserver, ProcessRecord
from tuner.engine.vllm import VllmLauncher
from tuner.evaluate import ServerEvaluator
from tuner.load.prepared import PreparedWorkloads
from tuner.measuring.session import Asked
from tuner.types import EngineConfig, Measurement, Outcome, Progress, StudySpec

MIB = 2**20

Tell = Callable[[int, EngineConfig, Outcome], None]
"""Told the position of a configuration that was just run, and how it went."""


def cpu_tiny_document(**sections: Any) -> dict[str, Any]:
    """`search_spaces/cpu_tiny.yaml` with `sections` in place of its own."""
    path = prepare_vllm.ROOT / "search_spaces" / "cpu_tiny.yaml"
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document | sections


def spec_of(document: Mapping[str, Any], command: Path, model: Path) -> StudySpec:
    """A space file's content, with the server that is here."""
    here = {"command": [str(command), "serve"], "model": str(model)}
    placed = {**document, "server": {**document["server"], **here}}
    return spec_file.parse(yaml.safe_dump(placed, sort_keys=False), Path("cpu_tiny.yaml"))


def measure(
    spec: StudySpec, configs: Sequence[EngineConfig], folder: Path, tell: Tell
) -> list[Outcome]:
    """Run each configuration under the workload of `spec`, in this order; logs go to `folder`."""
    return asyncio.run(_measure(spec, configs, folder, tell))


async def _measure(
    spec: StudySpec, configs: Sequence[EngineConfig], folder: Path, tell: Tell
) -> list[Outcome]:
    evaluator = ServerEvaluator(VllmLauncher(spec.server), Asked.of(spec), PreparedWorkloads())
    outcomes: list[Outcome] = []
    for number, config in enumerate(configs):
        life = folder / f"{number:04d}"
        life.mkdir(parents=True)
        outcomes.append(await evaluator.evaluate(config, life, _SILENT))
        tell(number, config, outcomes[-1])
    return outcomes


def told(outcome: Outcome) -> str:
    """An outcome in a few words."""
    if not isinstance(outcome, Measurement):
        return f"{outcome.cause} while in stage {outcome.stage}"
    return (
        f"{outcome.output_throughput_tokens_per_s:.0f} tokens/s, "
        f"{outcome.counters.preemptions} preemptions, {outcome.window_s:.1f} s"
    )


def _ignore_spawn(_record: ProcessRecord) -> None: ...


def _ignore_progress(_progress: Progress) -> None: ...


_SILENT = LaunchObserver(_ignore_spawn, _ignore_progress)
