"""Train a tiny model with traced and compiled layers and count torch's graphs (not CUDA graphs).

usage: cuda_graph_worker.py ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any


def main(argv: list[str]) -> dict[str, Any]:
    """Return losses of all steps, the validation loss, torch's counters and compile seconds."""
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="0")
    warnings.filterwarnings("ignore")
    from flagscale.config.arguments.derive import derive_arguments
    from flagscale.config.arguments.spec.command_line import parse_arguments
    from flagscale.train import distributed
    from flagscale.train.device import choose_device

    rank = distributed.RankIdentity.from_environment()
    device = choose_device("auto", 0)
    distributed.init_default_group(rank, device, backend="auto", timeout_minutes=2)
    from flagscale.train.build import build_state, padded_vocabulary_size
    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.data.tokenizers import build_tokenizer
    from flagscale.train.deferred_metrics import DeferredMetrics
    from flagscale.train.layers.layer_compilation import compile_layers, get_compile_seconds
    from flagscale.train.models.config import build_transformer_config
    from flagscale.train.step import Stepper

    args = derive_arguments(parse_arguments(argv), 1)
    distributed.init_model_parallel(args)
    tokenizer, config = build_tokenizer(args), build_transformer_config(args, device)
    state = build_state(args, config, padded_vocabulary_size(args, tokenizer), device)
    # Graphs do not depend on the compiler backend; this one is fast.
    compile_layers(state.modules()[0], backend="aot_eager")
    data: Any = build_data_iterators(args, tokenizer, state.progress, model_chunks=1)
    stepper, deferred_metrics = Stepper(args, config, state, device), DeferredMetrics()
    for _ in range(args.train_iters):
        deferred_metrics.add(*stepper.train(data.train, stop_flags=(False, False)))
    validation = stepper.evaluate(data.valid, 1).loss
    from torch._dynamo.utils import counters

    return {
        "loss": [metrics.loss for metrics in deferred_metrics.pop_completed(keep_newest=0)],
        "validation": validation,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "seconds": get_compile_seconds(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
