"""A workload like that of a server in production, from its page of metrics."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from builders import study_spec, workload
from test_workload import WordTokenizer

from tuner.commands import like_server as command
from tuner.errors import InputError
from tuner.load.like_server import FEWEST_ENDED, Seen, resolved
from tuner.load.workload import build, planned_lengths
from tuner.storage import workload_file
from tuner.types import (
    LengthBin,
    LengthKind,
    LengthSpec,
    SharedPrefixSpec,
    WorkloadKind,
    WorkloadSpec,
)

LABELS = 'model_name="m",engine="0"'


def page(
    *,
    ended: float = 400.0,
    uptime_s: float | None = 200.0,
    hits: float = 0.0,
    prompts: str = "1:0 2:0 10:40 100:200 1000:400 +Inf:400",
    answers: str = "1:0 10:100 100:400 +Inf:400",
) -> str:
    """Of vLLM, shortened; `bound:count` for the buckets."""
    lines = []
    for name, buckets in (("prompt", prompts), ("generation", answers)):
        lines.append(f"# TYPE vllm:request_{name}_tokens histogram")
        for bucket in buckets.split():
            bound, count = bucket.split(":")
            lines.append(
                f'vllm:request_{name}_tokens_bucket{{{LABELS},le="{bound}"}} {float(count)}'
            )
    lines.append("# TYPE vllm:request_success counter")
    for reason, share in (("stop", 0.75), ("length", 0.25)):
        lines.append(
            f'vllm:request_success_total{{{LABELS},finished_reason="{reason}"}} {ended * share}'
        )
    lines.append(f"vllm:prefix_cache_queries_total{{{LABELS}}} 1000.0")
    lines.append(f"vllm:prefix_cache_hits_total{{{LABELS}}} {hits}")
    if uptime_s is not None:
        lines.append(f"process_start_time_seconds {time.time() - uptime_s}")
    return "\n".join(lines) + "\n"


class Production:
    """A server with a page of metrics; `pages` are given one after the other, the last again."""

    def __init__(self) -> None:
        self.pages: list[str] = [page()]
        self.status = 200
        self.models: Any = None
        self.asked = 0
        self.url = ""

    async def metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        text = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        return web.Response(text=text, status=self.status)

    async def list_models(self, _: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=401)
        return web.json_response(self.models)

    async def look(self, look_s: float = 0.01, **changes: Any) -> Seen:
        return await resolved(self.spec(**changes), look_s=look_s)

    def spec(self, **changes: Any) -> WorkloadSpec:
        given: dict[str, Any] = {
            "kind": WorkloadKind.LIKE_SERVER,
            "url": self.url,
            "input_tokens": None,
            "output_tokens": None,
            "concurrency": None,
        }
        return replace(workload(requests=2000), **(given | changes))


@pytest.fixture
async def production() -> AsyncIterator[Production]:
    server = Production()
    app = web.Application()
    app.add_routes([web.get("/metrics", server.metrics), web.get("/v1/models", server.list_models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    yield server
    await runner.cleanup()


async def test_resolved_makes_a_synthetic_workload_of_the_servers_lengths(
    production: Production,
) -> None:
    found = (await production.look()).workload
    assert found.kind is WorkloadKind.SYNTHETIC
    assert found.input_tokens is not None
    assert found.input_tokens.kind is LengthKind.HISTOGRAM
    assert found.input_tokens.bins == (
        LengthBin(3, 10, 40.0),
        LengthBin(11, 100, 160.0),
        LengthBin(101, 1000, 200.0),
    )
    assert found.output_tokens is not None
    assert found.output_tokens.bins == (LengthBin(2, 10, 100.0), LengthBin(11, 100, 300.0))
    sent, asked = np.array(planned_lengths(found)).T
    assert (sent > 100).mean() == pytest.approx(0.5, abs=0.04)
    assert (asked > 10).mean() == pytest.approx(0.75, abs=0.04)
    assert found.shared_prefix is None


async def test_resolved_takes_the_rate_over_the_uptime(production: Production) -> None:
    seen = await production.look()
    assert seen.workload.request_rate_per_s == pytest.approx(2.0, rel=0.05)
    assert "400 requests" in seen.summary
    assert "over its uptime" in seen.summary


async def test_resolved_takes_the_rate_of_now_after_long_idleness(production: Production) -> None:
    production.pages = [page(uptime_s=9e6), page(ended=400 + FEWEST_ENDED, uptime_s=9e6)]
    seen = await production.look(look_s=0.2)
    assert seen.workload.request_rate_per_s is not None
    assert 1 < seen.workload.request_rate_per_s <= FEWEST_ENDED / 0.2
    assert "just now" in seen.summary


async def test_resolved_does_not_tell_a_rate_from_a_few_requests(production: Production) -> None:
    production.pages = [page(uptime_s=9e6), page(ended=400 + FEWEST_ENDED - 1, uptime_s=9e6)]
    rate = (await production.look()).workload.request_rate_per_s
    assert rate == pytest.approx(400 / 9e6, rel=0.1)


async def test_resolved_without_uptime_and_requests_asks_for_a_rate(
    production: Production,
) -> None:
    production.pages = [page(uptime_s=None)]
    with pytest.raises(InputError, match="how many requests come in") as caught:
        await production.look()
    assert "request_rate" in caught.value.hint


@pytest.mark.parametrize("load", [{"concurrency": 7}, {"request_rate_per_s": 3.0}])
async def test_resolved_keeps_the_load_of_the_space_file(
    production: Production, load: dict[str, Any]
) -> None:
    production.pages = [page(uptime_s=None)]
    found = (await production.look(**load)).workload
    assert found.concurrency == load.get("concurrency")
    assert found.request_rate_per_s == load.get("request_rate_per_s")
    assert production.asked == 1


async def test_resolved_shares_as_much_as_the_prefix_cache_had(production: Production) -> None:
    production.pages = [page(hits=300.0)]
    found = (await production.look(requests=400)).workload
    assert found.shared_prefix is not None
    assert (
        found.shared_prefix.tokens > 0.3 * 290
    )  # longer than the mean share: short ones have less
    built = await build(found, WordTokenizer())
    longest = max(built.requests, key=lambda r: len(r.prompt)).prompt[: found.shared_prefix.tokens]
    shared = 0
    for request in built.requests:
        pairs = enumerate(zip(request.prompt, longest, strict=False))
        shared += next((n for n, (a, b) in pairs if a != b), len(longest))
    total = sum(len(request.prompt) for request in built.requests)
    assert shared / total == pytest.approx(0.3, abs=0.04)


async def test_resolved_scales_and_cuts_lengths(production: Production) -> None:
    found = (await production.look(input_scale=0.1, max_input_tokens=50)).workload
    assert found.input_tokens is not None
    assert found.input_tokens.bins == (
        LengthBin(1, 1, 40.0),
        LengthBin(1, 10, 160.0),
        LengthBin(10, 50, 200.0),
    )
    assert (found.input_scale, found.max_input_tokens) == (1.0, None)
    assert max(sent for sent, _ in planned_lengths(found)) == 50


@pytest.mark.parametrize(
    ("models", "longest"),
    [
        (None, 2000),
        ({"data": [{"id": "m", "max_model_len": 1500}]}, 1500),
        ({"data": [{"id": "m"}]}, 2000),
        (["what"], 2000),
        ({"data": [3]}, 2000),
    ],
)
async def test_resolved_ends_the_open_bucket_at_the_context(
    production: Production, models: Any, longest: int
) -> None:
    production.models = models
    production.pages = [page(prompts="10:40 1000:300 +Inf:400")]
    found = (await production.look()).workload
    assert found.input_tokens is not None
    assert found.input_tokens.bins[-1] == LengthBin(1001, longest, 100.0)


async def test_resolved_adds_up_the_engines(production: Production) -> None:
    other = page().replace('engine="0"', 'engine="1"')
    both = page() + "\n".join(
        line for line in other.splitlines() if LABELS[:5] in line and "#" not in line
    )
    production.pages = [both + "\n"]
    seen = await production.look()
    assert seen.workload.input_tokens is not None
    assert [b.weight for b in seen.workload.input_tokens.bins] == [80.0, 320.0, 400.0]
    assert seen.workload.request_rate_per_s == pytest.approx(4.0, rel=0.05)


async def test_resolved_finds_the_page_of_a_bare_address(production: Production) -> None:
    found = await production.look(url=production.url.removesuffix("/metrics"))
    assert found.workload.input_tokens is not None


Change = Callable[[Production], None]


def answers(text: str) -> Change:
    def change(server: Production) -> None:
        server.pages = [text]

    return change


def refuses(server: Production) -> None:
    server.status = 404


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (answers(""), "has no vllm:request_prompt_tokens"),
        (answers("<html>hello</html>"), "is no page of metrics"),
        (answers("a b c d\n"), "is no page of metrics"),
        (answers("# a comment\n"), "has no vllm:request_prompt_tokens"),
        (answers(page(answers="")), "has no vllm:request_generation_tokens"),
        (answers(page(prompts="1:0 +Inf:0")), "has answered no request yet"),
        (answers(page(prompts="much:5")), "a bucket up to 'much'"),
        (refuses, "answers with HTTP 404"),
    ],
)
async def test_resolved_says_what_is_wrong_with_a_server(
    production: Production, change: Change, message: str
) -> None:
    change(production)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        await production.look()
    assert production.url in caught.value.message
    assert caught.value.hint


async def test_resolved_says_that_nobody_answers(production: Production) -> None:
    with pytest.raises(InputError, match="cannot be read") as caught:
        await production.look(url="http://127.0.0.1:1/metrics")
    assert "disable-log-stats" in caught.value.hint


@pytest.mark.parametrize("cut", [40, 200, 500, 900])
async def test_resolved_of_a_page_that_breaks_off_raises_input_errors_only(
    production: Production, cut: int
) -> None:
    production.pages = [page()[:cut]]
    with pytest.raises(InputError):
        await production.look()


# --- once a study ------------------------------------------------------------------------


def answered(monkeypatch: pytest.MonkeyPatch, found: WorkloadSpec) -> list[WorkloadSpec]:
    """Let a server be asked without one; the list tells how often."""
    asked: list[WorkloadSpec] = []

    async def answer(spec: WorkloadSpec) -> Seen:
        asked.append(spec)
        return Seen(found, "like it")

    resolve: Callable[..., Awaitable[Seen]] = answer
    monkeypatch.setattr(command.like_server, "resolved", resolve)
    return asked


TEXT = """\
server: {model: m}
search_space: {max-num-seqs: [1, 2]}
workload: {kind: like-server, url: 'http://h:8000/metrics', requests: 9}
"""


def test_settled_asks_once_and_keeps_what_it_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner import spec as spec_file

    found = replace(workload(), shared_prefix=SharedPrefixSpec(16, 2), url="http://h:8000/metrics")
    asked = answered(monkeypatch, found)
    notices: list[str] = []
    spec = spec_file.parse(TEXT, Path("s.yaml"))
    first = command.settled(spec, tmp_path, notices.append)
    assert first.workload == found
    command.keep(first, tmp_path)
    assert command.settled(spec, tmp_path, notices.append) == first
    assert len(asked) == 1
    assert notices == ["workload like it"]
    other = spec_file.parse(TEXT.replace("9}", "8}"), Path("s.yaml"))
    command.settled(other, tmp_path, notices.append)
    assert len(asked) == 2


def test_settled_leaves_other_workloads_and_their_folder_alone(tmp_path: Path) -> None:
    spec = study_spec()
    assert command.settled(spec, tmp_path, print) is spec
    command.keep(replace(spec, text=TEXT.replace(
        "kind: like-server, url: 'http://h:8000/metrics'",
        "kind: synthetic, input_tokens: 8, output_tokens: 8, concurrency: 2",
    )), tmp_path)  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"asked": {}, "found": {}}'])
def test_kept_workload_that_is_damaged_is_asked_for_again(tmp_path: Path, text: str) -> None:
    (tmp_path / workload_file.FILE).write_text(text)
    assert workload_file.read(tmp_path, workload()) is None


def test_kept_workload_comes_back_as_it_was(tmp_path: Path) -> None:
    asked = replace(workload(), kind=WorkloadKind.LIKE_SERVER, path=Path("x"))
    bins = (LengthBin(1, 8, 0.1), LengthBin(9, 90, 2 / 3))
    lengths = LengthSpec(20, kind=LengthKind.HISTOGRAM, bins=bins)
    found = replace(workload(), input_tokens=lengths, request_rate_per_s=1 / 3)
    workload_file.write(tmp_path, asked, found)
    assert workload_file.read(tmp_path, asked) == found


@pytest.mark.parametrize(
    "prompts",
    [
        "1e300:400 +Inf:400",
        "nan:1 +Inf:400",
        "-5:10 +Inf:400",
        "1:400 10:40 +Inf:400",
        "1:-3 10:40 +Inf:400",
        "1:0 +Inf:1e308",
    ],
)
async def test_histogram_that_makes_no_sense_is_refused(
    production: Production, prompts: str
) -> None:
    production.pages = [page(prompts=prompts)]
    with pytest.raises(InputError, match="request_prompt_tokens"):
        await production.look()


async def test_histogram_of_one_open_bucket_is_read_by_its_mean(production: Production) -> None:
    sums = f"vllm:request_prompt_tokens_sum{{{LABELS}}} 40000\n"
    counts = f"vllm:request_prompt_tokens_count{{{LABELS}}} 400\n"
    production.pages = [page(prompts="+Inf:400") + sums + counts]
    seen = await production.look()
    assert seen.workload.input_tokens is not None
    assert seen.workload.input_tokens.mean == pytest.approx(100, rel=0.02)
