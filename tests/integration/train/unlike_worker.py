"""Trains one tiny model with two ranks whose arguments differ, and writes down their weights.

usage: unlike_worker.py CASES.json

CASES is a list of {"directory", "argv": [of rank 0, of rank 1], "stop", "slow"}. A rank runs the
training program's ``main`` and leaves weights.npz and its exit code in DIRECTORY/RANK. With "stop",
rank 1 gets a SIGTERM once step 3 is reported; with "slow" its clock shows ten times as much time as
replicas are measured by. This process imports torch and megatron.core once and forks
the ranks of each case.
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

from support.forked_ranks import Record, run_world

from flagscale.status import STATUS_DIR_VARIABLE, read_events


def main() -> None:
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
    warnings.filterwarnings("ignore")
    import flagscale.train.setup  # noqa: F401 - so that the ranks need not

    for case in json.loads(Path(sys.argv[1]).read_text()):
        run_world(2, partial(run_rank, case))


def run_rank(case: dict[str, Any]) -> Iterator[Record]:
    """The life of a rank."""
    import numpy as np

    from flagscale.train import microbatch_balancer, setup, train_gpt

    rank = int(os.environ["RANK"])
    status = Path(case["directory"]) / "status"
    os.environ[STATUS_DIR_VARIABLE] = str(status)
    states: list[Any] = []
    prepare = setup.prepare

    def kept(*given: Any, **options: Any) -> Any:
        made = prepare(*given, **options)
        states.append(made[1])
        return made

    setup.prepare = kept
    if case["slow"] and rank == 1:
        microbatch_balancer.time = SimpleNamespace(
            perf_counter_ns=lambda: 10 * time.perf_counter_ns()
        )
    if case["stop"] and rank == 1:
        threading.Thread(target=stop_at_step_3, args=(status,), daemon=True).start()
    code = train_gpt.main(case["argv"][rank])
    own = Path(case["directory"]) / str(rank)
    own.mkdir()
    np.savez(own / "weights.npz", **(dict(weights_of(states[0])) if states else {}))
    (own / "code").write_text(str(code))
    yield "code", {"code": code}


def weights_of(state: Any) -> Iterator[tuple[str, Any]]:
    """Each weight by its name, which begins with ``shard:`` where tensor-parallel ranks hold parts
    of it."""
    for module in state.modules():
        for name, weight in module.named_parameters():
            split = "shard:" if getattr(weight, "tensor_model_parallel", False) else ""
            yield f"{split}{name}", weight.detach().float().numpy()


def stop_at_step_3(status: Path) -> None:
    reports = status / "rank_0.jsonl"
    while not reports.exists() or not any(
        event.event == "progress" and event.get("step") >= 3 for event in read_events(reports)[0]
    ):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
