"""Tuning tables of the NVLink engine: choice of the fastest kernels, and storage.

A table has rows ``<collective> <ordinary|registered> <most bytes> <algorithm> <blocks> <threads>``
(csrc/nvlink/kernel_plan.h). Tables are stored by the name of the GPU and the number of ranks, as
JSON in ``$XDG_CONFIG_HOME/flagscale`` or the file ``FSCCL_TUNE_FILE``.
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

VARIABLE = "FSCCL_TUNE_FILE"
_VERSION = 1
_OTHER = "other"


@dataclass(frozen=True)
class KernelTiming:
    """Time of one kernel shape at one size, in microseconds; algorithm ``other`` is the other
    library.
    """

    collective: str
    memory: str  # ordinary, registered
    size: int  # bytes, as benchmarks count them: the whole message
    algorithm: str
    blocks: int
    threads: int
    microseconds: float

    @property
    def shape(self) -> tuple[str, int, int]:
        return self.algorithm, self.blocks, self.threads


def choose_fastest(timings: Iterable[KernelTiming]) -> str:
    """Return the table of the fastest shapes: a row for each range of sizes with one winner.

    A size between two measured ones takes the winner of the larger. Above the largest measured size
    its winner stays.
    """
    by_case: dict[tuple[str, str], dict[int, list[KernelTiming]]] = {}
    for timing in timings:
        sizes = by_case.setdefault((timing.collective, timing.memory), {})
        sizes.setdefault(timing.size, []).append(timing)
    lines = []
    for (collective, memory), sizes in by_case.items():
        winners = [
            (size, min(of_size, key=lambda t: t.microseconds).shape)
            for size, of_size in sorted(sizes.items())
        ]
        for i, (size, shape) in enumerate(winners):
            if i + 1 < len(winners) and winners[i + 1][1] == shape:
                continue
            algorithm, blocks, threads = shape
            if algorithm == _OTHER:
                blocks = threads = 0
            lines.append(f"{collective} {memory} {size} {algorithm} {blocks} {threads}")
    return "\n".join(lines) + "\n"


def pair_with_baseline(
    timings: Iterable[KernelTiming], memory: str
) -> dict[tuple[str, int], tuple[KernelTiming, KernelTiming]]:
    """Return, by collective and size, the fastest shape of the engine and the other library."""
    pairs: dict[tuple[str, int], tuple[KernelTiming, KernelTiming]] = {}
    cases: dict[tuple[str, int], list[KernelTiming]] = {}
    for timing in timings:
        if timing.memory == memory:
            cases.setdefault((timing.collective, timing.size), []).append(timing)
    for case, of_case in cases.items():
        ours = [t for t in of_case if t.algorithm != _OTHER]
        baselines = [t for t in of_case if t.algorithm == _OTHER]
        if ours and baselines:
            pairs[case] = min(ours, key=lambda t: t.microseconds), baselines[0]
    return pairs


def table_path(device: str) -> Path:
    """Return the path of the tables of this kind of GPU."""
    if path := os.environ.get(VARIABLE):
        return Path(path)
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return Path(config) / "flagscale" / f"fsccl-{name}.json"


def load_tables(device: str) -> dict[int, str]:
    """Return the stored tables by number of ranks; empty if there are none.

    Raises:
        ConfigError: the file was not written by :func:`store`, or is for another kind of GPU.
    """
    path = table_path(device)
    try:
        content: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", hint=_HINT) from error
    return _validate_tables(content, path, device)


_HINT = "flagscale comm tune writes it anew"


def _validate_tables(content: Any, path: Path, device: str) -> dict[int, str]:
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise ConfigError(f"{path}: expected a table of version {_VERSION}", hint=_HINT)
    if content.get("device") != device:
        raise ConfigError(
            f"{path}: measured on {content.get('device')!r}, this is {device!r}", hint=_HINT
        )
    tables = content.get("tables")
    if not isinstance(tables, dict) or not all(
        str(ranks).isdigit() and isinstance(rows, list) and all(isinstance(r, str) for r in rows)
        for ranks, rows in tables.items()
    ):
        raise ConfigError(f"{path}: expected 'tables', lists of rows by ranks", hint=_HINT)
    return {int(ranks): "\n".join(rows) + "\n" for ranks, rows in tables.items()}


def store_table(device: str, ranks: int, table: str, measured: Mapping[str, str]) -> Path:
    """Store a table next to those of other numbers of ranks.

    Args:
        device: the name of the GPU.
        ranks: number of ranks of the table.
        table: its text.
        measured: date and versions of the measurement, stored with the table.
    """
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Sequence[str]] = {
        str(n): text.splitlines() for n, text in load_tables(device).items()
    }
    tables[str(ranks)] = table.splitlines()
    content = {
        "version": _VERSION,
        "device": device,
        "measured": dict(measured),
        "tables": dict(sorted(tables.items(), key=lambda item: int(item[0]))),
    }
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.rename(path)
    return path
