"""Result rows, one per size, and the JSON and CSV files that store them with their conditions."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from flagscale.bench.files import read_text
from flagscale.bench.statistics import Ratio
from flagscale.errors import ConfigError
from flagscale.files import write_atomic

GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class ResultRow:
    """Result of one size on one backend, written to JSON and CSV files by its field names.

    Times are in microseconds, bandwidths in 1e9 bytes per second, and ``size`` in bytes of the
    logical buffer (:mod:`.operations`).
    """

    operation: str
    type: str
    nccl_type: str
    reduction: str
    root: int
    in_place: bool
    backend: str
    ranks: int
    size: int
    count: int
    input_bytes: int
    output_bytes: int
    bus_factor: float
    time: float = math.nan
    statistics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    spread: tuple[float, float] | None = None
    """First and third quartile of the iterations' times."""
    algorithm: str = "n/a"
    wrong: int | None = None
    """Number of wrong elements over all ranks; None if not checked."""
    failure: str | None = None
    ratio: Ratio | None = None
    """Ratio of its time to the first backend's."""
    peak_share: float | None = None
    """Bus bandwidth as a fraction of the device's nominal limit."""
    probe_share: float | None = None
    """Bus bandwidth as a fraction of the measured bandwidth of plain copies."""

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, size over time, in 1e9 bytes per second; 0 without data."""
        return self.size / self.time / 1e3 if self.time > 0 else 0.0

    @property
    def busbw(self) -> float:
        """Bus bandwidth in 1e9 bytes per second; see :mod:`.operations`."""
        return self.algbw * self.bus_factor

    @property
    def ok(self) -> bool:
        """True if it was measured, and no element was wrong."""
        return self.failure is None and not self.wrong


def find_limits(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Return the limits of the bus bandwidth that ``peak_share`` and ``probe_share`` of the rows
    refer to, in 1e9 bytes per second.
    """
    limits = {}
    for name, field_name in (("peak", "peak_share"), ("probe", "probe_share")):
        values = [row.busbw / fraction for row in rows if (fraction := getattr(row, field_name))]
        if values:
            limits[name] = values[0]
    return limits


_KEY_FIELDS = ("operation", "type", "reduction", "root", "in_place", "backend", "ranks", "size")
"""Fields that identify comparable rows of different runs."""
_FIELDS_WITH_SAME_KEY = (
    "algorithm",
    "operation",
    "reduction",
    "root",
    "in_place",
    "backend",
    "ranks",
    "samples",
    "wrong",
    "failure",
)


def to_json_record(row: ResultRow) -> dict[str, Any]:
    """Return a row as a JSON record, with the keys of nccom-test's records first."""
    data: dict[str, Any] = {
        "size(B)": row.size,
        "count(elems)": row.count,
        "type": row.type,
        "algbw(GB/s)": row.algbw,
        "busbw(GB/s)": row.busbw,
        "time:avg(us)": _none_if_not_finite(row.time),
        **{name: _none_if_not_finite(value) for name, value in row.statistics.items()},
        "total_input_size(B)": row.input_bytes,
        "total_output_size(B)": row.output_bytes,
        **{name: getattr(row, name) for name in _FIELDS_WITH_SAME_KEY},
    }
    if row.spread is not None:
        data["time:p25(us)"], data["time:p75(us)"] = row.spread
    if row.ratio is not None:
        data["time_ratio"] = {
            name: _none_if_not_finite(value) for name, value in asdict(row.ratio).items()
        }
    for name in ("peak_share", "probe_share"):
        if getattr(row, name) is not None:
            data[name] = getattr(row, name)
    return data


def _none_if_not_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_ALLOWED_VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_SYMM_MEM|GLOO|FSCCL|FLAGCX|UCC|UCX|OMPI_MCA_btl|FI|MSCCL|RCCL|HCCL|MCCL)_"
    r"[A-Z0-9_]+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_MODULE_LOADING"
    r"|TORCH_DISTRIBUTED_DEBUG|SLURM_(JOB_NUM_NODES|STEP_NUM_TASKS|STEP_NODELIST)"
)
_SECRET_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect communication, by an allowlist: a whole environment would
    carry secrets into files that are passed on.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if _ALLOWED_VARIABLES.fullmatch(name) and not _SECRET_NAMES.search(name)
    }


def write_json(
    path: Path, rows: Sequence[ResultRow], conditions: Mapping[str, Any], *, complete: bool
) -> None:
    """Write the results so far. The file is replaced atomically, so that readers never see a
    part of it.

    Raises:
        OSError: the file cannot be written.
    """
    results = [to_json_record(row) for row in rows]
    data = {"results": results, "format": 1, "complete": complete, **conditions}
    write_atomic(path, json.dumps(data, indent=1) + "\n", 0o644, durable=False)


def write_csv(path: Path, rows: Sequence[ResultRow]) -> None:
    """Write one line per result, with the keys of the JSON file.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [to_json_record(row) for row in rows]
    for line in lines:
        # A ratio has three columns: its value and the bounds of its interval.
        line |= {f"time_ratio:{name}": value for name, value in line.pop("time_ratio", {}).items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)))
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(path, text.getvalue(), 0o644, durable=False)


@dataclass(frozen=True)
class Baseline:
    """Times of an earlier run in microseconds, by the values of :data:`_KEY_FIELDS`."""

    path: Path
    times: tuple[tuple[tuple[str, str, str, int, bool, str, int, int], float], ...]


def read_baseline(path: Path) -> Baseline:
    """Read the times of an earlier run's JSON file.

    Raises:
        ConfigError: the file is no result of this program.
    """
    text = read_text(path, f"--baseline {path}")
    try:
        data = json.loads(text)
        times = tuple(
            (
                (*(row[name] for name in _KEY_FIELDS[:-1]), row["size(B)"]),
                float(row["time:avg(us)"]),
            )
            for row in data["results"]
            if row["time:avg(us)"] is not None and row["failure"] is None
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--baseline {path}: not a result of --report-to-json-file ({error!r})"
        ) from error
    return Baseline(path, times)


def compare_with_baseline(
    rows: Sequence[ResultRow], baseline: Baseline, tolerance: float
) -> tuple[int, list[str]]:
    """Compare rows with a baseline.

    Args:
        rows: results of this run.
        baseline: times of an earlier run.
        tolerance: accepted slowdown, as a fraction of the baseline's time.

    Returns:
        The number of rows that the baseline contains, and a message for each row that is slower by
        more than ``tolerance``.
    """
    slower, compared = [], 0
    times = dict(baseline.times)
    for row in rows:
        baseline_time = times.get(attrgetter(*_KEY_FIELDS)(row))
        if baseline_time is None or not row.ok:
            continue
        compared += 1
        if row.time > baseline_time * (1 + tolerance):
            change = row.time / baseline_time - 1
            slower.append(
                f"{row.operation} {row.type} {row.size} B on {row.backend}: {row.time:.2f} us, "
                f"{baseline_time:.2f} us before ({change:+.1%}, tolerance {tolerance:.1%})"
            )
    return compared, slower
