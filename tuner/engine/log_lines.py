"""One line of a server's log without what stands around the message.

vLLM's lines carry a process tag, a level, a date and a file, and what runs vLLM adds more:
compose, Kubernetes, Ray, colours. None of it says what happened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_LINE = 2000
"""Characters of a line that are looked at; a message fits many times, a dumped prompt not."""

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"[\w.-]+\s+\| ",  # docker compose: "vllm-1  | "
        r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)? "
        r"(?:(?:stdout|stderr) [FP] )?",
        r"\[resource\.labels\.containerName: [\w.-]+\] ",
        r"[│┃║] ?",
        r"\[(?:Info|Error|Warning|Debug)\] (?:\([\w-]+\) )?",  # lemonade and other starters
        # Ray, multiprocessing and vLLM: "(EngineCore_DP0 pid=123) ", "(VllmWorker rank=0 pid=1) "
        r"\([\w.:<>-]+(?: [\w.]+=[\w.:-]+)*,? ?pid=\d+(?:, ip=[\d.]+)?\) ",
        r"\[rank\d+\]:? ?",
    )
)
# "ERROR 08-21 07:23:34 file.py:12] " to 0.7, "ERROR 08-21 07:23:34 [v1/file.py:12] " after.
_LEVEL = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:"
    r" \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[?[\w./<>-]+:\d+\] ?"
    r"|:\s+"  # uvicorn: "ERROR:    [Errno 98] ..."
    r"| (?=\d{4}-\d\d-\d\d[T ]))"  # a collector's level, before its own date
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message.

    Attributes:
        text: without prefixes; indentation is kept.
        level: such as "ERROR"; empty where the line does not say (tracebacks, C libraries).
    """

    text: str
    level: str = ""

    @property
    def may_tell_of_failure(self) -> bool:
        """False for what vLLM itself calls information or a warning."""
        return self.level in ("", "ERROR", "CRITICAL")


def clean(raw: str) -> LogLine:
    """The message of a raw line; never fails."""
    text = _COLOUR.sub("", raw[: 2 * LONGEST_LINE]).rstrip()
    level = ""
    for _ in range(8):  # prefixes stand in any order; no line has more of them
        before = text
        for prefix in _PREFIXES:
            if match := prefix.match(text):
                text = text[match.end() :]
        if match := _LEVEL.match(text):
            # The innermost one is vLLM's own.
            level, text = match["level"], text[match.end() :]
        if text == before:
            break
    return LogLine(text[:LONGEST_LINE], level)
