"""Tests that a missing matplotlib is reported before anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nvlink_plot import main as nvlink

from flagscale.bench.agreement.cli import main as agreement
from flagscale.bench.collectives.cli import main as collectives
from flagscale.bench.pipeline.cli import main as pipeline


@pytest.mark.parametrize(
    ("main", "line", "option"),
    [
        (collectives, "allr -r 2 --plot x.svg", "--plot x.svg"),
        (collectives, "--batch batch.txt -r 2", "--batch batch.txt:1: --plot x.png"),
        (collectives, "allr -r 2 --hosts a b --plot x.svg", "--plot x.svg"),
        (pipeline, "-r 2 --plot x.svg", "--plot x.svg"),
        (agreement, "-r 2 --plot x.svg", "--plot x.svg"),
        (agreement, "--import kept.json --plot x.svg", "--plot x.svg"),
        (nvlink, "kept.json x.svg", "x.svg"),
    ],
    ids=["plot", "batch", "hosts", "pipeline", "agreement", "import", "nvlink"],
)
def test_missing_matplotlib_is_reported_before_measuring(
    main: Callable[[list[str]], int],
    line: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch.txt").write_text("allr --plot x.png\n")
    (tmp_path / "kept.json").write_text("{}")
    # None makes the import fail, as if the package were not installed.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == (
        "",
        f"error: {option} needs matplotlib, which is not installed",
    )
    assert "pip install 'flagscale[bench]'" in err
