"""Tests of a sweep's directory: its record, its table, its best run, and its page."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.report_lab import ParsedPage, StoredRun, progress_events, store_run

from flagscale.cli import main
from flagscale.errors import RunStateError
from flagscale.launcher.sweep_runs import SWEEP_FILE, SweepRun, find_best, find_sweep, record_sweep

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def flagscale(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        return (end.value.code if isinstance(end.value.code, int) else 0, *capsys.readouterr())

    return call


def _store_sweep(directory: Path, *seeds: int) -> dict[int, StoredRun]:
    """Store a sweep over seeds, the loss of which is the seed; the last run is not started."""
    sweep_runs = [
        SweepRun(
            values={"train.model.seed": str(seed), "train.model.lr": "0.1"},
            exp_dir=directory / f"seed={seed}",
        )
        for seed in (*seeds, 99)
    ]
    record_sweep(Path("/conf/train.yaml"), sweep_runs)
    stored_runs = {}
    for seed in seeds:
        run_id = f"20260921-00000{seed}-aaaaaa"
        stored_run = store_run(directory, run_id=run_id, exp_dir=directory / f"seed={seed}")
        stored_run.append_events(*progress_events(3, loss=float(seed), tokens_per_second=1000.0))
        stored_run.write_exit_records()
        stored_runs[seed] = stored_run
    return stored_runs


def _evaluate(stored_run: StoredRun, *losses: tuple[int, str, float]) -> None:
    for step, data, loss in losses:
        stored_run.append_events({"event": "evaluation", "step": step, "loss": loss, "data": data})


def test_table_csv_and_json_of_a_directory(tmp_path: Path, flagscale: Command) -> None:
    stored_runs = _store_sweep(tmp_path / "sweep", 1, 2, 3)
    _evaluate(stored_runs[1], (2, "a", 1.0), (3, "a", 5.0), (3, "b", 7.0))
    _evaluate(stored_runs[2], (3, "", 2.5))
    _evaluate(stored_runs[3], (3, "", 2.0))
    stored_runs[3].write_exit_records(1)
    code, out, _ = flagscale("query", "sweep", "--csv", "table.csv")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()]
    ids = [run.state.run_id for run in stored_runs.values()]
    directories = [str(tmp_path / "sweep" / f"seed={seed}") for seed in (1, 2, 3, 99)]
    metrics = ["step", "loss", "validation", "tokens/s"]
    assert lines[0] == ["seed", "lr", "state", *metrics, "run", "directory"]
    assert lines[2:6] == [
        ["1", "0.1", "completed", "3", "1.0000", "6.0000", "1,000", ids[0], directories[0]],
        ["*", "2", "0.1", "completed", "3", "2.0000", "2.5000", "1,000", ids[1], directories[1]],
        ["3", "0.1", "failed", "3", "3.0000", "2.0000", "1,000", ids[2], directories[2]],
        ["99", "0.1", "not", "started", directories[3]],
    ]
    best = "* the best of the completed runs by validation loss (2.5000): seed=2 lr=0.1"
    assert best in out
    with Path("table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["best"] for row in rows] == ["0", "1", "0", "0"]
    assert (rows[0]["train.model.seed"], rows[0]["validation_loss"]) == ("1", "6.0")
    code, out, _ = flagscale("runs", "sweep", "--json", "--state", "completed")
    assert [(row["run_id"], row["best"]) for row in json.loads(out)] == [
        (ids[0], False),
        (ids[1], True),
    ]


def test_metrics_of_an_earlier_run_count_if_the_last_one_had_nothing_to_do(tmp_path: Path) -> None:
    stored_runs = _store_sweep(tmp_path / "sweep", 1)
    stored_runs[1].write_own_files({})
    stored_runs[1].set_aside()
    exp_dir = stored_runs[1].state.exp_dir
    again = store_run(tmp_path, run_id="20260922-000000-aaaaaa", exp_dir=exp_dir, started=2e9)
    again.write_exit_records()
    sweep = find_sweep(str(tmp_path / "sweep"))
    assert sweep is not None
    sweep.query()
    first = sweep.runs[0]
    assert first.state is not None
    assert (first.state.run_id, first.phase) == (again.state.run_id, "completed")
    assert (first.metrics["step"], first.metrics["loss"]) == (3, 1.0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([(1.0, None), (2.0, None)], (0, "training loss"), id="training"),
        pytest.param([(1.0, 5.0), (2.0, 4.0)], (1, "validation loss"), id="validation"),
        pytest.param([(1.0, None), (2.0, 4.0)], (0, "training loss"), id="not-all-validated"),
        pytest.param([(math.nan, math.nan), (2.0, 4.0)], (1, "validation loss"), id="diverged"),
        pytest.param([(None, None)], None, id="no-loss"),
        pytest.param([], None, id="none-completed"),
    ],
)
def test_best_run(
    tmp_path: Path,
    rows: list[tuple[float | None, float | None]],
    expected: tuple[int, str] | None,
) -> None:
    directory = tmp_path / "sweep"
    _store_sweep(directory, 1)
    sweep = find_sweep(str(directory))
    assert sweep is not None
    sweep.query()
    completed, not_started = sweep.runs
    not_started.metrics = {"loss": 0.0, "validation_loss": 0.0}
    sweep_runs = [not_started]
    for loss, validation_loss in rows:
        metrics: Mapping[str, Any] = {"loss": loss, "validation_loss": validation_loss}
        run = SweepRun(values={}, exp_dir=directory, snapshot=completed.snapshot, metrics=metrics)
        sweep_runs.append(run)
    best = find_best(sweep_runs)
    assert expected == (None if best is None else (sweep_runs.index(best.run) - 1, best.metric))


def test_sweeps_of_one_directory_share_the_record(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    _store_sweep(directory, 1, 2)
    other = SweepRun(values={"train.model.lr": "0.2"}, exp_dir=directory / "lr=0.2")
    record_sweep(Path("/conf/train.yaml"), [other])
    directory.rename(tmp_path / "renamed")
    sweep = find_sweep(str(tmp_path / "renamed"))
    assert sweep is not None
    assert [(str(run), run.exp_dir.name) for run in sweep.runs][2:] == [
        ("seed=99 lr=0.1", "seed=99"),
        ("seed= lr=0.2", "lr=0.2"),
    ]
    assert {run.exp_dir.parent for run in sweep.runs} == {tmp_path / "renamed"}


@pytest.mark.parametrize(
    "text",
    ["{", '{"config_file": "x", "runs": []}', '{"config_file": "x", "runs": [{"directory": "../x", '
     '"values": {}}]}'],
    ids=["damaged", "empty", "outside"],
)  # fmt: skip
def test_an_unusable_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SWEEP_FILE).write_text(text)
    with pytest.raises(RunStateError, match=r"sweep\.json is damaged"):
        find_sweep(str(tmp_path))


def test_a_directory_with_runs_of_its_own_is_no_sweep(tmp_path: Path, flagscale: Command) -> None:
    directory = tmp_path / "exp"
    _store_sweep(directory, 1)
    own_run = store_run(tmp_path, run_id="20260930-000000-aaaaaa", exp_dir=directory)
    own_run.write_exit_records()
    code, out, err = flagscale("query", "exp", "--json")
    assert (code, json.loads(out)["run_id"]) == (0, own_run.state.run_id)
    assert f"note: {directory} also holds a sweep: {directory / SWEEP_FILE} names it" in err
    code, out, _ = flagscale("query", directory / SWEEP_FILE, "--json")
    assert (code, len(json.loads(out))) == (0, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logs", "sweep"], "logs is of one run, and this is a sweep of 2"),
        (["query", "sweep", "--follow"], "query --follow is of one run"),
        (["query", "sweep/seed=1", "--csv", "x.csv"], "the table is of a sweep's directory"),
        (["query", "sweep", "--csv", "none/x.csv"], "none/x.csv: the table cannot be written"),
        (["runs", "sweep", "--limit", "1"], "is a sweep: only --state selects"),
        (["report", "sweep", "sweep/seed=1"], "sweep is a sweep: it has a page of its own"),
        (["runs", "--foo"], "unknown argument --foo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_requests_that_do_not_fit(
    tmp_path: Path, flagscale: Command, words: list[str], message: str
) -> None:
    _store_sweep(tmp_path / "sweep", 1)
    code, _, err = flagscale(*words)
    assert code == 2
    assert message in err


def test_page_of_a_sweep(tmp_path: Path, flagscale: Command) -> None:
    stored_runs = _store_sweep(tmp_path / "sweep", 1, 2)
    for seed, stored_run in stored_runs.items():
        stored_run.write_own_files({"train": {"model": {"seed": seed}}})
    code, out, _ = flagscale("report", "sweep")
    (path,) = tmp_path.glob("report_sweep_sweep_*.html")
    assert (code, out.startswith(f"report of a sweep of 3 runs: {path.name}")) == (0, True)
    page = ParsedPage(path.read_text(encoding="utf-8"))
    assert page.open_tags == []
    for fact in ("2 completed, 1 not started", "last training loss, 1", "★ best", "not started"):
        assert fact in page.text, fact
    loss_plot = page.find_elements("svg")[0]["aria-label"] or ""
    assert "seed=1 lr=0.1: 1 at step 1" in loss_plot
    assert "seed=2 lr=0.1: 2 at step 1" in loss_plot
    assert "the configuration of seed=1 lr=0.1" in page.text, "that of the best"
    assert "Hosts and layout" not in page.text


def test_page_of_a_sweep_without_started_runs(tmp_path: Path, flagscale: Command) -> None:
    _store_sweep(tmp_path / "sweep")
    code, _, err = flagscale("report", "sweep")
    assert (code, f"no run of the sweep in {tmp_path / 'sweep'} has been started" in err) == (
        1,
        True,
    )


def test_a_yaml_whose_directory_has_a_sweep_alone(tmp_path: Path, flagscale: Command) -> None:
    """``query`` shows the sweep; ``stop`` does not end runs that were not named."""
    _store_sweep(tmp_path / "sweep", 1)
    task = "{type: command, command: 'true'}"
    Path("x.yaml").write_text(f"experiment: {{exp_name: x, exp_dir: sweep, task: {task}}}\n")
    code, out, _ = flagscale("query", "x.yaml", "--json")
    assert (code, len(json.loads(out))) == (0, 2)
    code, out, _ = flagscale("stop", "x.yaml")
    assert (
        code,
        "name the directory for the 2 runs of the sweep there; nothing to stop" in out,
    ) == (
        0,
        True,
    )
    code, _, err = flagscale("report", "x.yaml")
    assert (code, f"a sweep was: name its directory, {tmp_path / 'sweep'}" in err) == (2, True)
    code, out, _ = flagscale("stop", "sweep")
    assert (code, "completed" in out) == (0, True)


def test_a_run_with_a_damaged_state_does_not_hide_the_others(
    tmp_path: Path, flagscale: Command
) -> None:
    _store_sweep(tmp_path / "sweep", 1, 2)
    (tmp_path / "sweep" / "seed=1" / "logs" / "state.json").write_text("{")
    code, out, err = flagscale("query", "sweep", "--json")
    assert (code, [row["state"] for row in json.loads(out)]) == (
        0,
        ["not started", "completed", "not started"],
    )
    assert "state.json is damaged" in json.loads(out)[0]["trouble"], err
