"""Tests of further trials in the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.train.test_train_gpt import PATCHED_MEGATRON, ROOT

pytestmark = [pytest.mark.integration, pytest.mark.torch]

PROGRAM = """\
import sys
from flagscale.train import train_gpt, trial_series
free_memory = trial_series.TrialSeries._free_memory
def count(series):
    before = trial_series.count_tensor_bytes()
    is_free = free_memory(series)
    print("memory", before, trial_series.count_tensor_bytes(), is_free, flush=True)
    return is_free
trial_series.TrialSeries._free_memory = count
sys.exit(train_gpt.main())
"""
ARGUMENTS = """--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 32
--global-batch-size 4 --train-iters 50 --exit-interval 2 --lr 1e-3 --vocab-size 4096
--tokenizer-type NullTokenizer --mock-data --eval-iters 0 --num-workers 0 --device cpu
--position-embedding-type rope --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --log-interval 1 --micro-batch-size"""
RECOMPUTE = """--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""


def test_a_trial_leaves_no_memory_to_the_next(tmp_path: Path) -> None:
    orders: dict[int, list[str] | None] = {
        2: [*ARGUMENTS.split(), "2"],
        3: [*ARGUMENTS.split(), "1", *RECOMPUTE.split()],
        4: None,
    }
    for number, arguments in orders.items():
        text = json.dumps({"arguments": arguments})
        (tmp_path / f"{number}.json").write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(PATCHED_MEGATRON), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ARGUMENTS.split(), "1"],
        env={**os.environ, "PYTHONPATH": paths, "FLAGSCALE_TRIALS": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("memory")]
    assert [line[3] for line in lines] == ["True"] * 3
    for _, before, after, _ in lines:
        assert int(before) > 20e6
        assert int(after) < 0.01 * int(before)
