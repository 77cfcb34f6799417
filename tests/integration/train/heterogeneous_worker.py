"""Train a tiny model with two ranks whose arguments differ and write their weights.

usage: heterogeneous_worker.py CASES.json

CASES is a list of {"directory", "argv": [of rank 0, of rank 1], "stop", "slow"}. A rank runs the
training program's ``main`` and writes weights.npz and its exit code to DIRECTORY/RANK. With
"stop", rank 1 receives SIGTERM once step 3 is reported. With "slow", replica timings of rank 1 are
multiplied by ten. This process imports torch and megatron.core once and forks the ranks of each
case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.forked_ranks import Record, run_forked_ranks

from flagscale.status import STATUS_DIR_VARIABLE, read_events


def main() -> None:
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
    warnings.filterwarnings("ignore")

    for case in json.loads(Path(sys.argv[1]).read_text()):
        run_forked_ranks(2, partial(run_rank, case))


def run_rank(case: dict[str, Any]) -> Iterator[Record]:
    """Run a case on a rank."""
    import numpy as np

    from flagscale.train import microbatch_balancer, setup, train_gpt

    rank = int(os.environ["RANK"])
    status_dir = Path(case["directory"]) / "status"
    os.environ[STATUS_DIR_VARIABLE] = str(status_dir)
    states: list[Any] = []
    original_prepare = setup.prepare_training

    def prepare_and_record(*args: Any, **options: Any) -> Any:
        trainer, state = original_prepare(*args, **options)
        states.append(state)
        return trainer, state

    setup.prepare_training = prepare_and_record
    if case["slow"] and rank == 1:
        microbatch_balancer.time = SimpleNamespace(
            perf_counter_ns=lambda: 10 * time.perf_counter_ns()
        )
    if case["stop"] and rank == 1:
        threading.Thread(target=stop_at_step_3, args=(status_dir,), daemon=True).start()
    exit_code = train_gpt.main(case["argv"][rank])
    rank_directory = Path(case["directory"]) / str(rank)
    rank_directory.mkdir()
    np.savez(rank_directory / "weights.npz", **(dict(iter_weights(states[0])) if states else {}))
    (rank_directory / "exit_code").write_text(str(exit_code))
    yield "exit_code", {"exit_code": exit_code}


def iter_weights(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield each weight by name, with the prefix ``shard:`` if it is split over tensor-parallel
    ranks.
    """
    for module in state.modules():
        for name, weight in module.named_parameters():
            prefix = "shard:" if getattr(weight, "tensor_model_parallel", False) else ""
            yield f"{prefix}{name}", weight.detach().float().numpy()


def stop_at_step_3(status_dir: Path) -> None:
    """Send SIGTERM to this process once rank 0 has reported step 3."""
    status_file = status_dir / "rank_0.jsonl"
    while not status_file.exists() or not any(
        event.event == "progress" and event.get("step") >= 3
        for event in read_events(status_file)[0]
    ):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
