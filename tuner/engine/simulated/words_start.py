"""The lines of a start that goes well, as vLLM 0.32 writes them.

On CUDA, those of its first model runner (`vllm/v1/worker/gpu_model_runner.py`), which says more
of its memory than the second; vLLM uses it where a feature needs it or
`VLLM_USE_V2_MODEL_RUNNER=0` is set.
"""

from __future__ import annotations

from tuner.engine.simulated.log_format import LogWriter, Point
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.profiles import Platform
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.timeline import Timeline, timeline
from tuner.units import GIB

VERSION = "0.32.0+simulated"
"""The release whose defaults, rules and words are simulated; the ending tells that no figure is
of a real device."""


def write_start(log: LogWriter, settings: EngineSettings, plan: MemoryPlan, port: int) -> None:
    """All lines up to `Application startup complete.`; a failing start cuts them off."""
    times = timeline(settings)
    write_banner(log, settings.model_path)
    _write_flags(log, settings, times)
    _write_engine(log, settings, times)
    if settings.device.platform is Platform.CPU:
        _write_cpu(log, settings, plan, times)
    else:
        _write_cuda(log, settings, plan, times)
    _write_serving(log, port, times)


def write_banner(log: LogWriter, model: str) -> None:
    """The first lines, with version and model."""
    log.at(Point.FLAGS, 0.0)
    for text in (
        "",
        "       █     █     █▄   ▄█",
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {VERSION}",
        f"  █▄█▀ █     █     █     █  model   {model}",
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
        "",
    ):
        log.say("api", "api_utils.py:347", text)


def _write_flags(log: LogWriter, settings: EngineSettings, times: Timeline) -> None:
    log.at(Point.FLAGS, times.launch_s)
    given = {name.replace("-", "_"): value for name, value in settings.given.items()}
    shown = {"model_tag": settings.model_path, "model": settings.model_path} | given
    log.say("api", "api_utils.py:286", f"non-default args: {shown}")
    log.say("api", "model.py:2152", f"Using max model len {settings.max_model_len}")
    if settings.enable_chunked_prefill:
        log.say(
            "api",
            "scheduler.py:307",
            "Chunked prefill is enabled with max_num_batched_tokens="
            f"{settings.max_num_batched_tokens}.",
        )
    if settings.enforce_eager:
        log.say(
            "api",
            "vllm.py:1703",
            "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. This "
            "is equivalent to setting -cc.mode=none -cc.cudagraph_mode=none and "
            "--kernel_config.enable_jit_warmup=False",
            level="WARNING",
        )


def _write_engine(log: LogWriter, settings: EngineSettings, times: Timeline) -> None:
    log.at(Point.ENGINE, times.launch_s + times.engine_s)
    log.say(
        "engine",
        "core.py:133",
        f"Initializing a V1 LLM engine (v{VERSION}) with config: model='{settings.model_path}', "
        f"speculative_config=None, tokenizer='{settings.model_path}', dtype=torch.bfloat16, "
        f"max_seq_len={settings.max_model_len}, "
        f"tensor_parallel_size={settings.tensor_parallel_size}, "
        f"enforce_eager={settings.enforce_eager}, kv_cache_dtype={settings.kv_cache_dtype}, "
        f"enable_prefix_caching={settings.enable_prefix_caching}, "
        f"enable_chunked_prefill={settings.enable_chunked_prefill}",
    )
    log.at(Point.LOADING, times.launch_s + times.engine_s)
    runner = "cpu_model_runner.py:68"
    if settings.device.platform is Platform.CUDA:
        runner = "gpu_model_runner.py:5043"
    log.say("worker", runner, f"Starting to load model {settings.model_path}...")


def _write_cpu(log: LogWriter, settings: EngineSettings, plan: MemoryPlan, times: Timeline) -> None:
    log.at(Point.LOADED, times.launch_s + times.engine_s + times.load_s)
    log.say("worker", "base_loader.py:82", "Initializing model took 0.067659 seconds")
    log.at(Point.SIZED, times.launch_s + times.engine_s + times.load_s + times.profile_s)
    kv, total = _gib(plan.available_kv_gib), _gib(settings.device.total_gib)
    if settings.kv_cache_memory_bytes is not None:
        text = f"Explicitly set ({kv}/{total}) GiB for KV cache on node 0."
    else:
        worker = _gib(plan.requested_gib - plan.available_kv_gib)
        text = (
            f"Auto set ({kv}/{total}) GiB for KV cache on node 0, with "
            f"{_gib(plan.requested_gib)} GiB requested memory for the worker. {worker} GiB memory "
            "was consumed by non-kv usages."
        )
    log.say("worker", "cpu_worker.py:260", text)
    _write_kv_size(log, settings, plan, "CPU")
    log.at(Point.WARMED_UP, 0.0)
    _write_init(log, times)


def _write_cuda(
    log: LogWriter, settings: EngineSettings, plan: MemoryPlan, times: Timeline
) -> None:
    loaded_s = times.launch_s + times.engine_s + times.load_s
    log.at(Point.LOADING, loaded_s)
    log.say("worker", "default_loader.py:502", f"Loading weights took {times.load_s:.2f} seconds")
    log.at(Point.LOADED, loaded_s)
    log.say(
        "worker",
        "gpu_model_runner.py:5150",
        f"Model loading took {_gib(plan.weights_gib)} GiB memory and {times.load_s:.6f} seconds",
    )
    if times.compile_s:
        log.at(Point.COMPILING, loaded_s)
        log.say("worker", "backends.py:1167", "Dynamo bytecode transform time: 3.42 s")
        log.at(Point.COMPILED, loaded_s + times.compile_s)
        log.say("worker", "monitor.py:48", f"torch.compile took {times.compile_s:.2f} s in total")
    _write_profile(log, settings, plan, loaded_s + times.compile_s + times.profile_s)
    _write_kv_size(log, settings, plan, "GPU")
    sizes = len(settings.cudagraph_capture_sizes)
    if sizes:
        bar = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):"
        log.at(Point.CAPTURING, 0.0)
        log.plain(f"{bar}   0%|          | 0/{sizes} [00:00<?, ?it/s]")
        log.at(Point.CAPTURING, loaded_s + times.compile_s + times.profile_s + times.capture_s)
        log.plain(f"{bar} 100%|██████████| {sizes}/{sizes} [00:{times.capture_s:02.0f}<00:00]")
        log.at(Point.CAPTURED, 0.0)
        log.say(
            "worker",
            "gpu_model_runner.py:6582",
            f"Graph capturing finished in {times.capture_s:.0f} secs, "
            f"took {plan.graph_gib:.2f} GiB",
        )
    # Eagerly, nothing tells that the warm-up has begun before it is over.
    log.at(Point.CAPTURED if sizes else Point.ALLOCATED, 0.0)
    if settings.kv_cache_memory_bytes is None:
        _write_suggestion(log, settings, plan)
    log.at(Point.WARMED_UP, 0.0)
    _write_init(log, times)


def _write_profile(
    log: LogWriter, settings: EngineSettings, plan: MemoryPlan, after_s: float
) -> None:
    """What the profile run found, or that none was asked for."""
    log.at(Point.COMPILED, after_s)
    if settings.kv_cache_memory_bytes:
        log.say(
            "worker",
            "gpu_worker.py:660",
            f"Initial free memory {_gib(plan.free_at_start_gib)} GiB, reserved "
            f"{_gib(plan.available_kv_gib)} GiB memory for KV Cache as specified by "
            "kv_cache_memory_bytes config and skipped memory profiling. This does not respect the "
            "gpu_memory_utilization config. Only use kv_cache_memory_bytes config when you want "
            "manual control of KV cache memory size. If OOM'ed, check the difference of initial "
            "free memory between the current run and the previous run where "
            "kv_cache_memory_bytes is suggested and update it correspondingly.",
        )
        return
    if settings.cudagraph_capture_sizes and settings.estimate_graphs:
        log.say(
            "worker",
            "gpu_model_runner.py:6474",
            f"Estimated CUDA graph memory: {plan.graph_estimate_gib:.2f} GiB total",
        )
    log.at(Point.SIZED, after_s)
    log.say(
        "worker",
        "gpu_worker.py:760",
        f"Available KV cache memory: {_gib(plan.available_kv_gib)} GiB",
    )


def _write_kv_size(log: LogWriter, settings: EngineSettings, plan: MemoryPlan, kind: str) -> None:
    if settings.fit_max_model_len:
        fitted = (
            f"full model context length {plan.max_model_len} fits in"
            if plan.auto_fitted_from is None
            else f"reduced from {plan.auto_fitted_from} to {plan.max_model_len} to fit in"
        )
        log.say(
            "engine",
            "kv_cache_utils.py:2481",
            f"Auto-fit max_model_len: {fitted} available KV cache memory "
            f"({_gib(plan.available_kv_gib)} GiB {kind})",
        )
    log.at(Point.ALLOCATED, 0.0)
    log.say(
        "engine",
        "kv_cache_utils.py:2327",
        f"{kind} KV cache size: {plan.kv_cache_tokens:,} tokens, Maximum concurrency for "
        f"{plan.max_model_len:,} tokens per request: {plan.max_concurrency:.2f}x",
    )


def _write_suggestion(log: LogWriter, settings: EngineSettings, plan: MemoryPlan) -> None:
    """vLLM's advice on `--kv-cache-memory`, 150 MiB on the safe side."""
    consumed = plan.weights_gib + plan.non_torch_gib
    peak = plan.activation_gib + plan.graph_estimate_gib
    other = consumed + peak + plan.graph_gib + 150 / 1024
    within, whole = plan.requested_gib - other, plan.free_at_start_gib - other
    log.say(
        "worker",
        "gpu_worker.py:1037",
        f"Free memory on device ({_gib(plan.free_at_start_gib)}/{_gib(settings.device.total_gib)} "
        "GiB) on startup. Desired GPU memory utilization is "
        f"({settings.gpu_memory_utilization}, {_gib(plan.requested_gib)} GiB). Actual usage is "
        f"{_gib(consumed)} GiB for consumed memory (weights + non-torch), {_gib(peak)} GiB for "
        f"peak activation, and {_gib(plan.graph_gib)} GiB for CUDAGraph memory. Replace "
        f"gpu_memory_utilization config with `--kv-cache-memory={int(within * GIB)}` "
        f"({_gib(within)} GiB) to fit into requested memory, or "
        f"`--kv-cache-memory={int(whole * GIB)}` ({_gib(whole)} GiB) to fully utilize gpu memory. "
        f"Current kv cache memory in use is {_gib(plan.available_kv_gib)} GiB.",
    )


def _write_init(log: LogWriter, times: Timeline) -> None:
    took_s = times.compile_s + times.profile_s + times.capture_s
    compiled = f" (compilation: {times.compile_s:.2f} s)" if times.compile_s else ""
    log.say(
        "engine",
        "core.py:402",
        f"init engine (profile, create kv cache, warmup model) took {took_s:.2f} s{compiled}",
    )


def _write_serving(log: LogWriter, port: int, times: Timeline) -> None:
    log.at(Point.WARMED_UP, times.total_s)
    log.say("api", "entry.py:136", "Supported tasks: ['generate']")
    log.say("api", "entry.py:140", f"Starting vLLM server on http://0.0.0.0:{port}")
    log.plain("INFO:     Waiting for application startup.")
    log.at(Point.READY, times.total_s)
    log.plain("INFO:     Application startup complete.")


def _gib(size_gib: float) -> float:
    """vLLM's `format_gib`."""
    return round(size_gib, 2)
