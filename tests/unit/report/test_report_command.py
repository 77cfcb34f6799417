"""Tests of ``flagscale report``: its runs, its output file and its messages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.report_lab import StoredRun, progress_events, store_run
from support.waiting import PATIENCE_SECONDS

from flagscale.cli import main
from flagscale.launcher.runs import RunEntry

Report = Callable[..., tuple[int, str, str]]
IDS = ("19710101-000000-aaaaaa", "19710102-000000-bbbbbb")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[StoredRun]:
    """Two registered runs; the tests run in their own directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stored_runs = [store_run(tmp_path, f"run {run_id}", run_id=run_id) for run_id in IDS]
    for stored_run in stored_runs:
        stored_run.append_events(*progress_events(3))
        stored_run.write_exit_records()
        RunEntry(stored_run.state).save()
    return stored_runs


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["report", *map(str, words)])
        code = end.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return call


def test_run_is_selected_by_a_prefix_of_its_id(runs: list[StoredRun], report: Report) -> None:
    code, out, _ = report("19710101")
    page = Path(f"report_{IDS[0]}.html")
    assert (code, out) == (0, f"report of run {IDS[0]}: {page} (0.0 MB)\n")
    assert f"<h1>run {IDS[0]}</h1>" in page.read_text()


def test_several_runs_by_id_directory_and_yaml_are_deduplicated(
    runs: list[StoredRun], report: Report, tmp_path: Path
) -> None:
    experiment: dict[str, Any] = {"exp_name": "x", "exp_dir": "/nowhere", "task": {"type": "train"}}
    train = {"system": {}, "model": {}, "data": {}}
    config = {"experiment": experiment, "action": "run", "train": train}
    Path("x.yaml").write_text(yaml.safe_dump(config))
    exp_dir = runs[1].state.exp_dir
    arguments = (IDS[0], exp_dir, "x.yaml", f"experiment.exp_dir='{exp_dir}'", "-o", "both.html")
    code, out, err = report(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith("report of 2 runs: both.html (")
    assert Path("both.html").read_text().count("<article") == 2
    code, _, err = report("x.yaml")
    assert code == 2
    assert "no run was started in /nowhere\n  hint: `flagscale runs` lists yours" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "'nope' is not a run id, a prefix of one, a directory in which a run was"),
        (["nope"], f"`flagscale runs` lists yours: {IDS[1]}, {IDS[0]}"),
        (["1971"], "1971: 2 runs begin so"),
        ([IDS[0], "nope"], "'nope' is not a run id"),
        (["/nowhere/at/all"], "'/nowhere/at/all' is not a run id"),
        (["nope.yaml"], "nope.yaml"),
        (["a=b"], "a=b is an override, and none of these is a YAML's run"),
        ([IDS[0], "--plot"], "unknown option --plot"),
        ([IDS[0], "-o", "none/x.html"], "none/x.html: the report cannot be written: No such file"),
        ([IDS[0], "-o", "."], ".: the report cannot be written: Is a directory"),
    ],
)
def test_invalid_requests_are_rejected(
    runs: list[StoredRun], report: Report, arguments: list[str], message: str
) -> None:
    code, out, err = report(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not list(Path().iterdir()), "nothing is written"


def test_page_opens_in_the_browser(
    runs: list[StoredRun], report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``BROWSER`` names the program that gets the page's address."""
    shows = tmp_path / "shows"
    shows.write_text(f'#!/bin/sh\necho "$1" >"{tmp_path}/shown"\n')
    shows.chmod(0o755)
    # webbrowser reads the environment once.
    code = "import sys; from flagscale.cli import main; main(['report', sys.argv[1], '--open'])"
    environment = {**os.environ, "BROWSER": f"{shows} %s"}
    subprocess.run([sys.executable, "-c", code, IDS[0]], env=environment, check=True)
    page = Path(f"report_{IDS[0]}.html").absolute()
    assert (tmp_path / "shown").read_text().strip() == page.as_uri()


def test_run_id_may_contain_an_equals_sign(runs: list[StoredRun], report: Report) -> None:
    directory = runs[0].state.exp_dir
    renamed = directory.with_name("seed=1")
    directory.rename(renamed)
    code, _, stderr = report(renamed, "-o", "page.html")
    assert code == 0, stderr
    assert "directory is gone" not in Path("page.html").read_text(encoding="utf-8")
    code, _, stderr = report("./seed=2")
    assert (code, "override" in stderr) == (2, False), stderr
    code, _, stderr = report("19710102", "a=b")
    assert (code, "a=b is an override, and none of these is a YAML's run" in stderr) == (2, True)


def test_output_may_be_a_pipe(runs: list[StoredRun], report: Report) -> None:
    os.mkfifo("pipe")
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True) as cat:
        code, _, stderr = report("19710101", "-o", "pipe")
        assert code == 0, stderr
        assert IDS[0] in cat.communicate(timeout=PATIENCE_SECONDS)[0]
    assert Path("pipe").is_fifo()
