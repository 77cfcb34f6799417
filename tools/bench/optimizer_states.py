r"""Train a small model with Adam's states in several number formats, and compare the losses.

Every run is one of run.py's, of the quickstart's text (`make data`), in bf16. Runs of a seed start
from the same weights and see the same samples. adam_beta2 is 0.999, with which the second moment
changes little in a step, so that rounding matters. Each format is compared with fp32 states of the
same seed; over several seeds, the mean has Student's 95 % confidence interval.

    python tools/bench/optimizer_states.py --seeds 1,2,3 \
        --output docs/results/optimizer-states-cpu.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from precision import (
    Curve,
    describe_last_run,
    parse_seeds,
    read_curve,
    read_earlier_curves,
    write_results,
)

from flagscale.cli_errors import run_command
from flagscale.errors import JobError
from flagscale.status import read_events

PROJECT = Path(__file__).parents[2]
SETTINGS = """
experiment.runner.nproc_per_node=1 train.system.precision.bf16=true
train.system.precision.accumulate_allreduce_grads_in_fp32=false train.system.checkpoint.save=null
train.system.checkpoint.save_interval=null train.model.hidden_size=64
train.model.ffn_hidden_size=172 train.model.num_attention_heads=4 train.model.num_query_groups=2
train.model.seq_length=128 train.model.micro_batch_size=8 train.model.optimizer.adam_beta2=0.999
train.model.eval_iters=20 train.model.optimizer.lr_scheduler.lr=1e-3
"""
"""Overrides of examples/llama3 with its model ``tiny``."""
_AWARE = "use_precision_aware_optimizer=true"
_FP8_MOMENTS = f"{_AWARE} exp_avg_dtype=fp8 exp_avg_sq_dtype=fp8"
FORMATS = {
    "fp32": "",
    "remainders": _AWARE,
    "bf16 moments": f"{_AWARE} exp_avg_dtype=bf16 exp_avg_sq_dtype=bf16",
    "fp8 moments": _FP8_MOMENTS,
    "fp8 moments, bf16 weights and gradients": f"{_FP8_MOMENTS} main_params_dtype=bf16 "
    "main_grads_dtype=bf16",
}
"""Arguments of the formats by name."""


def train_format(name: str, seed: int, steps: int, directory: Path) -> Curve:
    """Train with states of one format. Return training losses and the final validation loss."""
    arguments = [f"+train.model.{argument}" for argument in FORMATS[name].split()]
    return train_example(name, [*SETTINGS.split(), *arguments], seed, steps, directory)


def train_example(
    name: str, settings: Sequence[str], seed: int, steps: int, directory: Path
) -> Curve:
    """Train examples/llama3's model ``tiny`` with changed settings. Return the curve ``name``."""
    overrides = [
        *settings,
        f"train.model.train_iters={steps}",
        f"train.model.eval_interval={steps}",
        f"train.model.seed={seed}",
        f"experiment.exp_dir={directory}",
    ]
    configuration = [f"--config-path={PROJECT / 'examples/llama3/conf'}", "--config-name=train"]
    process = subprocess.run(
        [sys.executable, "run.py", *configuration, "action=test", *overrides],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise JobError(f"{name} ended with {process.returncode}:\n{process.stdout[-3000:]}")
    (status,) = directory.glob("logs/details/*/*/status/rank_0.jsonl")
    return read_curve(name, seed, read_events(status)[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="training steps per run (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", default="1,2,3", help="comma-separated seeds (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file; the plot is written next to it"
    )
    parser.add_argument(
        "--append", action="store_true", help="keep the runs that --output already contains"
    )
    options = parser.parse_args(argv)
    setting: dict[str, Any] = {
        "text": "quickstart",
        "steps": options.steps,
        "settings": SETTINGS.split(),
        "formats": FORMATS,
    }
    curves = read_earlier_curves(options, setting)
    finished = {(curve["seed"], curve["precision"]) for curve in curves}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in parse_seeds(options.seeds):
            for index, name in enumerate(FORMATS):
                if (seed, name) not in finished:
                    directory = Path(scratch) / f"{seed}-{index}"
                    curves.append(train_format(name, seed, options.steps, directory))
                    write_results(options.output, setting, curves)
                    print("\n".join(describe_last_run(curves)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
