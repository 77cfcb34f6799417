#!/usr/bin/env python3
"""Measure how well layers are shared out between stages on unlike devices; write the figures.

Two ranks of this machine, a core or a GPU each, are the two stages of a model; with ``--slowed``
the second one's layers take twice the time: they do their work twice. Every split is trained, and
beside what its step took stands what the model of a step (docs/hetero.md) says of it by the times
that ``hetero_pipeline_layer_split: auto`` measured; then what auto chose. Without ``--slowed`` the
same cuts are trained as a plain pipeline of like ranks, too. ``--tensor-parallel 2`` makes a stage
of two ranks.

    python tools/bench/layer_split.py --slowed --output docs/results/layer-split-cpu.json
    python tools/bench/layer_split.py --slowed --device cuda --rounds 1 --output …
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.errors import ConfigError, JobError
from flagscale.estimate import cost_cache
from flagscale.estimate.costs import DENSE
from flagscale.estimate.split import Layers, Problem, best
from flagscale.status import STATUS_DIR_VARIABLE, read_events

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
LAYERS, WARM_UP = 8, 2
RANK = "--rank"
"""Comes first, and then "plain" or "slowed", where this file is a rank's program."""
MODEL = f"""
--num-layers {LAYERS} --mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--num-workers 0 --lr 1e-5 --lr-decay-style constant --log-interval 1
"""
SIZES = {
    "cpu": """--hidden-size 256 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 768
--seq-length 256 --micro-batch-size 2 --global-batch-size 8 --vocab-size 2000 --device cpu""",
    # A layer of Llama-3-8B.
    "cuda": """--hidden-size 4096 --num-attention-heads 32 --num-query-groups 8
--ffn-hidden-size 14336 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8
--vocab-size 32000 --device cuda --bf16""",
}
MESHES = "--enable-hetero --hetero-process-meshes {0} 1 1 1 1  {0} 1 1 1 1"
PLAIN = "--tensor-model-parallel-size {0} --pipeline-model-parallel-size 2"
"""Both of so many tensor-parallel ranks a stage."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == [RANK]:
        return rank_main(given[2:], slowed=given[1] == "slowed")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--slowed", action="store_true", help="the second rank is half as fast")
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu", help="%(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of a stage, %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="of each training, %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of all splits, %(default)s")
    parser.add_argument(
        "--first",
        type=int,
        nargs="+",
        default=list(range(1, LAYERS)),
        metavar="N",
        help="layers of the first stage, of each split that is trained; all splits",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write, or to add to")
    options = parser.parse_args(given)
    before = machine.facts("torch", "megatron-core")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two cores are needed, one for each stage")
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Trainings(Path(directory), options), options)
    print(text(found))
    if options.output:
        name = "slowed" if options.slowed else "alike"
        if options.tensor_parallel > 1:
            name += f", {2 * options.tensor_parallel} ranks"
        write(options.output, name, {**before, **found})
    return 0


def rank_main(arguments: Sequence[str], *, slowed: bool) -> int:
    """The training program, on layers that take twice the time if they are to."""
    sys.argv[0] = str(PROGRAM)
    sys.path.insert(0, str(PROJECT / "third_party" / "Megatron-LM"))
    if "cpu" in arguments:
        os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1")
    if slowed:
        slow_layers()
    from flagscale.train.train_gpt import main as train_gpt

    return train_gpt(arguments)


def slow_layers() -> None:
    """Have every transformer layer do its work twice, in both passes: it runs twice, and what comes
    out is the mean of the two, which is what one gives, as are the gradients."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    once = TransformerLayer.__call__

    def twice(layer: Any, *args: Any, **options: Any) -> Any:
        hidden, *others = once(layer, *args, **options)
        again, *_ = once(layer, *args, **options)
        return (0.5 * (hidden + again), *others)

    # Outside of what is compiled: a graph would do the same work once.
    TransformerLayer.__call__ = twice


def measure(trainings: Trainings, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step: of every split, as measured and as predicted, and of auto's."""
    meshes, plain = (text.format(options.tensor_parallel) for text in (MESHES, PLAIN))
    auto = f"{meshes} --hetero-pipeline-layer-split auto"
    trainings.seconds(auto, 1)
    problem = trainings.asked(auto)
    chosen = best(problem)
    splits = [(first, LAYERS - first) for first in sorted({*options.first, chosen[0]})]
    runs: dict[str, list[float]] = {}
    names = [f"{meshes} --hetero-pipeline-layer-split {a} {b}" for a, b in splits]
    if not options.slowed:
        plain += " --num-layers-in-first-pipeline-stage"
        names += [f"{plain} {a} --num-layers-in-last-pipeline-stage {b}" for a, b in splits]
    for number in range(options.rounds):
        # Forth and back, so that what drifts does so for all.
        for name in names if number % 2 == 0 else reversed(names):
            runs.setdefault(name, []).append(trainings.seconds(name, options.steps))
    rows = [
        {
            "split": list(layers),
            # Whatever else the machine does only slows.
            "measured": min(runs[name]),
            "predicted": problem.step(layers).seconds,
            "rounds": runs[name],
        }
        for layers, name in zip(splits, names, strict=False)
    ]
    for row, name in zip(rows, names[len(splits) :], strict=False):
        row["pipeline_of_like_ranks"] = min(runs[name])
    return {"rows": rows, **summary(rows, chosen, problem), "command": " ".join(sys.argv)}


def summary(rows: Sequence[dict[str, Any]], chosen: Layers, problem: Problem) -> dict[str, Any]:
    measured = {tuple(row["split"]): row["measured"] for row in rows}
    fastest = min(measured.values())
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    return {
        "chosen": list(chosen),
        "chosen_over_best": measured[chosen] / fastest - 1,
        "best_as_calculated_over_chosen": min(r["predicted"] for r in rows) / measured[chosen],
        "error_of_prediction": {"least": min(errors), "most": max(errors)},
        "error_of_chosen": problem.step(chosen).seconds / measured[chosen] - 1,
    }


class Trainings:
    """The training program on a rank or several a stage, which share a directory for what they
    keep."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._directory = directory
        self._model = f"{MODEL} {SIZES[options.device]}".split()
        each = options.tensor_parallel
        self._kinds = ["plain"] * each + ["slowed" if options.slowed else "plain"] * each
        self._pinned = options.device == "cpu" and each == 1

    def seconds(self, arguments: str, steps: int) -> float:
        """The median of a step's."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        own = Path(tempfile.mkdtemp(dir=self._directory))
        program = [*self._model, *arguments.split(), "--train-iters", str(steps + WARM_UP)]
        ranks = []
        cores = sorted(os.sched_getaffinity(0))
        for rank, kind in enumerate(self._kinds):
            command = [sys.executable, __file__, RANK, kind, *program]
            with (own / f"output_{rank}").open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=self._variables(rank, port, own),
                    cwd=own,
                    stdout=output,
                    stderr=output,
                )
            if self._pinned:
                os.sched_setaffinity(process.pid, {cores[rank]})
            ranks.append(process)
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            outputs = [own / f"output_{rank}" for rank in range(len(ranks))]
            tails = [output.read_text(errors="replace")[-2000:] for output in outputs]
            raise JobError(f"{arguments} ended with {codes}:\n" + "\n".join(tails))
        events, _ = read_events(own / "rank_0.jsonl")
        taken: list[float] = [e.get("step_seconds") for e in events if e.event == "progress"]
        return statistics.median(taken[WARM_UP:] or taken)

    def _variables(self, rank: int, port: int, own: Path) -> dict[str, str]:
        before = [path] if (path := os.environ.get("PYTHONPATH")) else []
        paths = [str(PROJECT), str(PROJECT / "third_party" / "Megatron-LM"), *before]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "XDG_CACHE_HOME": str(self._directory),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(self._kinds)),
            "LOCAL_WORLD_SIZE": str(len(self._kinds)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            STATUS_DIR_VARIABLE: str(own),
        }

    def asked(self, arguments: str) -> Problem:
        """The search that training made, from the times it has kept."""
        given = [*self._model, "--train-iters", "1", *arguments.split()]
        args = resolve(parse_arguments(given), len(self._kinds))
        os.environ["XDG_CACHE_HOME"] = str(self._directory)
        costs = [
            cost_cache.read(cost_cache.path_of(vars(args), args.meshes, index))
            for index in range(2)
        ]
        known = tuple(one.costs for one in costs if one is not None)
        if len(known) < len(costs):
            raise JobError("training has kept no times")
        return Problem(args.meshes, known, (DENSE,) * LAYERS, args.num_microbatches)


def text(found: dict[str, Any]) -> str:
    lines = ["split   measured  predicted           as a plain pipeline"]
    for row in found["rows"]:
        measured, predicted = row["measured"], row["predicted"]
        line = f"{'+'.join(map(str, row['split'])):6}  {1e3 * measured:5.0f} ms  "
        line += f"{1e3 * predicted:6.0f} ms {predicted / measured - 1:+6.1%}"
        if plain := row.get("pipeline_of_like_ranks"):
            line += f"  {1e3 * plain:6.0f} ms, meshes {measured / plain - 1:+.1%}"
        lines.append(line)
    chosen = "+".join(map(str, found["chosen"]))
    lines.append(f"auto takes {chosen}: {found['chosen_over_best']:+.1%} of the fastest of all")
    calculated = found["best_as_calculated_over_chosen"]
    lines.append(f"what the best split allows by calculation: {calculated:.1%} reached")
    return "\n".join(lines)


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, name: found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(guard(main))
