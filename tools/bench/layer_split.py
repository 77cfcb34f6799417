#!/usr/bin/env python3
"""Benchmark splits of the layers between two pipeline stages on heterogeneous devices.

Two ranks of this machine, with one CPU core or GPU each, are the two stages of a model. Each stage
is a mesh of its own, a group of homogeneous ranks with its own parallel layout. With ``--slowed``,
layers of the second stage take twice as long, because they are computed twice.

Every split of the layers is trained. Its measured step time is compared with the prediction
(docs/guides/heterogeneous.md), which uses the layer times that
``hetero_pipeline_layer_split: auto`` has measured. The split chosen by ``auto`` is reported too.
Without ``--slowed``, the same splits are also trained without meshes, in an ordinary pipeline of
homogeneous ranks. ``--tensor-parallel 2`` uses two ranks per stage.

    python tools/bench/layer_split.py --slowed --output docs/results/layer-split-cpu.json
    python tools/bench/layer_split.py --slowed --device cuda --rounds 1 --output …
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import ConfigError, JobError
from flagscale.estimate import cost_cache
from flagscale.estimate.costs import DENSE
from flagscale.estimate.split import LayerCounts, SplitProblem, find_best_split
from flagscale.free_port import free_port
from flagscale.status import STATUS_DIR_VARIABLE, read_events

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
LAYERS, WARMUP_STEPS = 8, 2
RANK_FLAG = "--rank"
"""First argument when this file is the program of a rank; "normal" or "slowed" follows."""
MODEL = f"""
--num-layers {LAYERS} --mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--num-workers 0 --lr 1e-5 --lr-decay-style constant --log-interval 1
"""
MODEL_SIZES = {
    "cpu": """--hidden-size 256 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 768
--seq-length 256 --micro-batch-size 2 --global-batch-size 8 --vocab-size 2000 --device cpu""",
    # Sizes of a layer of Llama-3-8B.
    "cuda": """--hidden-size 4096 --num-attention-heads 32 --num-query-groups 8
--ffn-hidden-size 14336 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8
--vocab-size 32000 --device cuda --bf16""",
}
MESH_ARGUMENTS = "--enable-hetero --hetero-process-meshes {0} 1 1 1 1  {0} 1 1 1 1"
PIPELINE_ARGUMENTS = "--tensor-model-parallel-size {0} --pipeline-model-parallel-size 2"
"""Arguments of two stages as meshes, and as an ordinary pipeline. ``{0}`` is the tensor-parallel
size of a stage.
"""


def main(argv: Sequence[str] | None = None) -> int:
    command_line = list(sys.argv[1:] if argv is None else argv)
    if command_line[:1] == [RANK_FLAG]:
        return rank_main(command_line[2:], slowed=command_line[1] == "slowed")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--slowed", action="store_true", help="make the second stage half as fast")
    parser.add_argument(
        "--device",
        choices=tuple(MODEL_SIZES),
        default="cpu",
        help="device of both stages (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        help="tensor-parallel ranks per stage (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="counted steps per training run (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds over all splits (default: %(default)s)"
    )
    parser.add_argument(
        "--first",
        type=int,
        nargs="+",
        default=list(range(1, LAYERS)),
        metavar="N",
        help="numbers of layers of the first stage to train (default: all splits)",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write or to extend")
    options = parser.parse_args(command_line)
    machine_facts = machine.describe_machine("torch", "megatron-core")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two cores are required, one for each stage")
    with tempfile.TemporaryDirectory() as directory:
        result = measure_splits(TwoStageTraining(Path(directory), options), options)
    print(format_result(result))
    if options.output:
        name = "slowed" if options.slowed else "alike"
        if options.tensor_parallel > 1:
            name += f", {2 * options.tensor_parallel} ranks"
        write_result(options.output, name, {**machine_facts, **result})
    return 0


def rank_main(arguments: Sequence[str], *, slowed: bool) -> int:
    """Run the training program, with slowed layers if ``slowed``."""
    sys.argv[0] = str(PROGRAM)
    sys.path.insert(0, str(PROJECT / "third_party" / "Megatron-LM"))
    if "cpu" in arguments:
        os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1")
    if slowed:
        slow_layers()
    from flagscale.train.train_gpt import main as train_gpt

    return train_gpt(arguments)


def slow_layers() -> None:
    """Make every transformer layer compute its forward and backward pass twice.

    The output is the mean of both results. It equals the result of one pass, and so do the
    gradients.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original_call = TransformerLayer.__call__

    def call_twice(layer: Any, *args: Any, **options: Any) -> Any:
        hidden, *extra_outputs = original_call(layer, *args, **options)
        second_hidden, *_ = original_call(layer, *args, **options)
        return (0.5 * (hidden + second_hidden), *extra_outputs)

    # Patched outside the compiled function: a compiled graph would deduplicate the second pass.
    TransformerLayer.__call__ = call_twice


def measure_splits(training: TwoStageTraining, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and predict the step time of every split, including the one that auto chooses."""
    meshes, pipeline = (
        template.format(options.tensor_parallel)
        for template in (MESH_ARGUMENTS, PIPELINE_ARGUMENTS)
    )
    auto_arguments = f"{meshes} --hetero-pipeline-layer-split auto"
    training.measure_step(auto_arguments, 1)
    problem = training.read_split_problem(auto_arguments)
    auto_split = find_best_split(problem)
    splits = [(first, LAYERS - first) for first in sorted({*options.first, auto_split[0]})]
    step_seconds: dict[str, list[float]] = {}
    argument_lists = [f"{meshes} --hetero-pipeline-layer-split {a} {b}" for a, b in splits]
    if not options.slowed:
        pipeline += " --num-layers-in-first-pipeline-stage"
        argument_lists += [
            f"{pipeline} {a} --num-layers-in-last-pipeline-stage {b}" for a, b in splits
        ]
    for round_number in range(options.rounds):
        # In alternating order, so that drift affects all splits equally.
        for arguments in argument_lists if round_number % 2 == 0 else reversed(argument_lists):
            step_seconds.setdefault(arguments, []).append(
                training.measure_step(arguments, options.steps)
            )
    rows = [
        {
            "split": list(layers),
            # The minimum: other load on the machine can only slow a step down.
            "measured": min(step_seconds[arguments]),
            "predicted": problem.simulate_step(layers).seconds,
            "rounds": step_seconds[arguments],
        }
        for layers, arguments in zip(splits, argument_lists, strict=False)
    ]
    for row, arguments in zip(rows, argument_lists[len(splits) :], strict=False):
        row["pipeline_of_like_ranks"] = min(step_seconds[arguments])
    return {
        "rows": rows,
        **summarize_rows(rows, auto_split, problem),
        "command": " ".join(sys.argv),
    }


def summarize_rows(
    rows: Sequence[dict[str, Any]], auto_split: LayerCounts, problem: SplitProblem
) -> dict[str, Any]:
    measured = {tuple(row["split"]): row["measured"] for row in rows}
    fastest_seconds = min(measured.values())
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    return {
        "chosen": list(auto_split),
        "chosen_over_best": measured[auto_split] / fastest_seconds - 1,
        "best_as_calculated_over_chosen": min(r["predicted"] for r in rows) / measured[auto_split],
        "error_of_prediction": {"least": min(errors), "most": max(errors)},
        "error_of_chosen": problem.simulate_step(auto_split).seconds / measured[auto_split] - 1,
    }


class TwoStageTraining:
    """Runner of the training program for two stages. All runs share a cache directory."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._directory = directory
        self._model_arguments = f"{MODEL} {MODEL_SIZES[options.device]}".split()
        ranks_per_stage = options.tensor_parallel
        self._rank_modes = ["normal"] * ranks_per_stage + [
            "slowed" if options.slowed else "normal"
        ] * ranks_per_stage
        self._pins_ranks = options.device == "cpu" and ranks_per_stage == 1

    def measure_step(self, arguments: str, steps: int) -> float:
        """Train for ``steps`` steps after the warm-up. Return the median seconds per step.

        Raises:
            JobError: A rank failed.
        """
        port = free_port()
        run_dir = Path(tempfile.mkdtemp(dir=self._directory))
        program = [
            *self._model_arguments,
            *arguments.split(),
            "--train-iters",
            str(steps + WARMUP_STEPS),
        ]
        processes = []
        cores = sorted(os.sched_getaffinity(0))
        for rank, mode in enumerate(self._rank_modes):
            command = [sys.executable, __file__, RANK_FLAG, mode, *program]
            with (run_dir / f"output_{rank}").open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=self._build_environment(rank, port, run_dir),
                    cwd=run_dir,
                    stdout=output,
                    stderr=output,
                )
            if self._pins_ranks:
                os.sched_setaffinity(process.pid, {cores[rank]})
            processes.append(process)
        codes = [rank.wait() for rank in processes]
        if any(codes):
            outputs = [run_dir / f"output_{rank}" for rank in range(len(processes))]
            tails = [output.read_text(errors="replace")[-2000:] for output in outputs]
            raise JobError(f"{arguments} ended with {codes}:\n" + "\n".join(tails))
        events, _ = read_events(run_dir / "rank_0.jsonl")
        step_seconds: list[float] = [e.get("step_seconds") for e in events if e.event == "progress"]
        return statistics.median(step_seconds[WARMUP_STEPS:] or step_seconds)

    def _build_environment(self, rank: int, port: int, run_dir: Path) -> dict[str, str]:
        inherited = [path] if (path := os.environ.get("PYTHONPATH")) else []
        paths = [str(PROJECT), str(PROJECT / "third_party" / "Megatron-LM"), *inherited]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "XDG_CACHE_HOME": str(self._directory),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(self._rank_modes)),
            "LOCAL_WORLD_SIZE": str(len(self._rank_modes)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            STATUS_DIR_VARIABLE: str(run_dir),
        }

    def read_split_problem(self, arguments: str) -> SplitProblem:
        """Rebuild the search of the ``auto`` training run from the costs that it has cached.

        Raises:
            JobError: The training run has stored no costs.
        """
        words = [*self._model_arguments, "--train-iters", "1", *arguments.split()]
        args = derive_arguments(parse_arguments(words), len(self._rank_modes))
        os.environ["XDG_CACHE_HOME"] = str(self._directory)
        costs = [
            cost_cache.read_costs(cost_cache.mesh_cost_path(vars(args), args.meshes, index))
            for index in range(2)
        ]
        cached_costs = tuple(cached.costs for cached in costs if cached is not None)
        if len(cached_costs) < len(costs):
            raise JobError("the training run has stored no layer times")
        return SplitProblem(args.meshes, cached_costs, (DENSE,) * LAYERS, args.num_microbatches)


def format_result(result: dict[str, Any]) -> str:
    lines = ["split   measured  predicted           as a plain pipeline"]
    for row in result["rows"]:
        measured, predicted = row["measured"], row["predicted"]
        line = f"{'+'.join(map(str, row['split'])):6}  {1e3 * measured:5.0f} ms  "
        line += f"{1e3 * predicted:6.0f} ms {predicted / measured - 1:+6.1%}"
        if pipeline_seconds := row.get("pipeline_of_like_ranks"):
            line += (
                f"  {1e3 * pipeline_seconds:6.0f} ms, meshes {measured / pipeline_seconds - 1:+.1%}"
            )
        lines.append(line)
    chosen = "+".join(map(str, result["chosen"]))
    lines.append(
        f"auto chooses {chosen}: {result['chosen_over_best']:+.1%} compared with the fastest split"
    )
    achieved_fraction = result["best_as_calculated_over_chosen"]
    lines.append(f"{achieved_fraction:.1%} of the predicted speed of the best split reached")
    return "\n".join(lines)


def write_result(path: Path, name: str, result: dict[str, Any]) -> None:
    earlier = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**earlier, name: result}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
