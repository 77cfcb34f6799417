"""Training the cases of :mod:`layout_cases`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagscale.comm.fsccl.build import builds_directory
from support.chat_files import write_talks, write_tokenizer
from support.layout_cases import ROOT
from support.layout_models import CHAT_TOKENIZER, SHORT_DOCUMENTS, TALKS, Case

WORKER = ROOT / "tests" / "integration" / "train" / "layout_worker.py"


def write_short_documents(prefix: Path, longest: int = 20) -> None:
    """An indexed data set of documents of 1 to ``longest`` tokens of a vocabulary of 500, the last
    one their end."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in generator.integers(0, longest, size=200):
        tokens = np.append(generator.integers(0, 500, size=length), 500)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def train(cases: Sequence[Case], directory: Path, *, timeout_s: float) -> dict[str, Any]:
    """What the worker tells of each case, by name; and its ``stderr``."""
    if any(SHORT_DOCUMENTS in case.model for case in cases):
        write_short_documents(directory / SHORT_DOCUMENTS)
    if any(TALKS in case.model for case in cases):
        write_talks(directory / TALKS, 200, words=20)
        write_tokenizer(directory / CHAT_TOKENIZER)
    given, answers = directory / "cases.json", directory / "results.json"
    given.write_text(json.dumps([case.record(directory / "cache") for case in cases]))
    path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    done = subprocess.run(
        [sys.executable, str(WORKER), str(given), str(answers)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(directory / "kept"),
            "FSCCL_BUILD_DIR": str(builds_directory()),  # which takes a minute to build
        },
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(answers.read_text()), "stderr": done.stderr}
