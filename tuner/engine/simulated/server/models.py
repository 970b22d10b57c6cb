"""Which model the stand-in plays: a profile by name, or one made from a model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tuner.engine.simulated.profiles import ModelProfile, model_named
from tuner.errors import InputError
from tuner.types import JsonValue

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "bfloat16": 2, "half": 2}


def model_profile(model: str) -> ModelProfile | None:
    """The profile for a folder or hub id; None where there is no such model.

    A folder counts by its config.json if that has the sizes, else by its name, as a hub id
    does.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        profile = _from_folder(path)
        if profile is not None:
            return profile
    try:
        return model_named(str(path.resolve()) if path.is_dir() else model)
    except InputError:
        return None


def _from_folder(folder: Path) -> ModelProfile | None:
    """By Hugging Face's config.json of a decoder such as Llama, Qwen2 or Mistral."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _from_config(folder.resolve().name, config)
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return None


def _from_config(name: str, config: Mapping[str, JsonValue]) -> ModelProfile:
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head_size = _whole(config, "head_dim", hidden // heads)
    layers, intermediate = (
        _whole(config, "num_hidden_layers"),
        _whole(config, "intermediate_size"),
    )
    vocab = _whole(config, "vocab_size")
    attention = 2 * hidden * (heads + kv_heads) * head_size
    parameters = layers * (attention + 3 * hidden * intermediate) + vocab * hidden
    if not config.get("tie_word_embeddings", False):
        parameters += vocab * hidden
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return ModelProfile(
        name=name,
        parameters=parameters,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        hidden=hidden,
        intermediate=intermediate,
        vocab=vocab,
        dtype_bytes=_DTYPE_BYTES.get(dtype, 2),
        max_position_embeddings=_whole(config, "max_position_embeddings"),
    )


def _whole(config: Mapping[str, JsonValue], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: {value!r}")
    return value
