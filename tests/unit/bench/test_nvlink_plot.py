"""Tests of nvlink_plot, which plots reports of fsccl's nvlink_check."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import nvlink_plot
import pytest

from flagscale.comm.fsccl.tune import KernelTiming


def test_report_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timings = [
        KernelTiming("all_reduce", memory, size, algorithm, 8, 256, us)
        for memory in ("ordinary", "registered")
        for size in (1024, 4096)
        for algorithm, us in (("other", 20.0), ("flagged", 4.0), ("staged", 6.0))
    ]
    rows = [asdict(t) for t in timings]
    report = {"gpu": "NVIDIA H200", "ranks": 2, "nccl": "2.28.9", "timings": rows}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert nvlink_plot.main([str(tmp_path / "report.json"), str(tmp_path / "a.svg")]) == 0
    svg = (tmp_path / "a.svg").read_text()
    for words in ("2 ranks, NVIDIA H200, NCCL 2.28.9", "all_reduce", "registered buffers", "NCCL"):
        assert words in svg


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        pytest.param("{}", "a.svg", "nothing was measured", id="nothing"),
        pytest.param("{", "a.svg", "report.json: cannot be read", id="no-json"),
        pytest.param("[]", "a.svg", "expected what nvlink_check keeps", id="another"),
        pytest.param("{}", "a.pdf", "ends in .svg or .png", id="ending"),
    ],
)
def test_invalid_report_is_not_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, name: str, message: str
) -> None:
    (tmp_path / "report.json").write_text(text)
    assert nvlink_plot.main([str(tmp_path / "report.json"), str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / name).exists()
