"""Tuning tables of the NVLink engine: choice of the fastest kernels, and storage.

The NVLink engine runs collectives of GPUs of one host. A tuning table selects a kernel by message
size; its rows are ``<collective> <ordinary|registered> <max bytes> <algorithm> <blocks> <threads>``
(csrc/nvlink/kernel_plan.h). nvlink_check.py measures and stores tables, nvlink.py loads them. They
are stored by the name of the GPU and the number of ranks, as JSON in ``$XDG_CONFIG_HOME/flagscale``
or the file ``FSCCL_TUNE_FILE``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import ConfigError

TABLE_FILE_VARIABLE = "FSCCL_TUNE_FILE"
_FORMAT_VERSION = 1
_OTHER_LIBRARY = "other"


@dataclass(frozen=True)
class KernelTiming:
    """Measured time of one kernel shape (algorithm and grid) at one message size."""

    collective: str
    memory: str  # "registered": mapped by peers; or "ordinary"
    size: int  # bytes of the whole message, as benchmarks count them
    algorithm: str  # "other": not a kernel of the engine but NCCL
    blocks: int
    threads: int  # per block
    microseconds: float

    @property
    def shape(self) -> tuple[str, int, int]:
        return self.algorithm, self.blocks, self.threads


def choose_fastest(timings: Iterable[KernelTiming]) -> str:
    """Return the table of the fastest shapes, with a row for each range of sizes.

    A size between two measured ones uses the fastest shape of the larger one, a size above all
    measured ones that of the largest.
    """
    sizes_by_case: dict[tuple[str, str], dict[int, list[KernelTiming]]] = {}
    for timing in timings:
        sizes = sizes_by_case.setdefault((timing.collective, timing.memory), {})
        sizes.setdefault(timing.size, []).append(timing)
    rows = []
    for (collective, memory), sizes in sizes_by_case.items():
        winners = [
            (size, min(of_size, key=lambda t: t.microseconds).shape)
            for size, of_size in sorted(sizes.items())
        ]
        for i, (size, shape) in enumerate(winners):
            if i + 1 < len(winners) and winners[i + 1][1] == shape:
                continue
            algorithm, blocks, threads = shape
            if algorithm == _OTHER_LIBRARY:
                blocks = threads = 0
            rows.append(f"{collective} {memory} {size} {algorithm} {blocks} {threads}")
    return "\n".join(rows) + "\n"


def pair_with_baseline(
    timings: Iterable[KernelTiming], memory: str
) -> dict[tuple[str, int], tuple[KernelTiming, KernelTiming]]:
    """Return, by collective and size, the timings of the engine's fastest shape and of NCCL.

    ``memory`` is ``ordinary`` or ``registered``. Cases without a timing of both are left out.
    """
    pairs: dict[tuple[str, int], tuple[KernelTiming, KernelTiming]] = {}
    cases: dict[tuple[str, int], list[KernelTiming]] = {}
    for timing in timings:
        if timing.memory == memory:
            cases.setdefault((timing.collective, timing.size), []).append(timing)
    for case, case_timings in cases.items():
        engine_timings = [t for t in case_timings if t.algorithm != _OTHER_LIBRARY]
        baseline_timings = [t for t in case_timings if t.algorithm == _OTHER_LIBRARY]
        if engine_timings and baseline_timings:
            pairs[case] = min(engine_timings, key=lambda t: t.microseconds), baseline_timings[0]
    return pairs


def table_path(gpu_name: str) -> Path:
    """Return the path of the file with the tables for this kind of GPU."""
    if path := os.environ.get(TABLE_FILE_VARIABLE):
        return Path(path)
    config_directory = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    file_stem = re.sub(r"[^A-Za-z0-9]+", "-", gpu_name).strip("-").lower()
    return Path(config_directory) / "flagscale" / f"fsccl-{file_stem}.json"


def load_tables(gpu_name: str) -> dict[int, str]:
    """Return the stored tables by number of ranks; empty if there are none.

    Raises:
        ConfigError: the file was not written by :func:`store_table`, or is for another kind of GPU.
    """
    path = table_path(gpu_name)
    try:
        content: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", hint=_RETUNE_HINT) from error
    return _validate_tables(content, path, gpu_name)


_RETUNE_HINT = "flagscale comm tune creates it again"


def _validate_tables(content: Any, path: Path, gpu_name: str) -> dict[int, str]:
    if not isinstance(content, dict) or content.get("version") != _FORMAT_VERSION:
        raise ConfigError(
            f"{path}: expected a table of version {_FORMAT_VERSION}", hint=_RETUNE_HINT
        )
    if content.get("device") != gpu_name:
        raise ConfigError(
            f"{path}: measured on {content.get('device')!r}, this is {gpu_name!r}",
            hint=_RETUNE_HINT,
        )
    tables = content.get("tables")
    if not isinstance(tables, dict) or not all(
        str(ranks).isdigit() and isinstance(rows, list) and all(isinstance(r, str) for r in rows)
        for ranks, rows in tables.items()
    ):
        raise ConfigError(f"{path}: expected 'tables', lists of rows by ranks", hint=_RETUNE_HINT)
    return {int(ranks): "\n".join(rows) + "\n" for ranks, rows in tables.items()}


def store_table(gpu_name: str, ranks: int, table: str, measurement_info: Mapping[str, str]) -> Path:
    """Store a table in the file of this kind of GPU, which keeps its tables for other numbers of
    ranks.

    Args:
        gpu_name: the name of the GPU.
        ranks: number of ranks for which the table was measured.
        table: its text.
        measurement_info: date and versions of the measurement, stored with the table.

    Returns:
        The path of the file.
    """
    path = table_path(gpu_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Sequence[str]] = {
        str(n): text.splitlines() for n, text in load_tables(gpu_name).items()
    }
    tables[str(ranks)] = table.splitlines()
    content = {
        "version": _FORMAT_VERSION,
        "device": gpu_name,
        "measured": dict(measurement_info),
        "tables": dict(sorted(tables.items(), key=lambda item: int(item[0]))),
    }
    temporary_path = path.with_suffix(f".{os.getpid()}")
    temporary_path.write_text(json.dumps(content, indent=2) + "\n")
    temporary_path.rename(path)
    return path
