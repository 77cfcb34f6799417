"""Verification of results: one run on reproducible inputs, compared with a golden result.

Every input element is a function of seed, rank and position. Each rank can therefore compute
what any other rank sent, piece by piece, without a message and without storing all inputs. The
golden result is computed on the CPU in 64 bits.

Tolerance of a floating-point sum: each addition rounds once, in whatever order, so the error is
at most ``g(k) * sum |x_i|`` with ``g(k) = k*u / (1 - k*u)``, unit roundoff ``u`` and number of
roundings ``k`` (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). For a
product it is ``g(k) * |product|``. Copies, minimum and maximum are exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flagscale.accelerators.device import Device
from flagscale.bench.collectives.collective_calls import OperationPart, PreparedBuffers, Shape
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.collectives.spec import BenchSpec, Case, CheckMode

CHUNK = 2**20
"""Elements that are computed at a time."""

_ALL = -1
_SHOWN = 4
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants


@dataclass(frozen=True)
class OutputPiece:
    """Consecutive output elements and the source of their values."""

    start: int
    length: int
    source: int
    """Index of a rank in the group, or ``_ALL``."""
    source_start: int


@dataclass(frozen=True)
class OutputCheck:
    """Result of the check of one output."""

    wrong: int = 0
    first: int = -1
    """Index of the first wrong element."""
    expected: float = 0.0
    found: float = 0.0

    def __str__(self) -> str:
        if not self.wrong:
            return "right"
        location = f"{self.wrong} wrong, the first at {self.first}"
        return f"{location}: expected {self.expected:g}, found {self.found:g}"


def output_pieces(case: Case, shape: Shape, group: RankGroup) -> Iterator[OutputPiece]:
    """Yield the required contents of this rank's output; nothing if it is undefined."""
    name, n, index = case.operation.name, group.size, group.index
    shard = shape.shard(n)
    if case.operation.rooted and name in ("reduce", "gather") and index != case.root:
        return
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        start = index * shard if name == "reduce_scatter" else 0
        yield OutputPiece(0, shape.outputs, _ALL, start)
    elif name in ("all_gather", "gather", "all_to_all"):
        start = index * shard if name == "all_to_all" else 0
        for source in range(n):
            yield OutputPiece(source * shard, shard, source, start)
    elif name == "all_to_all_v":
        own_exchange = shape.exchanges[index]
        for source, sender in enumerate(shape.exchanges):
            length = own_exchange.recv_counts[source]
            yield OutputPiece(
                own_exchange.recv_displs[source], length, source, sender.send_displs[index]
            )
    elif name in ("broadcast", "scatter"):
        yield OutputPiece(0, shape.outputs, case.root, index * shard if name == "scatter" else 0)
    else:
        for source, target in shape.pairs:
            if target == index:
                yield OutputPiece(0, shape.outputs, source, 0)


@dataclass(frozen=True)
class Golden:
    """Input data and golden result of one check."""

    case: Case
    group: RankGroup
    mode: CheckMode
    seed: int

    def fill(self, part: OperationPart) -> None:
        """Write this rank's input, and overwrite the output, so that elements left unwritten are
        detected.
        """
        if part.output.numel() and not self.case.in_place:
            part.output.copy_(torch.full((1,), 77, dtype=torch.int64).to(part.output.dtype))
        elif self.case.in_place and self.case.operation.name == "all_gather":
            part.output.zero_()
        for start in range(0, part.input.numel(), CHUNK):
            length = min(CHUNK, part.input.numel() - start)
            values = self.inputs(self.group.index, start, length)
            part.input[start : start + length] = values.to(part.input.device)

    def inputs(self, place: int, start: int, length: int) -> torch.Tensor:
        """Return elements of the input of the ``place``-th rank of the group, in the operation's
        type.
        """
        dtype = getattr(torch, self.case.type.torch)
        if self.mode == "all_ones":
            return torch.ones(length, dtype=torch.int64).to(dtype)
        bits = _random_bits(self.seed, self.group.ranks[place], start, length)
        if self.case.type.kind == "integer":
            return bits.to(dtype)
        unit = (bits & 0xFFFFFF).to(torch.float64) / 2**24
        if self.case.reduction == "prod":
            # Near one in size, so that a product over many ranks stays in range.
            sign = ((bits >> 32) & 1) * 2 - 1
            return ((0.75 + unit / 2) * sign).to(dtype)
        return (unit * 2 - 1).to(dtype)

    def expect(
        self, piece: OutputPiece, start: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of a piece's elements in 64 bits, and their tolerances."""
        wide = torch.int64 if self.case.type.kind == "integer" else torch.float64
        place = piece.source_start + start
        if piece.source != _ALL:
            value = self.inputs(piece.source, place, length).to(wide)
            return value, torch.zeros(length, dtype=torch.float64)
        value = self.inputs(0, place, length).to(wide)
        size = value.abs().to(torch.float64)
        calls = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
        combine = calls.get(self.case.reduction, torch.add)
        for source in range(1, self.group.size):
            operand = self.inputs(source, place, length).to(wide)
            value = combine(value, operand)
            size += operand.abs().to(torch.float64)
        if self.case.reduction == "avg":
            value = value / self.group.size
            size = size / self.group.size
        return value, self._tolerance(value, size)

    def _tolerance(self, value: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        type_, ranks = self.case.type, self.group.size
        if type_.kind == "integer" or self.case.reduction in ("min", "max"):
            return torch.zeros_like(size)
        # An average may scale every input before adding; the result is rounded once more.
        roundings = ranks + 1 if self.case.reduction == "avg" else ranks
        error = roundings * type_.roundoff
        bound = error / (1 - error) if error < 0.5 else 1.0
        scale = value.abs() if self.case.reduction == "prod" else size
        return bound * scale + roundings * type_.tiny

    def _expected(self, part: OperationPart) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the elements where this rank's output is defined, with values and tolerances."""
        for piece in output_pieces(self.case, part.shape, self.group):
            for start in range(0, piece.length, CHUNK):
                length = min(CHUNK, piece.length - start)
                begin = piece.start + start
                yield slice(begin, begin + length), *self.expect(piece, start, length)

    def verify(self, part: OperationPart) -> OutputCheck:
        """Compare this rank's output with the golden result."""
        wrong, first, expected, first_actual = 0, -1, 0.0, 0.0
        for place, value, tolerance in self._expected(part):
            actual = part.output[place].cpu()
            bad = _find_differences(actual, value, tolerance)
            count = int(bad.sum())
            if count and not wrong:
                offset = int(bad.nonzero()[0])
                first, expected = place.start + offset, float(value[offset])
                first_actual = float(actual[offset].to(torch.float64))
            wrong += count
        return OutputCheck(wrong, first, expected, first_actual)

    def whole(self, part: OperationPart) -> torch.Tensor:
        """Return the golden output in 64 bits, with zeros where it is undefined. For dumps."""
        wide = torch.int64 if self.case.type.kind == "integer" else torch.float64
        result = torch.zeros(part.output.numel(), dtype=wide)
        for place, value, _ in self._expected(part):
            result[place] = value
        return result


def _find_differences(
    actual: torch.Tensor, value: torch.Tensor, tolerance: torch.Tensor
) -> torch.Tensor:
    if value.dtype == torch.int64:
        # The golden sum wraps around as the type does.
        return actual.to(torch.int64) != value.to(actual.dtype).to(torch.int64)
    distance = (actual.to(torch.float64) - value).abs()
    # Rounding of the golden value itself may overflow; NaN must count as different.
    same = (distance <= tolerance) | (actual == value.to(actual.dtype))
    return ~same


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _random_bits(seed: int, rank: int, start: int, length: int) -> torch.Tensor:
    """Return 64 random bits per element by splitmix64, as a function of the position."""
    key = (seed * 1_000_003 + rank * 7919 + 1) % 2**62
    bits = (torch.arange(start, start + length, dtype=torch.int64) + key) * _MIX[0]
    bits = (bits ^ _shift(bits, 30)) * _MIX[1]
    bits = (bits ^ _shift(bits, 27)) * _MIX[2]
    return bits ^ _shift(bits, 31)


def fingerprint_bytes(output: torch.Tensor) -> bytes:
    """Return a fingerprint of a tensor's bytes, to compare ranks without sending the data."""
    result = hashlib.blake2b(digest_size=16)
    step = CHUNK * 8
    raw = output.contiguous().view(torch.uint8)
    for start in range(0, raw.numel(), step):
        result.update(raw[start : start + step].cpu().numpy().tobytes())
    return result.digest()


@dataclass(frozen=True)
class CheckResult:
    """Result of the checks on one rank."""

    wrong: int = 0
    first: str = ""
    """Description of the first wrong element."""
    fingerprint: bytes = b""
    """Fingerprint of all outputs, if every rank must end with the same."""
    part: int = -1
    """Index of the first wrong part."""


def check_output(
    case: Case, prepared: PreparedBuffers, device: Device, spec: BenchSpec
) -> CheckResult:
    """Fill the buffers, run once, and verify. The buffers must be cleared before the timing."""
    if spec.check.mode is None or not prepared.group.member or case.operation.name == "barrier":
        return CheckResult()
    verdicts: list[OutputCheck] = []
    fingerprints: list[bytes] = []
    for body in prepared.bodies:
        goldens = _golden_parts(case, prepared, spec, body.parts)
        for part, golden in goldens:
            golden.fill(part)
        body.step()
        device.synchronize()
        for part, golden in goldens:
            verdicts.append(golden.verify(part))
            if case.operation.same_output:
                fingerprints.append(fingerprint_bytes(part.output))
    wrong_parts = [i for i, verdict in enumerate(verdicts) if verdict.wrong]
    return CheckResult(
        wrong=sum(verdict.wrong for verdict in verdicts),
        first=str(verdicts[wrong_parts[0]]) if wrong_parts else "",
        fingerprint=b"".join(fingerprints),
        part=wrong_parts[0] if wrong_parts else -1,
    )


def format_sample(case: Case, prepared: PreparedBuffers, device: Device, spec: BenchSpec) -> str:
    """Return the first values of this rank's first buffers before and after an operation. Every
    rank must call this.
    """
    if not prepared.bodies:
        return "in no group"
    body = prepared.bodies[0]
    for part, golden in _golden_parts(case, prepared, spec, body.parts):
        golden.fill(part)
    part = body.parts[0]
    before = _format_values(part.input)
    body.step()
    device.synchronize()
    return f"{before} -> {_format_values(part.output)}"


def _format_values(values: torch.Tensor) -> str:
    text = ", ".join(f"{value:.5g}" for value in values[:_SHOWN].tolist())
    return f"[{text}{', ...' if values.numel() > _SHOWN else ''}]"


def clear_buffers(prepared: PreparedBuffers) -> None:
    """Fill all buffers with zeros: repeated sums in place would overflow, which is slower on a
    CPU.
    """
    for part in (part for body in prepared.bodies for part in body.parts):
        part.input.zero_()
        part.output.zero_()


def _golden_parts(
    case: Case, prepared: PreparedBuffers, spec: BenchSpec, parts: tuple[OperationPart, ...]
) -> list[tuple[OperationPart, Golden]]:
    """Return the parts of a body with their golden data."""
    mode, seed = spec.check.mode or "random", spec.check.seed
    # Parts have different data, so that interchanged parts are detected.
    return [(part, Golden(case, prepared.group, mode, seed + i)) for i, part in enumerate(parts)]


def dump_buffers(
    case: Case, prepared: PreparedBuffers, spec: BenchSpec, size: int, rank: int, part_number: int
) -> Path:
    """Save input, output and golden result of a failed check, and return the file.

    Raises:
        OSError: the file cannot be written.
    """
    every = [g for body in prepared.bodies for g in _golden_parts(case, prepared, spec, body.parts)]
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
