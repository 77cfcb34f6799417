"""``flagscale evaluate``: evaluate a checkpoint on tasks of lm-evaluation-harness.

    flagscale evaluate outputs/checkpoints --tokenizer-path /models/tok --tasks arc.yaml
    flagscale evaluate /models/Llama-3.2-1B --tasks hellaswag arc_easy --nproc 4

CHECKPOINT is a training checkpoint (of a directory of checkpoints the newest), with adapters or
without, or a model in any format that `flagscale convert` reads. Nothing is converted, and no
network is used unless HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flagscale.config.arguments.derive import derive_arguments, rank_arguments
from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.errors import ConfigError, FlagscaleError
from flagscale.files import write_atomic
from flagscale.module_command import python_arguments
from flagscale.train import distributed
from flagscale.train.checkpoint.formats.adapters import (
    merge_adapters,
    open_base_model,
    read_adapters,
)
from flagscale.train.checkpoint.formats.base import StoredModel, detect_format
from flagscale.train.device import choose_device
from flagscale.train.distributed import RankIdentity
from flagscale.train.evaluation.command_options import DEFAULT_SEQ_LENGTH, build_parser
from flagscale.train.evaluation.scores import TaskScores

_MODULE = "flagscale.train.evaluation.command"
_TIMEOUT_MINUTES = 60  # the other ranks wait while rank 0 loads tasks and computes metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``flagscale evaluate``; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = build_parser(__doc__).parse_args(words)
    if options.nproc > 1 and "RANK" not in os.environ:
        _start_ranks(options.nproc, words)
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    rank = RankIdentity.from_environment()
    try:
        scores = evaluate_checkpoint(options, rank)
        if rank.rank == 0:
            _print_scores(scores)
            if options.output is not None:
                write_atomic(options.output, json.dumps(asdict(scores), indent=2) + "\n")
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or options.checkpoint}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _start_ranks(count: int, words: Sequence[str]) -> None:
    """Replace this process with torchrun, which starts this command on ``count`` ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--"]
    command = [sys.executable, *torchrun, *python_arguments(_MODULE), *words]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execv(sys.executable, command)


def evaluate_checkpoint(options: argparse.Namespace, rank: RankIdentity) -> TaskScores:
    """Load the checkpoint into a model on all ranks, and evaluate it.

    Raises:
        DataError: a task or its data cannot be loaded.
        CheckpointError: the checkpoint cannot be read.
        ConfigError: a task is not supported, or the layout does not fit.
    """
    model = open_model(options.checkpoint.absolute(), options.base)
    args = build_arguments(model, options, rank)
    device = choose_device(args.device, rank.local_rank)
    distributed.init_default_group(
        rank, device, backend=args.distributed_backend, timeout_minutes=_TIMEOUT_MINUTES
    )
    try:
        # megatron.core reads the selected device at import time.
        from flagscale.train.checkpoint.formats.pretrained import load_weights
        from flagscale.train.data.tokenizers import build_tokenizer
        from flagscale.train.evaluation.scoring import SequenceScorer
        from flagscale.train.evaluation.tasks import TaskEvaluation, TaskOptions
        from flagscale.train.models.config import build_transformer_config
        from flagscale.train.models.provider import build_chunks
        from flagscale.train.state import Progress, TrainState

        distributed.init_model_parallel(args)
        tokenizer = build_tokenizer(args)
        config = build_transformer_config(args, device)
        vocabulary = pad_vocabulary(args.vocab_size, vars(args))
        chunks = build_chunks(
            args, config, vocabulary, device, initialize_all=False, for_training=False
        )
        scorer = SequenceScorer(args, config, chunks, device, args.vocab_size)
        tasks = TaskOptions(options.tasks, "--tasks", options.fewshot, options.limit)
        evaluation = TaskEvaluation(tasks, scorer, tokenizer)
        no_optimizer: Any = None
        load_weights(args, TrainState(chunks, no_optimizer, no_optimizer, Progress()), model)
        return evaluation.run()
    finally:
        distributed.destroy_groups()


def open_model(path: Path, base: Path | None) -> StoredModel:
    """Open the model of a checkpoint; adapters are merged into their base model."""
    reader = detect_format(path)
    adapters = read_adapters(path) if reader.name == "torch_dist" else None
    if adapters is not None:
        return merge_adapters(adapters, open_base_model(adapters, base)).without_mtp()
    return reader.read(path).without_mtp()


def build_arguments(
    model: StoredModel, options: argparse.Namespace, rank: RankIdentity
) -> argparse.Namespace:
    """Return the arguments of this rank for the model and the layout of the options.

    Raises:
        ConfigError: there is no tokenizer, or the layout does not fit.
    """
    # Imports torch, which the help of the command does not need.
    from flagscale.train.checkpoint.formats.logits import build_model_arguments

    tokenizer_path = options.tokenizer_path or _find_tokenizer(model)
    positions = model.values.get("max_position_embeddings") or DEFAULT_SEQ_LENGTH
    seq_length = options.seq_length or min(positions, DEFAULT_SEQ_LENGTH)
    precision = options.dtype or {"bfloat16": "bf16", "float16": "fp16"}.get(
        str(model.dtype).removeprefix("torch.")
    )
    overrides = {
        "device": options.device,
        "micro_batch_size": options.batch_size,
        "tokenizer_type": options.tokenizer_type,
        "tokenizer_path": str(tokenizer_path),
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "sequence_parallel": options.tensor_model_parallel_size > 1,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
    }
    args = build_model_arguments(model, seq_length, overrides)
    return rank_arguments(derive_arguments(args, rank.world_size), rank.rank)


def _find_tokenizer(model: StoredModel) -> Path:
    """Return the directory of the tokenizer that is stored with a model."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    for directory in (*{path.parent for path in model.files}, model.path):
        if any((directory / name).is_file() for name in names):
            return directory
    raise ConfigError(
        f"{model.path} has no tokenizer",
        hint="name the one that the model was trained with: --tokenizer-path DIR",
    )


def _print_scores(scores: TaskScores) -> None:
    width = max(map(len, scores.values), default=0)
    for name, value in scores.values.items():
        error = f" ± {scores.errors[name]:.4f}" if name in scores.errors else ""
        print(f"{name:<{width}}  {value:.4f}{error}")
    print(f"evaluated in {scores.seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
