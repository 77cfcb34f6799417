"""Tests of the story of a directory: its runs as one curve, with stops, resumes and changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.report_lab import START_TIME, ParsedPage, StoredRun, progress_events, store_run

from flagscale.cli import main
from flagscale.launcher import runs
from flagscale.launcher.layout import Layout
from flagscale.launcher.listing import list_runs
from flagscale.launcher.runs import RunEntry
from flagscale.report.curves import main_plots
from flagscale.report.pages import render_runs
from flagscale.report.run import RunReport
from flagscale.report.story import collect_story

IDS = tuple(f"2026092{number}-000000-aaaaaa" for number in range(1, 5))
STOPPED = {"signal": 15}


@pytest.fixture(autouse=True)
def _registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def _store_runs(
    exp_dir: Path, *steps: range, configs: tuple[dict[str, Any], ...] = (), **exit_record: Any
) -> list[StoredRun]:
    """Store runs that were started one after the other in a directory; all but the last one were
    stopped.
    """
    stored_runs: list[StoredRun] = []
    for number, (run_id, run_steps) in enumerate(zip(IDS, steps, strict=False)):
        if stored_runs:
            stored_runs[-1].set_aside()
        started = START_TIME + 1000 * number
        stored_run = store_run(exp_dir, run_id=run_id, exp_dir=exp_dir, started=started)
        stored_run.append_events(*progress_events(len(run_steps), first=run_steps.start or 1))
        is_last = number == len(steps) - 1
        stored_run.write_exit_records(
            *((0,) if is_last else (143,)), **({} if is_last else STOPPED)
        )
        if configs:
            commit = "a" * 40 if number < 2 else "b" * 40
            stored_run.write_own_files(configs[number], commit)
        stored_runs.append(stored_run)
    return stored_runs


def _collect(exp_dir: Path) -> RunReport:
    return collect_story(runs.find_history(exp_dir))


def _texts(story: RunReport, *kinds: str) -> Iterator[tuple[int | None, int | None, str]]:
    return ((e.run_number, e.step, e.text) for e in story.timeline if e.kind in kinds)


def test_runs_of_a_directory_are_one_curve(tmp_path: Path) -> None:
    """Steps of a run that the next one repeated from a checkpoint are a faint line."""
    _store_runs(tmp_path / "exp", range(1, 51), range(41, 71), range(71, 91))
    story = _collect(tmp_path / "exp")
    assert [run.state.run_id for run in story.runs] == list(IDS[:3])
    lines = [
        (line.label, line.x[0], line.x[-1], line.faint) for line in main_plots([story])[0].lines
    ]
    assert lines == [
        ("training", 1, 40, False),
        ("training in run 1", 41, 50, True),
        ("training", 41, 70, False),
        ("training", 71, 90, False),
    ]
    assert [*_texts(story, "stop")] == [(1, 50, "stopped"), (2, 70, "stopped")]
    assert [*_texts(story, "resume")] == [
        (2, 41, f"run 2 was started, {IDS[1]}: it continued at step 41"),
        (3, 71, f"run 3 was started, {IDS[2]}: it continued at step 71"),
    ]
    page = ParsedPage(render_runs([story]))
    assert page.open_tags == []
    for fact in (f"{IDS[2]}, the last of 3 in this directory", "1 to 50", "41 to 70"):
        assert fact in page.text, fact


def test_a_run_that_began_anew_replaces_all_steps_and_validation_losses(tmp_path: Path) -> None:
    first, _ = _store_runs(tmp_path / "exp", range(1, 31), range(1, 11))
    first.append_events({"event": "evaluation", "step": 20, "loss": 5.0})
    story = _collect(tmp_path / "exp")
    lines = [(line.label, len(line.x), line.faint) for line in main_plots([story])[0].lines]
    assert lines == [
        ("training in run 1", 30, True),
        ("training", 10, False),
        ("validation in run 1", 1, True),
    ]
    ((_, step, text),) = _texts(story, "resume")
    assert (step, text.endswith("it began at step 1")) == (1, True)


def test_steps_of_another_program_do_not_say_where_it_continued(tmp_path: Path) -> None:
    """It may report every tenth step, so that 10 is the first one of a training begun anew."""
    _, second = _store_runs(tmp_path / "exp", range(10, 31), range(10, 21))
    second.replace_state(external=True)
    ((_, step, text),) = _texts(_collect(tmp_path / "exp"), "resume")
    assert (step, text.endswith(": the first step that it reported is 10")) == (10, True)


def test_changes_from_run_to_run_are_named(tmp_path: Path) -> None:
    model = {"global_batch_size": 8, "seed": 1}
    configs = (
        {"action": "run", "train": {"model": model}},
        {"action": "test", "train": {"model": model}},
        {"action": "run", "train": {"model": {"global_batch_size": 16, "lr": 0.1}}},
        {"action": "run", "train": {"model": {"global_batch_size": 16, "lr": 0.1}}},
    )
    steps = (range(1, 6), range(6, 9), range(9, 12), range(12, 12))
    _store_runs(tmp_path / "exp", *steps, configs=configs)
    story = _collect(tmp_path / "exp")
    assert [*_texts(story, "resume")] == [
        (2, 6, f"run 2 was started, {IDS[1]}: it continued at step 6"),
        (4, 11, f"run 4 was started, {IDS[3]}: it reported no step"),
    ]
    ((_, _, text),) = _texts(story, "change")
    assert text.partition("; ")[2] == (
        "changed: train.model.global_batch_size 8 → 16, train.model.seed 1 → (not set), "
        "train.model.lr (not set) → 0.1; code of code aaaaaaaaaaaa → bbbbbbbbbbbb"
    )
    page = ParsedPage(render_runs([story]))
    assert page.text.count("the configuration of run 2 of tiny") == 1, "the one that was changed"
    assert "the configuration of run 1 of tiny" not in page.text


def test_runs_are_found_after_a_rename_and_without_their_own_files(tmp_path: Path) -> None:
    """Runs of older versions are registered alone; those whose files are gone are left out."""
    exp_dir = tmp_path / "exp"
    first, second, _ = _store_runs(exp_dir, range(1, 3), range(3, 5), range(5, 7))
    for stored_run in (first, second):
        RunEntry(stored_run.state).save()
        Layout(exp_dir).run_files(stored_run.state.run_id).state.unlink()
    assert [state.run_id for state in runs.find_history(exp_dir)] == list(IDS[:3])
    shutil.rmtree(first.state.hosts[0].run_dir)
    assert [state.run_id for state in runs.find_history(exp_dir)] == list(IDS[1:3])
    stored_runs = _store_runs(tmp_path / "old", range(1, 3), range(3, 5))
    stored_runs[0].state.exp_dir.rename(tmp_path / "new")
    history = runs.find_history(tmp_path / "new")
    assert [state.exp_dir for state in history] == [tmp_path / "new"] * 2
    assert len(collect_story(history).attempts) == 2


def test_unregistered_runs_of_a_directory_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were started on another machine that shares the disk."""
    _store_runs(tmp_path / "exp", range(1, 3), range(3, 5))
    assert list_runs(str(tmp_path / "exp"), as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run_id"], row["state"], row["step"]) for row in rows] == [
        (IDS[1], "completed", "4/100"),
        (IDS[0], "stopped", "2/100"),
    ]


def _report(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, words)])
    return end.value.code if isinstance(end.value.code, int) else 0


def test_directory_names_the_story_and_an_id_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exp_dir = tmp_path / "exp"
    for stored_run in _store_runs(exp_dir, range(1, 4), range(4, 7)):
        RunEntry(stored_run.state).save()
    assert _report(exp_dir) == 0
    assert capsys.readouterr().out.startswith("report of 2 runs of one directory: ")
    assert _report(IDS[0]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"report of run {IDS[0]}: report_{IDS[0]}.html")
    assert f"note: run {IDS[0]} is one of 2 in {exp_dir}; `flagscale report ../exp` shows" in err
    assert "Runs of the directory" not in Path(f"report_{IDS[0]}.html").read_text()


def test_reports_do_not_overwrite_each_other(tmp_path: Path) -> None:
    directories = [tmp_path / f"{number}" / "exp" for number in range(5)]
    ids = [f"run-{number}" for number in range(5)]
    for run_id, directory in zip(ids, directories, strict=True):
        RunEntry(store_run(tmp_path, run_id=run_id, exp_dir=directory).state).save()
    requests = [
        *([directory] for directory in directories[:2]),
        *([ids[0]], [ids[1]], ids[:2], ids[1::-1], ids[:4], ids),
    ]
    for count, request in enumerate(requests, start=1):
        assert _report(*request) == 0
        assert len(list(Path().glob("report_*.html"))) == count, request
