"""Tests of the explanation of hangs in NCCL. Needs two GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.hang_agent import read_explanation

from flagscale.free_port import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

DATA_GROUP = "the data-parallel group of ranks 0-1"
KINDS = {
    "asleep": r"never entered all_reduce #5 of the default group; rank 0 has waited in it since "
    r".*; it is in `time\.sleep",
    "operation": r"called \w*all_?gather\w* as #4 of the default group, where rank 0 called "
    r"all_?reduce",
    "shape": rf"called all_reduce #4 of {DATA_GROUP} with \[5\] Float, where rank 0 passed \[4\]",
    "missing": rf"never entered all_reduce #4 of {DATA_GROUP}; rank 0 has waited in it since",
    "group": rf"waits in all_reduce #4 of group 'first' of ranks 0-1 for rank 0, which waits in "
    rf"all_reduce #4 of {DATA_GROUP} for it",
    "kernel": r"called all_reduce #4 of the default group, but its device has not started it: "
    r"earlier work still runs; rank 0 has started it",
}


@pytest.mark.parametrize("kind", KINDS)
def test_hang_of_nccl_is_explained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
    text = read_explanation(tmp_path, kind, "nccl", 2, free_port())
    assert re.match(rf"rank 1 \(here\) {KINDS[kind]}", text), text
