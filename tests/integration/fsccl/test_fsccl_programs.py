"""Tests of valid programs that libraries often hang on."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.mark.parametrize(
    "case",
    [
        "check_collectives_in_callbacks",
        "check_later_works_in_callbacks",
        "check_message_callbacks",
        "check_forks",
        "check_sparse_all_reduce",
    ],
)
def test_callbacks_forks_and_sparse_tensors(run_on_four_ranks: Any, case: str) -> None:
    run_on_four_ranks(case)


@pytest.mark.parametrize("case", ["train_with_power_sgd", "train_with_sparse_gradients"])
def test_ddp_training(run_on_four_ranks: Any, case: str) -> None:
    run_on_four_ranks(case, steps=4)


@pytest.mark.parametrize("op", ["broadcast", "scatter", "send"])
def test_groups_with_a_single_operation(run_on_four_ranks: Any, op: str) -> None:
    run_on_four_ranks("check_short_lived_groups", count=2, op=op)


def test_many_unexpected_messages(run_on_four_ranks: Any) -> None:
    """There are so many that a linear search would take minutes."""
    run_on_four_ranks("receive_unexpected_messages", count=20_000)


def test_invalid_root_raises_in_the_call(run_on_four_ranks: Any) -> None:
    for errors in run_on_four_ranks("collect_root_errors"):
        for name, text in zip(("broadcast", "reduce", "gather", "scatter"), errors, strict=True):
            assert text == f"{name}: fsccl: {name}: root 6 is not in the group of 4 ranks"


def test_all_gather_coalesced_rejects_other_types(run_on_four_ranks: Any) -> None:
    for errors in run_on_four_ranks("collect_gather_errors"):
        assert "all_gather_coalesced: tensors of Int and of Float" in errors[0]
        assert "all_gather_coalesced: tensors of Double and of Float" in errors[1]


def test_mismatched_sparse_tensors_are_reported(run_on_four_ranks: Any) -> None:
    for error in run_on_four_ranks("all_reduce_mismatched_sparse"):
        assert re.search(r"rank 1 .* has a sparse tensor of other sizes.* than rank 0 ", error)
