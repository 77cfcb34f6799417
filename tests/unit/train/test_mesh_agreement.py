"""What is over its bar: tools/train/mesh_agreement.py."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools" / "train"


@pytest.fixture(scope="module")
def agreement() -> Any:
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("mesh_agreement")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize(
    ("precision", "loss", "norm", "missed"),
    [
        ("fp32", 1e-5, 1e-5, []),
        ("fp32", 2e-5, 1e-6, ["loss"]),
        ("fp32", 1e-6, 2e-5, ["grad_norm"]),
        ("bf16", 9e-3, 9e-3, []),
        ("bf16", 2e-3, 2e-2, ["grad_norm"]),
        ("fp16", float("inf"), float("inf"), ["loss", "grad_norm"]),
    ],
)
def test_losses_and_gradient_norms_are_judged(
    precision: str, loss: float, norm: float, missed: list[str], agreement: Any
) -> None:
    row = agreement.Row("mesh", 4, precision, "one", loss, norm, experts=False, like=False)
    assert [miss.quantity for miss in agreement.misses([row])] == missed


def test_like_ranks_stand_beside_a_miss_and_are_not_judged(agreement: Any) -> None:
    def row(name: str, norm: float, *, experts: bool, like: bool) -> Any:
        return agreement.Row(name, 2, "bf16", "one", 1e-3, norm, experts=experts, like=like)

    rows = [
        row("tp2", 0.9, experts=False, like=True),
        row("ep2", 0.03, experts=True, like=True),
        row("mesh-ep2", 0.02, experts=True, like=False),
    ]
    assert list(agreement.misses(rows)) == [
        agreement.Miss("mesh-ep2", "grad_norm", 0.02, 1e-2, like_ranks=0.03)
    ]
    found = agreement.report(rows[2:], argparse.Namespace(steps=20, lr=1e-3))
    assert [one["grad_norm"] for one in found["rows"]] == [0.02]
    assert [one["like_ranks"] for one in found["missed"]] == [None]


def test_a_step_that_one_alone_skips_is_as_far_as_can_be(agreement: Any) -> None:
    one = {"loss": [4.0, 9.0], "skipped": [False, True]}
    other = {"loss": [4.4, 1.0], "skipped": [False, True]}
    assert agreement.furthest(other, one, "loss") == pytest.approx(0.1)
    never = {**other, "skipped": [False, False]}
    assert agreement.furthest(never, one, "loss") == float("inf")
