"""`tuner` on a real vLLM, from a space file to a served configuration."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, started
from tuning import Done, Json, Workplace, cpu_tiny, finished_files, finished_rows

from tuner.stopping import Ending

MIB = 2**20
BYTES_A_TOKEN = 4096
"""Of KV cache, in the tiny model (see `prepare_vllm.MODEL_CONFIG`)."""

SPACE = {
    "study": "small",
    "server_args": {"enable-prefix-caching": False},
    "search_space": {
        "kv-cache-memory-bytes": ["4MiB", "16MiB"],
        "max-num-seqs": [8, 64],
        "max-model-len": [512, 2048],
    },
    "constraints": ["max-num-seqs == 8 or max-model-len == 512"],
    "reference": {"kv-cache-memory-bytes": "16MiB", "max-model-len": 512},
    "budget": {"trials": 2},
}
POINTS = 6
"""Of the space, within the constraint. The reference is none of them: vLLM's default of
max-num-seqs is neither 8 nor 64."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Three runs of one study, and what it held after each.

    Attributes:
        first: up to the budget of the space file.
        again: the same command.
        more: with `--trials` beyond the size of the space.
    """

    workplace: Workplace
    first: Done
    again: Done
    more: Done
    rows: tuple[set[tuple[object, ...]], ...]
    files: tuple[dict[Path, int], ...]
    status: Json

    @property
    def study(self) -> Path:
        return self.workplace.study("small")

    @property
    def trials(self) -> list[Json]:
        trials: list[Json] = self.status["trials"]
        return trials

    def show(self, trial: Json) -> Json:
        return self.workplace.tuner("show", "small", str(trial["number"]), "--json").json()


@pytest.fixture(scope="module")
def runs(forked_vllm, tiny_model, flag_cache, tmp_path_factory) -> Runs:
    workplace = Workplace(tmp_path_factory.mktemp("whole"), flag_cache)
    space = workplace.write_space(cpu_tiny(forked_vllm, tiny_model, **SPACE))
    done, rows, files = [], [], []
    for words in ([], [], ["--trials", "20"]):
        done.append(workplace.tuner("run", space, *words))
        assert done[-1].code == 0, done[-1]
        rows.append(finished_rows(workplace.study("small")))
        files.append(finished_files(workplace.study("small")))
    status = workplace.tuner("status", "small", "--json").json()
    return Runs(workplace, *done, tuple(rows), tuple(files), status)


def kv_bytes(trial: Json) -> int:
    return int(trial["params"]["kv-cache-memory-bytes"])


def fits(trial: Json) -> bool:
    return kv_bytes(trial) / BYTES_A_TOKEN >= trial["params"]["max-model-len"]


# --- one study -------------------------------------------------------------------------


def test_run_gives_every_trial_a_score_or_a_named_failure(runs):
    assert len(runs.trials) == 1 + POINTS
    for trial in runs.trials:
        assert trial["state"] == ("measured" if fits(trial) else "infeasible")
        assert trial["failure"] == (None if fits(trial) else "kv_too_small")
        assert (trial["score"] > 0) == fits(trial)
    assert sum(not fits(trial) for trial in runs.trials) == 1


def test_run_measures_preemptions_where_the_kv_cache_is_short(runs):
    preemptions = {trial["number"]: trial["preemptions"] for trial in runs.trials if fits(trial)}
    short = {trial["number"] for trial in runs.trials if kv_bytes(trial) == 4 * MIB}
    assert len(short & preemptions.keys()) == 2
    assert all((count > 0) == (number in short) for number, count in preemptions.items())


def test_run_prefers_what_does_not_preempt(runs):
    best, default = runs.status["best"], runs.status["default"]
    assert kv_bytes(best) == 16 * MIB
    assert default["number"] == 0
    assert default["reference"] is True
    assert default["params"] == {"kv-cache-memory-bytes": 16 * MIB, "max-model-len": 512}
    assert runs.status["gain"] == pytest.approx(best["score"] / default["score"] - 1)
    assert best["score"] == max(trial["score"] for trial in runs.trials)


def test_run_says_why_it_ended_and_how_to_deploy(runs):
    assert f"{Ending.TRIALS}: 2 measured, 0 could not serve" in runs.first.out
    assert f"{Ending.EXHAUSTED}: 6 measured, 1 could not serve" in runs.more.out
    assert "--config studies/small/best.yaml" in runs.more.out
    config = yaml.safe_load((runs.study / "best.yaml").read_text())
    assert config["kv-cache-memory-bytes"] == 16 * MIB
    assert config["load-format"] == "dummy"


def test_run_counts_finished_trials_and_repeats_none(runs):
    once, again, more = runs.rows
    assert again == once
    assert once < more
    assert f"{Ending.TRIALS}: 2 measured" in runs.again.out
    assert "starting" not in runs.again.out
    assert len({json.dumps(trial["params"]) for trial in runs.trials}) == 1 + POINTS
    assert runs.files[1] == runs.files[0]
    assert runs.files[0].items() < runs.files[2].items()


def test_status_agrees_with_the_database(runs):
    study = optuna.load_study(study_name="small", storage=f"sqlite:///{runs.study / 'study.db'}")
    assert runs.status["study"] == "small"
    assert runs.status["state"] == "finished"
    assert runs.status["finished_trials"] == len(study.trials) == 1 + POINTS
    for trial, stored in zip(runs.trials, study.trials, strict=True):
        assert trial["number"] == stored.number
        assert stored.state is optuna.trial.TrialState.COMPLETE
        assert trial["score"] == stored.value
        assert (trial["state"] == "measured") == all(c <= 0 for c in stored.constraints.values())
        assert trial["preemptions"] == stored.user_attrs.get("preemptions")
        assert trial["failure"] == stored.user_attrs.get("failure")
        throughput = stored.user_attrs.get("output_throughput")
        assert trial["output_throughput"] == pytest.approx(throughput, abs=0.001)
        assert set(stored.params) == set(trial["params"])
    assert study.best_trial.number == runs.status["best"]["number"]


def test_show_tells_what_was_measured(runs):
    for trial in filter(fits, runs.trials):
        shown = runs.show(trial)
        measured, memory = shown["measurement"], shown["measurement"]["memory"]
        assert measured["served"] == measured["offered"] == 16
        assert measured["counters"]["generation_tokens"] == 16 * 160
        assert memory["kv_cache_tokens"] == kv_bytes(trial) // BYTES_A_TOKEN
        assert memory["max_model_len_tokens"] == trial["params"]["max-model-len"]
        assert memory["vllm_version"].startswith("0.32")
        assert shown["effective"]["enable-prefix-caching"] is False
        assert trial["score"] == pytest.approx(
            measured["output_throughput_tokens_per_s"] / (1 + trial["preemptions"] / 16)
        )
        assert (
            "Application startup complete" in Path(runs.workplace.folder, shown["log"]).read_text()
        )


def test_show_tells_by_how_much_a_configuration_did_not_fit(runs):
    [trial] = [trial for trial in runs.trials if not fits(trial)]
    shown = runs.show(trial)
    facts = shown["failure_facts"]
    assert facts["line"].startswith("ValueError: To serve at least one request")
    assert facts["stage"] == "kv_allocation"
    assert facts["numbers"]["max_model_len_tokens"] == 2048
    assert 512 <= facts["numbers"]["estimated_max_model_len_tokens"] <= 1024
    assert 0.5 <= shown["constraints"]["memory"] < 1
    assert shown["measurement"] is None


# --- what it hands out -----------------------------------------------------------------


def cache_config(server: Running) -> dict[str, str]:
    """How the engine's cache is configured, as it says itself."""
    families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics"))}
    labels: dict[str, str] = families["vllm:cache_config_info"].samples[0].labels
    return labels


def serves_the_best(server: Running, model: Path) -> None:
    server.wait_until_ready()
    assert server.complete(model)["completion_tokens"] == 7
    config = cache_config(server)
    assert config["enable_prefix_caching"] == "False"
    assert int(config["num_gpu_blocks"]) * int(config["block_size"]) * BYTES_A_TOKEN == 16 * MIB


def test_best_yaml_starts_vllm(runs, forked_vllm, tiny_model, tmp_path):
    command = [forked_vllm, "serve", "--config", runs.study / "best.yaml"]
    with started(command, tmp_path, HF_HUB_OFFLINE="1") as server:
        serves_the_best(server, tiny_model)


def test_exported_script_starts_vllm(runs, tiny_model, tmp_path):
    script = tmp_path / "serve.sh"
    done = runs.workplace.tuner("export", "small", "--format", "shell", "-o", script)
    assert done.code == 0, done.err
    with started(["bash", script], tmp_path) as server:
        serves_the_best(server, tiny_model)


# --- memory utilization ----------------------------------------------------------------


ASK_FOR_MEMORY = """
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
print(get_memory_node_info(get_allowed_cpu_list()[0].numa_node).total_memory)
"""


def node_memory_gib(python: Path) -> float:
    """What `gpu-memory-utilization` is a share of on this machine, as vLLM sees it."""
    said = subprocess.check_output([python, "-c", ASK_FOR_MEMORY], text=True)
    return int(said.split()[-1]) / 2**30


def test_memory_utilization_sets_the_kv_cache(workplace, prepared_vllm, forked_vllm, tiny_model):
    # The process itself takes 0.6 GiB; what is left of the share becomes KV cache.
    total_gib = node_memory_gib(prepared_vllm.python)
    low, high = (round(gib / total_gib, 5) for gib in (1.2, 1.7))
    space = cpu_tiny(
        forked_vllm,
        tiny_model,
        study="utilization",
        server_args={"max-model-len": 512},
        search_space={"gpu-memory-utilization": [low, high]},
        constraints=[],
        reference={"gpu-memory-utilization": low},
        budget={"trials": 2},
    )
    space["workload"] |= {"requests": 4, "concurrency": 4, "output_tokens": 16}
    done = workplace.tuner("run", workplace.write_space(space))
    assert done.code == 0, done
    shown = [workplace.tuner("show", "utilization", n, "--json").json() for n in ("0", "1")]
    assert [trial["params"]["gpu-memory-utilization"] for trial in shown] == [low, high]
    less, more = (trial["measurement"]["memory"] for trial in shown)
    assert more["kv_cache_tokens"] > less["kv_cache_tokens"] > 0
    more_gib = (more["kv_cache_tokens"] - less["kv_cache_tokens"]) * BYTES_A_TOKEN / 2**30
    assert more_gib > 0.25, "0.5 where the machine's memory stays what it was"
    assert more["kv_cache_gib"] - less["kv_cache_gib"] == pytest.approx(more_gib, abs=0.02)
