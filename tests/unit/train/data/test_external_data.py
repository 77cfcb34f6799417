"""Tests of micro-batches from a function of the user (``external_data``)."""

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
# A micro-batch of 2 samples with 4 tokens each, the length of DATASET_SPEC.
BATCH = {"tokens": torch.ones(2, 4).int(), "labels": torch.ones(2, 4).int()}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_sample_indices_are_those_of_the_micro_batch_sampler(
    ranks: int, micro_batch_size: int, steps: int
) -> None:
    consumed = steps * ranks * micro_batch_size
    for rank in range(ranks):
        shard = Shard.for_equal_ranks(rank, ranks, micro_batch_size)
        expected = MicroBatchSampler(10_000, shard, consumed=consumed)
        assert list(islice(external.Samples(shard, consumed), 5)) == list(islice(expected, 5))


def read_batches(*batches: Any) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches that training gets from a function which yields ``batches``."""

    def function(*_: Any) -> Iterator[Any]:
        yield from batches

    samples = external.Samples(Shard.for_equal_ranks(0, 1, 2), 0)
    iterator = external.iter_micro_batches(
        function, ARGS, TOKENIZER, "train", samples, DATASET_SPEC
    )
    assert iterator is not None
    return list(islice(iterator, len(batches) or 1))


def test_missing_optional_tensors_get_defaults() -> None:
    (micro_batch,) = read_batches(BATCH)
    assert micro_batch["tokens"].dtype == micro_batch["labels"].dtype == torch.int64
    assert micro_batch["loss_mask"].tolist() == [[1.0] * 4] * 2
    assert micro_batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param((1, 2), "1 of train: expected tensors by name, found tuple", id="tuple"),
        pytest.param(
            {"tokens": BATCH["tokens"]}, "lacks labels; it has tokens", id="missing-labels"
        ),
        pytest.param({}, "lacks tokens, labels; it has nothing", id="empty"),
        pytest.param(
            {**BATCH, "labels": torch.ones(2, 5).int()},
            r"labels is \[2, 5\], expected a tensor \[2, 4\]",
            id="wrong-length",
        ),
        pytest.param(
            {**BATCH, "tokens": [[1] * 4] * 2},
            "tokens is list, expected",
            id="list-instead-of-tensor",
        ),
        pytest.param({**BATCH, "tokens": torch.ones(2, 4)}, "of torch.float32", id="float-tokens"),
        pytest.param(
            {**BATCH, "tokens": 10 * BATCH["tokens"]},
            "tokens are 10 to 10, expected ids of the vocabulary, 0 to 9",
            id="unknown-token",
        ),
        pytest.param(
            {**BATCH, "tokens": -BATCH["tokens"]}, "tokens are -1 to -1", id="negative-token"
        ),
    ],
)
def test_invalid_micro_batch_is_rejected(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_batches(batch)


def test_iterator_that_ends_is_rejected() -> None:
    with pytest.raises(DataError, match="train ended after 0 micro-batches"):
        read_batches()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("no_such_package.x:f", "there is no module no_such_package.x", id="module"),
        pytest.param("/no/such.py:f", "no file /no/such.py", id="file"),
        pytest.param("os.path:joim", "has no function joim.*\n.*did you mean join", id="function"),
    ],
)
def test_missing_function_is_rejected(name: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        external.find_data_function(name)
    assert re.search(message, f"{raised.value}\n{raised.value.hint}")


def test_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own data.py").write_text("def batches(*_):\n    return None\n")
    function = external.find_data_function(f"{tmp_path}/own data.py:batches")
    samples = external.Samples(Shard.for_equal_ranks(0, 1, 2), 0)
    assert (
        external.iter_micro_batches(function, ARGS, TOKENIZER, "test", samples, DATASET_SPEC)
        is None
    )


def test_failed_import_inside_the_module_is_raised(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lacking_module.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        external.find_data_function("lacking_module:f")
