"""What ``action=estimate`` says of the runs that docs/results/ has, beside what they took."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu

from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.estimate.plan import GIB, Estimate, device_of

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
_LAYOUTS = {
    "one rank": "",
    "dp4": "",
    "tp2 pp2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2",
}


@dataclass(frozen=True)
class Compared:
    """A run: GiB that its fullest rank took, seconds of a step, and both by calculation."""

    name: str
    memory: float
    seconds: float
    counted: float
    reckoned: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of memory and time, as shares of what was measured."""
        return self.counted / self.memory - 1, self.reckoned / self.seconds - 1


def compared() -> Iterator[Compared]:
    """Every run on GPUs of which there are time and memory."""
    names = {field.name for field in fields(gpu.Row)}
    for path in sorted(RESULTS.glob("gpu-*.json")):
        for record in json.loads(path.read_text())["rows"]:
            row = gpu.Row(**{name: record[name] for name in names & record.keys()})
            took = record["memory_gib"], record["step_seconds"]
            yield _beside(f"{row.name} ({path.stem})", gpu.settings(row), *took)
    path = RESULTS / "h200-llama3-8b.json"
    before: list[str] = []
    for gpus, layers, layout, said, speed, *_, memory in json.loads(path.read_text())["rows"]:
        more = [word for word in said.split() if "=" in word]
        before = [*before, *more] if said.startswith("the same") else more
        args = _of_overrides(gpus, layers, layout, before)
        seconds = args.global_batch_size * args.seq_length / speed
        name = f"{layers} layers, {layout}, {said} ({path.stem})"
        yield _beside(name, args, memory, seconds)


def _of_overrides(gpus: int, layers: int, layout: str, overrides: list[str]) -> Namespace:
    words = []
    for name, value in (word.split("=") for word in overrides):
        words += [f"--{name.replace('_', '-')}", *([] if value == "true" else [value])]
    size = f"--num-layers {layers} --seq-length 4096 --train-iters 1 --mock-data"
    size = f"{gpu.MODEL} {size} {_LAYOUTS[layout]} {gpu.OVERLAP} --transformer-impl local"
    return resolve(parse_arguments([*size.split(), *words]), gpus)


def _beside(name: str, args: Any, memory: float, seconds: float) -> Compared:
    stages = args.pipeline_model_parallel_size
    made = Estimate(args, args.vocab_size, (device_of("H200"),) * stages)
    most = max(stage.memory.all for stage in made.forecast.stages) / GIB
    if made.seconds is None:
        raise AssertionError(name)
    return Compared(name, memory, seconds, most, made.seconds[0])
