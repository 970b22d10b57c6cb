"""Requests of a file of recorded traffic.

Only as many rows are kept as are needed. Where they are taken from:

- Replayed at the recorded times, or lengths without texts: the first rows, in every round.
- Texts otherwise: in an order drawn by the seed, no text twice; each round takes the next part.
  When all are used up they come again behind a number, which no cache takes for the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

from tuner.errors import InputError
from tuner.load.lengths import draw
from tuner.load.plan import Draft, Plan, of_two_lengths
from tuner.load.seeds import Stream, generator
from tuner.load.traces.detect import detect
from tuner.load.traces.reading import TraceStream
from tuner.load.traces.statistics import estimated_tokens
from tuner.load.traces.trace import HASH_BLOCK_TOKENS, TraceFormat, TraceRequest
from tuner.types import ArrivalKind, WorkloadKind, WorkloadSpec


def plan(spec: WorkloadSpec, round_number: int) -> Plan:
    """The drafts of a round.

    Raises:
        InputError: the file cannot be read, has too few usable requests, lacks what the spec
            needs (output lengths, times), or has texts that should become longer.
    """
    if spec.path is None:
        raise InputError(
            f"A workload of kind `{spec.kind}` needs a file.", "Set `workload: path:` to it."
        )
    # Rates and concurrency change from level to level, but not what is read.
    asked = replace(spec, concurrency=None, request_rate_per_s=None, levels=())
    return _plan(asked, round_number, _stamp(spec.path))


@lru_cache(maxsize=2)
def _plan(spec: WorkloadSpec, round_number: int, _version: tuple[int, int] | None) -> Plan:
    source = _Source(spec)
    return source.shuffled(round_number) if source.is_shuffled else source.in_order(round_number)


@dataclass(slots=True)
class _Count:
    """Rows that are requests but of no use here."""

    unanswered: int = 0
    repeated: int = 0


class _Source:
    """A file as a source of drafts."""

    def __init__(self, spec: WorkloadSpec) -> None:
        assert spec.path is not None
        form = None if spec.kind is WorkloadKind.TRACE else TraceFormat(spec.kind.value)
        self._spec = spec
        self._stream = TraceStream(spec.path, form)
        self._count = _Count()
        first = _first(self._stream, form)
        self._is_replayed = spec.arrivals is ArrivalKind.TRACE
        self.is_shuffled = first.text is not None and not self._is_replayed
        if spec.input_scale > 1 and first.text is not None:
            raise InputError(
                f"{spec.path} has texts, which cannot be made longer.",
                "Set `workload: scale: input:` to 1 at most.",
            )

    # --- which rows --------------------------------------------------------------------

    def in_order(self, round_number: int) -> Plan:
        """The first rows, by their times if they are replayed."""
        spec = self._spec
        wanted = spec.requests + spec.warmup_requests
        rows = list(islice(self._usable(distinct=False), wanted))
        if len(rows) < spec.requests:
            raise self._too_few(len(rows), spec.requests)
        if self._is_replayed:
            rows = self._by_time(rows)
        measured, others = rows[: spec.requests], rows[spec.requests :]
        spare = [rows[place % len(rows)] for place in range(spec.warmup_requests - len(others))]
        due_s = _due_s(measured) if self._is_replayed else None
        lap = f"({round_number}) " if round_number else ""
        drafts = [_behind(draft, lap) for draft in self._drafts(measured)]
        note = _repeats(spec.path) if lap and drafts[0].text is not None else ""
        return Plan(tuple(drafts), self._warmup([*others, *spare]), due_s, note)

    def shuffled(self, round_number: int) -> Plan:
        """The round's part of an order that the seed decides; the warm-up's rows stay out."""
        spec = self._spec
        usable = sum(1 for _ in self._usable(distinct=True))
        needed = spec.requests + spec.warmup_requests
        if usable < needed:
            raise self._too_few(usable, needed)
        order = generator(spec.seed, Stream.ORDER).permutation(usable).tolist()
        pool = order[: spec.requests] + order[needed:]
        begin = round_number * spec.requests
        laps = [divmod(begin + place, len(pool)) for place in range(spec.requests)]
        chosen = [pool[place] for _, place in laps] + order[spec.requests : needed]
        row_of = self._rows(set(chosen))
        rows = [row_of[position] for position in chosen]
        drafts = [
            _behind(draft, f"({lap}) " if lap else "")
            for draft, (lap, _) in zip(self._drafts(rows[: spec.requests]), laps, strict=True)
        ]
        note = _repeats(spec.path) if laps[-1][0] else ""
        return Plan(tuple(drafts), self._warmup(rows[spec.requests :]), None, note)

    def _rows(self, positions: set[int]) -> dict[int, TraceRequest]:
        return {
            position: row
            for position, row in enumerate(self._usable(distinct=True))
            if position in positions
        }

    def _usable(self, *, distinct: bool) -> Iterator[TraceRequest]:
        """Rows whose answer has a length; with `distinct` no text twice."""
        self._count = _Count()
        seen: set[int] = set()  # hashes: texts of millions of rows would be large
        for row in self._stream:
            if self._spec.output_tokens is None and row.output_tokens is None and not row.reply:
                self._count.unanswered += 1
                continue
            if distinct:
                name = hash(row.line if row.text is None else row.text)
                if name in seen:
                    self._count.repeated += 1
                    continue
                seen.add(name)
            yield row

    def _by_time(self, rows: Sequence[TraceRequest]) -> list[TraceRequest]:
        """In order of arrival; a row without a time follows the turn, or the row, before it."""
        if all(row.arrival_s is None for row in rows):
            raise InputError(
                f"{self._spec.path} does not say when its requests came.",
                "Write `concurrency: 32` (closed loop) or `request_rate: 4` (arrivals per second).",
            )
        ends: dict[str, float] = {}
        now_s = next(row.arrival_s for row in rows if row.arrival_s is not None)
        timed = []
        for row in rows:
            if row.arrival_s is not None:
                now_s = row.arrival_s
            else:
                now_s = ends.get(row.session or "", now_s) + (row.delay_s or 0.0)
            if row.session is not None:
                ends[row.session] = now_s
            timed.append(replace(row, arrival_s=now_s))
        return sorted(timed, key=lambda row: row.arrival_s or 0.0)

    # --- what becomes of them ----------------------------------------------------------

    def _drafts(self, rows: Sequence[TraceRequest]) -> list[Draft]:
        spec = self._spec
        outputs = None
        if spec.output_tokens is not None:
            rng = generator(spec.seed, Stream.OUTPUT)
            outputs = draw(spec.output_tokens, len(rows), rng)
        numbers: dict[int, int] = {}
        turns: dict[str, int] = {}
        drafts = []
        for place, row in enumerate(rows):
            blocks = tuple(numbers.setdefault(name, len(numbers)) for name in row.hash_ids)
            asked = None if outputs is None else outputs[place]
            draft = self._draft(row, blocks, asked)
            if row.session is not None:
                # A row with a whole chat has said already what was said before.
                before, whole = turns.get(row.session), bool(row.messages)
                draft = replace(draft, after=before, carries=before is not None and not whole)
                turns[row.session] = place
            drafts.append(draft)
        return drafts

    def _warmup(self, rows: Sequence[TraceRequest]) -> tuple[Draft, ...]:
        """Drafts that share nothing with the measured ones."""
        spec = self._spec
        outputs = None
        if spec.output_tokens is not None:
            outputs = draw(spec.output_tokens, len(rows), generator(spec.seed, Stream.WARMUP))
        drafts = [
            self._draft(row, (), None if outputs is None else outputs[place])
            for place, row in enumerate(rows)
        ]
        if not self.is_shuffled:
            drafts = [_behind(draft, f"(w{place}) ") for place, draft in enumerate(drafts)]
        return tuple(of_two_lengths(drafts))

    def _draft(self, row: TraceRequest, blocks: tuple[int, ...], asked: int | None) -> Draft:
        spec, text = self._spec, row.text
        tokens = row.input_tokens
        if tokens is None or text is not None:
            tokens = estimated_tokens(text or "")
        reply = None
        if asked is None:
            reply = row.reply if row.output_tokens is None else None
            recorded = row.output_tokens or estimated_tokens(row.reply or "")
            asked = scaled_output(spec, recorded)
        elif spec.max_output_tokens is not None:
            asked = min(asked, spec.max_output_tokens)
        block = max(1, round(HASH_BLOCK_TOKENS * spec.input_scale)) if blocks else 0
        length = scaled_input(spec, tokens)
        return Draft(length, asked, blocks, block, length if blocks else 0, text, reply)

    def _too_few(self, usable: int, needed: int) -> InputError:
        spec, count = self._spec, self._count
        left_out = [str(self._stream.refused)] if self._stream.refused.total else []
        if count.unanswered:
            left_out.append(f"without output tokens: {count.unanswered:,}")
        if count.repeated:
            left_out.append(f"repeat an earlier prompt: {count.repeated:,}")
        wanted = f"{spec.requests} requests"
        if needed > spec.requests:
            wanted += f" and {spec.warmup_requests} for the warm-up"
        spare = usable - (needed - spec.requests)
        if count.unanswered and spare < 1:
            hint = "Say how long the answers are, such as `output_tokens: 128`."
        elif spare < 1:
            hint = "Give a larger file; repeated prompts would be answered from the prefix cache."
        else:
            hint = f"Set `workload: requests:` to {spare} at most."
        why = f" (left out: {'; '.join(left_out)})" if left_out else ""
        return InputError(
            f"{spec.path}: has only {usable} usable requests{why}, but {wanted} are asked for.",
            hint,
        )


def _first(stream: TraceStream, form: TraceFormat | None) -> TraceRequest:
    """The first usable row.

    Raises:
        InputError: there is none; where the file looks like another format than the one that
            the space file names, that is said.
    """
    reading = iter(stream)
    try:
        return next(reading)
    except InputError:
        looks = None if form is None else _detected(stream.path)
        if looks is None or looks is form:
            raise
        raise InputError(
            f"{stream.path}: `workload.kind` says {form}, but the file looks like {looks}",
            f"Write `kind: {looks}`, or `kind: trace`, which tells the format by the content.",
        ) from None
    finally:
        reading.close()


def _detected(path: Path) -> TraceFormat | None:
    try:
        return detect(path)
    except InputError:
        return None


def scaled_input(spec: WorkloadSpec, tokens: int) -> int:
    """A recorded length of a prompt as the spec wants it."""
    return _scaled(tokens, spec.input_scale, spec.max_input_tokens)


def scaled_output(spec: WorkloadSpec, tokens: int) -> int:
    """A recorded length of an answer as the spec wants it."""
    return _scaled(tokens, spec.output_scale, spec.max_output_tokens)


def _scaled(tokens: int, scale: float, limit: int | None) -> int:
    length = max(1, round(tokens * scale))
    return length if limit is None else min(length, limit)


def _due_s(rows: Sequence[TraceRequest]) -> tuple[float, ...]:
    """Seconds after the first."""
    first_s = rows[0].arrival_s or 0.0
    return tuple((row.arrival_s or 0.0) - first_s for row in rows)


def _behind(draft: Draft, mark: str) -> Draft:
    """The same behind a mark, so that no cache knows its text."""
    return draft if draft.text is None or not mark else replace(draft, text=mark + draft.text)


def _repeats(path: Path | None) -> str:
    return (
        f"{path} has too few texts for prompts that are all different: they come again behind a "
        "number, so that the prefix cache does not know them"
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from what it was before; None if there is none, which reading will say."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
