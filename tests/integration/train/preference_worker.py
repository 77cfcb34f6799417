"""Train on pairs of answers in forked ranks, and write events and logs of each run.

usage: preference_worker.py CASES.json RESULTS.json

CASES is a list of {"id", "world", "argv"}, run in this order. Cases that follow each other with the
same number of ranks share their ranks. The process imports torch and megatron.core once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.forked_ranks import (
    Record,
    import_training,
    reset_megatron_state,
    run_forked_ranks,
)


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    os.environ["FLAGSCALE_DEVICE"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import_training()
    results: dict[str, Any] = {}
    for world, group in groupby(cases, key=lambda case: case["world"]):
        results.update(run_forked_ranks(world, partial(run_rank, list(group))))
    Path(sys.argv[2]).write_text(json.dumps(results))


def run_rank(cases: list[dict[str, Any]]) -> Iterator[Record]:
    """Run the cases on a rank and yield their results."""
    from flagscale.train import distributed
    from flagscale.train.device import choose_device

    rank = distributed.RankIdentity.from_environment()
    device = choose_device("cpu", rank.local_rank)
    distributed.init_default_group(rank, device, backend="gloo", timeout_minutes=2)
    for case in cases:
        yield case["id"], train(case["argv"], rank, device)
        reset_megatron_state()
    distributed.destroy_groups()


def train(argv: list[str], rank: Any, device: Any) -> dict[str, Any]:
    """Train as the training program does; return events, the console's text and the error."""
    from flagscale.config.arguments.derive import derive_arguments, rank_arguments
    from flagscale.config.arguments.spec.command_line import parse_arguments
    from flagscale.errors import FlagscaleError
    from flagscale.status import StatusWriter, read_events
    from flagscale.train.setup import prepare_training

    log, error = io.StringIO(), ""
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(log):
        status = StatusWriter(Path(directory), rank.rank)
        try:
            args = derive_arguments(parse_arguments(argv), rank.world_size)
            trainer, _ = prepare_training(rank_arguments(args, rank.rank), rank, device, status)
            trainer.run()
        except FlagscaleError as problem:
            error = f"{problem} {getattr(problem, 'hint', '') or ''}"
        events = []
        if rank.rank == 0:
            rows = read_events(Path(directory) / "rank_0.jsonl")[0]
            events = [{"event": row.event, **row.fields} for row in rows]
    return {"events": events, "log": log.getvalue(), "error": error}


if __name__ == "__main__":
    main()
