#!/usr/bin/env python3
"""Compare the search of ``auto_tune`` with a measurement of every layout, on a CPU.

For each of five small experiments, ``algo.name: grid`` measures all layouts, and a search with the
default method runs beside it in another directory. The result is how much slower the winner of the
search is than the best of the grid, both by the times of the grid, and the number of trials of
each. Run it on a quiet machine: what else runs decides between layouts that are nearly as fast.

    python tools/bench/auto_tune.py --output docs/results/auto_tune.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
_MODEL = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 344,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 128,
}
_MIXTURE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "dense-2": {"nproc_per_node": 2, "global_batch_size": 8},
    "dense-4": {"nproc_per_node": 4, "global_batch_size": 8},
    "long-2": {"nproc_per_node": 2, "global_batch_size": 4, "seq_length": 512},
    "wide-4": {"nproc_per_node": 4, "global_batch_size": 8, "hidden_size": 256},
    "mixture-2": {"nproc_per_node": 2, "global_batch_size": 8, **_MIXTURE},
}
"""Overrides of the tiny Llama of the examples, by the name of the experiment."""
_SPACE = "{use_distributed_optimizer: [true], optimizer_cpu_offload: [false]}"


def tune(directory: Path, overrides: dict[str, Any], *words: str) -> dict[str, Any]:
    """Run a search and return its answer."""
    values = {**_MODEL, **overrides, "exp_dir": directory, "eval_iters": 0}
    command = [
        sys.executable,
        str(PROJECT / "run.py"),
        *("--config-path", "examples/llama3/conf", "--config-name", "train"),
        *("action=auto_tune", "json=true", "device=cpu"),
        f"++experiment.auto_tuner.space={_SPACE}",
        *(f"{name}={value}" for name, value in values.items()),
        *words,
    ]
    result = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def compare(directory: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Search one experiment, measure its whole grid, and compare."""
    start = time.monotonic()
    search = tune(directory / "search", overrides)
    search_seconds = time.monotonic() - start
    grid = tune(directory / "grid", overrides, "experiment.auto_tuner.algo.name=grid")
    grid_seconds = time.monotonic() - start - search_seconds
    times = {row["name"]: row["seconds"] for row in grid["trials"] if "seconds" in row}
    trials = [sum(row.get("trials", 1) for row in answer["trials"]) for answer in (search, grid)]
    return {
        "winner": search["best"],
        "grid_best": grid["best"],
        "slower": times[search["best"]] / min(times.values()) - 1,
        "trials": trials[0],
        "grid_layouts": len(grid["trials"]),
        "trials_of_grid": trials[0] / len(grid["trials"]),
        "seconds": round(search_seconds),
        "grid_seconds": round(grid_seconds),
        "grid": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="result file, JSON")
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, help="these experiments")
    parser.add_argument("--directory", type=Path, help="directory of the runs, to go on later")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="auto-tune-"))
    results = {}
    for name in options.only or EXPERIMENTS:
        results[name] = compare(directory / name, EXPERIMENTS[name])
        row = results[name]
        print(
            f"{name}: {row['winner']} is {row['slower']:.1%} slower than {row['grid_best']}; "
            f"{row['trials']} trials for {row['grid_layouts']} layouts, "
            f"{row['seconds']} s for {row['grid_seconds']} s",
            flush=True,
        )
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "command": "python tools/bench/auto_tune.py",
        "experiments": results,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
