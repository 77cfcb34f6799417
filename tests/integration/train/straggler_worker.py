"""Train with four ranks, of which one reads its data slowly in the first steps.

usage: straggler_worker.py STATUS_DIRECTORY SLOW_RANK ARGUMENT …

Windows are shorter than in real runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.forked_ranks import Record, import_training, run_forked_ranks

_DELAY_SECONDS = 0.1
_SLOW_MICRO_BATCHES = 50
_USUAL_SECONDS = 0.02
"""Time to read any other micro-batch. It makes the remaining steps last several windows, however
fast the machine is.
"""


def main() -> None:
    os.environ |= {"FLAGSCALE_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["FLAGSCALE_STATUS_DIR"] = sys.argv[1]
    import_training()
    print(json.dumps(run_forked_ranks(4, run_rank)))


def run_rank() -> Iterator[Record]:
    from flagscale.train import stragglers, train_gpt
    from flagscale.train.data import datasets

    stragglers.WINDOW_SECONDS = 0.5
    rank = int(os.environ["RANK"])
    os.environ["FLAGSCALE_HOST"] = f"host{rank}"
    slow_micro_batches = _SLOW_MICRO_BATCHES if rank == int(sys.argv[2]) else 0
    build_iterators = datasets.Datasets.build_iterators

    def build_slow_iterators(*args: Any, **kwargs: Any) -> Any:
        iterators = build_iterators(*args, **kwargs)
        return replace(iterators, train=delay(iterators.train, slow_micro_batches))

    datasets.Datasets.build_iterators = build_slow_iterators  # type: ignore[method-assign]
    yield "end", {"code": train_gpt.main(sys.argv[3:])}


def delay(iterator: Any, slow_micro_batches: int) -> Iterator[Any]:
    for number, item in enumerate(iterator):
        time.sleep(_DELAY_SECONDS if number < slow_micro_batches else _USUAL_SECONDS)
        yield item


if __name__ == "__main__":
    main()
