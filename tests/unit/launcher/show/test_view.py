"""Tests of a run's display in a narrow terminal."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.show import view
from flagscale.launcher.snapshot import HostRow, Phase, Snapshot

LOG = Path("/scratch/a user/outputs of a long name") / ("x" * 120) / "stderr.log"


def _make_snapshot(*hosts: str) -> Snapshot:
    rows = tuple(HostRow(host, Phase.RUNNING, 8, 8) for host in hosts)
    snapshot = Snapshot("20260101-000000-abcdef", "llama", Phase.RUNNING, time.time(), 8, 8)
    snapshot = replace(snapshot, hosts=rows, step=12345, train_steps=100000, eta_seconds=3661.0)
    return replace(snapshot, loss=2.5, tokens_per_second=1234567.0)


def _print(snapshot: Snapshot, capsys: pytest.CaptureFixture[str]) -> str:
    view.print_run(snapshot)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", ["80", "200"])
def test_hosts_keep_their_names(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert "gpu-node-17" in _print(_make_snapshot("gpu-node-17"), capsys)


def test_all_figures_fit_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = _print(_make_snapshot("localhost"), capsys)
    for figure in ("localhost", "12345/100000", "2.5000", "1,234,567", "1:01:01"):
        assert figure in text


def test_empty_column_is_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "memory" not in _print(_make_snapshot("h"), capsys)
    assert "memory" in _print(replace(_make_snapshot("h"), memory_gib=3.0), capsys)


@pytest.mark.parametrize(
    ("world_size", "memory_gib", "is_shown"),
    [(8, 70.0, True), (1, 70.0, False), (8, None, False)],
    ids=["gpus", "one-gpu", "cpu"],
)
def test_speed_per_gpu(
    *, world_size: int, memory_gib: float | None, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = replace(_make_snapshot("h"), world_size=world_size, memory_gib=memory_gib)
    text = _print(replace(snapshot, tokens_per_second_per_gpu=154321.0), capsys)
    assert ("a GPU" in text and "154,321" in text) == is_shown


def test_paths_stay_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    failure = Failure(host="h", rank=1, exit_code=1, reason="ValueError", traceback="", log=LOG)
    assert str(LOG) in _print(replace(_make_snapshot("h"), failure=failure), capsys)


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 100])
@pytest.mark.parametrize("with_lines", [False, True], ids=["once", "live"])
def test_no_figure_is_cut(
    *, width: int, with_lines: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        HostRow("gpu-node-17", Phase.RUNNING, 8, 8, step=815, last_line="a line " * 30),
        HostRow("gpu-node-18", Phase.RUNNING, 8, 8, step=816),
    )
    snapshot = replace(_make_snapshot("h"), hosts=rows, memory_gib=71.5)
    snapshot = replace(snapshot, tokens_per_second_per_gpu=154321.0)
    console = Console(width=width, highlight=False)
    console.print(view.run_table(snapshot, with_lines=with_lines))
    text = capsys.readouterr().out
    assert "…" not in text
    for figure in (
        "815/100000",
        "816/100000",
        "2.5000",
        "1,234,567",
        "154,321",
        "71.5 GiB",
        "1:01:01",
    ):
        assert figure in text
    assert max(map(len, text.splitlines())) <= width
