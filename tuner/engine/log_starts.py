"""A log cut into the starts it holds: container logs append every restart to the ones before.

A start begins where a server says its version, where argparse refuses, or where an API server
with another process id speaks after a failure. Servers of one start (API servers side by side,
engines) say so too, within a minute and before anything came of it; they are not cut apart.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from tuner.engine.log_facts import begins_anew
from tuner.engine.log_lines import messages, quotes_request, time_s, without_colours
from tuner.engine.log_settings import HEAD_BYTES
from tuner.engine.logs import LogReader, cause_of_exit
from tuner.types import Failure, MemoryFacts, Stage

SERVING = (Stage.READY, Stage.LOAD)

_MOST_HELD = 1 << 18
"""Characters without a line break that are looked at together."""

_SIDE_BY_SIDE_S = 60.0
"""API servers that are started together say their version within it."""

_SAME_BANNER_LINES = 6
"""Lines within which a version is said again by the same server."""

_WORDS = ("ersion ", "API server", "▀▄▀", "usage: vllm")
"""A line that may begin a start, or a part of one that a terminal broke."""

_LETTERED = re.compile(r"[A-Za-z].*\bversion ")
_API_PID = re.compile(r"\(APIServer pid=(\d+)\)")
_API_WORKER = re.compile(r"\(ApiServer_\d+ pid=")
_USAGE = re.compile(r"usage: vllm\b")

_SERVED = re.compile(
    r'"POST /v1/[\w/.-]* HTTP/1\.[01]" [25]\d\d|Avg prompt throughput: |Added request \S'
    r"|Received request \S|output_handler failed|EngineDeadError|Exception in ASGI application"
    r"|Dumping input data|Engine loop has died|Background loop (?:has errored|is not running)"
    r"|execute_model_with_error_logging|\b_process_engine_step\b|in run_(?:busy|engine)_loop\b"
    r"|INFO:\s+Shutting down|Application shutdown complete|Finished server process"
)
"""Only a server that was ready says it, or the one that ends after it."""

_LOADING = re.compile(
    r"\bin (?:load_model|create_weights|make_layers|process_weights_after_loading)\b"
    r"|Failed to load model"
)
_STARTING = re.compile(
    r"ngine core initialization failed|EngineCore failed to start|WorkerProc (?:failed|init)"
    r"|Engine process failed to start|orker failed to start"
)

_OF_VLLM = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d"
    r'|\bpid=\d+\) |"POST /v1/|throughput: [\d.]+ tokens/s|vLLM (?:API )?server version'
    r"|INFO:\s+(?:Started|Finished|Shutting|Waiting for app|Application)|LLM engine \(v\d"
    r"|Uvicorn running on|usage: vllm"
    r'|(?:vllm|api_server\.py): error: |File \\?"[^"\n]*/vllm/|VLLM::'
    r"|\bvllm(?:\.\w+)+\.\w*(?:Error|Exception)\b"
)
_NAMES_VLLM = re.compile(r"(?i)vllm")


class Start:
    """What was read of one start.

    Attributes:
        reader: of its lines.
        served: it says what only a server says that has been ready.
        loading, starting: a traceback, or vLLM, says that it was loading or starting.
        of_vllm: it has lines as vLLM logs them.
        names_vllm: it has at least a word of it.
    """

    def __init__(self, *, may_be_cut: bool) -> None:
        """Begin with no line.

        Args:
            may_be_cut: the lines before may be missing, so that the server may be ready.
        """
        self.reader = LogReader()
        self.served = self.loading = self.starting = False
        self.of_vllm = self.names_vllm = False
        self.has_version = self.was_refused = False
        self.api_pids: set[str] = set()
        self.time_s: float | None = None
        self._head = ""
        self._ready: LogReader | None = None
        if may_be_cut:
            self._ready = LogReader()
            self._ready.stage = Stage.READY

    @property
    def head(self) -> bytes:
        """The beginning, where the settings stand."""
        return self._head.encode("utf-8", "replace")

    @property
    def is_part(self) -> bool:
        """Whether no line tells that or how it started: the beginning of the log is missing."""
        return self._ready is not None and self.reader.memory == MemoryFacts()

    @property
    def as_ready(self) -> LogReader | None:
        """The same lines, read as those of a server that was ready; where that may be so."""
        return self._ready if self.is_part and self.served else None

    def feed(self, text: str) -> None:
        """Read whole lines."""
        if not text:
            return
        self.reader.feed(text)
        if len(self._head) < HEAD_BYTES:
            self._head += text[: HEAD_BYTES - len(self._head)]
        self.of_vllm = self.of_vllm or _OF_VLLM.search(text) is not None
        self.names_vllm = self.names_vllm or _NAMES_VLLM.search(text) is not None
        if self._ready is not None:
            self._feed_ready(self._ready, text)

    def finish(self) -> None:
        """No line follows."""
        self.reader.finish()
        if self._ready is not None:
            self._ready.finish()

    def failed(self) -> bool:
        """Whether it has said why it fails, or at least that it does."""
        return self.reader.failure() is not None

    def troubled(self) -> bool:
        """The same, or an exception that has no name."""
        supposed = self.reader.failure(1)
        said_nothing = cause_of_exit(1, self.reader.stage)[1]
        return supposed is not None and supposed.line != said_nothing

    def failure_as_ready(self, exit_code: int | None) -> Failure | None:
        """Why it failed if it was ready; None where it cannot have been."""
        reader = self.as_ready
        return None if reader is None else reader.failure(exit_code)

    def _feed_ready(self, ready: LogReader, text: str) -> None:
        ready.feed(text)
        self.served = self.served or _SERVED.search(text) is not None
        self.loading = self.loading or _LOADING.search(text) is not None
        self.starting = self.starting or _STARTING.search(text) is not None
        reader = self.reader
        is_starting = reader.stage not in (Stage.LAUNCH, *SERVING)
        knows_start = is_starting or reader.memory != MemoryFacts()
        is_the_same = reader.stage in SERVING and ready.failure() is None
        if knows_start or is_the_same:
            self._ready = None


class Starts:
    """Reads a log in pieces; each start has a reader of its own.

    What it finds does not depend on where the pieces were cut. Of starts that are over,
    `ended` is given away and nothing is kept.
    """

    def __init__(self) -> None:
        self.last = Start(may_be_cut=True)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._undecoded = b""
        self._held = ""
        self._before = ""
        self._lines_since_version = 0

    def feed(self, data: bytes) -> Iterator[Start]:
        """Read on; the starts that ended on the way."""
        text = self._decode(data)
        return self._take(self._held + text, is_last=False)

    def finish(self) -> Iterator[Start]:
        """The log has ended."""
        yield from self._take(self._held + self._decode(b"", final=True), is_last=True)
        self.last.finish()

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if self._decoder is None:
            data = self._undecoded + data
            if len(data) < 2 and not final:
                self._undecoded = data
                return ""
            is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            decoder = codecs.getincrementaldecoder("utf-16" if is_wide else "utf-8")
            self._decoder = decoder("replace")
        return self._decoder.decode(data, final).replace("\0", "")

    def _take(self, text: str, *, is_last: bool) -> Iterator[Start]:
        end = len(text) if is_last else self._judgeable(text)
        begin = 0
        for at, after in self._candidates(text, end):
            self._give(text[begin:at])
            begin = at
            raw = text[at:after].rstrip("\r\n")
            following = text[after : text.find("\n", after) + 1 or len(text)].rstrip("\r\n")
            if self._begins(raw, following):
                ended, self.last = self.last, Start(may_be_cut=False)
                ended.finish()
                yield ended
            self._note(raw, following)
        self._give(text[begin:end])
        self._held = text[end:]

    @staticmethod
    def _judgeable(text: str) -> int:
        """Up to the last whole line, which must be seen with the one before."""
        last = text.rfind("\n")
        end = text.rfind("\n", 0, last) + 1 if last > 0 else 0
        return len(text) if len(text) - end > _MOST_HELD else end

    def _candidates(self, text: str, end: int) -> Iterator[tuple[int, int]]:
        """Begin and end of the lines that may begin a start."""
        at = 0 if self._may_begin(text) else end
        while at < end and (found := self._candidate().search(text, at, end)):
            begin = text.rfind("\n", 0, found.start()) + 1
            at = text.find("\n", found.start(), end) + 1 or end
            yield begin, at

    def _candidate(self) -> re.Pattern[str]:
        """Of the current start: whose API server is known by then (`re` keeps it compiled)."""
        known = "".join(rf"(?!{pid}\))" for pid in sorted(self.last.api_pids))
        return re.compile(rf"{'|'.join(_WORDS)}|\(APIServer pid={known}")

    def _may_begin(self, text: str) -> bool:
        """Whether there is such a line at all: a busy server's lines are counted in no time."""
        if any(word in text for word in _WORDS):
            return True
        known = sum(text.count(f"(APIServer pid={pid})") for pid in self.last.api_pids)
        return text.count("(APIServer pid=") > known

    def _give(self, text: str) -> None:
        if text:
            self.last.feed(text)
            self._lines_since_version += text.count("\n")
            self._before = text[text.rfind("\n", 0, -1) + 1 :].rstrip("\r\n")

    # --- one line that may begin a start -----------------------------------------------

    def _begins(self, raw: str, following: str) -> bool:
        start = self.last
        if quotes_request(raw) or _API_WORKER.search(raw):
            return False
        pid = _API_PID.search(raw)
        is_other = pid is not None and bool(start.api_pids) and pid[1] not in start.api_pids
        has_failed = start.failed()
        is_past_launch = start.reader.stage is not Stage.LAUNCH
        if self._says_version(raw, following):
            if not start.has_version:
                return has_failed or is_past_launch or start.was_refused
            if has_failed or is_past_launch or start.troubled():
                return True
            if self._lines_since_version <= _SAME_BANNER_LINES and not is_other:
                return False
            return not (is_other and self._is_soon(raw))
        if _is_usage(raw):  # before the version is said
            return has_failed or is_past_launch or start.has_version or start.was_refused
        return is_other and (has_failed or start.troubled())

    def _note(self, raw: str, following: str) -> None:
        """Keep of a line what the next one is compared with."""
        start = self.last
        if quotes_request(raw):
            return
        if (pid := _API_PID.search(raw)) and len(start.api_pids) < 64:
            start.api_pids.add(pid[1])
        if self._says_version(raw, following):
            start.has_version = True
            start.time_s = time_s(raw)
            self._lines_since_version = 0
        start.was_refused = start.was_refused or _is_usage(raw)

    def _is_soon(self, raw: str) -> bool:
        now_s, then_s = time_s(raw), self.last.time_s
        return now_s is None or then_s is None or abs(now_s - then_s) < _SIDE_BY_SIDE_S

    def _says_version(self, raw: str, following: str) -> bool:
        """Whether the line does, also where a terminal broke it."""
        if _says_version(raw):
            return True
        if _says_version(self._before) or _says_version(following):
            return False
        before, visible, after = map(without_colours, (self._before, raw, following))
        return any(
            ("▀▄▀" in joined or "server" in joined) and _says_version(joined)
            for joined in (visible + after, before + visible)
        )


def _says_version(raw: str) -> bool:
    for line in messages(raw):
        if begins_anew(line.text):
            return "server version" in line.text or not _LETTERED.search(line.text)
    return False


def _is_usage(raw: str) -> bool:
    return any(_USAGE.match(line.text.strip()) for line in messages(raw))
