"""Number formats in which Adam keeps its weights and moments.

Every format reads fp32 values from its tensors and writes them back in place. Writing rounds
stochastically, to one of the two nearest numbers with probabilities such that the expected value is
the exact one. An update that is smaller than half of the distance of two numbers would otherwise be
lost in every step: with ``adam_beta2: 0.999``, the second moment changes by a thousandth at a time,
and numbers in bf16 are 1/128 apart.

Formats with a scale per block use powers of two as scales. A new scale then keeps the numbers that
both scales can represent, so that writing an unchanged value is exact (Rouhani et al., "OCP
Microscaling Formats", 2023). 8-bit moments by blocks: Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", 2022.

Reading and writing consist of elementwise operations and maxima of blocks, in order to be compiled
into one kernel. They take tensors as rows of one block, ``[blocks, values of a block]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from flagscale.config.arguments.rules.optimizer_states import BLOCK_WEIGHTS

Tensors = tuple[torch.Tensor, ...]
Thresholds = torch.Tensor | float
NEAREST = 0.5
"""Threshold that rounds to the nearest number, in place of random ones."""
HOST_PART, DEVICE_PART = 1 << 16, 1 << 24
"""Weights that are processed at once on the host and on a device, because every operation has a
result in memory. On the host these results stay in the caches.
"""
_EXPONENT_MASK, _EXPONENT_SHIFT, _EXPONENT_BIAS = 0x7F800000, 23, 127


class Format(Protocol):
    """Format of one value per weight."""

    @property
    def is_rounded(self) -> bool:
        """True if values are rounded by thresholds."""

    def allocate(self, size: int, device: torch.device) -> Tensors:
        """Return the tensors of ``size`` zeros."""

    def cut(self, tensors: Tensors, part: slice) -> Tensors:
        """Return the flat tensors of a part of the weights, which begins with a block."""

    def rows(self, tensors: Tensors) -> Tensors:
        """Return flat tensors as rows."""

    def read(self, tensors: Tensors) -> torch.Tensor:
        """Return the values of rows in fp32."""

    def write(self, tensors: Tensors, values: torch.Tensor, thresholds: Thresholds) -> None:
        """Round values and overwrite the tensors, which are rows.

        A value between two numbers is rounded up if its distance from the lower one, relative to
        that of the two, exceeds its threshold: a random number from 0 to 1, or :data:`NEAREST`.
        """


def block_parts(size: int, most: int) -> Iterator[slice]:
    """Yield the parts of ``size`` weights that are processed at once: whole blocks with at most
    ``most`` weights, and the shorter block at the end.
    """
    end = size - size % BLOCK_WEIGHTS
    for begin in range(0, end, most):
        yield slice(begin, min(begin + most, end))
    if end < size:
        yield slice(end, size)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor as rows of one block. The only row of a tensor may be shorter."""
    return tensor.view(-1, min(BLOCK_WEIGHTS, tensor.numel()))


class _Elementwise:
    """Format of which every tensor has one element per weight."""

    def cut(self, tensors: Tensors, part: slice) -> Tensors:
        return tuple(tensor[part] for tensor in tensors)

    def rows(self, tensors: Tensors) -> Tensors:
        return tuple(as_rows(tensor) for tensor in tensors)


@dataclass(frozen=True)
class Plain(_Elementwise):
    """Numbers of a torch dtype: fp32, bf16 or fp16."""

    dtype: torch.dtype = torch.float32

    @property
    def is_rounded(self) -> bool:
        return self.dtype != torch.float32

    def allocate(self, size: int, device: torch.device) -> Tensors:
        return (torch.zeros(size, dtype=self.dtype, device=device),)

    def read(self, tensors: Tensors) -> torch.Tensor:
        return tensors[0].float()

    def write(self, tensors: Tensors, values: torch.Tensor, thresholds: Thresholds) -> None:
        if self.is_rounded and isinstance(thresholds, torch.Tensor):
            mantissa_bits, min_exponent = _PRECISIONS[self.dtype]
            step, _ = _distance(values, mantissa_bits, min_exponent)
            values = _round(values / step, thresholds) * step
        tensors[0].copy_(values)


_PRECISIONS = {torch.bfloat16: (7, -119), torch.float16: (10, -14)}
"""Stored bits of the significand, and the smallest exponent with all of them. Smaller bf16 numbers
are not needed.
"""


@dataclass(frozen=True)
class ScaledBlocks:
    """Floating-point numbers of a few bits, relative to a power of two that a block shares.

    A stored number is the position of the value among all representable ones, from 0, the value 0,
    to that of the value 1. Negative values are negative positions.
    """

    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int
    """Exponent below which numbers are evenly spaced."""
    keeps_positive: bool = False
    """True if small values become the smallest positive number instead of zero. An update is
    divided by the root of the second moment.
    """
    is_rounded = True

    def allocate(self, size: int, device: torch.device) -> Tensors:
        blocks = -(-size // BLOCK_WEIGHTS)
        return (
            torch.zeros(size, dtype=self.dtype, device=device),
            torch.zeros(blocks, dtype=torch.uint8, device=device),
        )

    def cut(self, tensors: Tensors, part: slice) -> Tensors:
        blocks = slice(part.start // BLOCK_WEIGHTS, -(-part.stop // BLOCK_WEIGHTS))
        return tensors[0][part], tensors[1][blocks]

    def rows(self, tensors: Tensors) -> Tensors:
        return as_rows(tensors[0]), tensors[1].view(-1, 1)

    def read(self, tensors: Tensors) -> torch.Tensor:
        positions, scales = (tensor.int() for tensor in tensors)
        magnitudes = positions.abs()
        binade = ((magnitudes >> self.mantissa_bits) - 1).clamp(min=0)
        steps = positions.sign() * (magnitudes - (binade << self.mantissa_bits))
        return (
            steps
            * _power_of_two(binade + self.min_exponent - self.mantissa_bits)
            * (_power_of_two(scales - (_EXPONENT_BIAS - 1)) * (scales > 0))
        )

    def write(self, tensors: Tensors, values: torch.Tensor, thresholds: Thresholds) -> None:
        largest = values.abs().amax(dim=1, keepdim=True)
        # The exponent of the power of two below it; all values are at most 1 relative to the next.
        scales = (largest.view(torch.int32) - 1) >> _EXPONENT_SHIFT
        scales = scales.clamp(min=0, max=2 * _EXPONENT_BIAS - 2)
        relative = values.abs() * _power_of_two(_EXPONENT_BIAS - 1 - scales)
        step, binade = _distance(relative, self.mantissa_bits, self.min_exponent)
        positions = (binade << self.mantissa_bits) + _round(relative / step, thresholds).int()
        if self.keeps_positive:
            positions = positions.clamp(min=1)
        positions = torch.where(values < 0, -positions, positions)
        positions = torch.where((values == 0) | (scales == 0), 0, positions)
        tensors[0].copy_(positions)
        tensors[1].copy_(scales)


FIRST_MOMENTS: dict[str, Format] = {
    "fp32": Plain(),
    "bf16": Plain(torch.bfloat16),
    "fp16": ScaledBlocks(torch.int16, mantissa_bits=10, min_exponent=-30),
    "fp8": ScaledBlocks(torch.int8, mantissa_bits=3, min_exponent=-14),
}
"""Formats of the first moment by name. fp8 has a sign, 4 bits of exponent and 3 of significand."""
SECOND_MOMENTS: dict[str, Format] = {
    "fp32": Plain(),
    "bf16": Plain(torch.bfloat16),
    "fp16": ScaledBlocks(torch.int16, mantissa_bits=10, min_exponent=-30, keeps_positive=True),
    "fp8": ScaledBlocks(torch.uint8, mantissa_bits=3, min_exponent=-30, keeps_positive=True),
}
"""Formats of the second moment by name. fp8 has no sign, 5 bits of exponent and 3 of significand:
the squares of a block differ by more than the values.
"""


class WeightFormat(Format, Protocol):
    """Format of master weights, whose first tensor is the model's weights."""

    @property
    def reads_model_weights(self) -> bool:
        """True if the values depend on the model's weights, and not on a copy alone."""


class InPlaceWeights(Plain):
    """Weights of the model that are updated themselves. The tensors are ``(weights,)``."""

    reads_model_weights = True

    def allocate(self, size: int, device: torch.device) -> Tensors:
        return ()


@dataclass(frozen=True)
class SeparateWeights(_Elementwise):
    """Weights in another format than the model's, or in another memory.

    The tensors are ``(weights of the model, copy)``.
    """

    copy: Plain
    reads_model_weights = False

    @property
    def is_rounded(self) -> bool:
        return self.copy.is_rounded

    def allocate(self, size: int, device: torch.device) -> Tensors:
        return self.copy.allocate(size, device)

    def read(self, tensors: Tensors) -> torch.Tensor:
        return self.copy.read(tensors[1:])

    def write(self, tensors: Tensors, values: torch.Tensor, thresholds: Thresholds) -> None:
        self.copy.write(tensors[1:], values, thresholds)
        tensors[0].copy_(tensors[1])


@dataclass(frozen=True)
class RemainderWeights(_Elementwise):
    """fp32 weights as bf16 weights of the model and the difference of the bit patterns, 16 bits.

    The tensors are ``(weights of the model, differences)``. The model's weights are the fp32 ones,
    rounded to nearest. A value in the middle of two bf16 numbers that is rounded down becomes the
    next smaller fp32 number, because its difference has 17 bits.
    """

    is_rounded = False
    reads_model_weights = True

    def allocate(self, size: int, device: torch.device) -> Tensors:
        return (torch.zeros(size, dtype=torch.int16, device=device),)

    def read(self, tensors: Tensors) -> torch.Tensor:
        weights, differences = tensors
        bits = (weights.view(torch.int16).int() << 16) + differences
        return bits.view(torch.float32)

    def write(self, tensors: Tensors, values: torch.Tensor, thresholds: Thresholds) -> None:
        rounded = values.bfloat16()
        difference = values.view(torch.int32) - (rounded.view(torch.int16).int() << 16)
        tensors[0].copy_(rounded)
        tensors[1].copy_(difference.clamp(max=0x7FFF))


class RoundingThresholds(NamedTuple):
    """Random thresholds for the three values of each weight, ``[blocks, values of a block]``."""

    weights: Thresholds
    first_moment: Thresholds
    second_moment: Thresholds


NO_THRESHOLDS = RoundingThresholds(NEAREST, NEAREST, NEAREST)
"""Thresholds for formats that do not use any."""


def draw_thresholds(key: torch.Tensor, gradient: torch.Tensor) -> RoundingThresholds:
    """Return thresholds that depend on a key and on the position of a weight.

    There is no generator with a state: ranks that hold the same weight round it equally, and a
    resumed run as the original one.

    Args:
        key: int64 scalar on the device of ``gradient``.
        gradient: rows.
    """
    positions = torch.arange(gradient.numel(), dtype=torch.int64, device=gradient.device)
    bits = _mix(positions.view(gradient.shape) ^ key)
    return RoundingThresholds(*(_to_fraction(bits >> shift) for shift in (0, 16, 32)))


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Return 64 random bits for each element (Steele et al., "SplitMix", 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def _to_fraction(bits: torch.Tensor) -> torch.Tensor:
    """Return the lowest 16 bits as numbers between 0 and 1, exclusive."""
    return ((bits & 0xFFFF).float() + 0.5) * 2.0**-16


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of int32 ``exponents``, from -126 to 127, in fp32."""
    return ((exponents + _EXPONENT_BIAS) << _EXPONENT_SHIFT).view(torch.float32)


def _distance(
    values: torch.Tensor, mantissa_bits: int, min_exponent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance of the two numbers next to each value, and the index of its binade,
    counted from ``min_exponent``.
    """
    exponents = (values.view(torch.int32) & _EXPONENT_MASK) >> _EXPONENT_SHIFT
    binade = (exponents - (min_exponent + _EXPONENT_BIAS)).clamp(min=0)
    return _power_of_two(binade + min_exponent - mantissa_bits), binade


def _round(values: torch.Tensor, thresholds: Thresholds) -> torch.Tensor:
    """Round to whole numbers, up if the fraction exceeds the threshold."""
    floor = values.floor()
    return floor + (values - floor > thresholds)
