#!/usr/bin/env python3
"""Measure the deviation of heterogeneous layouts from single-rank training over many steps.

    tools/train/mesh_agreement.py --output docs/results/mesh-agreement-cpu.json

A heterogeneous layout has groups of ranks (meshes) with different parallel sizes, or data-parallel
replicas with different numbers of micro-batches. The program trains every heterogeneous layout of
the test suite on this host's CPU, fp32 cases also in bf16. Each is compared with a run of one rank
with the same batches. Some homogeneous layouts are trained for comparison. The report has the
largest relative differences of loss and gradient norm over all steps, except steps that both runs
skip.

The exit code is 4 if a loss or a gradient norm of a heterogeneous layout differs by more than 1e-5,
in 16 bits by more than 1e-2. These differences are listed with the largest difference of
homogeneous layouts, which are not checked.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

FP32_TOLERANCE, SIXTEEN_BIT_TOLERANCE = 1e-5, 1e-2
QUANTITIES = ("loss", "grad_norm")
HOMOGENEOUS_LAYOUTS = ("dp2-do", "tp2-sp", "pp2", "moe-ep2")


@dataclass(frozen=True)
class AgreementRow:
    """Largest relative differences between the steps of a layout and of its reference.

    Attributes:
        layout: name of the test case.
        ranks: number of ranks.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        reference: name of the test case of one rank.
        loss: relative difference of the loss.
        grad_norm: relative difference of the gradient norm.
        experts: whether the model has experts.
        like: whether the layout is homogeneous.
    """

    layout: str
    ranks: int
    precision: str
    reference: str
    loss: float
    grad_norm: float
    experts: bool
    like: bool

    @property
    def tolerance(self) -> float:
        return FP32_TOLERANCE if self.precision == "fp32" else SIXTEEN_BIT_TOLERANCE


@dataclass(frozen=True)
class ToleranceMiss:
    """Difference above its tolerance.

    Attributes:
        layout: name of the test case.
        quantity: ``loss`` or ``grad_norm``.
        difference: relative difference.
        bar: tolerance.
        like_ranks: largest difference of homogeneous layouts in the same precision, and with
            experts if this layout has them.
    """

    layout: str
    quantity: str
    difference: float
    bar: float
    like_ranks: float


def find_misses(rows: Sequence[AgreementRow]) -> Iterator[ToleranceMiss]:
    """Yield the differences of heterogeneous layouts that exceed their tolerance."""
    for row in rows:
        homogeneous_rows = [
            other_row
            for other_row in rows
            if other_row.like
            and (other_row.precision, other_row.experts) == (row.precision, row.experts)
        ]
        for quantity in QUANTITIES:
            difference = getattr(row, quantity)
            if row.like or difference <= row.tolerance:
                continue
            largest_homogeneous = max(
                (getattr(homogeneous_row, quantity) for homogeneous_row in homogeneous_rows),
                default=float("nan"),
            )
            yield ToleranceMiss(
                row.layout, quantity, difference, row.tolerance, largest_homogeneous
            )


def measure_agreement(steps: int, learning_rate: float, pattern: str) -> list[AgreementRow]:
    """Train the layouts whose names contain ``pattern`` and their references."""
    from support import layout_cases as layouts  # type: ignore[import-not-found]
    from support import layout_lab, layout_meshes

    single_rank_cases = {
        case.name: case
        for case in (*layouts.REFERENCE_CASES, *layouts.HOMOGENEOUS_CASES)
        if case.world_size == 1
    }
    layout_cases = [case for case in layouts.HOMOGENEOUS_CASES if case.name in HOMOGENEOUS_LAYOUTS]
    layout_cases += [
        case
        for case in (*layout_meshes.MESH_CASES, *layouts.FAMILY_CASES)
        if "--enable-hetero" in case.layout
    ]
    selected_cases = [
        case
        for case in layout_cases
        if pattern in case.name and case.reference in single_rank_cases
    ]
    reference_names = sorted({case.reference for case in selected_cases})
    references = [replace(single_rank_cases[name], reference="") for name in reference_names]
    training_arguments = f"--train-iters {steps} --lr {learning_rate}"
    cases = [
        replace(case, layout=f"{case.layout} {training_arguments}")
        for case in (*references, *selected_cases)
    ]
    cases += [with_bf16(case) for case in cases if get_precision(case) == "fp32"]
    with tempfile.TemporaryDirectory() as directory:
        results = layout_lab.train_cases(cases, Path(directory), timeout_seconds=3600)
    return [
        AgreementRow(
            case.name,
            case.world_size,
            get_precision(case),
            case.reference,
            find_largest_difference(results[case.name], results[case.reference], "loss"),
            find_largest_difference(results[case.name], results[case.reference], "norm"),
            "--num-experts" in case.model,
            "--enable-hetero" not in case.layout,
        )
        for case in cases
        if case.reference in results
    ]


def get_precision(case: Any) -> str:
    return next((name for name in ("bf16", "fp16") if f"--{name}" in case.model), "fp32")


def with_bf16(case: Any) -> Any:
    """Return a case, and the name of its reference, in bf16."""
    reference = f"{case.reference}, bf16" if case.reference else ""
    model = f"{case.model} --bf16"
    return replace(case, name=f"{case.name}, bf16", model=model, reference=reference)


def find_largest_difference(
    steps: dict[str, Any], reference: dict[str, Any], quantity: str
) -> float:
    """Return the largest relative difference; infinite if the runs skip different steps."""
    if steps["skipped"] != reference["skipped"]:
        return float("inf")
    pairs = zip(steps[quantity], reference[quantity], steps["skipped"], strict=True)
    return max(
        float(abs(value - expected) / abs(expected))
        for value, expected, skipped in pairs
        if not skipped
    )


def build_report(rows: Sequence[AgreementRow], options: argparse.Namespace) -> dict[str, Any]:
    from flagscale.bench.machine import describe_machine

    return {
        **describe_machine("flagscale", "torch", "megatron-core"),
        "method": f"{options.steps} steps at a learning rate of {options.lr}; largest relative "
        "difference over the steps from the reference, which is one rank with the same batches",
        "bars": {"fp32": FP32_TOLERANCE, "bf16 and fp16": SIXTEEN_BIT_TOLERANCE},
        "rows": [
            {**asdict(row), **{name: round_for_json(getattr(row, name)) for name in QUANTITIES}}
            for row in rows
        ],
        "missed": [
            {
                **asdict(miss),
                "difference": round_for_json(miss.difference),
                "like_ranks": round_for_json(miss.like_ranks),
            }
            for miss in find_misses(rows)
        ],
    }


def round_for_json(difference: float) -> float | None:
    """Round for JSON; None for numbers that JSON cannot represent."""
    return float(f"{difference:.1e}") if math.isfinite(difference) else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/train/mesh_agreement.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument(
        "--only", default="", help="train only layouts whose names contain this text"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write the report to")
    options = parser.parse_args(argv)
    rows = measure_agreement(options.steps, options.lr, options.only)
    print(f"{'layout':40} {'ranks':>5} {'loss':>8} {'grad norm':>9}")
    for row in rows:
        print(f"{row.layout:40} {row.ranks:>5} {row.loss:>8.1e} {row.grad_norm:>9.1e}")
    if options.output:
        options.output.write_text(json.dumps(build_report(rows, options), indent=2) + "\n")
    misses = list(find_misses(rows))
    for miss in misses:
        print(
            f"missed: {miss.layout}: {miss.quantity} {miss.difference:.1e}, expected at most "
            f"{miss.bar:.0e}; homogeneous layouts differ by up to {miss.like_ranks:.1e}"
        )
    return 4 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
