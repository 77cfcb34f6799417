"""Legal programs that libraries tend to hang on."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.mark.parametrize(
    "case",
    [
        "collectives_in_callbacks",
        "later_works_in_callbacks",
        "callbacks_of_messages",
        "forks",
        "sparse_sums",
    ],
)
def test_programs(four: Any, case: str) -> None:
    four(case)


@pytest.mark.parametrize("case", ["power_sgd", "sparse_gradients"])
def test_training(four: Any, case: str) -> None:
    four(case, steps=4)


@pytest.mark.parametrize("op", ["broadcast", "scatter", "send"])
def test_groups_whose_first_operation_is_their_last(four: Any, op: str) -> None:
    four("brief_groups", count=2, op=op)


def test_messages_that_nobody_waits_for_yet(four: Any) -> None:
    """As many as a look-up through all of them would take minutes for."""
    four("many_unexpected", count=20_000)


def test_wrong_roots_are_refused_by_the_call(four: Any) -> None:
    for said in four("wrong_roots"):
        for name, text in zip(("broadcast", "reduce", "gather", "scatter"), said, strict=True):
            assert text == f"{name}: fsccl: {name}: root 6 is not in the group of 4 ranks"


def test_tensors_of_another_type_are_not_gathered_into(four: Any) -> None:
    for said in four("gathered_into_others"):
        assert "all_gather_coalesced: tensors of Int and of Float" in said[0]
        assert "all_gather_coalesced: tensors of Double and of Float" in said[1]


def test_other_sparse_tensors_are_named(four: Any) -> None:
    for said in four("unlike_sparse"):
        assert re.search(r"rank 1 .* has a sparse tensor of other sizes.* than rank 0 ", said)
