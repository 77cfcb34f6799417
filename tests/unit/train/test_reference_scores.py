"""Scores of the reference model: the files that keep them, and the hash that names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chat_files import write_lines
from support.preference_files import make_text_pairs, write_pair_model

from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.data.chat.packed_dataset import SequenceSettings
from flagscale.train.data.chat.packed_preferences import PackedPreferences
from flagscale.train.data.chat.preference_files import PreferenceFile
from flagscale.train.data.chat.token_cache import build_cache, open_samples
from flagscale.train.data.tokenizers import TokenizerSpec, open_tokenizer
from flagscale.train.reference_scores import hash_weights, read_scores

pytestmark = pytest.mark.torch

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_model(tmp_path_factory.mktemp("model"))


def test_hash_depends_on_every_weight_and_not_on_files(model: Path, tmp_path: Path) -> None:
    hashes = {}
    for name in ("copy", "changed", "bf16"):
        copy = shutil.copytree(model, tmp_path / name)
        weights = load_file(copy / WEIGHTS)
        if name == "changed":
            weights["model.norm.weight"][-1] += 2**-20
        if name == "bf16":
            weights = {key: weight.to(torch.bfloat16) for key, weight in weights.items()}
        (copy / WEIGHTS).unlink()
        files = {}
        for part, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
            file = f"model-{part:05}-of-00002.safetensors"
            save_file({key: weights[key] for key in names}, copy / file)
            files.update(dict.fromkeys(names, file))
        (copy / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
        hashes[name] = hash_weights(detect_format(copy).read(copy))
    assert hashes["copy"] == hash_weights(detect_format(model).read(model))
    assert len(set(hashes.values())) == 3


@pytest.fixture
def dataset(model: Path, tmp_path: Path) -> PackedPreferences:
    tokenizer = open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(model)))
    source = PreferenceFile(
        write_lines(tmp_path / "pairs.jsonl", make_text_pairs(6)), tokenizer, None
    )
    build_cache(source, tmp_path, "key")
    settings = SequenceSettings(128, is_packed=True, long_conversations="drop", seed=1)
    samples = open_samples(source, tmp_path, "key")
    return PackedPreferences("train", [(samples, np.arange(6))], settings)


def test_damaged_scores_are_not_used(
    dataset: PackedPreferences, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "reference.npy"
    assert read_scores(path, dataset) is None
    assert capsys.readouterr().out == ""
    scores = np.arange(12.0).reshape(6, 2)
    np.save(path, scores)
    np.testing.assert_array_equal(read_scores(path, dataset), scores)
    whole = path.read_bytes()
    for content in (whole[:-20], b"", b"no array"):
        path.write_bytes(content)
        assert read_scores(path, dataset) is None
    for other in (scores[:5], scores.T, np.full((6, 2), np.nan)):
        np.save(path, other)
        assert read_scores(path, dataset) is None
    assert capsys.readouterr().out.count("reference.npy: damaged; the reference model scores") == 6
