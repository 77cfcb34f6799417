"""Command line of ``flagscale evaluate``. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from flagscale.train.checkpoint.formats.convert_options import PRECISIONS, parse_count

DEFAULT_SEQ_LENGTH = 2048


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="flagscale evaluate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="directory of checkpoints or of a model"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="names of tasks of lm-evaluation-harness, or YAML files of tasks",
    )
    parser.add_argument(
        "--fewshot",
        type=int,
        metavar="N",
        help="solved examples before each question (default: that of the task)",
    )
    parser.add_argument(
        "--limit", type=parse_count, metavar="N", help="evaluate at most N documents of each task"
    )
    parser.add_argument(
        "--seq-length",
        type=parse_count,
        metavar="N",
        help="tokens of a sequence; longer contexts lose their beginning (default: "
        f"{DEFAULT_SEQ_LENGTH}, or fewer if the model has fewer positions)",
    )
    parser.add_argument(
        "--batch-size",
        type=parse_count,
        default=1,
        metavar="N",
        help="sequences of a batch (default: 1)",
    )
    parser.add_argument(
        "--dtype", choices=PRECISIONS, help="precision (default: that of the checkpoint)"
    )
    parser.add_argument(
        "--device", default="auto", metavar="KIND", help="cpu, cuda, … (default: auto)"
    )
    parser.add_argument(
        "--nproc",
        type=parse_count,
        default=1,
        metavar="N",
        help="processes on this machine, each with a device; they share the requests (default: 1)",
    )
    parser.add_argument(
        "--tensor-model-parallel-size",
        type=parse_count,
        default=1,
        metavar="N",
        help="processes over which each layer is divided (default: 1)",
    )
    parser.add_argument(
        "--pipeline-model-parallel-size",
        type=parse_count,
        default=1,
        metavar="N",
        help="processes over which the layers are distributed (default: 1)",
    )
    parser.add_argument(
        "--tokenizer-path",
        type=Path,
        metavar="DIR",
        help="tokenizer (default: the one that is stored with the model)",
    )
    parser.add_argument(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        metavar="TYPE",
        help="type of the tokenizer, as in train.data (default: HuggingFaceTokenizer)",
    )
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=Path,
        help="base model of the adapters in CHECKPOINT (default: the one they were trained on)",
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="also write the scores to this JSON file"
    )
    return parser
