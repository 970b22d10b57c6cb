"""What no configuration can mend stops a study before a real vLLM is blamed for it."""

from __future__ import annotations

from tuning import cpu_tiny

from tuner.errors import ExitCode

SPACE = {
    "study": "refused",
    "search_space": {"max-num-seqs": [8, 16]},
    "constraints": [],
    "reference": {},
    "server_args": {"kv-cache-memory-bytes": "16MiB", "max-model-len": 512},
    "budget": {"trials": 1},
}


def test_missing_model_folder_stops_the_study_until_it_is_there(workplace, forked_vllm, tiny_model):
    space = workplace.write_space(cpu_tiny(forked_vllm, "./models/mine", **SPACE))
    refused = workplace.tuner("run", space)
    assert refused.code == ExitCode.ENVIRONMENT
    assert "the model folder ./models/mine is not there" in refused.err
    assert list(workplace.folder.rglob("server.log")) == []

    (workplace.folder / "models").mkdir()
    (workplace.folder / "models" / "mine").symlink_to(tiny_model)
    assert workplace.tuner("run", space).code == ExitCode.OK
    study = workplace.tuner("status", "refused", "--json").json()
    assert study["finished_trials"] == 1
    assert study["best"]["score"] > 0


def test_model_that_is_not_on_the_hub_stops_the_study(workplace, forked_vllm):
    space = workplace.write_space(cpu_tiny(forked_vllm, "nobody/no-such-model", **SPACE))
    refused = workplace.tuner("run", space)
    assert refused.code == ExitCode.ENVIRONMENT
    assert "model_not_found" in refused.err
    assert "Traceback" not in refused.err
    study = workplace.tuner("status", "refused", "--json").json()
    assert study["finished_trials"] == 0
    assert [trial["state"] for trial in study["trials"]] == ["aborted", "waiting"]
    assert [trial["score"] for trial in study["trials"]] == [None, None]


def test_flag_that_this_vllm_does_not_have_is_refused_before_any_start(
    workplace, forked_vllm, tiny_model
):
    sections = SPACE | {"server_args": {"max-nun-seqs": 8}}
    space = workplace.write_space(cpu_tiny(forked_vllm, tiny_model, **sections))
    refused = workplace.tuner("run", space)
    assert refused.code == ExitCode.INPUT
    assert "refused.yaml:" in refused.err
    assert "has no flag `max-nun-seqs`" in refused.err
    assert "max-num-seqs" in refused.err, "what was meant"
    assert list(workplace.folder.rglob("server.log")) == []


def test_value_that_this_vllm_does_not_take_is_refused_before_any_start(
    workplace, forked_vllm, tiny_model
):
    sections = SPACE | {"search_space": {"kv-cache-dtype": ["auto", "fp7"]}}
    space = workplace.write_space(cpu_tiny(forked_vllm, tiny_model, **sections))
    refused = workplace.tuner("run", space)
    assert refused.code == ExitCode.INPUT
    assert "fp7" in refused.err
    assert "fp8" in refused.err, "what it takes"
    assert list(workplace.folder.rglob("server.log")) == []
