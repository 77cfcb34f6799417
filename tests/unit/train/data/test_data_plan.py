"""Plan of the data that a run reads: sources, sample counts and checks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagscale.errors import DataError
from flagscale.train.data.indexed_dataset import MAGIC
from flagscale.train.data.plan import plan_data
from flagscale.train.data.tokenizers import TokenizerSpec, open_tokenizer

TOKENIZER = open_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=99))


def make_args(**defaults: Any) -> Namespace:
    values: dict[str, Any] = {
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "split": None,
        "data_phases": None,
        "mock_data": False,
        "data_cache_path": None,
        "save": None,
        "tensorboard_dir": None,
        "seq_length": 8,
        "seed": 1,
        "train_iters": 10,
        "train_samples": None,
        "skip_train": False,
        "eval_iters": 0,
        "eval_interval": 5,
        "global_batch_size": 4,
        "dataloader_type": "single",
        "reset_position_ids": False,
        "mmap_bin_files": True,
        "num_dataset_builder_threads": 1,
        "mid_level_dataset_surplus": 0.005,
        "eod_mask_loss": False,
        "multiple_validation_sets": None,
    }
    return Namespace(**{**values, **defaults})


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "data", documents=10)


def write_dataset(prefix: Path, *, documents: int, dtype: Any = np.uint16, token: int = 5) -> str:
    """Write documents of 20 equal tokens."""
    index = np.arange(documents, dtype=np.int64)
    code = {np.uint16: 8, np.int32: 4, np.float32: 7, np.uint8: 1}[dtype]
    sizes = np.array([documents, documents + 1], np.uint64).tobytes()
    header = MAGIC + np.uint64(1).tobytes() + bytes([code]) + sizes
    lengths = np.full(documents, 20, np.int32).tobytes()
    offsets = (index * 20 * np.dtype(dtype).itemsize).tobytes()
    ends = np.arange(documents + 1, dtype=np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(header + lengths + offsets + ends)
    Path(f"{prefix}.bin").write_bytes(np.full(documents * 20, token, dtype).tobytes())
    return str(prefix)


def planned_samples(arguments: Namespace) -> list[int]:
    return [split.sample_count for split in plan_data(arguments, TOKENIZER).splits]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, [40, 0, 0], id="no-evaluation"),
        pytest.param({"train_samples": 37}, [37, 0, 0], id="samples"),
        pytest.param({"eval_iters": 2, "split": "8,1,1"}, [40, 24, 8], id="evaluations"),
        pytest.param({"eval_iters": 2, "split": "9,1"}, [40, 24, 0], id="no-test-share"),
        pytest.param(
            {"eval_iters": 2, "eval_interval": None, "split": "8,1,1"}, [40, 0, 8], id="test-alone"
        ),
        pytest.param({"split": "1"}, [40, 0, 0], id="all-for-training"),
        pytest.param(
            {"eval_iters": 2, "split": "8,1,1", "skip_train": True}, [0, 24, 8], id="no-training"
        ),
        pytest.param(
            {"eval_iters": 2, "split": "8,1,1", "skip_train": True, "train_iters": 0},
            [0, 8, 8],
            id="no-training-length",
        ),
    ],
)
def test_samples_per_split(prefix: str, settings: dict[str, Any], expected: list[int]) -> None:
    assert planned_samples(make_args(data_path=[prefix], **settings)) == expected


def test_separate_data_for_each_split(prefix: str) -> None:
    plan = plan_data(
        make_args(train_data_path=[prefix], valid_data_path=[prefix], eval_iters=1), TOKENIZER
    )
    assert [split.sample_count for split in plan.splits] == [40, 12, 0]
    assert [split.blend is not None for split in plan.splits] == [True, True, False]
    assert plan.blend is None


def test_evaluation_needs_no_training_data(prefix: str) -> None:
    arguments = make_args(valid_data_path=[prefix], eval_iters=1, skip_train=True)
    assert planned_samples(arguments) == [0, 12, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({}, "no training data: data_path is not set", id="nothing"),
        pytest.param({"data_path": ["D"], "mock_data": True}, "mock_data makes data up", id="mock"),
        pytest.param(
            {"data_path": ["D"], "train_data_path": ["D"]},
            "data_path and train_data_path are both set",
            id="both",
        ),
        pytest.param({"valid_data_path": ["D"]}, "train_data_path is not", id="no-train"),
        pytest.param(
            {"train_data_path": ["D"], "split": "9,1"}, "split cuts data_path", id="split-of-own"
        ),
        pytest.param({"data_path": ["D"], "split": "x"}, "split 'x': expected", id="bad-split"),
        pytest.param(
            {"data_path": ["D"], "eval_iters": 1, "split": "99,1,0"},
            "nothing is left for valid with split 99,1,0",
            id="few-documents",
        ),
        pytest.param({"data_path": ["D_"]}, "there is data", id="misspelt"),
    ],
)
def test_contradictory_arguments_are_refused(
    prefix: str, settings: dict[str, Any], message: str
) -> None:
    settings_with_paths = {
        key: [word.replace("D", prefix) for word in value] if isinstance(value, list) else value
        for key, value in settings.items()
    }
    with pytest.raises(DataError) as caught:
        plan_data(make_args(**settings_with_paths), TOKENIZER)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "token", "message"),
    [
        pytest.param(
            np.uint16,
            100,
            "holds token id 100, but the tokenizer has 100 entries",
            id="token-beyond",
        ),
        pytest.param(np.int32, -1, "holds the token id -1", id="negative"),
        pytest.param(np.float32, 5, "holds float32 values", id="floats"),
    ],
)
def test_data_of_another_tokenizer_is_refused(
    tmp_path: Path, dtype: Any, token: int, message: str
) -> None:
    prefix = write_dataset(tmp_path / "d", documents=3, dtype=dtype, token=token)
    with pytest.raises(DataError, match=message):
        plan_data(make_args(data_path=[prefix]), TOKENIZER)


def test_a_vocabulary_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", documents=3)
    large = open_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=128_000))
    with pytest.raises(DataError, match=r"uint16 \(below 65536\), but the tokenizer has 128001"):
        plan_data(make_args(data_path=[prefix]), large)


def test_cache_directory_depends_on_the_experiment_and_the_data(
    prefix: str, tmp_path: Path
) -> None:
    configured = make_args(data_path=[prefix], save=str(tmp_path / "exp" / "checkpoints"))
    first = plan_data(configured, TOKENIZER).cache_directory
    assert first is not None
    assert first.parent == tmp_path / "exp" / "data_cache"
    write_dataset(Path(prefix), documents=11)
    assert plan_data(configured, TOKENIZER).cache_directory != first
    configured.data_cache_path = str(tmp_path / "here")
    default = plan_data(configured, TOKENIZER).cache_directory
    assert default is not None
    assert default.parent == tmp_path / "here"
    assert plan_data(make_args(data_path=[prefix]), TOKENIZER).cache_directory is None
