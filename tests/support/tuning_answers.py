"""Answer of a search for a layout, as ``auto_tune`` records it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagscale.files import write_json


def measured_row(
    name: str, seconds: float, *, best: bool = False, **changes: Any
) -> dict[str, Any]:
    """Return the record of a measured layout."""
    row = {
        "name": name,
        "layout": {},
        "state": "measured",
        "best": best,
        "seconds": seconds,
        "low": 0.9 * seconds,
        "high": 1.1 * seconds,
        "trials": 2,
        "tokens_per_second": 100 / seconds,
        "memory_gib": None,
        "predicted_seconds": 2 * seconds,
        "predicted_memory_gib": seconds,
        "why": "",
        "log": "",
    }
    return {**row, **changes}


def answer_record() -> dict[str, Any]:
    """Return the answer of a search with three measured layouts and a failed one."""
    failed = {
        "name": "tp8 <b>",
        "state": "failed",
        "why": "rank 0 ran out",
        "log": "",
        "best": False,
    }
    return {
        "name": "demo",
        "machine": "4 ranks on 1 host",
        "reason": "every layout that fits was tried",
        "best": "tp1 pp1 mbs2",
        "overrides": ["train.model.micro_batch_size=2"],
        "yaml": "/x/best.yaml",
        "trials": [
            measured_row("tp1 pp1 mbs2", 1.0, best=True),
            measured_row("tp2 pp1 mbs2", 1.5, why="start of kernels +0.5 s"),
            measured_row("tp1 pp2 mbs1", 2.0, memory_gib=0.5),
            failed,
        ],
        "corrections": {"matrix products and attention": 1.25},
        "untried": 1,
        "expected": [
            {"name": "tp4 pp1 mbs1", "seconds": 3.0, "low": 2.0, "high": 4.0, "memory_bytes": 2**30}
        ],
    }


def record_answer(exp_dir: Path) -> Path:
    """Write the answer of a search in an experiment's directory, and return its directory."""
    directory = exp_dir / "auto_tuner"
    directory.mkdir(parents=True)
    write_json(directory / "answer.json", answer_record())
    return directory
