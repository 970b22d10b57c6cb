"""A stand-in for `vllm serve` that starts in a quarter of a second and says what vLLM says.

Run as `python tests/fake_vllm.py serve MODEL --port N [flags as vLLM has them]`; the commands
`--version` and `serve --config FILE` work too. It speaks vLLM's HTTP interface (/health,
/version, /v1/models, /v1/completions with streaming and usage, /tokenize, /metrics), refuses
the configurations that vLLM refuses, in its words and with its exit codes, and misbehaves on
request.

The engine that it plays: 4096 bytes of KV cache a token (half with an fp8 cache dtype), blocks
of `block-size` tokens, one of them reserved; `max-num-seqs` requests run at once, each token
takes a fixed step, so more sequences are faster; a request counts one preemption where
`max-num-seqs` requests of its length would not fit the KV cache, whatever the load. From 2048
sequences on, the warm-up runs out of memory.

Environment:
    FAKE_VLLM_FAULT: one or more of the names in `fake_vllm_engine.FAULTS`, comma-separated.
    FAKE_VLLM_LOG, FAKE_VLLM_EXIT_CODE: print this file instead of serving and exit so
        (a negative code is a signal).
    FAKE_VLLM_START_S: how long a start takes (0.05).
    FAKE_VLLM_STEP_S: seconds a token (0.001).
    FAKE_VLLM_FAULT_AFTER: completions served before a fault under load (8).
    FAKE_VLLM_ENGINE: "1" starts a child in the same process group that ignores SIGTERM and
        outlives its parent, as vLLM's engine does.
    FAKE_VLLM_VERSION: the version it claims ("0.32.0").
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from aiohttp import web
from fake_vllm_engine import VERSION, Engine, fault, parse_command_line, say, start_engine
from fake_vllm_http import Api, die


def fork_engine() -> None:
    """A child that only SIGKILL ends, until this process' group is cleared."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            time.sleep(60)


async def serve(engine: Engine, host: str, port: int) -> None:
    """Serve until a signal."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, (lambda: None) if fault("ignore_term") else stop.set)
    runner = web.AppRunner(Api(engine).app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    engine.ready_at = time.monotonic()
    say(
        f"Starting vLLM server on http://{host}:{port}\nApplication startup complete.",
        "(APIServer pid=4241)",
    )
    if fault("die_after_ready_rc0") or fault("engine_dead"):
        leave = fault("die_after_ready_rc0")
        loop.call_later(
            0.3,
            lambda: die(
                engine,
                "RuntimeError: CUDA error: an illegal memory access was encountered",
                leave=leave,
            ),
        )
    await stop.wait()
    say("Shutting down", "(APIServer pid=4241)")
    await runner.cleanup()


def main() -> None:
    """Start as `vllm` would."""
    if canned := os.environ.get("FAKE_VLLM_LOG"):
        sys.stdout.write(Path(canned).read_text())
        sys.stdout.flush()
        code = int(os.environ.get("FAKE_VLLM_EXIT_CODE", "1"))
        os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
    args = parse_command_line(sys.argv[1:])
    say(f"vLLM server version {VERSION}, serving model {args.model_tag}", "(APIServer pid=4241)")
    if fault("model_missing"):
        print(
            "(APIServer pid=4241) huggingface_hub.errors.HFValidationError: Repo id must be in the "
            f"form 'repo_name' or 'namespace/repo_name': '{args.model_tag}'.",
            flush=True,
        )
        sys.exit(1)
    if fault("port_in_use"):
        print("(APIServer pid=4241) OSError: [Errno 98] Address already in use", flush=True)
        sys.exit(1)
    if fault("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = start_engine(args)
    if os.environ.get("FAKE_VLLM_ENGINE") == "1":
        fork_engine()
    asyncio.run(serve(engine, args.host, args.port))


if __name__ == "__main__":
    main()
