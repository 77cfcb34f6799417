"""Tests of tools/train/mesh_agreement.py: tolerances and comparison with homogeneous layouts."""

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
    ("precision", "loss", "norm", "missed_quantities"),
    [
        ("fp32", 1e-5, 1e-5, []),
        ("fp32", 2e-5, 1e-6, ["loss"]),
        ("fp32", 1e-6, 2e-5, ["grad_norm"]),
        ("bf16", 9e-3, 9e-3, []),
        ("bf16", 2e-3, 2e-2, ["grad_norm"]),
        ("fp16", float("inf"), float("inf"), ["loss", "grad_norm"]),
    ],
)
def test_losses_and_gradient_norms_are_checked(
    precision: str, loss: float, norm: float, missed_quantities: list[str], agreement: Any
) -> None:
    row = agreement.AgreementRow("mesh", 4, precision, "one", loss, norm, experts=False, like=False)
    assert [miss.quantity for miss in agreement.find_misses([row])] == missed_quantities


def test_homogeneous_layouts_are_reported_but_not_checked(agreement: Any) -> None:
    def create_row(name: str, norm: float, *, experts: bool, like: bool) -> Any:
        return agreement.AgreementRow(
            name, 2, "bf16", "one", 1e-3, norm, experts=experts, like=like
        )

    rows = [
        create_row("tp2", 0.9, experts=False, like=True),
        create_row("ep2", 0.03, experts=True, like=True),
        create_row("mesh-ep2", 0.02, experts=True, like=False),
    ]
    assert list(agreement.find_misses(rows)) == [
        agreement.ToleranceMiss("mesh-ep2", "grad_norm", 0.02, 1e-2, like_ranks=0.03)
    ]
    # Without the homogeneous rows there is nothing to compare with.
    report = agreement.build_report(rows[2:], argparse.Namespace(steps=20, lr=1e-3))
    assert [row["grad_norm"] for row in report["rows"]] == [0.02]
    assert [miss["like_ranks"] for miss in report["missed"]] == [None]


def test_difference_is_infinite_if_runs_skip_different_steps(agreement: Any) -> None:
    reference = {"loss": [4.0, 9.0], "skipped": [False, True]}
    layout = {"loss": [4.4, 1.0], "skipped": [False, True]}
    assert agreement.find_largest_difference(layout, reference, "loss") == pytest.approx(0.1)
    layout_without_skips = {**layout, "skipped": [False, False]}
    assert agreement.find_largest_difference(layout_without_skips, reference, "loss") == float(
        "inf"
    )
