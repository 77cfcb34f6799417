"""Micro-batches that a function of the user's makes."""

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
KIND: Any = SimpleNamespace(
    keys=("tokens", "labels", "loss_mask", "position_ids"), length=4, config=None
)
GOOD = {"tokens": torch.ones(2, 4).int(), "labels": torch.ones(2, 4).int()}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_each_rank_takes_what_it_would_of_a_data_set(ranks: int, size: int, steps: int) -> None:
    consumed = steps * ranks * size
    for rank in range(ranks):
        shard = Shard.even(rank, ranks, size)
        expected = MicroBatchSampler(10_000, shard, consumed=consumed)
        assert list(islice(external.Samples(shard, consumed), 5)) == list(islice(expected, 5))


def made(*batches: Any) -> list[dict[str, torch.Tensor]]:
    def function(*_: Any) -> Iterator[Any]:
        yield from batches

    samples = external.Samples(Shard.even(0, 1, 2), 0)
    found = external.batches(function, ARGS, TOKENIZER, "train", samples, KIND)
    assert found is not None
    return list(islice(found, len(batches) or 1))


def test_what_can_be_left_out() -> None:
    (found,) = made(GOOD)
    assert found["tokens"].dtype == found["labels"].dtype == torch.int64
    assert found["loss_mask"].tolist() == [[1.0] * 4] * 2
    assert found["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param((1, 2), "1 of train: expected tensors by name, found tuple", id="tuple"),
        pytest.param({"tokens": GOOD["tokens"]}, "lacks labels; it has tokens", id="missing"),
        pytest.param({}, "lacks tokens, labels; it has nothing", id="nothing"),
        pytest.param(
            {**GOOD, "labels": torch.ones(2, 5).int()},
            r"labels is \[2, 5\], expected a tensor \[2, 4\]",
            id="length",
        ),
        pytest.param({**GOOD, "tokens": [[1] * 4] * 2}, "tokens is list, expected", id="no-tensor"),
        pytest.param({**GOOD, "tokens": torch.ones(2, 4)}, "of torch.float32", id="floats"),
        pytest.param(
            {**GOOD, "tokens": 10 * GOOD["tokens"]},
            "tokens are 10 to 10, and the 10 known ones are 0 to 9",
            id="unknown-token",
        ),
        pytest.param({**GOOD, "tokens": -GOOD["tokens"]}, "tokens are -1 to -1", id="negative"),
    ],
)  # fmt: skip
def test_a_micro_batch_is_looked_at(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(batch)


def test_data_that_ends_too_early() -> None:
    with pytest.raises(DataError, match="train ended after 0 micro-batches"):
        made()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("no_such_package.x:f", "there is no module no_such_package.x", id="module"),
        pytest.param("/no/such.py:f", "no file /no/such.py", id="file"),
        pytest.param("os.path:joim", "has no function joim.*\n.*did you mean join", id="function"),
    ],
)
def test_a_function_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        external.find(name)
    assert re.search(message, f"{raised.value}\n{raised.value.hint}")


def test_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own data.py").write_text("def batches(*_):\n    return None\n")
    function = external.find(f"{tmp_path}/own data.py:batches")
    samples = external.Samples(Shard.even(0, 1, 2), 0)
    assert external.batches(function, ARGS, TOKENIZER, "test", samples, KIND) is None


def test_a_function_whose_module_lacks_another(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lacking_module.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        external.find("lacking_module:f")
