"""What tests on GPUs start: the training program, with a small model."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "flagscale" / "train" / "train_gpt.py"
MODEL = """
--num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 688
--seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-3
--vocab-size 1000 --make-vocab-size-divisible-by 64 --mock-data --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --num-workers 0 --lr-decay-style constant
"""


def environment(**changes: str) -> dict[str, str]:
    own = [str(ROOT), str(ROOT / "third_party" / "Megatron-LM")]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0", **changes}
