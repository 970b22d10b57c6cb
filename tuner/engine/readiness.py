"""Questions to a vLLM server over HTTP: is it there, does it serve, what does it say of itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tuner.redact import redact_text
from tuner.types import JsonValue, MemoryFacts

HTTP_OK = 200
SERVER_ERRORS = 500

_PROBE_PROMPT = "Hello, my name is"

_REFUSALS = 3
"""4xx answers to the first completion in a row after which it is not a matter of time."""

_TEMPORARY = frozenset({404, 408, 425, 429})
"""4xx while a server is still putting itself together."""


class WillNotServe(Exception):
    """The server is up and refuses completions, for a reason that time will not mend."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Longest waits of one request, in seconds.

    The first completion may compile or warm up: on two cores it took 2 s with dummy weights,
    on large models it takes tens of seconds.
    """

    health_s: float = 5.0
    first_answer_s: float = 180.0


class ServerHttp:
    """The server's own HTTP interface; an async session that must be closed.

    Attributes:
        base_url: without a trailing slash.
        model_name: what requests name as `model`.
        problem: why it is not ready yet, for a message.
    """

    def __init__(self, base_url: str, model_name: str, timeouts: Timeouts | None = None) -> None:
        self.base_url = base_url
        self.model_name = model_name
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None
        self.problem = "nothing listens on its port yet"

    async def close(self) -> None:
        """Close all connections; safe to call more than once."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def health(self) -> int | None:
        """The status of /health; None where there is no answer."""
        try:
            async with self._open().get(
                f"{self.base_url}/health", timeout=_limit(self._timeouts.health_s)
            ) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.problem = f"/health: {type(error).__name__}"
            return None

    async def serves(self) -> MemoryFacts:
        """Wait until /health is 200, /v1/models lists the model, and a completion works.

        Returns:
            What /v1/models says of the model.

        Raises:
            WillNotServe: completions are refused.
        """
        refused = 0
        while True:
            facts = None
            if await self.health() == HTTP_OK:
                facts = await self._listed()
            if facts is not None:
                status, answer = await self._complete()
                if status == HTTP_OK:
                    return facts
                self.problem = f"a completion is answered with {status}: {answer}"
                final = HTTP_OK <= status < SERVER_ERRORS and status not in _TEMPORARY
                refused = refused + 1 if final else 0
                if refused == _REFUSALS:
                    raise WillNotServe(self.problem)
            await asyncio.sleep(_POLL_S)

    async def describe(self, facts: MemoryFacts) -> MemoryFacts:
        """`facts`, completed by /version and /metrics where they are silent.

        `vllm:cache_config_info` carries the cache's configuration in its labels.
        """
        if facts.vllm_version is None:
            version = (await self._json("/version")).get("version")
            facts = replace(facts, vllm_version=version if isinstance(version, str) else None)
        if facts.kv_cache_tokens is None or facts.max_concurrency is None:
            labels = _cache_labels(await self._text("/metrics"))
            tokens, concurrency = _tokens(labels), _number(labels.get("kv_cache_max_concurrency"))
            if facts.kv_cache_tokens is None and tokens is not None:
                facts = replace(facts, kv_cache_tokens=int(tokens))
            if facts.max_concurrency is None and concurrency is not None:
                facts = replace(facts, max_concurrency=concurrency)
        return facts

    async def started_s(self) -> float | None:
        """When the process that answers was started, since the epoch; None if it does not say.

        Where several processes serve one port it does not.
        """
        for line in (await self._text("/metrics")).splitlines():
            if line.startswith(f"{_PROCESS_START} "):
                return _number(line.rpartition(" ")[2])
        return None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No connection is kept: vLLM's shutdown waits for clients to close theirs.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _listed(self) -> MemoryFacts | None:
        """What /v1/models says of our model; None if it does not list it."""
        data = (await self._json("/v1/models")).get("data")
        listed = data if isinstance(data, list) else []
        entries = [entry for entry in listed if isinstance(entry, dict)]
        names = [str(entry.get("id")) for entry in entries]
        if self.model_name not in names:
            self.problem = f"/v1/models lists {', '.join(names) or 'no model'}, not the one served"
            return None
        length = entries[names.index(self.model_name)].get("max_model_len")
        sane = isinstance(length, int) and 0 < length < _ABSURD
        return MemoryFacts(max_model_len_tokens=length if sane else None)  # type: ignore[arg-type]

    async def _complete(self) -> tuple[int, str]:
        """Status and text of the answer to a completion of one token; 0 where there is none."""
        body = {
            "model": self.model_name,
            "prompt": _PROBE_PROMPT,
            "max_tokens": 1,
            "temperature": 0,
        }
        try:
            async with self._open().post(
                f"{self.base_url}/v1/completions",
                json=body,
                timeout=_limit(self._timeouts.first_answer_s),
            ) as response:
                return response.status, redact_text((await response.text())[:500])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, type(error).__name__

    async def _json(self, path: str) -> dict[str, JsonValue]:
        text = await self._text(path)
        try:
            document = json.loads(text)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    async def _text(self, path: str) -> str:
        """The body of a GET; empty where the answer is not 200."""
        try:
            async with self._open().get(
                f"{self.base_url}{path}", timeout=_limit(self._timeouts.health_s)
            ) as response:
                return await response.text() if response.status == HTTP_OK else ""
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
            self.problem = f"{path}: {type(error).__name__}"
            return ""


_POLL_S = 0.2

_PROCESS_START = "process_start_time_seconds"

_ABSURD = 2**53
"""No count of tokens is as large, and larger integers do not survive JSON and SQLite."""


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _cache_labels(metrics: str) -> dict[str, str]:
    try:
        for family in text_string_to_metric_families(metrics):
            if family.name == "vllm:cache_config_info":
                for sample in family.samples:
                    return dict(sample.labels)
    except ValueError:
        pass
    return {}


def _tokens(labels: dict[str, str]) -> float | None:
    tokens = _number(labels.get("kv_cache_size_tokens"))
    if tokens is not None:
        return tokens
    blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
    return None if blocks is None or size is None else blocks * size


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
