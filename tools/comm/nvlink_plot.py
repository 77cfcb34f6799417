#!/usr/bin/env python3
"""Plot a JSON report of fsccl's nvlink_check; see `tools/comm/nvlink_plot.py --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.bench.files import read_object
from flagscale.cli_errors import run_command
from flagscale.comm.fsccl.tune import KernelTiming, pair_with_baseline
from flagscale.report.figure import PanelLine, require_image, write_panels

_DESCRIPTION = "Draw the times of NCCL and of fsccl's NVLink engine over the size of messages."
_MEMORY_STYLES = (("ordinary", "fsccl", "-"), ("registered", "fsccl, registered buffers", "--"))


def write_figure(report: Mapping[str, Any], path: Path) -> None:
    """Write a figure with a panel for each collective to an ``.svg`` or ``.png``. Raises the
    errors of :func:`.figure.write_panels`.
    """
    timings = [KernelTiming(**row) for row in report.get("timings", [])]
    panels = {}
    for collective in dict.fromkeys(t.collective for t in timings):
        collective_timings = [t for t in timings if t.collective == collective]
        nccl_times = {
            size: baseline.microseconds
            for (_, size), (_, baseline) in pair_with_baseline(
                collective_timings, "ordinary"
            ).items()
        }
        lines = [PanelLine("NCCL", nccl_times, "gray")]
        for memory, label, style in _MEMORY_STYLES:
            fsccl = {
                size: t.microseconds
                for (_, size), (t, _) in pair_with_baseline(collective_timings, memory).items()
            }
            lines += [PanelLine(label, fsccl, "C0", style)] if fsccl else []
        panels[collective] = lines
    conditions = f"{report.get('gpu')}, NCCL {report.get('nccl')}, CUDA graphs"
    title = f"{report.get('ranks')} ranks, {conditions}"
    write_panels(path, title, "microseconds", panels, columns=len(panels))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="nvlink_plot.py", description=_DESCRIPTION)
    parser.add_argument("report", type=Path, help="what nvlink_check or comm tune wrote by --json")
    parser.add_argument("figure", type=Path, help="an .svg or .png")
    options = parser.parse_args(argv)

    def draw_figure() -> int:
        require_image(options.figure)
        expected_content = "what nvlink_check keeps by --json"
        write_figure(
            read_object(options.report, str(options.report), expected_content), options.figure
        )
        return 0

    return run_command(draw_figure)


if __name__ == "__main__":
    sys.exit(main())
