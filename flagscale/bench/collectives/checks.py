"""Verification of results: one run on reproducible inputs, compared with a golden result.

Every input element is a function of seed, rank and position. Each rank can therefore compute the
input of any other rank, chunk by chunk, without communication and without storing all inputs. The
golden result is computed on the CPU in 64 bits. Called by :mod:`.session` before and after the
timing of each size.

A *part* is one operation on its buffers, and a *body* the parts that one iteration issues together
(:mod:`.collective_calls`). A *piece* is a range of a part's output whose elements have the same
source: one rank's input, or a reduction of all ranks' inputs.

Tolerance of a floating-point sum: each addition rounds once, in whatever order, so the error is
at most ``g(k) * sum |x_i|`` with ``g(k) = k*u / (1 - k*u)``, unit roundoff ``u`` and number of
roundings ``k`` (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). For the sum
of n ranks ``k`` is n: n - 1 additions, and the conversion of the result. For a product the
tolerance is ``g(k) * |product|``. Copies, minimum and maximum are exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flagscale.accelerators.device import Device
from flagscale.bench.collectives.collective_calls import BufferSizes, OperationPart, PreparedBuffers
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.collectives.spec import BenchSpec, Case, CheckMode

CHUNK_ELEMENTS = 2**20
"""Number of elements that are computed at a time."""

_ALL_RANKS = -1
_SAMPLE_VALUES = 4
# Written to outputs before the operation, so that elements which it leaves unwritten are detected:
# few golden values are equal to it.
_UNWRITTEN_VALUE = 77
_SPLITMIX64 = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Constants of the random generator splitmix64, as signed 64-bit integers."""


@dataclass(frozen=True)
class OutputPiece:
    """Range of output elements, and the input elements that they come from."""

    start: int
    """Index of the first element in the output."""
    length: int
    """Number of elements."""
    source: int
    """Index of a rank in the group, or ``_ALL_RANKS`` for a reduction."""
    source_start: int
    """Index of the first element in the input of the source, or of every rank."""


@dataclass(frozen=True)
class OutputCheck:
    """Result of the check of one part's output."""

    wrong_count: int = 0
    """Number of wrong elements."""
    first_wrong_index: int = -1
    """Index of the first wrong element; -1: none."""
    expected: float = 0.0
    """Golden value of that element."""
    actual: float = 0.0
    """Value of that element."""

    def __str__(self) -> str:
        if not self.wrong_count:
            return "right"
        location = f"{self.wrong_count} wrong, the first at {self.first_wrong_index}"
        return f"{location}: expected {self.expected:g}, found {self.actual:g}"


def output_pieces(case: Case, buffer_sizes: BufferSizes, group: RankGroup) -> Iterator[OutputPiece]:
    """Yield the required contents of this rank's output; nothing if it is undefined."""
    name, ranks, index = case.operation.name, group.size, group.index
    shard = buffer_sizes.shard(ranks)
    if case.operation.rooted and name in ("reduce", "gather") and index != case.root:
        return
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        start = index * shard if name == "reduce_scatter" else 0
        yield OutputPiece(0, buffer_sizes.output_elements, _ALL_RANKS, start)
    elif name in ("all_gather", "gather", "all_to_all"):
        start = index * shard if name == "all_to_all" else 0
        for source in range(ranks):
            yield OutputPiece(source * shard, shard, source, start)
    elif name == "all_to_all_v":
        own_exchange = buffer_sizes.exchanges[index]
        for source, sender in enumerate(buffer_sizes.exchanges):
            length = own_exchange.recv_counts[source]
            yield OutputPiece(
                own_exchange.recv_displs[source], length, source, sender.send_displs[index]
            )
    elif name in ("broadcast", "scatter"):
        yield OutputPiece(
            0, buffer_sizes.output_elements, case.root, index * shard if name == "scatter" else 0
        )
    else:
        for source, target in buffer_sizes.pairs:
            if target == index:
                yield OutputPiece(0, buffer_sizes.output_elements, source, 0)


@dataclass(frozen=True)
class Golden:
    """Input data and golden result of one check."""

    case: Case
    group: RankGroup
    mode: CheckMode
    seed: int

    def fill_buffers(self, part: OperationPart) -> None:
        """Write this rank's input, and overwrite the output, so that elements left unwritten are
        detected.
        """
        if part.output.numel() and not self.case.in_place:
            part.output.copy_(
                torch.full((1,), _UNWRITTEN_VALUE, dtype=torch.int64).to(part.output.dtype)
            )
        elif self.case.in_place and self.case.operation.name == "all_gather":
            part.output.zero_()
        for start in range(0, part.input.numel(), CHUNK_ELEMENTS):
            length = min(CHUNK_ELEMENTS, part.input.numel() - start)
            values = self.inputs(self.group.index, start, length)
            part.input[start : start + length] = values.to(part.input.device)

    def inputs(self, index: int, start: int, length: int) -> torch.Tensor:
        """Return elements of the input of a rank, in the operation's type. ``index``: index of the
        rank in the group.
        """
        dtype = getattr(torch, self.case.type.torch)
        if self.mode == "all_ones":
            return torch.ones(length, dtype=torch.int64).to(dtype)
        bits = _random_bits(self.seed, self.group.ranks[index], start, length)
        if self.case.type.kind == "integer":
            return bits.to(dtype)
        unit = (bits & 0xFFFFFF).to(torch.float64) / 2**24
        if self.case.reduction == "prod":
            # Magnitudes near 1, so that a product over many ranks neither overflows nor vanishes.
            sign = ((bits >> 32) & 1) * 2 - 1
            return ((0.75 + unit / 2) * sign).to(dtype)
        return (unit * 2 - 1).to(dtype)

    def expected_values(
        self, piece: OutputPiece, start: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of a piece's elements in 64 bits, and their tolerances."""
        wide_dtype = torch.int64 if self.case.type.kind == "integer" else torch.float64
        source_start = piece.source_start + start
        if piece.source != _ALL_RANKS:
            value = self.inputs(piece.source, source_start, length).to(wide_dtype)
            return value, torch.zeros(length, dtype=torch.float64)
        value = self.inputs(0, source_start, length).to(wide_dtype)
        magnitude = value.abs().to(torch.float64)
        calls = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
        combine = calls.get(self.case.reduction, torch.add)
        for source in range(1, self.group.size):
            operand = self.inputs(source, source_start, length).to(wide_dtype)
            value = combine(value, operand)
            magnitude += operand.abs().to(torch.float64)
        if self.case.reduction == "avg":
            value = value / self.group.size
            magnitude = magnitude / self.group.size
        return value, self._tolerance(value, magnitude)

    def _tolerance(self, value: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
        data_type, ranks = self.case.type, self.group.size
        if data_type.kind == "integer" or self.case.reduction in ("min", "max"):
            return torch.zeros_like(magnitude)
        # A sum: ranks - 1 additions, and one conversion to the type. An average may also scale
        # every input before adding.
        roundings = ranks + 1 if self.case.reduction == "avg" else ranks
        error = roundings * data_type.roundoff
        bound = error / (1 - error) if error < 0.5 else 1.0
        scale = value.abs() if self.case.reduction == "prod" else magnitude
        return bound * scale + roundings * data_type.tiny

    def _expected_chunks(
        self, part: OperationPart
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the elements where this rank's output is defined, with values and tolerances."""
        for piece in output_pieces(self.case, part.buffer_sizes, self.group):
            for start in range(0, piece.length, CHUNK_ELEMENTS):
                length = min(CHUNK_ELEMENTS, piece.length - start)
                begin = piece.start + start
                yield slice(begin, begin + length), *self.expected_values(piece, start, length)

    def verify(self, part: OperationPart) -> OutputCheck:
        """Compare this rank's output with the golden result."""
        wrong_count, first_wrong_index, expected, first_actual = 0, -1, 0.0, 0.0
        for output_range, value, tolerance in self._expected_chunks(part):
            actual = part.output[output_range].cpu()
            is_wrong = _find_differences(actual, value, tolerance)
            count = int(is_wrong.sum())
            if count and not wrong_count:
                offset = int(is_wrong.nonzero()[0])
                first_wrong_index, expected = output_range.start + offset, float(value[offset])
                first_actual = float(actual[offset].to(torch.float64))
            wrong_count += count
        return OutputCheck(wrong_count, first_wrong_index, expected, first_actual)

    def golden_output(self, part: OperationPart) -> torch.Tensor:
        """Return the golden output in 64 bits, with zeros where it is undefined. For dumps."""
        wide_dtype = torch.int64 if self.case.type.kind == "integer" else torch.float64
        result = torch.zeros(part.output.numel(), dtype=wide_dtype)
        for output_range, value, _ in self._expected_chunks(part):
            result[output_range] = value
        return result


def _find_differences(
    actual: torch.Tensor, value: torch.Tensor, tolerance: torch.Tensor
) -> torch.Tensor:
    if value.dtype == torch.int64:
        # The golden sum is converted to the type, which wraps around on overflow as the sum does.
        return actual.to(torch.int64) != value.to(actual.dtype).to(torch.int64)
    distance = (actual.to(torch.float64) - value).abs()
    # The golden value itself may overflow when it is rounded to the type, hence the second
    # comparison. NaN must count as different.
    is_equal = (distance <= tolerance) | (actual == value.to(actual.dtype))
    return ~is_equal


def _shift_right(bits: torch.Tensor, bit_count: int) -> torch.Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return (bits >> bit_count) & ((1 << (64 - bit_count)) - 1)


def _random_bits(seed: int, rank: int, start: int, length: int) -> torch.Tensor:
    """Return 64 random bits per element by splitmix64, as a function of the position."""
    key = (seed * 1_000_003 + rank * 7919 + 1) % 2**62
    bits = (torch.arange(start, start + length, dtype=torch.int64) + key) * _SPLITMIX64[0]
    bits = (bits ^ _shift_right(bits, 30)) * _SPLITMIX64[1]
    bits = (bits ^ _shift_right(bits, 27)) * _SPLITMIX64[2]
    return bits ^ _shift_right(bits, 31)


def fingerprint_bytes(output: torch.Tensor) -> bytes:
    """Return a fingerprint of a tensor's bytes, to compare ranks without sending the data."""
    result = hashlib.blake2b(digest_size=16)
    step = CHUNK_ELEMENTS * 8
    raw = output.contiguous().view(torch.uint8)
    for start in range(0, raw.numel(), step):
        result.update(raw[start : start + step].cpu().numpy().tobytes())
    return result.digest()


@dataclass(frozen=True)
class CheckResult:
    """Result of the checks of all parts on one rank."""

    wrong_count: int = 0
    """Number of wrong elements in all outputs."""
    description: str = ""
    """Description of the first output with wrong elements; empty if there is none."""
    fingerprint: bytes = b""
    """Fingerprint of all outputs, if every rank must end with the same."""
    first_wrong_part: int = -1
    """Index of the first part with wrong elements, among the parts of all bodies; -1: none."""


def check_output(
    case: Case, prepared: PreparedBuffers, device: Device, spec: BenchSpec
) -> CheckResult:
    """Fill the buffers, run every body once, and verify the outputs.

    Before the timing the caller must call :func:`clear_buffers`.
    """
    if spec.check.mode is None or not prepared.group.is_member or case.operation.name == "barrier":
        return CheckResult()
    output_checks: list[OutputCheck] = []
    fingerprints: list[bytes] = []
    for body in prepared.bodies:
        goldens = _golden_parts(case, prepared, spec, body.parts)
        for part, golden in goldens:
            golden.fill_buffers(part)
        body.step()
        device.synchronize()
        for part, golden in goldens:
            output_checks.append(golden.verify(part))
            if case.operation.same_output:
                fingerprints.append(fingerprint_bytes(part.output))
    wrong_parts = [i for i, output_check in enumerate(output_checks) if output_check.wrong_count]
    return CheckResult(
        wrong_count=sum(output_check.wrong_count for output_check in output_checks),
        description=str(output_checks[wrong_parts[0]]) if wrong_parts else "",
        fingerprint=b"".join(fingerprints),
        first_wrong_part=wrong_parts[0] if wrong_parts else -1,
    )


def format_sample(case: Case, prepared: PreparedBuffers, device: Device, spec: BenchSpec) -> str:
    """Return the first values of this rank's first buffers before and after an operation. Every
    rank must call this.
    """
    if not prepared.bodies:
        return "in no group"
    body = prepared.bodies[0]
    for part, golden in _golden_parts(case, prepared, spec, body.parts):
        golden.fill_buffers(part)
    part = body.parts[0]
    before = _format_values(part.input)
    body.step()
    device.synchronize()
    return f"{before} -> {_format_values(part.output)}"


def _format_values(values: torch.Tensor) -> str:
    text = ", ".join(f"{value:.5g}" for value in values[:_SAMPLE_VALUES].tolist())
    return f"[{text}{', ...' if values.numel() > _SAMPLE_VALUES else ''}]"


def clear_buffers(prepared: PreparedBuffers) -> None:
    """Fill all buffers with zeros, for the timing: repeated in-place sums of random values would
    overflow, which is slower on a CPU.
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
    case: Case, prepared: PreparedBuffers, spec: BenchSpec, size: int, rank: int, part_index: int
) -> Path:
    """Save input, output and golden result of a failed check, and return the file.

    In place, the operation has overwritten the input, so it is computed again.

    Raises:
        OSError: the file cannot be written.
    """
    part_goldens = [
        g for body in prepared.bodies for g in _golden_parts(case, prepared, spec, body.parts)
    ]
    part, golden = part_goldens[max(part_index, 0)]
    name = f"{case.operation.name}_{case.type.name}_{case.reduction}_{size}"
    directory = spec.check.dump / f"{name}_seed{spec.check.seed}"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{rank}.pt"
    input_values = (
        golden.inputs(golden.group.index, 0, part.input.numel())
        if case.in_place
        else part.input.cpu().clone()
    )
    content = {
        "input": input_values,
        "output": part.output.cpu().clone(),
        "golden": golden.golden_output(part),
        "case": case.label,
        "seed": spec.check.seed,
    }
    torch.save(content, path)
    return path
