#!/usr/bin/env python3
"""How far unlike meshes part from one rank over many steps.

    tools/train/mesh_agreement.py --output docs/results/mesh-agreement-cpu.json

Trains every layout of meshes and of unlike replicas that the tests have, on this machine's CPU,
what is in fp32 in bf16 too; beside each the run that it has to equal, of one rank with the same
batches, and for comparison some layouts of like ranks. Of losses and gradient norms the largest
relative difference over all steps is told; steps that both skip count in neither.

Exits with 4 where a loss differs by more than 1e-5, in 16 bits 1e-2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

FP32, SIXTEEN_BITS = 1e-5, 1e-2
OF_LIKE_RANKS = ("dp2-do", "tp2-sp", "pp2", "moe-ep2")


@dataclass(frozen=True)
class Row:
    """Largest relative differences of a layout's steps from its reference's."""

    layout: str
    ranks: int
    precision: str
    reference: str
    loss: float
    grad_norm: float

    @property
    def misses(self) -> bool:
        return not self.loss <= (FP32 if self.precision == "fp32" else SIXTEEN_BITS)


def measure(steps: int, rate: float, pattern: str) -> list[Row]:
    """Train the layouts whose names hold ``pattern``, and what they are compared with."""
    import layout_cases as layouts  # type: ignore[import-not-found]

    alone = {case.name: case for case in (*layouts.REFERENCES, *layouts.CASES) if case.world == 1}
    every = [*(case for case in layouts.CASES if case.name in OF_LIKE_RANKS), *layouts.MESHES]
    chosen = [case for case in every if pattern in case.name and case.reference in alone]
    wanted = sorted({case.reference for case in chosen})
    references = [replace(alone[name], reference="") for name in wanted]
    length = f"--train-iters {steps} --lr {rate}"
    longer = [replace(c, layout=f"{c.layout} {length}") for c in (*references, *chosen)]
    longer += [in_bf16(case) for case in longer if precision(case) == "fp32"]
    with tempfile.TemporaryDirectory() as directory:
        found = layouts.train(longer, Path(directory), timeout_s=3600)
    return [
        Row(
            case.name,
            case.world,
            precision(case),
            case.reference,
            furthest(found[case.name], found[case.reference], "loss"),
            furthest(found[case.name], found[case.reference], "norm"),
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
            {
                **asdict(row),
                "loss": float(f"{row.loss:.1e}"),
                "grad_norm": float(f"{row.grad_norm:.1e}"),
            }
            for row in rows
        ],
    }


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
    return 4 if any(row.misses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
