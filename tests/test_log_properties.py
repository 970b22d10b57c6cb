"""Laws of the log reader: what does not change a verdict, and that nothing breaks it."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_corpus import CASES, WRAPPINGS, Case, expected, verdict, wrapped_at

from tuner.engine.logs import LogReader

ANY_CASE = st.sampled_from(CASES)
OUTER = st.sampled_from(sorted(set(WRAPPINGS) - {"ray_repeated"}))

HEALTHY = [
    "(Worker_TP3 pid=909) INFO 10-02 09:00:01 [custom_all_reduce.py:35] Skipping P2P check",
    "(Worker_TP3 pid=909) WARNING 10-02 09:00:01 [topk_topp_sampler.py:59] FlashInfer is not used.",
    "(Worker_TP3 pid=909) INFO 10-02 09:00:02 [cuda.py:290] Using Flash Attention backend on V1.",
    "(Worker_TP3 pid=909) [Autotuner]: OOM detected, falling back to default tactic",
    "(Worker_TP3 pid=909) Traceback (most recent call last):",
    '(Worker_TP3 pid=909)   File "/usr/lib/x.py", line 12, in profile_run',
    "(Worker_TP3 pid=909)     raise RuntimeError('CUDA out of memory')",
    "[rank3]:[W1002 09:00:03.1 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy",
]
"""Of another process that writes into the same log."""


@given(case=ANY_CASE, width=st.integers(60, 200))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_breaking_lines_at_a_width_changes_nothing(case: Case, width: int) -> None:
    assert verdict(wrapped_at(case.text, width), case.exit_code) == expected(case)


@given(case=ANY_CASE, outer=OUTER, ends=st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_prefixes_and_line_ends_change_nothing(case: Case, outer: str, ends: str) -> None:
    text = WRAPPINGS[outer](case.text).replace("\r\n", "\n").replace("\n", ends)
    assert verdict(text, case.exit_code) == expected(case)


@given(case=ANY_CASE, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_another_process_in_between_changes_nothing(case: Case, seed: int) -> None:
    chance = random.Random(seed)
    lines = []
    for line in case.text.splitlines():
        while chance.random() < 0.25:
            lines.append(chance.choice(HEALTHY))
        lines.append(line)
    # That of a server that hangs does not get on.
    if case.cause != "hang":
        assert verdict("\n".join(lines), case.exit_code) == expected(case)


@given(case=ANY_CASE, cuts=st.lists(st.integers(0, 60_000), max_size=12), data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cutting_the_log_anywhere_changes_nothing(
    case: Case, cuts: list[int], data: st.DataObject
) -> None:
    wrapping = data.draw(st.sampled_from(["crlf", "boxed", "docker_json", "nul"]))
    text = WRAPPINGS[wrapping](case.text)
    encoding = data.draw(st.sampled_from(["utf-8", "utf-16"]))
    whole, cut = LogReader(), LogReader()
    raw = text.encode(encoding)
    whole.feed(raw)
    edges = sorted({0, len(raw), *(c % (len(raw) + 1) for c in cuts)})
    for begin, end in itertools.pairwise(edges):
        cut.feed(raw[begin:end])
    for reader in (whole, cut):
        reader.finish()
    assert cut.failure(case.exit_code) == whole.failure(case.exit_code)
    assert (cut.stage, cut.memory, cut.progress) == (whole.stage, whole.memory, whole.progress)
    assert cut.tail() == whole.tail()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_cutting_the_log_into_small_pieces_changes_nothing(size: int) -> None:
    for case in CASES[::25]:
        reader, raw = LogReader(), WRAPPINGS["crlf"](case.text).encode()
        for at in range(0, len(raw), size):
            reader.feed(raw[at : at + size])
        reader.finish()
        failure = reader.failure(case.exit_code)
        assert (str(failure.cause) if failure else "none") == case.cause


@given(case=ANY_CASE)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_records_without_line_breaks_keep_the_cause(case: Case) -> None:
    """Where each line is a record of vLLM's logger, the breaks can be found again."""
    lines = case.text.splitlines()
    if all(" 0" in line[:60] and "] " in line for line in lines) and lines:
        found = verdict("".join(lines), case.exit_code)
        assert (found.cause, found.numbers) == (case.cause, expected(case).numbers)


@pytest.mark.parametrize("name", ["oom_profile_0.8.5", "oom_load_0.33.0", "kv_too_small_0.21.0"])
@pytest.mark.parametrize("joint", ["", "\\n", " "])
def test_a_traceback_in_one_line_keeps_cause_and_numbers(name: str, joint: str) -> None:
    case = next(c for c in CASES if c.name == name)
    lines = case.text.splitlines()
    first = next(i for i, line in enumerate(lines) if "Traceback (most recent" in line)
    stamp, _, _ = lines[first].partition("Traceback")
    last = first
    while lines[last + 1].startswith(stamp):
        last += 1
    packed = stamp + joint.join(line.removeprefix(stamp) for line in lines[first : last + 1])
    text = "\n".join([*lines[:first], packed, *lines[last + 1 :]])
    assert verdict(text, case.exit_code) == expected(case)


# --- any input -------------------------------------------------------------------------

REAL_LINES = [line for case in CASES for line in case.text.splitlines()]


@given(st.lists(st.binary(max_size=300), max_size=20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_bytes_are_read(pieces: list[bytes]) -> None:
    reader = LogReader()
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    assert reader.failure(1) is not None
    assert isinstance(reader.tail(), str)


@given(
    lines=st.lists(st.sampled_from(REAL_LINES), max_size=60),
    outer=OUTER,
    noise=st.lists(st.tuples(st.integers(0, 20_000), st.binary(max_size=8)), max_size=10),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_real_lines_in_any_order_are_read(
    lines: list[str], outer: str, noise: list[tuple[int, bytes]]
) -> None:
    raw = bytearray(WRAPPINGS[outer]("\n".join(lines)).encode())
    for at, what in noise:
        raw[at % (len(raw) + 1) : at % (len(raw) + 1)] = what
    reader = LogReader()
    reader.feed(bytes(raw))
    reader.finish()
    reader.failure()
    assert reader.failure(1) is None or reader.failure(1).excerpt is not None
    assert reader.progress >= 0


@given(st.text(alphabet=st.sampled_from('{}":\\nlog,[]()pid=INFO 0123-:.'), max_size=400))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_looks_like_json_or_a_stamp_is_read(text: str) -> None:
    reader = LogReader()
    reader.feed(text)
    reader.finish()
    reader.failure(1)


# --- size ------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_log() -> None:
    case = next(c for c in CASES if c.name == "unknown_0.8.5")
    trouble = case.text.encode() * 10
    reader = LogReader()
    reader.feed(trouble)
    tracemalloc.start()
    for at in range(20):
        reader.feed(trouble)
        reader.feed(b"x" * 2**20)  # a line without an end
        reader.feed(f"\n(Worker pid={at}) Traceback (most recent call last):\n".encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * 2**20
    failure = reader.failure(1)
    assert failure is not None
    assert len(failure.excerpt) < 120_000


def test_a_line_without_an_end_hides_nothing() -> None:
    reader = LogReader()
    reader.feed("INFO:     Application startup complete.\n")
    for _ in range(60):
        reader.feed("lorem ipsum " * 10_000)
    reader.feed("ERROR 10-02 09:00:00 [core.py:1] EngineCore encountered a fatal error. ")
    reader.feed("y" * 100_000)
    reader.feed("ERROR 10-02 09:00:00 [core.py:1] RuntimeError: CUDA error: illegal memory access")
    reader.finish()
    assert verdict_of(reader) == "crash"
    assert reader.engine_dead


def verdict_of(reader: LogReader) -> str:
    failure = reader.failure()
    return "none" if failure is None else str(failure.cause)


START = next(c for c in CASES if c.name == "none_0.29.0").text
ACCESS = 'INFO:     127.0.0.1:43210 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
ENGINE = (
    "(EngineCore pid=77) DEBUG 08-21 07:23:34 [v1/engine/core.py:400] EngineCore loop active, "
    "with nothing to do for now but to wait for the next request.\n"
)


@pytest.mark.parametrize(
    ("start", "body", "mib_per_s"),
    [
        (START, ACCESS * 200_000, 8.0),
        (wrapped_at(START, 80), wrapped_at(ENGINE * 10_000, 80), 3.0),
        ("", wrapped_at(ENGINE * 10_000, 80), 3.0),
        (
            "",
            "00000000  4c 6f 72 65 6d 20 69 70 73 75 6d 20 64 6f 6c 6f  |............|\n" * 9000,
            2.0,
        ),
        ("", ("a" * 70 + "\n") * 9000, 1.2),
    ],
    ids=["access log", "wrapped", "wrapped while starting", "of one width", "of one letter"],
)
def test_a_large_log_is_read_quickly(start: str, body: str, mib_per_s: float) -> None:
    """Generous: tests/bench/log_reader.py measures."""
    raw = (start + body).encode()
    reader = LogReader()
    begin = time.process_time()
    reader.feed(raw)
    reader.finish()
    assert reader.failure() is None
    assert len(raw) / 2**20 / (time.process_time() - begin) > mib_per_s


# --- broken lines ----------------------------------------------------------------------


def test_a_broken_line_is_judged_though_nothing_follows_it() -> None:
    """As a server that hangs after its last words shows it."""
    line = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 232.00 MiB. GPU 2 has a "
        "total capacity of 23.57 GiB of which 154.88 MiB is free. Including non-PyTorch memory, "
        "this process has 23.40 GiB memory in use.\n"
    )
    reader = LogReader()
    reader.feed(wrapped_at("INFO 08-21 07:23:34 [x.py:1] Starting to load model m\n" + line, 80))
    failure = reader.failure()
    assert failure is not None
    assert failure.numbers["free_gib"] == pytest.approx(154.88 / 1024)


def test_a_long_request_hides_what_it_quotes_though_it_is_broken() -> None:
    quoted = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. " * 200
    request = f"INFO 08-21 07:23:34 [logger.py:40] Received request cmpl-1: prompt: '{quoted}'\n"
    reader = LogReader()
    reader.feed(wrapped_at(START + request, 80))
    reader.finish()
    assert reader.failure() is None


def test_lines_of_one_width_hide_nothing() -> None:
    reader = LogReader()
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    filler = "x" * len(error) + "\n"
    reader.feed(filler * 500 + error + "\n" + filler * 500)
    reader.finish()
    assert verdict_of(reader) == "crash"
