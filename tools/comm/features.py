#!/usr/bin/env python3
"""Compare PyTorch features that are built on collectives on fsccl and gloo, by turns.

    tools/comm/features.py --rounds 30 --json docs/results/fsccl-features-cpu.json

Four ranks of this host have a group of each backend. In each round every feature runs once on
each, in an order drawn by a seed. A time is that of the slowest rank, a ratio that of the
medians, with its 95 % interval by the bootstrap over rounds.
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
"""Of the model that is trained: 0.4 million weights in fp32, 1.6 MB of gradients."""

Step = Callable[[], object]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _training(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def _ddp(group: dist.ProcessGroup) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return _training(DistributedDataParallel(_model(), process_group=group))


def _fsdp2(group: dist.ProcessGroup) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _training(model)


def _tensor_parallel(group: dist.ProcessGroup) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import parallel as tp

    plan: dict[str, tp.ParallelStyle] = {
        str(i): tp.RowwiseParallel() if i % 2 else tp.ColwiseParallel() for i in range(LAYERS)
    }
    return _training(tp.parallelize_module(_model(), DeviceMesh.from_group(group, "cpu"), plan))


def _redistribution(group: dist.ProcessGroup) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(1024, 256)
    shards = distribute_tensor(whole, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return lambda: shards.redistribute(placements=[Shard(1)])


def _functional(group: dist.ProcessGroup, *, compiled: bool) -> Step:
    import torch.distributed._functional_collectives as funcol

    def step(x: Tensor) -> Any:
        total = funcol.all_reduce(x * 2, "sum", group)
        whole = funcol.all_gather_tensor(total, 0, group)
        return funcol.reduce_scatter_tensor(whole + 1, "sum", 0, group)

    x = torch.randn(16384)
    run = torch.compile(step, fullgraph=True) if compiled else step
    return lambda: run(x).sum().item()


def _objects(group: dist.ProcessGroup) -> Step:
    interval = {"rank": dist.get_rank(), "words": ["some"] * 100}
    return lambda: dist.all_gather_object([None] * RANKS, interval, group=group)


def _checkpoint(group: dist.ProcessGroup, directory: str) -> Step:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _model().state_dict()
    at = Path(directory, group.name())
    return lambda: save(state, checkpoint_id=at, process_group=group)


def _features(directory: str) -> dict[str, Callable[[dist.ProcessGroup], Step]]:
    return {
        "DDP, a step": _ddp,
        "FSDP2, a step": _fsdp2,
        "tensor parallel (DTensor), a step": _tensor_parallel,
        "DTensor from rows to columns, 1 MiB": _redistribution,
        "functional collectives, 64 KiB": partial(_functional, compiled=False),
        "the same compiled by inductor": partial(_functional, compiled=True),
        "all_gather_object": _objects,
        "distributed.checkpoint, a save": partial(_checkpoint, directory=directory),
    }


def _run_rank(rounds: int, warm: int, seed: int, directory: str, rank: int, out: int) -> None:
    """Run a rank: write its seconds as a JSON line for each feature, backend and round."""
    warnings.filterwarnings("ignore")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    order = random.Random(seed)  # the same on all ranks
    for feature, make in _features(directory).items():
        steps = {name: make(group) for name, group in groups.items()}
        for number in range(-warm, rounds):
            for name in order.sample(BACKENDS, len(BACKENDS)):
                dist.barrier()
                begin = time.perf_counter()
                steps[name]()
                taken = time.perf_counter() - begin
                if number >= 0:
                    line = {"feature": feature, "backend": name, "seconds": taken}
                    os.write(out, (json.dumps(line) + "\n").encode())
    os.write(out, b"\n")
    dist.barrier()
    signal.pause()


def measure(rounds: int, warm: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of the slowest rank for each round, by feature and backend."""
    directory = tempfile.mkdtemp()
    keeper, port = children.start_store()
    started = [keeper]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    try:
        life = partial(_run_rank, rounds, warm, seed, directory)
        ranks = children.start_ranks(RANKS, port, str(RANKS), life)
        started += ranks
        while True:
            lines = [rank.output.readline() for rank in ranks]
            if not all(lines):
                raise RuntimeError("a rank has ended")
            if not lines[0].strip():
                return found
            interval: list[dict[str, Any]] = [json.loads(line) for line in lines]
            slowest = max(one["seconds"] for one in interval)
            found[interval[0]["feature"]][interval[0]["backend"]].append(slowest)
    finally:
        children.kill_children(started)
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
        ends = (ratio.value, ratio.low, ratio.high)
        row = {f"{name}_ms": round(statistics.median(times[name]) * 1e3, 3) for name in BACKENDS}
        rows.append({"feature": feature, **row, "times_gloo": [round(end, 3) for end in ends]})
        interval = "{:.2f} [{:.2f}, {:.2f}]".format(*ends)
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
