"""Device and model profiles: shapes against parameter counts and KV bytes."""

from __future__ import annotations

import pytest
from simulated_builders import settings

from tuner.engine.simulated.memory_needs import kv_bytes_per_token
from tuner.engine.simulated.profiles import DEVICES, MODELS, device_named, model_named
from tuner.errors import InputError


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_model_profile_shape_gives_its_parameters(model):
    # All but norms and biases, which are some 0.1 % at most; untied ones look a token up in a
    # second embedding.
    tied = model.parameters - model.matrix_parameters
    untied = tied - model.vocab * model.hidden
    rest = tied if model.name == "qwen2.5-1.5b" else untied
    assert 0 < rest < 0.001 * model.parameters


@pytest.mark.parametrize(
    ("model", "ranks", "dtype", "bytes_per_token"),
    [
        ("tiny", 1, "auto", 4096),  # 2 x 2 layers x 8 heads x 64 x 2 bytes
        ("tiny", 1, "fp8", 2048),
        ("llama-3.1-8b", 1, "auto", 131_072),
        ("llama-3.1-70b", 1, "auto", 327_680),
        ("llama-3.1-70b", 4, "auto", 81_920),
        ("qwen2.5-1.5b", 4, "auto", 14_336),  # two heads on four ranks: one each
        ("llama-3.1-8b", 1, "int8_per_token_head", 67_584),  # 128 + 4 bytes a vector
    ],
)
def test_kv_bytes_per_token(model, ranks, dtype, bytes_per_token):
    device = "cpu" if model == "tiny" else "h100-80g"
    made = settings(device, model, tensor_parallel_size=ranks, kv_cache_dtype=dtype)
    assert kv_bytes_per_token(made) == bytes_per_token


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-1.5B", "qwen2.5-1.5b"),
        ("./models/tiny/", "tiny"),
    ],
)
def test_model_named_takes_hub_ids_and_folders(name, found):
    assert model_named(name) is MODELS[found]


def test_names_that_do_not_exist_are_the_users_mistake():
    with pytest.raises(InputError, match="gpt-5") as unknown_model:
        model_named("org/gpt-5")
    assert "llama-3.1-8b" in unknown_model.value.hint
    with pytest.raises(InputError, match="abacus"):
        device_named("abacus")


def test_device_profiles_are_possible():
    for name, device in DEVICES.items():
        assert device_named(name) is device
        assert 0 < device.free_gib <= device.total_gib
        assert min(device.bandwidth_gb_per_s, device.flops_per_s, device.count) > 0
