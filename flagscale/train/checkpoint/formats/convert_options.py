"""Command line of ``flagscale convert``. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from flagscale.object_storage import is_address

PRECISIONS = ("fp32", "bf16", "fp16")
LAYOUT_OPTIONS = {
    "--tensor-model-parallel-size": ("tensor_parallel", "tensor-parallel size (default: 1)"),
    "--pipeline-model-parallel-size": ("pipeline_parallel", "pipeline-parallel size (default: 1)"),
    "--expert-model-parallel-size": ("expert_parallel", "expert-parallel size (default: 1)"),
    "--num-virtual-stages-per-pipeline-rank": (
        "chunks_per_stage",
        "model chunks per stage (default: 1)",
    ),
    "--decoder-first-pipeline-num-layers": (
        "first_stage_layers",
        "layers of the first stage, if different",
    ),
    "--decoder-last-pipeline-num-layers": (
        "last_stage_layers",
        "layers of the last stage, if different",
    ),
    "--make-vocab-size-divisible-by": (
        "vocabulary_multiple",
        "pad the vocabulary to a multiple of this per tensor-parallel rank (default: 1)",
    ),
}
"""Options of a parallel layout: the field of :class:`MegatronLayout`, and the help text."""
LAYER_OPTIONS = ("--transformer-impl", "--moe-grouped-gemm")
"""Options of a layout that select the implementation of layers."""


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="flagscale convert",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="IN", type=_parse_directory, help="directory of a model or of checkpoints"
    )
    parser.add_argument(
        "target",
        metavar="OUT",
        type=_parse_directory,
        help="directory to write; must not exist, or be empty",
    )
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help="output format: huggingface or torch_dist (default: the one that IN is not); "
        "megatron_dist or torch: Megatron-LM's torch_dist or torch; peft: LoRA adapters alone",
    )
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=_parse_directory,
        help="base model of the adapters in IN (default: the model that they were trained on)",
    )
    parser.add_argument(
        "--like",
        metavar="DIR",
        type=_parse_directory,
        help="take config.json and tokenizer from this Hugging Face model",
    )
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        help="precision of the output (default: that of IN)",
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="TEXT",
        help="compare logits with those of transformers, on a text or on token ids (1,2,3)",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the output with the input"
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the files of an interrupted conversion"
    )
    _add_layout_options(parser)
    return parser


def _add_layout_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "parallel layout of --to torch",
        "options by Megatron-LM's names; training must use the same layout",
    )
    for name, (field, text) in LAYOUT_OPTIONS.items():
        group.add_argument(name, dest=field, metavar="N", type=parse_count, help=text)
    group.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        help="implementation of layers (default: transformer_engine)",
    )
    group.add_argument(
        "--moe-grouped-gemm",
        action="store_true",
        default=None,
        help="run the experts as one grouped GEMM of Transformer Engine",
    )


def _parse_directory(text: str) -> Path:
    if is_address(text):
        raise argparse.ArgumentTypeError(
            "expected a directory, found an address of object storage: copy the checkpoint first"
        )
    return Path(text)


def parse_count(text: str) -> int:
    """Parse a number of things, of which there is at least one."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)
