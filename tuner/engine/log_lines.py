"""One line of a server's log without what stands around the message.

vLLM's lines carry a process tag, a level, a date and a file, and what runs vLLM adds more:
compose, Kubernetes, journald, Ray, collectors that pack lines into JSON, colours. None of it
says what happened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tuner.engine.log_input import REST_OF_LINE, record_starts

LONGEST_LINE = 2000
"""Characters of a message that are looked at; a message fits many times, a dumped prompt not."""

_MOST_RECORDS = 4000
_DEEPEST_PACKING = 3

_COLOUR = re.compile(
    r"(?:\x1b|\^\[|\\x1b|\\u001b|#033)\[[0-9;?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\[\d{1,3}(?:;\d{1,3})*m"  # the escape character itself was lost
)
_BOX = "│┃║"
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")

_PREFIX = re.compile(
    # docker compose, pm2: "vllm-1  | "; bounded, as a line may be one word
    r"(?P<service>[\w./-]{1,120})(?:\|[\w.-]{1,120})?\s{1,40}\| "
    r"|(?:(?:DEFAULT|DEBUG|INFO|NOTICE|WARNING|ERROR|CRITICAL) )?"  # a collector's level
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?\]? "
    r"(?:(?:stdout|stderr) [FP] |[\w.-]+ [\w.@/-]+\[\d+\]: )?"  # CRI; journald
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? [\w.-]+ [\w.@/-]+(?:\[\d+\])?: "  # syslog
    r"|\[pod/[^\]\s]+\] |\[resource\.labels\.[\w.]+: [\w.-]+\] "
    rf"|[{_BOX}] ?"
    r"|\[(?:Info|Error|Warning|Debug)\] (?:\([\w-]+\) )?"  # lemonade and other starters
    r"|\s*[\"']?(?:textPayload|message|log|msg)[\"']?: [\"']?(?=\(|\[|[A-Z])"  # YAML or JSON
    # Ray, multiprocessing and vLLM: "(EngineCore_DP0 pid=123) ", "(VllmWorker rank=0 pid=1) "
    r"|\([A-Za-z][\w.:<>-]*(?: [\w.]+=[\w.:-]+)*,? ?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\d.]+))?\) "
    r"|\[(?P<rank>rank\d+)\]:? ?"
    # "ERROR 08-21 07:23:34 file.py:12] " to 0.7, "ERROR 08-21 07:23:34 [v1/file.py:12] " after;
    # uvicorn: "ERROR:    [Errno 98] ..."
    r"|(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    r"(?: (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[?[\w./<>-]+:\d+\] ?|:\s+)"
)
_OWN_DATE = re.compile(r"(?:[A-Z]{4,8}) (?:\d{4}-)?(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_DATE = re.compile(r"(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_QUOTED_REQUEST = re.compile(r"Received request|Generated response|prompt: ['\"]")
_FRAME_START = re.compile(r'(?<=\S)(?=\s{2,}File "[^"\n]{1,300}", line \d+, in )')

_LEVELS = ("INFO ", "ERROR ", "WARNING ", "DEBUG ", "CRITICAL ")

_PACKED_NAMES = ("log", "textPayload", "message", "msg", "MESSAGE")
_CUT_PACKED = re.compile(r'"(?:log|textPayload|message|msg|MESSAGE)": ?"((?:[^"\\]|\\.)*)')


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message.

    Attributes:
        text: without prefixes; indentation is kept.
        level: vLLM's or uvicorn's, such as "ERROR"; empty where the line does not say
            (tracebacks, C libraries). What a collector calls it does not count.
        process: tells the processes apart that write into one log; empty where nothing does.
    """

    text: str
    level: str = ""
    process: str = ""

    @property
    def may_tell_of_failure(self) -> bool:
        """False for what vLLM itself calls information or a warning."""
        return self.level in ("", "ERROR", "CRITICAL")


def without_colours(raw: str) -> str:
    """`raw` without terminal codes and without the frame that a viewer drew around it."""
    if "\x1b" in raw or "0m" in raw or "\\x1b" in raw or "\\u001b" in raw:
        raw = _COLOUR.sub("", raw)
    if raw[:1] in _BOX and raw:
        raw = raw[1:].removeprefix(" ").rstrip().rstrip(_BOX).rstrip()
    return raw


def clean(raw: str) -> LogLine:
    """The message of a raw line; never fails."""
    text = without_colours(raw[: 2 * LONGEST_LINE]).rstrip()
    if text.endswith("across cluster]"):
        text = _REPEATED.sub("", text)
    level = service = process = ""
    at = 0
    for match in _prefixes(text):
        at = match.end()
        kind = match.lastgroup
        if kind == "level":
            level = match["level"]  # the innermost one is vLLM's own
        elif kind == "service":
            service = match["service"] + " "
        elif kind is not None:
            process = match["rank"] or f"{match['pid']} {match['ip'] or ''}"
    return LogLine(text[at : at + LONGEST_LINE], level, service + process)


def _prefixes(text: str) -> Iterator[re.Match[str]]:
    at = 0
    for _ in range(10):  # they stand in any order; no line has more of them
        match = _PREFIX.match(text, at)
        if match is None or match.end() == at:
            return
        at = match.end()
        yield match


def quotes_request(raw: str) -> bool:
    """Whether the line holds what a client sent, which may be anything."""
    return _QUOTED_REQUEST.search(raw) is not None


def time_s(raw: str) -> float | None:
    """The line's own date in seconds, on a calendar of months of 31 days; None without one."""
    match = _OWN_DATE.search(raw) or _DATE.search(raw)
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups())
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60.0 + second


# --- several messages in one line -----------------------------------------------------


def messages(raw: str) -> Iterable[LogLine]:
    """The messages in a raw line, in order.

    Usually one; more where line breaks were lost, or were written as a backslash and an n, or
    a collector packed a text into JSON. A part without level or process of its own has those
    of the part before it.
    """
    if raw.startswith(REST_OF_LINE):
        start = next(record_starts(raw), None)
        return () if start is None else _unpacked(raw[start:], _DEEPEST_PACKING)
    if is_packed(raw):
        return _unpacked(raw, _DEEPEST_PACKING)
    line = clean(raw)
    frames = raw.count('File "')
    if frames + ("Traceback (most" in raw) < 2 and _is_one_record(raw, line):
        return (line,)
    return _unpacked(raw, _DEEPEST_PACKING)


def _is_one_record(raw: str, line: LogLine) -> bool:
    """A quick look, for most lines."""
    return "\\n" not in raw and sum(map(raw.count, _LEVELS)) <= bool(line.level)


def is_packed(raw: str) -> bool:
    """Whether the line looks like JSON that a collector made of a line."""
    return '{"' in raw[:120] or raw.startswith("{")


def _unpacked(raw: str, depth: int) -> Iterator[LogLine]:
    if depth and is_packed(raw):
        line = clean(raw)
        if line.text.startswith("{") and (text := _packed_text(raw[raw.index("{") :])) is not None:
            for part in text.rstrip("\n").split("\n"):
                for message in _unpacked(part, depth - 1):
                    yield replace(message, level=message.level or line.level)
            return
    for record in _records(raw):
        yield from _broken(record)


def _packed_text(raw: str) -> str | None:
    """What a JSON line holds; None if it is none of a collector's."""
    try:
        packed = json.loads(raw)
    except (ValueError, RecursionError):
        cut = _CUT_PACKED.search(raw)  # a viewer or a terminal cut the line
        return None if cut is None else cut[1].replace("\\n", "\n").replace('\\"', '"')
    if isinstance(packed, dict) and isinstance(packed.get("jsonPayload"), dict):
        packed = packed["jsonPayload"]
    if not isinstance(packed, dict):
        return None
    text = next((packed[n] for n in _PACKED_NAMES if isinstance(packed.get(n), str)), None)
    if text is None:
        return None
    level = packed.get("levelname")  # of Python's logging, so vLLM's own
    return f"{level}: {text}" if level in ("DEBUG", "INFO", "WARNING", "ERROR") else str(text)


def _records(raw: str) -> Iterator[str]:
    """`raw` cut where records of vLLM's logger begin within it.

    Not in what a request holds: a client may send a log.
    """
    quoted = _QUOTED_REQUEST.search(raw)
    end = quoted.start() if quoted else len(raw)
    begin = count = 0
    for start in record_starts(raw, 0, end):
        if start > begin and _says_something(raw[begin:start]):
            yield raw[begin:start]
            begin = start
            count += 1
            if count == _MOST_RECORDS:
                break
    yield raw[begin:]


def _says_something(text: str) -> bool:
    text = without_colours(text)
    ends = [match.end() for match in _prefixes(text)]
    return bool(text[ends[-1] if ends else 0 :].strip())


def _broken(record: str) -> Iterator[LogLine]:
    """The lines of a record whose own breaks were lost or written out."""
    first = clean(record)
    written_out = "\\n" in record and ("Traceback (most" in record or '\\n  File "' in record)
    run_together = record.count('File "') > 1 or ("Traceback (most" in record and "File" in record)
    if not (written_out or run_together) or _QUOTED_REQUEST.search(record):
        yield first
        return
    parts = record.replace("\\n", "\n").split("\n") if written_out else [record]
    for part in parts:
        for piece in _FRAME_START.split(part):
            line = clean(piece)
            if line.text.strip():
                yield LogLine(line.text, line.level or first.level, line.process or first.process)
