"""Tests of recorded trials and of the times of their steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.tuning import fake_layout, make_problem

from flagscale.errors import RunStateError
from flagscale.tune.records import (
    MEASURED,
    TRIALS_FILE,
    Timing,
    combine,
    fingerprint,
    lock_records,
    open_records,
    time_steps,
)


def test_records_are_read_again(tmp_path: Path) -> None:
    problem = make_problem()
    records, note = open_records(tmp_path, problem)
    trial = records.start(fake_layout(micro_batch_size=2).setting)
    records.finish(replace(trial, state=MEASURED, step_seconds=(0.5, 0.5)))
    running = records.start(fake_layout(micro_batch_size=4).setting)
    again, _ = open_records(tmp_path, problem)
    assert note == ""
    assert [t.state for t in again.trials] == [MEASURED, "running"]
    assert again.trials[0].setting == trial.setting
    assert again.trials[1].directory == running.directory == "trial_002"


def test_records_of_another_model_are_set_aside(tmp_path: Path) -> None:
    records, _ = open_records(tmp_path, make_problem())
    records.start(fake_layout().setting)
    others, note = open_records(tmp_path, make_problem(hidden_size=128))
    assert others.trials == []
    assert "are of another model" in note
    assert len(list(tmp_path.glob("auto_tuner_*/trials.json"))) == 1


def test_records_that_are_set_aside_again_keep_the_earlier_ones(tmp_path: Path) -> None:
    problems = [make_problem(), make_problem(hidden_size=128)]
    for problem in (*problems, *problems):
        records, _ = open_records(tmp_path, problem)
        records.start(fake_layout().setting)
    assert len(list(tmp_path.glob("auto_tuner*/trials.json"))) == 4


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    records, _ = open_records(tmp_path, make_problem())
    records.start(fake_layout().setting)
    (records.directory / TRIALS_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(RunStateError, match="is damaged"):
        open_records(tmp_path, make_problem())


def test_one_search_at_a_time(tmp_path: Path) -> None:
    with (
        lock_records(tmp_path),
        pytest.raises(RunStateError, match="another auto_tune is searching"),
        lock_records(tmp_path),
    ):
        pass


def test_layouts_and_length_do_not_change_the_problem() -> None:
    own = fingerprint(make_problem())
    assert own == fingerprint(make_problem(tensor_model_parallel_size=2, train_iters=99))
    assert own != fingerprint(make_problem(seq_length=128))
    assert own != fingerprint(make_problem(2))


def test_a_step_that_the_machine_interrupts_counts_as_the_slowest_other() -> None:
    timing = time_steps([1.0, 1.1, 1.0, 9.0])
    assert timing is not None
    assert timing.seconds == pytest.approx(1.05)
    assert time_steps([1.0]) is None


def test_runs_that_differ_widen_the_interval() -> None:
    same = combine([Timing(1.0, 0.01, 8), Timing(1.0, 0.01, 8)])
    different = combine([Timing(1.0, 0.01, 8), Timing(1.2, 0.01, 8)])
    assert different.seconds == pytest.approx(1.1)
    assert different.error > 5 * same.error
    low, high = different.interval
    assert (low < 1.0, high > 1.2) == (True, True)
