"""What ``nvlink_check`` has measured, as a figure: times of NCCL and of the engine over the size.

``python -m flagscale.comm.fsccl.nvlink_plot REPORT.json FIGURE.svg`` draws a report again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.comm.fsccl.tune import Timing, best
from flagscale.errors import ConfigError

_LINES = (("ordinary", "fsccl", "-"), ("registered", "fsccl, registered buffers", "--"))


def write(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each collective, into an ``.svg`` or ``.png``.

    Raises:
        ConfigError: nothing was measured, the file has another ending, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    from flagscale.bench.collectives.plots import image_of, new_figure, over_sizes

    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "png"):
        raise ConfigError(f"{path}: expected a file that ends in .svg or .png")
    timings = [Timing(**row) for row in report.get("timings", [])]
    collectives = list(dict.fromkeys(t.collective for t in timings))
    if not collectives:
        raise ConfigError("nothing was measured that could be drawn")
    figure = new_figure(4.6 * len(collectives), 4.2)
    figure.suptitle(f"{report['ranks']} ranks, {report['gpu']}, NCCL {report['nccl']}, CUDA graphs")
    all_axes = figure.subplots(1, len(collectives), squeeze=False)[0]
    for collective, axes in zip(collectives, all_axes, strict=True):
        own = [t for t in timings if t.collective == collective]
        nccl = sorted((t.size, t.microseconds) for t in own if _is_nccl(t))
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


def _is_nccl(timing: Timing) -> bool:
    return timing.algorithm == "other" and timing.memory == "ordinary"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a report.

    Returns:
        0.

    Raises:
        ConfigError: the report cannot be read, or see :func:`write`.
    """
    parser = argparse.ArgumentParser(prog="nvlink_plot", description=__doc__)
    parser.add_argument("report", type=Path, help="what nvlink_check --json wrote")
    parser.add_argument("figure", type=Path, help="an .svg or .png")
    given = parser.parse_args(argv)
    try:
        report = json.loads(given.report.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given.report}: cannot be read: {error}") from error
    write(report, given.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
