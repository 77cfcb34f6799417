#!/usr/bin/env python3
"""Measure how well layers are shared out between stages on unlike devices; write the figures.

Two ranks of this machine, a core each, are the two stages of a small model; with ``--slowed`` the
second one's layers take twice the time: after each of their passes it computes as long again for
nothing. Every split is trained, and beside what its step took stands what the model of a step
(docs/hetero.md) says of it by the times that ``hetero_pipeline_layer_split: auto`` measured; then
what auto chose. Without ``--slowed`` the same cuts are trained as a plain pipeline of like ranks,
too.

    python tools/bench/layer_split.py --slowed --output docs/results/layer-split-cpu.json
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.errors import ConfigError, JobError
from flagscale.estimate import kept
from flagscale.estimate.costs import DENSE
from flagscale.estimate.split import Layers, Problem, best
from flagscale.guard import guard
from flagscale.status import STATUS_DIR_VARIABLE, read_events

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
LAYERS, WARM_UP = 8, 2
MODEL = f"""
--num-layers {LAYERS} --hidden-size 256 --num-attention-heads 8 --num-query-groups 4
--ffn-hidden-size 768 --seq-length 256 --micro-batch-size 2 --global-batch-size 8
--vocab-size 2000 --make-vocab-size-divisible-by 64 --mock-data --tokenizer-type NullTokenizer
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--num-workers 0 --lr 1e-4 --lr-decay-style constant --log-interval 1 --device cpu
"""
MESHES = "--enable-hetero --hetero-process-meshes 1 1 1 1 1  1 1 1 1 1"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--slowed", action="store_true", help="the second rank is half as fast")
    parser.add_argument("--steps", type=int, default=8, help="of each training, %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of all splits, %(default)s")
    parser.add_argument("--rank", choices=("plain", "slowed"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file to write, or to add to")
    options, training = parser.parse_known_args(argv)
    if options.rank:
        return rank_main(training, slowed=options.rank == "slowed")
    if training:
        parser.error(f"unknown: {' '.join(training)}")
    if len(os.sched_getaffinity(0)) < 2:
        raise ConfigError("two cores are needed, one for each stage")
    before = machine.facts("torch", "megatron-core")
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), cores, options)
    print(text(found))
    if options.output:
        write(options.output, "slowed" if options.slowed else "alike", {**before, **found})
    return 0


def rank_main(arguments: Sequence[str], *, slowed: bool) -> int:
    """The training program, on layers that take twice the time if they are to."""
    sys.argv[0] = str(PROGRAM)
    sys.path.insert(0, str(PROJECT / "third_party" / "Megatron-LM"))
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1")
    if slowed:
        slow_layers()
    from flagscale.train.train_gpt import main as train_gpt

    return train_gpt(arguments)


def slow_layers() -> None:
    """Have every transformer layer's passes be followed by as long a computation for nothing."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    ballast = torch.ones(256, 256)

    def as_long_again(begun: float) -> None:
        now = time.perf_counter()
        with torch.no_grad():
            while time.perf_counter() < 2 * now - begun:
                ballast @ ballast

    class Inward(torch.autograd.Function):
        """Its backward pass is the last of the layer's."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, begun: list[float]) -> Any:
            ctx.begun = begun
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            as_long_again(ctx.begun[0])
            return gradient, None

    class Outward(torch.autograd.Function):
        """Its backward pass is the first of the layer's."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, begun: list[float]) -> Any:
            ctx.begun = begun
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            ctx.begun[:] = [time.perf_counter()]
            return gradient, None

    plain = TransformerLayer.forward

    def forward(layer: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
        begin, begun = time.perf_counter(), list[float]()
        hidden = Inward.apply(hidden_states, begun)  # type: ignore[no-untyped-call]
        out, *others = plain(layer, hidden, *args, **options)
        as_long_again(begin)
        return (Outward.apply(out, begun), *others)  # type: ignore[no-untyped-call]

    TransformerLayer.forward = forward


def measure(directory: Path, cores: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step: of every split, as measured and as predicted, and of auto's."""
    splits = [(first, LAYERS - first) for first in range(1, LAYERS)]
    runs: dict[str, list[float]] = {}
    names = [f"{MESHES} --hetero-pipeline-layer-split {a} {b}" for a, b in splits]
    if not options.slowed:
        plain = "--pipeline-model-parallel-size 2 --num-layers-in-first-pipeline-stage"
        names += [f"{plain} {a} --num-layers-in-last-pipeline-stage {b}" for a, b in splits]
    auto = f"{MESHES} --hetero-pipeline-layer-split auto"
    train(auto, directory, cores, steps=1, slowed=options.slowed)
    for number in range(options.rounds):
        # Forth and back, so that what drifts does so for all.
        for name in names if number % 2 == 0 else reversed(names):
            seconds = train(name, directory, cores, steps=options.steps, slowed=options.slowed)
            runs.setdefault(name, []).append(seconds)
    problem = asked(auto, directory)
    chosen = best(problem)
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


def asked(arguments: str, directory: Path) -> Problem:
    """The search that training made, from the times it has kept."""
    args = resolve(parse_arguments(f"{MODEL} --train-iters 1 {arguments}".split()), 2)
    os.environ["XDG_CACHE_HOME"] = str(directory)
    costs = [kept.read(kept.path_of(vars(args), args.meshes, index)) for index in range(2)]
    known = tuple(one.costs for one in costs if one is not None)
    if len(known) < len(costs):
        raise JobError("training has kept no times")
    return Problem(args.meshes, known, (DENSE,) * LAYERS, args.num_microbatches)


def train(
    arguments: str, directory: Path, cores: Sequence[int], *, steps: int, slowed: bool
) -> float:
    """Median seconds of a step of the training program on two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    own = Path(tempfile.mkdtemp(dir=directory))
    paths = [str(PROJECT), str(PROJECT / "third_party" / "Megatron-LM")]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XDG_CACHE_HOME": str(directory),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        STATUS_DIR_VARIABLE: str(own),
    }
    program = [*MODEL.split(), *arguments.split(), "--train-iters", str(steps + WARM_UP)]
    ranks = []
    for rank, core in enumerate(cores):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        kind = "slowed" if slowed and rank == 1 else "plain"
        command = [sys.executable, __file__, "--rank", kind, *program]
        with (own / f"output_{rank}").open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=own, stdout=output, stderr=output
            )
        os.sched_setaffinity(process.pid, {core})
        ranks.append(process)
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        tails = [(own / f"output_{rank}").read_text(errors="replace")[-2000:] for rank in (0, 1)]
        raise JobError(f"{arguments} ended with {codes}:\n" + "\n".join(tails))
    events, _ = read_events(own / "rank_0.jsonl")
    taken: list[float] = [e.get("step_seconds") for e in events if e.event == "progress"]
    return statistics.median(taken[WARM_UP:] or taken)


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
