#!/usr/bin/env python3
"""How far unlike meshes part from one rank over many steps.

    tools/train/mesh_agreement.py --output docs/results/mesh-agreement-cpu.json

Trains every layout of meshes and of unlike replicas that the tests have, on this machine's CPU,
what is in fp32 in bf16 too; beside each the run that it has to equal, of one rank with the same
batches, and for comparison some layouts of like ranks. Of losses and gradient norms the largest
relative difference over all steps is told; steps that both skip count in neither.

Exits with 4 where a loss or a gradient norm differs by more than 1e-5, in 16 bits 1e-2; what does
is named, beside the furthest that like ranks part, which are not judged.
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

FP32, SIXTEEN_BITS = 1e-5, 1e-2
QUANTITIES = ("loss", "grad_norm")
OF_LIKE_RANKS = ("dp2-do", "tp2-sp", "pp2", "moe-ep2")


@dataclass(frozen=True)
class Row:
    """Largest relative differences of a layout's steps from its reference's. ``like``: its ranks
    are alike, so that it is no mesh's."""

    layout: str
    ranks: int
    precision: str
    reference: str
    loss: float
    grad_norm: float
    experts: bool
    like: bool

    @property
    def bar(self) -> float:
        return FP32 if self.precision == "fp32" else SIXTEEN_BITS


@dataclass(frozen=True)
class Miss:
    """A difference over its bar. ``like_ranks``: the largest of like ranks, in the same precision,
    with experts where this has them."""

    layout: str
    quantity: str
    difference: float
    bar: float
    like_ranks: float


def misses(rows: Sequence[Row]) -> Iterator[Miss]:
    """What is over its bar, of meshes and replicas."""
    for row in rows:
        kin = [
            r for r in rows if r.like and (r.precision, r.experts) == (row.precision, row.experts)
        ]
        for quantity in QUANTITIES:
            found = getattr(row, quantity)
            if row.like or found <= row.bar:
                continue
            like = max((getattr(other, quantity) for other in kin), default=float("nan"))
            yield Miss(row.layout, quantity, found, row.bar, like)


def measure(steps: int, rate: float, pattern: str) -> list[Row]:
    """Train the layouts whose names hold ``pattern``, and what they are compared with."""
    from support import layout_cases as layouts  # type: ignore[import-not-found]
    from support import layout_lab, layout_meshes

    alone = {case.name: case for case in (*layouts.REFERENCES, *layouts.CASES) if case.world == 1}
    every = [case for case in layouts.CASES if case.name in OF_LIKE_RANKS]
    every += [
        case
        for case in (*layout_meshes.MESHES, *layouts.FAMILIES)
        if "--enable-hetero" in case.layout
    ]
    chosen = [case for case in every if pattern in case.name and case.reference in alone]
    wanted = sorted({case.reference for case in chosen})
    references = [replace(alone[name], reference="") for name in wanted]
    length = f"--train-iters {steps} --lr {rate}"
    longer = [replace(c, layout=f"{c.layout} {length}") for c in (*references, *chosen)]
    longer += [in_bf16(case) for case in longer if precision(case) == "fp32"]
    with tempfile.TemporaryDirectory() as directory:
        found = layout_lab.train(longer, Path(directory), timeout_s=3600)
    return [
        Row(
            case.name,
            case.world,
            precision(case),
            case.reference,
            furthest(found[case.name], found[case.reference], "loss"),
            furthest(found[case.name], found[case.reference], "norm"),
            "--num-experts" in case.model,
            "--enable-hetero" not in case.layout,
        )
        for case in longer
        if case.reference in found
    ]


def precision(case: Any) -> str:
    return next((name for name in ("bf16", "fp16") if f"--{name}" in case.model), "fp32")


def in_bf16(case: Any) -> Any:
    """A case, and what it is compared with, in another precision."""
    reference = f"{case.reference}, bf16" if case.reference else ""
    model = f"{case.model} --bf16"
    return replace(case, name=f"{case.name}, bf16", model=model, reference=reference)


def furthest(ours: dict[str, Any], reference: dict[str, Any], quantity: str) -> float:
    """The largest relative difference; infinite where one skips a step that the other takes."""
    if ours["skipped"] != reference["skipped"]:
        return float("inf")
    pairs = zip(ours[quantity], reference[quantity], ours["skipped"], strict=True)
    return max(float(abs(a - b) / abs(b)) for a, b, skipped in pairs if not skipped)


def report(rows: Sequence[Row], options: argparse.Namespace) -> dict[str, Any]:
    from flagscale.bench.machine import facts

    return {
        **facts("flagscale", "torch", "megatron-core"),
        "method": f"{options.steps} steps at a learning rate of {options.lr}; largest relative "
        "difference over the steps from the reference, which is one rank with the same batches",
        "bars": {"fp32": FP32, "bf16 and fp16": SIXTEEN_BITS},
        "rows": [
            {**asdict(row), **{name: short(getattr(row, name)) for name in QUANTITIES}}
            for row in rows
        ],
        "missed": [
            {
                **asdict(miss),
                "difference": short(miss.difference),
                "like_ranks": short(miss.like_ranks),
            }
            for miss in misses(rows)
        ],
    }


def short(difference: float) -> float | None:
    """For JSON, which has no numbers that are none."""
    return float(f"{difference:.1e}") if math.isfinite(difference) else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/train/mesh_agreement.py")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", default="", help="layouts whose names hold this text")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    options = parser.parse_args(argv)
    rows = measure(options.steps, options.lr, options.only)
    print(f"{'layout':40} {'ranks':>5} {'loss':>8} {'grad norm':>9}")
    for row in rows:
        print(f"{row.layout:40} {row.ranks:>5} {row.loss:>8.1e} {row.grad_norm:>9.1e}")
    if options.output:
        options.output.write_text(json.dumps(report(rows, options), indent=2) + "\n")
    missed = list(misses(rows))
    for miss in missed:
        print(
            f"missed: {miss.layout}: {miss.quantity} {miss.difference:.1e}, expected at most "
            f"{miss.bar:.0e}; like ranks part by {miss.like_ranks:.1e}"
        )
    return 4 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
