"""Compare rows of the benchmark :mod:`gpu` with torchtitan, on the same GPUs in the same run.

torchtitan trains the same model in bf16 with FSDP2 and torch.compile, without activation
recomputation, and with as many tokens per step. Both trainers run with the row's micro-batch size
and with twice that size, alternately. The faster run of each trainer is compared. torchtitan and
its dependencies must be importable. Its Llama-3-8B is reduced to the row's number of layers.

    python tools/bench/beside_torchtitan.py --checkout ~/torchtitan --rows dp2,dp2-8k
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError, JobError

FLAVOR = """
from dataclasses import replace
from torchtitan.models.llama3 import llama3_args

llama3_args["cut"] = replace(llama3_args["8B"], n_layers={layers})
"""
"""Module that torchtitan imports before it builds the model."""
LOG_LINE = re.compile(r"step: +(\d+) .*?memory: +([\d.]+)GiB.*?tps: ([\d,]+)")
"""Pattern of torchtitan's log line of a step. Memory is the GiB reserved by its allocator."""


def compare_rows(
    rows: Sequence[gpu.GpuRow], steps: int, checkout: Path, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Measure each row with both trainers and yield a record with the ratio of the fastest runs."""
    for row in rows:
        flagscale_records, torchtitan_records = [], []
        for factor in (1, 2):
            flagscale_records.append(
                measure_flagscale(scale_micro_batch(row, factor), steps, scratch / f"ours-{factor}")
            )
            torchtitan_records.append(
                measure_torchtitan(scale_micro_batch(row, factor), steps, checkout, scratch)
            )
        flagscale_speed, torchtitan_speed = (
            best_throughput(flagscale_records),
            best_throughput(torchtitan_records),
        )
        ratio = round(flagscale_speed / torchtitan_speed, 3) if torchtitan_speed else None
        yield {
            "name": row.name,
            "ours": flagscale_records,
            "torchtitan": torchtitan_records,
            "ratio": ratio,
        }


def scale_micro_batch(row: gpu.GpuRow, factor: int) -> gpu.GpuRow:
    """Return the row with micro-batches ``factor`` times as large and as many tokens per step."""
    micro_batch, accumulated = row.micro_batch * factor, row.accumulated // factor
    return replace(row, micro_batch=micro_batch, accumulated=accumulated)


def best_throughput(records: Sequence[dict[str, Any]]) -> int:
    """Return the highest tokens per second per GPU, or 0 if no run fits in memory."""
    return max(int(record.get("tokens_per_second_per_gpu", 0)) for record in records)


def measure_flagscale(row: gpu.GpuRow, steps: int, scratch: Path) -> dict[str, Any]:
    """Measure a row once with flagscale."""
    scratch.mkdir(exist_ok=True)
    (record,) = gpu.measure_rows([row], steps, scratch, None)
    return record


def measure_torchtitan(
    row: gpu.GpuRow, steps: int, checkout: Path, scratch: Path
) -> dict[str, Any]:
    """Measure a row once with torchtitan.

    Raises:
        JobError: The run failed for another reason than GPU memory.
    """
    directory = scratch / f"torchtitan-{row.name}-{row.micro_batch}"
    directory.mkdir()
    write_texts(directory / "texts")
    (directory / "flavor_of_row.py").write_text(FLAVOR.format(layers=row.layers))
    process = run_torchtitan(row, steps, checkout, directory)
    record: dict[str, Any] = {"micro_batch": row.micro_batch}
    if process.returncode:
        if "OutOfMemoryError" in process.stdout:
            return {**record, "failed": "out of memory"}
        raise JobError(f"torchtitan ended with {process.returncode}:\n{process.stdout[-3000:]}")
    logged_steps = [
        (int(s), float(m), int(t.replace(",", ""))) for s, m, t in LOG_LINE.findall(process.stdout)
    ]
    speeds = [speed for step, _, speed in logged_steps if step > gpu.WARM_UP]
    return {
        **record,
        "tokens_per_second_per_gpu": round(statistics.median(speeds)),
        "tokens_per_second_of_all": speeds,
        "memory_gib": max(memory for _, memory, _ in logged_steps),
    }


def run_torchtitan(
    row: gpu.GpuRow, steps: int, checkout: Path, directory: Path
) -> subprocess.CompletedProcess[str]:
    """Run torchtitan's training program."""
    global_batch = row.micro_batch * row.accumulated * row.replicas
    options = {
        "model.name": "llama3",
        "model.flavor": "cut",
        "model.hf_assets_path": checkout / "tests/assets/tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": directory / "texts",
        "training.local_batch_size": row.micro_batch,
        "training.global_batch_size": global_batch,
        "training.seq_len": row.sequence,
        "training.steps": steps,
        "training.dataloader.num_workers": 1,
        "optimizer.lr": 3e-4,
        "activation_checkpoint.mode": "none",
        "compile.enable": None,
        "metrics.log_freq": 2,
        "metrics.disable_color_printing": None,
        "job.dump_folder": directory / "outputs",
        "experimental.custom_import": "flavor_of_row",
    }
    arguments = [
        word
        for name, value in options.items()
        for word in (f"--{name}", *([] if value is None else str(value).split()))
    ]
    paths = [str(directory), str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.gpus))
    return subprocess.run(
        [sys.executable, *launcher, "-m", "torchtitan.train", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        cwd=directory, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def write_texts(directory: Path, count: int = 256) -> None:
    """Write texts long enough for every step. The data set starts over after the last one."""
    directory.mkdir()
    words = ["the", "model", "reads", "every", "word", "and", "tells", "which", "one", "is", "next"]
    texts = (" ".join(words[(i * j) % len(words)] for j in range(8192)) for i in range(count))
    lines = (json.dumps({"text": text}) for text in texts)
    (directory / "data.json").write_text("\n".join(lines) + "\n")


def format_record(record: dict[str, Any]) -> str:
    """Format a record as a table line."""
    flagscale_text, torchtitan_text = (
        ", ".join(
            f"{run.get('tokens_per_second_per_gpu', run.get('failed'))} (batch "
            f"{run['micro_batch']}, {run.get('memory_gib', 0):.1f} GiB)"
            for run in record[trainer]
        )
        for trainer in ("ours", "torchtitan")
    )
    speeds = f"tok/s/GPU: {flagscale_text} | torchtitan {torchtitan_text}"
    return f"{record['name']:>8} | {speeds} | {record['ratio']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True, help="source tree of torchtitan")
    parser.add_argument(
        "--rows", default="dp2,dp2-8k", help="comma-separated rows of gpu.py (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=12, help="training steps per run (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    checkout = options.checkout.absolute()
    if not (checkout / "torchtitan" / "train.py").is_file():
        raise ConfigError(f"--checkout: {checkout} has no torchtitan/train.py")
    rows = gpu.select_rows(options.rows)
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in compare_rows(rows, options.steps, checkout, Path(scratch)):
            records.append(record)
            print(format_record(record), flush=True)
            if options.output:
                machine_facts = {
                    **machine.describe_machine("torch", "triton", "megatron-core"),
                    **gpu.query_gpus(),
                }
                options.output.write_text(
                    json.dumps({**machine_facts, "rows": records}, indent=1) + "\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
