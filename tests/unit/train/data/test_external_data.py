"""Micro-batches from a function of the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import DataError
from flagscale.train.data import external
from flagscale.train.data.samplers import MicroBatchSampler, Shard

pytestmark = pytest.mark.torch

ARGS: Any = SimpleNamespace(family="gpt")
TOKENIZER: Any = SimpleNamespace(vocab_size=10)
DATASET_SPEC: Any = SimpleNamespace(
    keys=("tokens", "labels", "loss_mask", "position_ids"), length=4, config=None
)
VALID = {"tokens": torch.ones(2, 4).int(), "labels": torch.ones(2, 4).int()}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_ranks_get_the_samples_of_a_dataset(ranks: int, micro_batch_size: int, steps: int) -> None:
    consumed = steps * ranks * micro_batch_size
    for rank in range(ranks):
        shard = Shard.for_equal_ranks(rank, ranks, micro_batch_size)
        expected = MicroBatchSampler(10_000, shard, consumed=consumed)
        assert list(islice(external.Samples(shard, consumed), 5)) == list(islice(expected, 5))


def check_batches(*batches: Any) -> list[dict[str, torch.Tensor]]:
    def function(*_: Any) -> Iterator[Any]:
        yield from batches

    samples = external.Samples(Shard.for_equal_ranks(0, 1, 2), 0)
    iterator = external.iter_micro_batches(
        function, ARGS, TOKENIZER, "train", samples, DATASET_SPEC
    )
    assert iterator is not None
    return list(islice(iterator, len(batches) or 1))


def test_missing_optional_tensors_get_defaults() -> None:
    (batches,) = check_batches(VALID)
    assert batches["tokens"].dtype == batches["labels"].dtype == torch.int64
    assert batches["loss_mask"].tolist() == [[1.0] * 4] * 2
    assert batches["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param((1, 2), "1 of train: expected tensors by name, found tuple", id="tuple"),
        pytest.param({"tokens": VALID["tokens"]}, "lacks labels; it has tokens", id="missing"),
        pytest.param({}, "lacks tokens, labels; it has nothing", id="nothing"),
        pytest.param(
            {**VALID, "labels": torch.ones(2, 5).int()},
            r"labels is \[2, 5\], expected a tensor \[2, 4\]",
            id="length",
        ),
        pytest.param(
            {**VALID, "tokens": [[1] * 4] * 2}, "tokens is list, expected", id="no-tensor"
        ),
        pytest.param({**VALID, "tokens": torch.ones(2, 4)}, "of torch.float32", id="floats"),
        pytest.param(
            {**VALID, "tokens": 10 * VALID["tokens"]},
            "tokens are 10 to 10, and the 10 known ones are 0 to 9",
            id="unknown-token",
        ),
        pytest.param({**VALID, "tokens": -VALID["tokens"]}, "tokens are -1 to -1", id="negative"),
    ],
)  # fmt: skip
def test_an_invalid_micro_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_batches(batch)


def test_data_that_ends_is_refused() -> None:
    with pytest.raises(DataError, match="train ended after 0 micro-batches"):
        check_batches()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("no_such_package.x:f", "there is no module no_such_package.x", id="module"),
        pytest.param("/no/such.py:f", "no file /no/such.py", id="file"),
        pytest.param("os.path:joim", "has no function joim.*\n.*did you mean join", id="function"),
    ],
)
def test_a_missing_function_is_refused(name: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        external.find_data_function(name)
    assert re.search(message, f"{raised.value}\n{raised.value.hint}")


def test_a_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own data.py").write_text("def batches(*_):\n    return None\n")
    function = external.find_data_function(f"{tmp_path}/own data.py:batches")
    samples = external.Samples(Shard.for_equal_ranks(0, 1, 2), 0)
    assert (
        external.iter_micro_batches(function, ARGS, TOKENIZER, "test", samples, DATASET_SPEC)
        is None
    )


def test_a_failed_import_in_the_module_is_raised(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lacking_module.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        external.find_data_function("lacking_module:f")
