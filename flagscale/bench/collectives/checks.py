"""One correctness check of a size: run each operation once on known data and look at the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from flagscale.bench.collectives.bodies import Part
from flagscale.bench.collectives.buffers import PreparedBuffers
from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.collectives.golden import Golden, Verdict, digest
from flagscale.bench.collectives.spec import BenchSpec, Case

_SHOWN = 4


@dataclass(frozen=True)
class Checked:
    """What one rank found."""

    wrong: int = 0
    first: str = ""
    """The first wrong element in words."""
    fingerprint: bytes = b""
    """Of all outputs, where every rank must end with the same."""
    part: int = -1
    """The first part that is wrong."""


def check(case: Case, prepared: PreparedBuffers, device: BenchDevice, spec: BenchSpec) -> Checked:
    """Fill, run once, verify; leaves zeros in the buffers for the timing."""
    if spec.check.mode is None or not prepared.group.member or case.operation.name == "barrier":
        return Checked()
    verdicts: list[Verdict] = []
    prints: list[bytes] = []
    for body in prepared.bodies:
        goldens = _goldens(case, prepared, spec, body.parts)
        for part, golden in goldens:
            golden.fill(part)
        body.step()
        device.synchronize()
        for part, golden in goldens:
            verdicts.append(golden.verify(part))
            if case.operation.same_output:
                prints.append(digest(part.output))
    bad = [i for i, verdict in enumerate(verdicts) if verdict.wrong]
    return Checked(
        wrong=sum(verdict.wrong for verdict in verdicts),
        first=str(verdicts[bad[0]]) if bad else "",
        fingerprint=b"".join(prints),
        part=bad[0] if bad else -1,
    )


def sample(case: Case, prepared: PreparedBuffers, device: BenchDevice, spec: BenchSpec) -> str:
    """The first values of this rank's first buffers before and after an operation on known data;
    every rank calls this."""
    if not prepared.bodies:
        return "in no group"
    body = prepared.bodies[0]
    for part, golden in _goldens(case, prepared, spec, body.parts):
        golden.fill(part)
    part = body.parts[0]
    before = _first(part.input)
    body.step()
    device.synchronize()
    return f"{before} -> {_first(part.output)}"


def _first(values: torch.Tensor) -> str:
    shown = ", ".join(f"{value:.5g}" for value in values[:_SHOWN].tolist())
    return f"[{shown}{', ...' if values.numel() > _SHOWN else ''}]"


def clear(prepared: PreparedBuffers) -> None:
    """Zeros in all buffers: repeated sums in place would overflow, which is slower on a CPU."""
    for part in prepared.distinct:
        part.input.zero_()
        part.output.zero_()


def _goldens(
    case: Case, prepared: PreparedBuffers, spec: BenchSpec, parts: tuple[Part, ...]
) -> list[tuple[Part, Golden]]:
    """The parts of a body, each with its data."""
    mode, seed = spec.check.mode or "random", spec.check.seed
    # Parts differ in their data, so that one in the place of another shows.
    return [(part, Golden(case, prepared.group, mode, seed + i)) for i, part in enumerate(parts)]


def dump(
    case: Case, prepared: PreparedBuffers, spec: BenchSpec, size: int, rank: int, part_number: int
) -> Path:
    """Save input, output and golden result of a failed check; returns the file.

    Raises:
        OSError: it cannot be written.
    """
    every = [g for body in prepared.bodies for g in _goldens(case, prepared, spec, body.parts)]
    part, golden = every[max(part_number, 0)]
    name = f"{case.operation.name}_{case.type.name}_{case.reduction}_{size}"
    directory = spec.check.dump / f"{name}_seed{spec.check.seed}"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{rank}.pt"
    content = {
        "input": part.input.cpu().clone(),
        "output": part.output.cpu().clone(),
        "golden": golden.whole(part),
        "case": case.label,
        "seed": spec.check.seed,
    }
    torch.save(content, path)
    return path
