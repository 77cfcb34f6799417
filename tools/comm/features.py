#!/usr/bin/env python3
"""Compare fsccl with gloo in PyTorch features that are built on collectives, such as DDP.

    tools/comm/features.py --rounds 30 --json docs/results/fsccl-features-cpu.json

Four ranks of this host have a group of each backend. In each round every feature runs once on
each backend, in an order drawn by a seed. The time of a round is that of its slowest rank. The
ratio is that of the medians, with its 95 % interval by the bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import children
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flagscale.comm.fsccl
from flagscale.bench.machine import describe_machine
from flagscale.bench.statistics import median_ratio

RANKS = 4
BACKENDS = ("gloo", "fsccl")
WIDTH, LAYERS, BATCH = 256, 6, 8
"""Sizes of the trained model, a multilayer perceptron with 0.4 million weights in fp32."""

Step = Callable[[], object]


def _build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _make_training_step(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def _make_ddp_step(group: dist.ProcessGroup) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return _make_training_step(DistributedDataParallel(_build_model(), process_group=group))


def _make_fsdp2_step(group: dist.ProcessGroup) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _build_model(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _make_training_step(model)


def _make_tensor_parallel_step(group: dist.ProcessGroup) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import parallel as tp

    plan: dict[str, tp.ParallelStyle] = {
        str(i): tp.RowwiseParallel() if i % 2 else tp.ColwiseParallel() for i in range(LAYERS)
    }
    return _make_training_step(
        tp.parallelize_module(_build_model(), DeviceMesh.from_group(group, "cpu"), plan)
    )


def _make_redistribution_step(group: dist.ProcessGroup) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(1024, 256)
    shards = distribute_tensor(whole, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return lambda: shards.redistribute(placements=[Shard(1)])


def _make_functional_step(group: dist.ProcessGroup, *, compiled: bool) -> Step:
    import torch.distributed._functional_collectives as funcol

    def step(x: Tensor) -> Any:
        total = funcol.all_reduce(x * 2, "sum", group)
        whole = funcol.all_gather_tensor(total, 0, group)
        return funcol.reduce_scatter_tensor(whole + 1, "sum", 0, group)

    x = torch.randn(16384)
    run = torch.compile(step, fullgraph=True) if compiled else step
    return lambda: run(x).sum().item()


def _make_object_gather_step(group: dist.ProcessGroup) -> Step:
    data = {"rank": dist.get_rank(), "words": ["some"] * 100}
    return lambda: dist.all_gather_object([None] * RANKS, data, group=group)


def _make_checkpoint_step(group: dist.ProcessGroup, directory: str) -> Step:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _build_model().state_dict()
    checkpoint_path = Path(directory, group.name())
    return lambda: save(state, checkpoint_id=checkpoint_path, process_group=group)


def _list_features(directory: str) -> dict[str, Callable[[dist.ProcessGroup], Step]]:
    return {
        "DDP, a step": _make_ddp_step,
        "FSDP2, a step": _make_fsdp2_step,
        "tensor parallel (DTensor), a step": _make_tensor_parallel_step,
        "DTensor from rows to columns, 1 MiB": _make_redistribution_step,
        "functional collectives, 64 KiB": partial(_make_functional_step, compiled=False),
        "the same compiled by inductor": partial(_make_functional_step, compiled=True),
        "all_gather_object": _make_object_gather_step,
        "distributed.checkpoint, a save": partial(_make_checkpoint_step, directory=directory),
    }


def _run_rank(
    rounds: int, warmup_rounds: int, seed: int, directory: str, rank: int, output: int
) -> None:
    """Run a rank: write its seconds as a JSON line for each feature, backend and round."""
    warnings.filterwarnings("ignore")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    generator = random.Random(seed)  # the same on all ranks
    for feature, make_step in _list_features(directory).items():
        steps = {name: make_step(group) for name, group in groups.items()}
        for round_number in range(-warmup_rounds, rounds):
            for name in generator.sample(BACKENDS, len(BACKENDS)):
                dist.barrier()
                begin = time.perf_counter()
                steps[name]()
                seconds = time.perf_counter() - begin
                if round_number >= 0:
                    line = {"feature": feature, "backend": name, "seconds": seconds}
                    os.write(output, (json.dumps(line) + "\n").encode())
    os.write(output, b"\n")
    dist.barrier()
    signal.pause()


def measure(rounds: int, warmup_rounds: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of the slowest rank for each round, by feature and backend."""
    directory = tempfile.mkdtemp()
    store_process, port = children.start_store()
    processes = [store_process]
    seconds_by_feature: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    try:
        run_rank = partial(_run_rank, rounds, warmup_rounds, seed, directory)
        ranks = children.start_ranks(RANKS, port, str(RANKS), run_rank)
        processes += ranks
        while True:
            lines = [rank.output.readline() for rank in ranks]
            if not all(lines):
                raise RuntimeError("a rank has ended")
            if not lines[0].strip():
                return seconds_by_feature
            results: list[dict[str, Any]] = [json.loads(line) for line in lines]
            slowest_seconds = max(result["seconds"] for result in results)
            seconds_by_feature[results[0]["feature"]][results[0]["backend"]].append(slowest_seconds)
    finally:
        children.kill_children(processes)
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm", type=int, default=5, help="rounds that do not count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flagscale.comm.fsccl.load_extension()  # compiled before ranks are started
    rows = []
    print(f"{'':36} {'gloo ms':>9} {'fsccl ms':>9}   times gloo [95 %]")
    for feature, times in measure(arguments.rounds, arguments.warm, arguments.seed).items():
        ratio = median_ratio(times["gloo"], times["fsccl"])
        bounds = (ratio.value, ratio.low, ratio.high)
        row = {f"{name}_ms": round(statistics.median(times[name]) * 1e3, 3) for name in BACKENDS}
        rows.append(
            {"feature": feature, **row, "times_gloo": [round(bound, 3) for bound in bounds]}
        )
        interval = "{:.2f} [{:.2f}, {:.2f}]".format(*bounds)
        print(f"{feature:36} {row['gloo_ms']:9.2f} {row['fsccl_ms']:9.2f}   {interval}")
    if arguments.json:
        result = {
            "machine": describe_machine(),
            "ranks": RANKS,
            "rounds": arguments.rounds,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
