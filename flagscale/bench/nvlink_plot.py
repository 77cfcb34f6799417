"""What fsccl's ``nvlink_check`` has measured, as a figure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.plots import (
    image_kind,
    image_of,
    new_figure,
    over_sizes,
    require_matplotlib,
)
from flagscale.bench.files import read_object
from flagscale.comm.fsccl.tune import Timing, best
from flagscale.errors import ConfigError
from flagscale.guard import guard

_DESCRIPTION = "Draw the times of NCCL and of fsccl's NVLink engine over the size of messages."
_LINES = (("ordinary", "fsccl", "-"), ("registered", "fsccl, registered buffers", "--"))


def write(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each collective, into an ``.svg`` or ``.png``.

    Raises:
        ConfigError: nothing was measured, the file has another ending, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    kind = image_kind(path)
    timings = [Timing(**row) for row in report.get("timings", [])]
    collectives = list(dict.fromkeys(t.collective for t in timings))
    if not collectives:
        raise ConfigError("nothing was measured that could be drawn")
    figure = new_figure(4.6 * len(collectives), 4.2)
    figure.suptitle(f"{report['ranks']} ranks, {report['gpu']}, NCCL {report['nccl']}, CUDA graphs")
    all_axes = figure.subplots(1, len(collectives), squeeze=False)[0]
    for collective, axes in zip(collectives, all_axes, strict=True):
        own = [t for t in timings if t.collective == collective]
        pairs = best(own, "ordinary").items()
        nccl = sorted((size, other.microseconds) for (_, size), (_, other) in pairs)
        axes.plot(*zip(*nccl, strict=True), color="gray", marker=".", label="NCCL")
        for memory, label, style in _LINES:
            ours = sorted((size, t.microseconds) for (_, size), (t, _) in best(own, memory).items())
            if ours:
                axes.plot(*zip(*ours, strict=True), color="C0", linestyle=style, marker=".",
                          label=label)  # fmt: skip
        over_sizes(axes, collective, "microseconds", (t.size for t in own))
        axes.set_yscale("log")
    all_axes[0].legend(fontsize="small")
    path.write_bytes(image_of(figure, kind))


def main(argv: Sequence[str] | None = None, *, prog: str = "nvlink_plot.py") -> int:
    """Draw a report; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=_DESCRIPTION)
    parser.add_argument("report", type=Path, help="what nvlink_check or comm tune wrote by --json")
    parser.add_argument("figure", type=Path, help="an .svg or .png")
    given = parser.parse_args(argv)
    return guard(lambda: _draw(given.report, given.figure))


def _draw(report: Path, figure: Path) -> int:
    require_matplotlib(str(figure))
    write(read_object(report, str(report), "what nvlink_check keeps by --json"), figure)
    return 0
