"""Writes a package named `vllm` with a parser and a configuration check like the real one's.

For tests of what asks vLLM in its own process: importing it takes no time, and it can be laid
out as releases of different ages are.
"""

from __future__ import annotations

from pathlib import Path

_PARSER = """
import argparse, json

class FlexibleArgumentParser(argparse.ArgumentParser):
    def load_config_file(self, path):
        import yaml
        words = []
        for key, value in yaml.safe_load(open(path)).items():
            if value is True:
                words.append("--" + key)
            elif value is not False:
                words += ["--" + key, str(value)]
        return words

    def parse_args(self, args=None, namespace=None):
        if "--config" in args:
            at = args.index("--config")
            words = self.load_config_file(args[at + 1])
            model = words.index("--model")
            args = ["serve", words[model + 1], *words[:model], *words[model + 2 :], *args[at + 2 :]]
        return super().parse_args(args, namespace)

def human_readable_int(value):
    return int(value[:-1]) * 1024 if value.endswith("K") else int(value)

def optional_type(kind):
    def _optional_type(value):
        return None if value == "None" else kind(value)
    return _optional_type
"""

_CLI_ARGS = """
import argparse, json
from {parser} import human_readable_int, optional_type

def make_arg_parser(parser):
    print("noise on stdout")
    {model_tag}
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--model", default="default/model")
    parser.add_argument("--max-num-seqs", type=optional_type(int))
    parser.add_argument("--max-num-batched-tokens", type=optional_type(human_readable_int))
    parser.add_argument("--gpu-memory-utilization", "--device-memory-utilization",
                        type=float, default=0.92)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--enable-prefix-caching", action=flag)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--compilation-config", "-cc", type=optional_type(json.loads))
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--hf-token", nargs="?", const=True)
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host")
    return parser
"""

_ARG_UTILS = """
import os, time
from types import SimpleNamespace as Space

class AsyncEngineArgs:
    def __init__(self, args):
        self.args = args

    @classmethod
    def from_cli_args(cls, args):
        if args.model == "missing/model":
            raise OSError("missing/model is not a valid model identifier listed on the hub")
        return cls(args)

    def create_engine_config(self, usage_context=None, headless=False):
        args = self.args
        if args.model == "hang":
            time.sleep(600)
        if args.model == "crash":
            os._exit(11)
        seqs = args.max_num_seqs or int(os.environ.get("VLLM_FAKE_SEQS", 128))
        os.environ["VLLM_FAKE_SEQS"] = "7"  # what one question changes, the next must not see
        tokens = args.max_num_batched_tokens or 2048
        if tokens < seqs:
            raise ValueError(f"max_num_batched_tokens ({tokens}) must be greater than or equal to "
                             f"max_num_seqs ({seqs}).")
        assert usage_context == "openai_api_server"
        return Space(
            scheduler_config=Space(max_num_seqs=seqs, max_num_batched_tokens=tokens),
            model_config=Space(max_model_len=8192),
            cache_config=Space(gpu_memory_utilization=args.gpu_memory_utilization),
        )
"""

_USAGE = "class UsageContext:\n    OPENAI_API_SERVER = 'openai_api_server'\n"


def write_vllm(folder: Path, *, version: str = "0.32.0", old: bool = False) -> Path:
    """A folder for PYTHONPATH that holds the package.

    Args:
        old: laid out as before 2026: other modules, and no model in the parser itself.
    """
    parser = "vllm.utils" if old else "vllm.utils.argparse_utils"
    cli = "vllm.entrypoints.openai.cli_args" if old else "vllm.entrypoints.launchers.cli_args"
    model_tag = "pass" if old else 'parser.add_argument("model_tag", nargs="?")'
    config = "" if old else '    parser.add_argument("--config")\n    return parser\n'
    cli_args = _CLI_ARGS.format(parser=parser, model_tag=model_tag)
    modules = {
        "vllm": "from vllm._version import __version__\n",
        "vllm._version": f"__version__ = version = {version!r}\n",
        "vllm.envs": "environment_variables = {'VLLM_LOGGING_LEVEL': str, 'VLLM_FAKE_SEQS': int}\n",
        "vllm.engine.arg_utils": _ARG_UTILS,
        "vllm.usage.usage_lib": _USAGE,
        parser: _PARSER,
        cli: cli_args.replace("    return parser\n", config) if config else cli_args,
    }
    packages = {name.rpartition(".")[0] for name in modules if "." in name}
    packages |= {name.rpartition(".")[0] for name in packages if "." in name} | {"vllm"}
    for name in packages:
        path = folder.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").touch()
    for name, text in modules.items():
        path = folder.joinpath(*name.split("."))
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).write_text(text)
    return folder


def write_command(folder: Path, interpreter: str, name: str = "vllm") -> Path:
    """A script such as pip makes for `vllm`, with this interpreter in its first line."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    script.write_text(f"#!{interpreter}\nimport sys\n")
    script.chmod(0o755)
    return script
