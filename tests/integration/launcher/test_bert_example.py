"""Test of the BERT example: from real text and its own tokenizer to a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch_lab import PROJECT

from flagscale.status import list_status_files, read_events

pytestmark = [pytest.mark.integration, pytest.mark.torch]

SPECIAL = ("[CLS]", "[SEP]", "[MASK]")
SMALL = (
    *("num_layers=2", "hidden_size=64", "num_attention_heads=4", "seq_length=64", "train_iters=12"),
    *("global_batch_size=8", "micro_batch_size=2", "eval_interval=12", "eval_iters=1"),
    *("optimizer.lr_scheduler.lr_warmup_iters=1", "optimizer.lr_scheduler.lr=3e-3"),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """A directory with the documentation's text as a data set, and a tokenizer trained on it."""
    from flagscale.train.data import train_bpe
    from flagscale.train.data.preprocess import PreprocessJob, preprocess
    from flagscale.train.data.tokenizers import TokenizerSpec

    root = tmp_path_factory.mktemp("bert example")
    texts = [page.read_text(encoding="utf-8") for page in sorted(PROJECT.glob("docs/*.md"))]
    source, tokenizer = root / "docs.jsonl", root / "tokenizer"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trained = train_bpe.train_tokenizer(texts, train_bpe.BpeSettings(512, SPECIAL))
    tokenizer.mkdir()
    trained.save(str(tokenizer / "tokenizer.json"))
    spec = TokenizerSpec("HuggingFaceTokenizer", str(tokenizer))
    dataset = preprocess(PreprocessJob((source,), str(root / "docs"), spec, append_eod=True))
    return root, dataset.prefixes[0], tokenizer


def launch(prepared: tuple[Path, str, Path], *words: str) -> subprocess.CompletedProcess[str]:
    root, data, tokenizer = prepared
    keys = {
        "experiment.exp_dir": root / "exp",
        "experiment.runner.nproc_per_node": 2,
        "train.data.data_path": data,
        "train.data.split": "'8,1,1'",
        "train.data.tokenizer.tokenizer_path": tokenizer,
        "train.system.tensor_model_parallel_size": 2,
        "++train.system.sequence_parallel": "true",
        "train.system.logging.log_interval": 1,
    }
    overrides = [f"{key}={value}" for key, value in keys.items()]
    sizes = [f"++train.model.{size}" for size in SMALL]
    conf = ("--config-path", str(PROJECT / "examples/bert/conf"), "--config-name", "train")
    return subprocess.run(
        [sys.executable, str(PROJECT / "run.py"), *conf, *overrides, *sizes, *words],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_example_is_estimated_planned_and_trained(prepared: tuple[Path, str, Path]) -> None:
    estimated = launch(prepared, "action=estimate", "json=true")
    assert estimated.returncode == 0, estimated.stdout + estimated.stderr
    assert json.loads(estimated.stdout)["vocabulary"] == 512  # its tokenizer has a [MASK]
    planned = launch(prepared, "action=dryrun")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "--family bert" in planned.stdout
    result = launch(prepared, "action=test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BERT, 0.1 M weights on rank 0, vocabulary 512" in result.stdout
    losses = [event.get("loss") for event in events(prepared[0], "progress")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    assert [event.get("step") for event in events(prepared[0], "evaluation")] == [12]
    assert list((prepared[0] / "exp" / "checkpoints").glob("iter_0000012"))


def events(root: Path, kind: str) -> list[Any]:
    (directory,) = (root / "exp").glob("logs/details/*/*/status")
    events_of_ranks = [
        event for path in list_status_files(directory) for event in read_events(path)[0]
    ]
    return [event for event in events_of_ranks if event.event == kind]
