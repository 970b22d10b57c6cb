"""`kill -9` of the tuner, and of what it has started, at random moments of a study.

A dozen kills here; fifty with `python -m pytest tests/test_killed_tuner.py --long`, other
moments with `--seed N`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
import yaml
from faulty_studies import SLOWER, SPACE, assert_consistent, clean_up_checked, left_behind
from killing import Phase, Run, finished, kill_quietly, trials_of

from tuner.errors import ExitCode

SPACE_FILE = "space.yaml"
FOLDER = Path("studies/faulty")
DATABASE = FOLDER / "study.db"
ENOUGH_TRIALS = 10_000
END_DEADLINE_S = 60.0
"""From the tuner's death to that of the last process: up to 6 s, and a busy machine's share."""

STATE = optuna.trial.TrialState

CUT_OFF = (None, "interrupted")
"""What is stored of a trial that a kill cut off."""


class Study:
    """A study that is killed again and again.

    Attributes:
        kept: the finished trials at the last look, with all that is stored of them.
        kills: of the tuner, so far.
    """

    def __init__(self, tmpdir):
        self.tmpdir = tmpdir
        self.kept = {}
        self.kills = 0
        document = {
            **SPACE,
            "server": {**SPACE["server"], "env": SLOWER},
            "search_space": {
                "max-num-seqs": {"low": 4, "high": 64},
                "max-num-batched-tokens": {"low": 512, "high": 2048},
            },
            "search": {"sampler": "random"},
        }
        Path(SPACE_FILE).write_text(yaml.safe_dump(document))

    def start(self):
        return Run(FOLDER, SPACE_FILE, "--trials", str(ENOUGH_TRIALS))

    def strike(self, run, chance):
        """Kill one of the processes that the tuner has started, or that and the tuner, or the
        tuner with all its children at once."""
        started = run.descendants()
        victims = chance.sample(started, min(1, len(started)))
        way = chance.choice(("one", "one", "with the tuner", "with its children"))
        if way == "with its children":
            victims = run.children()
        if way != "one":
            run.process.kill()
            self.kills += 1
        for victim in victims:
            kill_quietly(victim)
        if way != "one":
            run.process.wait()

    def check_what_is_kept(self):
        """No finished trial is lost or changed; those that came in between are kept as well."""
        now = trials_of(DATABASE)
        done = finished(now)
        changed = [number for number in self.kept if done.get(number) != self.kept[number]]
        assert changed == []
        assert sum(t.state is STATE.RUNNING for t in now) <= 1
        assert sum(t.state is STATE.WAITING for t in now) <= 1
        # Not those that were ended uncharged: on a busy machine a client may be too slow.
        assert len(cut_off(now)) <= self.kills
        self.kept = done

    def check_nothing_is_left(self):
        deadline_s = time.monotonic() + END_DEADLINE_S
        while left := left_behind(Path.cwd(), self.tmpdir):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.2)

    def finish(self, more=2):
        """Some more trials, undisturbed; then everything must add up."""
        run = Run(FOLDER, SPACE_FILE, "--trials", str(len(self.kept) + more))
        assert run.process.wait(120) == 0, run.said()
        self.check_what_is_kept()
        assert_consistent(DATABASE)
        trials = trials_of(DATABASE)
        assert len(self.kept) == len(finished(trials))
        measured = Counter(
            str(t.user_attrs["tuner:params"]) for t in trials if t.number in self.kept
        )
        assert set(measured.values()) == {1}, "no configuration is measured twice"
        repeated = cut_off(trials)
        assert len(repeated) <= self.kills
        for trial in repeated:
            assert measured[str(trial.user_attrs["tuner:params"])] == 1, "it was run again"


def cut_off(trials):
    return [t for t in trials if t.state is STATE.FAIL and t.user_attrs.get("state") in CUT_OFF]


@pytest.fixture
def study(in_tmp, monkeypatch):
    with clean_up_checked(in_tmp, monkeypatch) as tmpdir:
        yield Study(tmpdir)


def moments(rounds, chance):
    """Phases in turn, so that a short test has all of them, in a random order."""
    phases = [list(Phase)[i % len(Phase)] for i in range(rounds)]
    chance.shuffle(phases)
    return phases


def test_kill_of_the_tuner_loses_nothing_and_leaves_nothing(study, long_form, seed):
    chance = random.Random(seed)
    for phase in moments(50 if long_form else 12, chance):
        run = study.start()
        assert run.wait_for(phase, chance, trial=chance.choice((1, 1, 2))), run.said()
        run.kill()
        study.kills += 1
        study.check_nothing_is_left()
        study.check_what_is_kept()
    study.finish()


def test_kill_of_whatever_it_has_started_ends_in_a_consistent_study(study, long_form, seed):
    """Supervisor, server, engine, or the process that checks configurations; one of them with
    the tuner; or the tuner with its children. What even that leaves, the next run ends."""
    chance = random.Random(seed + 1)
    run = study.start()
    assert run.wait_for(Phase.STORING, chance), run.said()  # else all starts may fail: the end
    for phase in moments(50 if long_form else 10, chance):
        run.count_from_here()
        if run.wait_for(phase, chance):
            study.strike(run, chance)
        if run.process.poll() is not None:
            # 3: who checks configurations, or a supervisor as it starts, was what was killed.
            assert run.process.returncode in (-9, ExitCode.ENVIRONMENT), run.said()
            # A tuner that gives up gives its trial back, as one that is killed does.
            study.kills += run.process.returncode == ExitCode.ENVIRONMENT
            run = study.start()
        study.check_what_is_kept()
    run.kill()
    study.kills += 1
    study.finish()
    for folder in Path(study.tmpdir).glob("tuner-*"):
        # The tuner was killed with who would clean up, before anything was started or recorded.
        if not any(folder.iterdir()):
            folder.rmdir()
    study.check_nothing_is_left()
