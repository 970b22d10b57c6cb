"""SIMULATED_FAULT: names, options, and which launches have a fault."""

from __future__ import annotations

import pytest
from simulated_builders import settings

from tuner.engine.simulated.server.command_line import ServeCommand
from tuner.engine.simulated.server.fault_kinds import BEHAVIOUR, CAUSES, help_text
from tuner.engine.simulated.server.faults import faults_of_launch, read_faults
from tuner.errors import InputError
from tuner.types import FailureCause, Stage


def launch(text, made=None, **flags):
    command = ServeCommand("tiny", {name.replace("_", "-"): v for name, v in flags.items()})
    return faults_of_launch(read_faults(text), command, made)


def test_fault_has_its_options_and_defaults():
    first, second = read_faults("oom_runtime after=3 exit=-9; slow_start")
    assert (first.cause, first.stage, first.exit_code) == (FailureCause.OOM_RUNTIME, Stage.LOAD, -9)
    assert first.number("after") == 3
    assert (second.cause, second.stage, second.number("seconds")) == (None, Stage.LOADING, 2.0)
    assert read_faults(" ; ") == []


@pytest.mark.parametrize(
    ("text", "code"),
    [("bad_config", 2), ("oom_load", 1), ("crash stage=load", 0), ("host_oom exit=137", 137)],
)
def test_fault_ends_with_vllm_s_exit_code(text, code):
    assert read_faults(text)[0].exit_code == code


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "no fault `nonsense`"),
        ("oom_load nonsense=1", "no option `nonsense`"),
        ("crash stage=nowhere", "no stage `nowhere`"),
        ("hang_load after=soon", "takes a number"),
        ("crash exit=x", "takes a number"),
    ],
)
def test_fault_that_cannot_be_read_is_refused(text, told):
    with pytest.raises(InputError, match=told):
        read_faults(text)


def test_condition_decides_by_flags_as_given_or_by_default():
    text = "oom_load when='max-num-seqs > 64 and kv-cache-dtype == \"auto\"'"
    assert launch(text, max_num_seqs=65).has("oom_load")
    assert not launch(text, max_num_seqs=64).has("oom_load")
    assert not launch(text, max_num_seqs=65, kv_cache_dtype="fp8").has("oom_load")
    assert not launch(text).has("oom_load")  # nobody knows what is in effect


def test_condition_decides_by_the_values_in_effect():
    assert launch("oom_load when='max-num-seqs == 128'", settings()).has("oom_load")
    assert not launch("oom_load when='max-num-seqs == 128'", settings(max_num_seqs=8)).has(
        "oom_load"
    )


def test_condition_that_cannot_be_read_is_refused():
    with pytest.raises(InputError, match="no-such-flag"):
        launch("oom_load when='no-such-flag > 1'")


@pytest.mark.parametrize(
    ("options", "struck"),
    [("", [0]), ("first=2", [0, 1]), ("skip=2", [2]), ("skip=1 first=2", [1, 2])],
)
def test_launches_are_counted_in_a_file(tmp_path, options, struck):
    text = f"oom_load once={tmp_path / 'count'} {options}"
    assert [n for n in range(5) if launch(text).has("oom_load")] == struck


def test_launch_that_the_condition_excludes_does_not_count(tmp_path):
    text = f"oom_load when='max-num-seqs > 64' once={tmp_path / 'count'}"
    assert not launch(text, max_num_seqs=8).has("oom_load")
    assert launch(text, max_num_seqs=65).has("oom_load")
    assert not launch(text, max_num_seqs=65).has("oom_load")


def test_causes_strike_while_starting_or_under_load():
    faults = launch("ignore_term; crash; hang")
    assert faults.of_cause(under_load=False).name == "crash"
    assert faults.of_cause(under_load=True).name == "hang"
    assert launch("ignore_term").of_cause(under_load=True) is None


def test_faults_of_answers_strike_after_some_and_every_so_often():
    faults = launch("http_500 after=2 every=3")
    assert [n for n in range(10) if faults.strikes("http_500", n)] == [2, 5, 8]
    assert not faults.strikes("http_429", 5)


def test_help_names_every_fault():
    text = help_text()
    for name in (*CAUSES, *BEHAVIOUR):
        assert name in text
