"""The logs of `data/logs/corpus`, what each must be read as, and what may stand around a log."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tuner.engine.logs import LogReader
from tuner.types import Failure

CORPUS = Path(__file__).parent / "data" / "logs" / "corpus"


@dataclass(frozen=True)
class Case:
    """A log and its verdict."""

    name: str
    cause: str
    stage: str
    numbers: dict[str, float] = field(default_factory=dict)
    vllm_version: str | None = None
    exit_code: int | None = None

    @property
    def text(self) -> str:
        return (CORPUS / f"{self.name}.log").read_text(encoding="utf-8")


MANIFEST = yaml.safe_load((CORPUS / "manifest.yaml").read_text(encoding="utf-8"))
CASES = [Case(name, **entry) for name, entry in MANIFEST.items()]


@dataclass(frozen=True)
class Reading:
    """What was read, numbers rounded."""

    cause: str
    stage: str
    numbers: dict[str, float]
    vllm_version: str | None


def read(data: bytes | str, exit_code: int | None = None) -> tuple[LogReader, Failure | None]:
    reader = LogReader()
    reader.feed(data)
    reader.finish()
    return reader, reader.failure(exit_code)


def verdict(data: bytes | str, exit_code: int | None = None) -> Reading:
    reader, failure = read(data, exit_code)
    version = reader.memory.vllm_version
    if failure is None:
        return Reading("none", str(reader.stage), {}, version)
    numbers = {name: round(value, 5) for name, value in failure.numbers.items()}
    return Reading(str(failure.cause), str(failure.stage), numbers, version)


def expected(case: Case) -> Reading:
    numbers = {name: round(float(value), 5) for name, value in case.numbers.items()}
    return Reading(case.cause, case.stage, numbers, case.vllm_version)


# --- what stands around a log ----------------------------------------------------------


def each(text: str, change) -> str:
    return "".join(change(line) + "\n" for line in text.splitlines())


def wrapped_at(text: str, width: int) -> str:
    """As a terminal breaks lines."""
    lines = []
    for line in text.splitlines():
        lines += [line[at : at + width] for at in range(0, len(line), width)] or [""]
    return "\n".join(lines) + "\n"


def boxed(text: str, width: int = 120) -> str:
    """As k9s shows a log: broken at the width of the box, every row framed and filled up."""
    rows = wrapped_at(text, width).splitlines()
    return "".join(f"│ {row.ljust(width)} │\n" for row in rows)


def docker_json(text: str) -> str:
    return each(
        text,
        lambda line: json.dumps(
            {"log": line + "\n", "stream": "stderr", "time": "2025-05-16T13:08:58.090123456Z"}
        ),
    )


def cloud_json(text: str) -> str:
    return each(
        text,
        lambda line: json.dumps(
            {
                "insertId": "1f2e",
                "severity": "ERROR",
                "textPayload": line,
                "timestamp": "2025-05-16T13:08:58.090123Z",
            }
        ),
    )


def coloured(text: str) -> str:
    def colour(line: str) -> str:
        head, closes, rest = line.partition(") ")
        return f"\x1b[1;36m{head})\x1b[0;0m {rest}" if closes and line[0] == "(" else line

    return each(text, lambda line: colour(line) if line else line)


WRAPPINGS = {
    "compose": lambda text: each(text, lambda line: f"vllm-1  | {line}"),
    "kubectl_time": lambda text: each(text, lambda line: f"2025-05-16T13:08:58.090123456Z {line}"),
    "cri": lambda text: each(text, lambda line: f"2025-05-16T13:08:58.09+02:00 stdout F {line}"),
    "kubectl_prefix": lambda text: each(text, lambda line: f"[pod/vllm-7d9c-x2b/vllm] {line}"),
    "cloud_lines": lambda text: each(
        text,
        lambda line: f"INFO 2025-05-16T13:08:58.09Z [resource.labels.containerName: vllm] {line}",
    ),
    "journald": lambda text: each(text, lambda line: f"Dec 01 09:00:00 node-7 vllm[123]: {line}"),
    "journald_iso": lambda text: each(
        text, lambda line: f"2025-12-01T09:00:00+0000 node-7 vllm[123]: {line}"
    ),
    "starter": lambda text: each(text, lambda line: f"[Info] (Process) {line}"),
    "docker_json": docker_json,
    "cloud_json": cloud_json,
    "coloured": coloured,
    "coloured_compose": lambda text: each(
        coloured(text), lambda line: f"\x1b[33mvllm-1  | \x1b[0m{line}"
    ),
    "escape_lost": lambda text: coloured(text).replace("\x1b", ""),
    "boxed": boxed,
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "nul": lambda text: "\0" * 64 + text.replace("\n", "\n\0"),
    "wrapped_80": lambda text: wrapped_at(text, 80),
    "wrapped_120": lambda text: wrapped_at(text, 120),
    "compose_wrapped_100": lambda text: wrapped_at(WRAPPINGS["compose"](text), 100),
    "ray_repeated": lambda text: each(
        text, lambda line: f"{line} [repeated 7x across cluster]" if "Error" in line else line
    ),
}
"""By name: what turns a log into the same log as another program shows it."""
