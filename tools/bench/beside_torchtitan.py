"""Measure the rows of :mod:`gpu` beside torchtitan, on the same GPUs in the same run.

torchtitan trains the same model in bf16 with FSDP2 and torch.compile, without recomputing, with as
many tokens a step. Both do it once in the row's micro-batches and once in micro-batches twice as
large, in turn; the faster of each is compared. torchtitan has to be importable with what it needs;
its Llama-3-8B is cut to the row's layers.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.errors import ConfigError, JobError

FLAVOR = """
from dataclasses import replace
from torchtitan.models.llama3 import llama3_args

llama3_args["cut"] = replace(llama3_args["8B"], n_layers={layers})
"""
"""A module that torchtitan imports before it builds the model."""
LINE = re.compile(r"step: +(\d+) .*?memory: +([\d.]+)GiB.*?tps: ([\d,]+)")
"""What torchtitan logs of a step; the memory is what its allocator holds, in GiB."""


def beside(
    rows: Sequence[gpu.Row], steps: int, checkout: Path, scratch: Path
) -> Iterator[dict[str, Any]]:
    """For each row a record: our runs and torchtitan's in turn, and the fastest of ours by the
    fastest of theirs."""
    for row in rows:
        ours, theirs = [], []
        for factor in (1, 2):
            ours.append(ours_once(larger(row, factor), steps, scratch / f"ours-{factor}"))
            theirs.append(torchtitan(larger(row, factor), steps, checkout, scratch))
        best, reference = fastest(ours), fastest(theirs)
        ratio = round(best / reference, 3) if reference else None
        yield {"name": row.name, "ours": ours, "torchtitan": theirs, "ratio": ratio}


def larger(row: gpu.Row, factor: int) -> gpu.Row:
    """The same tokens a step in micro-batches ``factor`` times as large."""
    micro_batch, accumulated = row.micro_batch * factor, row.accumulated // factor
    return replace(row, micro_batch=micro_batch, accumulated=accumulated)


def fastest(records: Sequence[dict[str, Any]]) -> int:
    """In tokens a second and GPU; 0 where none fits."""
    return max(int(record.get("tokens_per_second_per_gpu", 0)) for record in records)


def ours_once(row: gpu.Row, steps: int, scratch: Path) -> dict[str, Any]:
    """One record of ours."""
    scratch.mkdir(exist_ok=True)
    (record,) = gpu.measure([row], steps, scratch, None)
    return record


def torchtitan(row: gpu.Row, steps: int, checkout: Path, scratch: Path) -> dict[str, Any]:
    """One run of torchtitan.

    Raises:
        JobError: it fails, and not for want of memory.
    """
    directory = scratch / f"torchtitan-{row.name}-{row.micro_batch}"
    directory.mkdir()
    write_texts(directory / "texts")
    (directory / "flavor_of_row.py").write_text(FLAVOR.format(layers=row.layers))
    found = run(row, steps, checkout, directory)
    record: dict[str, Any] = {"micro_batch": row.micro_batch}
    if found.returncode:
        if "OutOfMemoryError" in found.stdout:
            return {**record, "failed": "out of memory"}
        raise JobError(f"torchtitan ended with {found.returncode}:\n{found.stdout[-3000:]}")
    told = [(int(s), float(m), int(t.replace(",", ""))) for s, m, t in LINE.findall(found.stdout)]
    counted = [speed for step, _, speed in told if step > gpu.WARM_UP]
    return {
        **record,
        "tokens_per_second_per_gpu": round(statistics.median(counted)),
        "tokens_per_second_of_all": counted,
        "memory_gib": max(memory for _, memory, _ in told),
    }


def run(
    row: gpu.Row, steps: int, checkout: Path, directory: Path
) -> subprocess.CompletedProcess[str]:
    """Train by torchtitan; what it printed."""
    batch = row.micro_batch * row.accumulated * row.replicas
    options = {
        "model.name": "llama3",
        "model.flavor": "cut",
        "model.hf_assets_path": checkout / "tests/assets/tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": directory / "texts",
        "training.local_batch_size": row.micro_batch,
        "training.global_batch_size": batch,
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
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name}", *([] if value is None else str(value).split()))
    ]
    paths = [str(directory), str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.gpus))
    return subprocess.run(
        [sys.executable, *launcher, "-m", "torchtitan.train", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        cwd=directory, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def write_texts(directory: Path, count: int = 256) -> None:
    """Texts long enough for every step, read again from the first after the last."""
    directory.mkdir()
    words = ["the", "model", "reads", "every", "word", "and", "tells", "which", "one", "is", "next"]
    texts = (" ".join(words[(i * j) % len(words)] for j in range(8192)) for i in range(count))
    lines = (json.dumps({"text": text}) for text in texts)
    (directory / "data.json").write_text("\n".join(lines) + "\n")


def line(record: dict[str, Any]) -> str:
    """A record to read."""
    ours, theirs = (
        ", ".join(
            f"{each.get('tokens_per_second_per_gpu', each.get('failed'))} (batch "
            f"{each['micro_batch']}, {each.get('memory_gib', 0):.1f} GiB)"
            for each in record[whose]
        )
        for whose in ("ours", "torchtitan")
    )
    return f"{record['name']:>8} | tok/s/GPU: {ours} | torchtitan {theirs} | {record['ratio']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True, help="torchtitan's source")
    parser.add_argument("--rows", default="dp2,dp2-8k", help="of gpu.py, %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="of each run, %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    checkout = options.checkout.absolute()
    if not (checkout / "torchtitan" / "train.py").is_file():
        raise ConfigError(f"--checkout: {checkout} has no torchtitan/train.py")
    rows = gpu.chosen(options.rows)
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in beside(rows, options.steps, checkout, Path(scratch)):
            records.append(record)
            print(line(record), flush=True)
            if options.output:
                facts = {**machine.facts("torch", "triton", "megatron-core"), **gpu.gpu_facts()}
                options.output.write_text(json.dumps({**facts, "rows": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
