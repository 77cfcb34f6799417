from __future__ import annotations

import os
from pathlib import Path

import pytest

from flagscale.launcher.liveness.output_times import INTERVAL_SECONDS, OutputTimes
from flagscale.launcher.log_lines import offset_since


def test_growth_is_recorded_at_intervals(tmp_path: Path) -> None:
    output, index = tmp_path / "output", tmp_path / "index"
    with output.open("w") as file:
        times = OutputTimes(index, file.fileno())

        def write_and_record(now: float, *, final: bool = False) -> list[int]:
            file.write("line\n")
            file.flush()
            times.record(now, final=final)
            return [int(line.split()[1]) for line in index.read_text().splitlines()]

        assert write_and_record(0.0) == [5]
        assert write_and_record(INTERVAL_SECONDS / 2) == [5]
        assert write_and_record(INTERVAL_SECONDS) == [5, 15]
        times.record(3 * INTERVAL_SECONDS)
        assert write_and_record(3.1 * INTERVAL_SECONDS) == [5, 15]
        assert write_and_record(3.2 * INTERVAL_SECONDS, final=True) == [5, 15, 25]
    assert index.stat().st_mode & 0o777 == 0o600
    assert offset_since(output, index, output.stat().st_mtime - 60) == 0
    assert offset_since(output, index, output.stat().st_mtime + 60) == 25


@pytest.mark.parametrize("path", ["no directory/index", "index"])
def test_what_cannot_be_recorded_is_left_out(tmp_path: Path, path: str) -> None:
    reader, writer = os.pipe()
    with (tmp_path / "output").open("w") as file:
        file.write("x")
        file.flush()
        is_pipe = path == "index"
        OutputTimes(tmp_path / path, writer if is_pipe else file.fileno()).record(0.0)
    os.close(reader)
    os.close(writer)
    assert not (tmp_path / path).exists()
