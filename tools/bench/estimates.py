"""Compare ``action=estimate`` with the measured runs in docs/results."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gpu

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.estimate.plan import GIB, Estimate, get_device_spec

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
_LAYOUTS = {
    "one rank": "",
    "dp4": "",
    "tp2 pp2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2",
}


@dataclass(frozen=True)
class ComparedRun:
    """Measured and estimated memory and step time of one run.

    ``memory`` is in GiB, of the rank that uses most. ``seconds`` is the time of a step.
    """

    name: str
    memory: float
    seconds: float
    estimated_memory: float
    estimated_seconds: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of the estimated memory and step time."""
        return self.estimated_memory / self.memory - 1, self.estimated_seconds / self.seconds - 1


def compare_runs() -> Iterator[ComparedRun]:
    """Yield every run on GPUs for which both time and memory were recorded."""
    field_names = {field.name for field in fields(gpu.GpuRow)}
    for path in sorted(RESULTS.glob("gpu-*.json")):
        for record in json.loads(path.read_text())["rows"]:
            row = gpu.GpuRow(**{name: record[name] for name in field_names & record.keys()})
            measured = record["memory_gib"], record["step_seconds"]
            yield _compare_run(
                f"{row.name} ({path.stem})", gpu.resolve_row_arguments(row), *measured
            )
    path = RESULTS / "h200-llama3-8b.json"
    previous_overrides: list[str] = []
    for gpus, layers, layout, description, speed, *_, memory in json.loads(path.read_text())[
        "rows"
    ]:
        overrides = [word for word in description.split() if "=" in word]
        previous_overrides = (
            [*previous_overrides, *overrides] if description.startswith("the same") else overrides
        )
        args = _resolve_overrides(gpus, layers, layout, previous_overrides)
        seconds = args.global_batch_size * args.seq_length / speed
        name = f"{layers} layers, {layout}, {description} ({path.stem})"
        yield _compare_run(name, args, memory, seconds)


def _resolve_overrides(gpus: int, layers: int, layout: str, overrides: list[str]) -> Namespace:
    words = []
    for name, value in (word.split("=") for word in overrides):
        words += [f"--{name.replace('_', '-')}", *([] if value == "true" else [value])]
    size = f"--num-layers {layers} --seq-length 4096 --train-iters 1 --mock-data"
    size = (
        f"{gpu.MODEL} {gpu.UNTIED} {size} {_LAYOUTS[layout]} {gpu.OVERLAP} --transformer-impl local"
    )
    return derive_arguments(parse_arguments([*size.split(), *words]), gpus)


def _compare_run(name: str, args: Any, memory: float, seconds: float) -> ComparedRun:
    stages = args.pipeline_model_parallel_size
    estimate = Estimate(args, args.vocab_size, (get_device_spec("H200"),) * stages)
    peak_memory = max(stage.memory.total for stage in estimate.forecast.stages) / GIB
    if estimate.seconds is None:
        raise AssertionError(name)
    return ComparedRun(name, memory, seconds, peak_memory, estimate.seconds[0])
