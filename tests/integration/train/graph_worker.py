"""Trains a tiny model with layers compiled as far as graphs go; says how many graphs there were.

usage: graph_worker.py ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any


def main(argv: list[str]) -> dict[str, Any]:
    """Losses of three steps, the validation loss, what torch's tracer counted, and how long it
    took."""
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="0")
    warnings.filterwarnings("ignore")
    from flagscale.config.arguments.parser import parse_arguments
    from flagscale.config.arguments.resolve import resolve
    from flagscale.train import distributed
    from flagscale.train.device import choose

    rank = distributed.Rank.from_environment()
    device = choose("auto", 0)
    distributed.join(rank, device, backend="auto", timeout_minutes=2)
    from flagscale.train.build import build_state, model_vocabulary
    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.data.tokenizers import build_tokenizer
    from flagscale.train.layers.compiling import compile_layers, seconds_spent
    from flagscale.train.models.config import transformer_config
    from flagscale.train.readings import Readings
    from flagscale.train.step import Stepper

    args = resolve(parse_arguments(argv), 1)
    distributed.lay_out(args)
    tokenizer, config = build_tokenizer(args), transformer_config(args, device)
    state = build_state(args, config, model_vocabulary(args, tokenizer), device)
    # The graphs are the same for every compiler; this one is quick.
    compile_layers(state.modules()[0], backend="aot_eager")
    data: Any = build_data_iterators(args, tokenizer, state.progress, chunks=1)
    stepper, readings = Stepper(args, config, state, device), Readings()
    for _ in range(3):
        readings.add(*stepper.train(data.train, stop=(False, False)))
    validation = stepper.evaluate(data.valid, 1)
    from torch._dynamo.utils import counters

    return {
        "loss": [reading.loss for reading in readings.take(leave=0)],
        "validation": validation,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "seconds": seconds_spent(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
