"""Whether a server gets on: real progress, heart-beats without any, and what they mean at the end.

A server that hangs does not fall silent: those that wait for it go on saying that they wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuner.engine.log_lines import LogLine, time_s

HEARTBEAT = re.compile(
    r"No available (?:shared memory broadcast )?block found in"
    r"|Waiting for \d+ local, \d+ remote core engine proc\(s\) to (?:start|connect)"
    r"|Waiting for READY message from|Still waiting for .* to (?:start|be ready)"
)
"""vLLM 0.5.3 - 0.33: says that time goes by, and nothing else."""

_STATS = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs,(?: Swapped: (?P<swapped>\d+) reqs,)? "
    r"(?:Waiting|Pending): (?P<waiting>\d+) reqs"
)
"""The line of every ten seconds; to 0.10 (V0) "Pending"."""

_ACCESS = re.compile(r"HTTP/1\.[01]\"|Received request|Generated response|Added request")

_SPECIAL = re.compile("available|Waiting|waiting|Avg prompt|HTTP/1|request|Generated resp")
"""Some part of all of these."""

_HUNG_BEATS = 5
_HUNG_S = 300.0
_STUCK_STATS = 6
_MOST_KNOWN = 2048
_MOST_ENGINES = 4096


@dataclass(slots=True)
class _Beats:
    """The heart-beats of one process since the last progress of any."""

    count: int = 0
    first_s: float | None = None
    last_s: float | None = None

    @property
    def hung(self) -> bool:
        if self.count >= _HUNG_BEATS:
            return True
        if self.first_s is None or self.last_s is None:
            return False
        return self.last_s - self.first_s >= _HUNG_S


class ProgressWatch:
    """Told every message in order.

    Attributes:
        count: messages that were progress. Not among them are heart-beats, what was said
            before in the same words, and, once the server is ready, all but statistics that
            show tokens.
        line: the last heart-beat, or the last statistics that showed a standstill.
    """

    def __init__(self) -> None:
        self.count = 0
        self.line = ""
        self._last = ""
        self._known: set[int] = set()
        self._beats: dict[str, _Beats] = {}
        self._before: dict[str, _Beats] | None = None
        self._stuck: dict[str, int] = {}
        self._busy = False

    def begin_line(self) -> None:
        """What is noted next is not part of what was noted before."""
        self._last, self._before = "", None

    def note(self, line: LogLine, raw: str, *, serving: bool, again: bool = False) -> None:
        """Take account of a message.

        Args:
            again: it was broken, and a part of it was noted before.
        """
        if not _SPECIAL.search(line.text):
            if not again and not serving:
                self.note_plain(line.text)
            return
        if again and self._last and line.text.startswith(self._last):
            return
        if HEARTBEAT.search(line.text):
            if again and self._before is not None:  # its first part looked like progress
                self._beats, self._before = self._before, None
                self.count -= 1
            self._beat(line, raw)
            self._last = line.text
        elif (stats := _STATS.search(line.text)) is not None:
            self._note_stats(stats, line.text)
            self._last = line.text
        elif not again and not serving and not _ACCESS.search(line.text):
            self.note_plain(line.text)

    def hangs(self, *, serving: bool) -> bool:
        """Whether a log that ends here is that of a server that hangs."""
        if max(self._stuck.values(), default=0) >= _STUCK_STATS:
            return True
        # A server without requests says the same of its idle workers.
        if serving and not self._busy:
            return False
        return any(beats.hung for beats in self._beats.values())

    def begin_anew(self) -> None:
        """Another life of the server begins, or this one serves from now on."""
        self._beats.clear()
        self._stuck.clear()
        self._busy = False

    def _beat(self, line: LogLine, raw: str) -> None:
        if len(self._beats) >= _MOST_ENGINES:
            self._beats.clear()
        beats = self._beats.setdefault(line.process, _Beats())
        beats.count += 1
        beats.last_s = time_s(raw)
        beats.first_s = beats.last_s if beats.first_s is None else beats.first_s
        self.line = line.text

    def _note_stats(self, stats: re.Match[str], text: str) -> None:
        engine = stats["engine"] or ""
        waiting = any(int(stats[name] or 0) for name in ("running", "swapped", "waiting"))
        moves = any(stats[name].strip("0.") for name in ("prompt", "generation"))
        self._busy = waiting
        if len(self._stuck) >= _MOST_ENGINES:
            self._stuck.clear()
        self._stuck[engine] = self._stuck.get(engine, 0) + 1 if waiting and not moves else 0
        if moves:
            self.count += 1
            self._beats.clear()
        elif waiting:
            self.line = text

    def note_plain(self, text: str) -> None:
        """Take account of a message that is nothing special."""
        known = hash(text)
        if known in self._known:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(known)
        self.count += 1
        self._before, self._beats = self._beats, {}
