"""Training of layout cases (:mod:`layout_cases`) in a worker process, and their data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagscale.comm.fsccl.build import builds_directory
from support.chat_files import write_conversations, write_tokenizer
from support.layout_cases import ROOT
from support.layout_models import CHAT_TOKENIZER, CONVERSATIONS, SHORT_DOCUMENTS, LayoutCase

WORKER = ROOT / "tests" / "integration" / "train" / "layout_worker.py"


def write_short_documents(prefix: Path, max_tokens: int = 20) -> None:
    """Write an indexed dataset of documents of 1 to ``max_tokens`` tokens.

    The vocabulary has 500 tokens and an end-of-document token.
    """
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in generator.integers(0, max_tokens, size=200):
        tokens = np.append(generator.integers(0, 500, size=length), 500)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def train_cases(
    cases: Sequence[LayoutCase], directory: Path, *, timeout_seconds: float
) -> dict[str, Any]:
    """Train the cases and return the results of the worker by case name.

    The key ``stderr`` has the error output of the worker.
    """
    if any(SHORT_DOCUMENTS in case.model for case in cases):
        write_short_documents(directory / SHORT_DOCUMENTS)
    if any(CONVERSATIONS in case.model for case in cases):
        write_conversations(directory / CONVERSATIONS, 200, words=20)
        write_tokenizer(directory / CHAT_TOKENIZER)
    cases_file, results_file = directory / "cases.json", directory / "results.json"
    cases_file.write_text(json.dumps([case.to_record(directory / "cache") for case in cases]))
    python_path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    process = subprocess.run(
        [sys.executable, str(WORKER), str(cases_file), str(results_file)],
        env={
            **os.environ,
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(directory / "user_cache"),
            "FSCCL_BUILD_DIR": str(builds_directory()),  # building takes a minute
        },
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {**json.loads(results_file.read_text()), "stderr": process.stderr}
