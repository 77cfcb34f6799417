"""Job of torch's elastic agent whose ranks are killed at random moments and started again.

usage: restarting_job.py {static,c10d} NODES NODE_RANK PORT RESTARTS SEED

Runs one agent with two ranks. In each attempt but the last, one rank kills itself: before it joins,
while the ranks meet, or during operations. Prints "recovered" if the last attempt passes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import flagscale.comm.fsccl

RANKS_PER_NODE = 2
LONGEST_LIFE_SECONDS = 0.25


def run_rank(seed: int, restarts: int, node: int) -> str:
    # A forked rank has the agent's handler, which does not run while the rank waits in fsccl. The
    # agent would wait 30 s before it kills the rank. torchrun starts programs without handlers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    generator = random.Random(f"{seed} {attempt} {node}")
    victim = generator.randrange(RANKS_PER_NODE)
    life = generator.uniform(0, LONGEST_LIFE_SECONDS)
    # only ranks of the first node are killed, so that its agent counts every restart
    dies = node == 0 and attempt < restarts and int(os.environ["LOCAL_RANK"]) == victim
    if dies:
        threading.Timer(life, os.kill, (os.getpid(), signal.SIGKILL)).start()
    dist.init_process_group("fsccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, size - 1])
    while True:
        values = torch.full((1000,), float(rank))
        dist.all_reduce(values)
        assert values.tolist() == [size * (size - 1) / 2] * 1000
        if rank in (0, size - 1):
            dist.all_reduce(values, group=pair)
        # the agent of the first node, which may not have rank 0, counts the attempts
        is_last = torch.tensor(float(node == 0 and attempt >= restarts))
        dist.all_reduce(is_last, op=dist.ReduceOp.MAX)
        if is_last.item():
            dist.destroy_process_group()
            return "recovered"
        time.sleep(0.01)


def main() -> None:
    kind, nodes, node, port, restarts, seed = sys.argv[1], *map(int, sys.argv[2:])
    flagscale.comm.fsccl.load_extension()
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=RANKS_PER_NODE,
        run_id="restarts",
        rdzv_backend=kind,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node, "timeout": 120, "is_host": node == 0},
        max_restarts=restarts if node == 0 else 10 * restarts,
        monitor_interval=0.05,
        start_method="fork",
    )
    results = elastic_launch(config, run_rank)(seed, restarts, node)
    print(*set(results.values()), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
