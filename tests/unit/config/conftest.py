"""Fixture with a small experiment on disk that tests edit and load."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from flagscale.config import schema
from flagscale.config.actions import Purpose
from flagscale.config.load import load
from flagscale.config.schema import Experiment

EXPERIMENT = """\
defaults:
  - _self_
  - train: tiny
experiment:
  exp_name: demo
  exp_dir: ./outputs demo
  task:
    type: train
  runner:
    nnodes: 1
    nproc_per_node: 2
  envs:
    CUDA_VISIBLE_DEVICES: 0,1
action: run
"""

TRAIN = """\
system:
  tensor_model_parallel_size: 1
  precision:
    bf16: true
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 8
  seq_length: 32
  micro_batch_size: 2
  train_iters: 10
  optimizer:
    lr_scheduler:
      lr: 1.0e-3
data:
  data_path: data/text
  tokenizer:
    tokenizer_path: data/tokenizer
    tokenizer_type: HuggingFaceTokenizer
"""


class Workspace:
    """Directory with ``conf/train.yaml``, ``conf/train/tiny.yaml`` and data."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conf = root / "conf"
        self.write("conf/train.yaml", EXPERIMENT)
        self.write("conf/train/tiny.yaml", TRAIN)
        self.write("data/text.bin", "")
        self.write("data/text.idx", "")
        self.write("data/tokenizer/tokenizer.json", "{}")
        self.write("hostfile", "h0 slots=2\n")

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    def load(self, *overrides: str, purpose: Purpose | None = None) -> Experiment:
        return load(self.conf, "train", overrides, purpose).experiment


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(tmp_path)
    # Act as a clone whose backend sources are set up, whether or not this one is.
    monkeypatch.setattr(schema, "BACKEND_SOURCE", tmp_path / "third_party")
    (tmp_path / "third_party" / "megatron" / "core").mkdir(parents=True)
    return Workspace(tmp_path)
