"""The kernel of 8-bit products that are scaled by blocks, beside what its operands stand for.

pytest -m gpu tests/gpu/test_gpu_blocks.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagscale.accelerators.device import Device
from flagscale.train.layers import blocks, fp8

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(
        CUDA and not Device.of(torch.device("cuda", 0)).multiplies_blocks,
        reason="needs Hopper and CUDA 12.9",
    ),
]

E4M3 = torch.float8_e4m3fn
SIZES = [
    (256, 512, 384),
    (16, 128, 128),
    (48, 144, 80),
    (128, 640, 16),
    (272, 384, 512),
    (512, 16, 688),
    (2048, 768, 2816),
]
"""Tokens, input and output features: the kernel reads four scales of squares at a time, so sizes
are such of which 128 goes in once to six times, and in part."""


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose magnitude changes along rows and columns, so that each block has its own."""
    draw = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(rows, columns, generator=draw, device="cuda")
    made *= torch.logspace(-1, 1, rows, device="cuda")[:, None]
    return made * torch.logspace(1, -1, columns, device="cuda")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_the_kernel_multiplies_what_is_meant(
    tokens: int, inputs: int, outputs: int, result: torch.dtype
) -> None:
    """The products of a layer: forward, and backward for input and weight."""
    left, gradient = numbers(tokens, inputs), numbers(tokens, outputs, seed=1)
    cast = blocks.cast_weight(numbers(outputs, inputs, seed=2), E4M3)
    for *operands, squares in (
        (*blocks.along_rows(left, E4M3), *cast[:2], True),
        (*blocks.along_rows(gradient, E4M3), *cast[2:], True),
        (*blocks.along_columns(gradient, E4M3), *blocks.along_columns(left, E4M3), False),
    ):
        found = blocks.multiply(*operands, result, squares=squares)
        expected = blocks.multiply(*(one.cpu() for one in operands), torch.float32, squares=squares)
        assert found.dtype == result
        # Sums within a block have 14 bits on Hopper, bf16 has 8.
        assert error(found.cpu(), expected) < (4e-3 if result == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("compiled", [False, True], ids=["as-it-is", "compiled"])
def test_a_layer_is_near_the_exact_one(compiled: bool) -> None:
    """With what comes before it, into which casts are fused when it is compiled."""
    tokens, inputs, outputs = 512, 688, 384
    input_ = numbers(tokens, inputs).bfloat16().requires_grad_()
    weight = numbers(outputs, inputs, seed=2).bfloat16()
    gradient = (numbers(tokens, outputs, seed=1) * 1e-6).bfloat16()
    total = torch.zeros(outputs, inputs, device="cuda")
    cast = fp8.cast_weight(weight, "blockwise")

    def layer(given: torch.Tensor, total: torch.Tensor, *settings: Any) -> torch.Tensor:
        normal = torch.nn.functional.rms_norm(given, (inputs,))
        made: torch.Tensor = fp8.Fp8Linear.apply(normal, weight, total, *settings)
        return made

    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    output = run(input_, total, *cast, "e4m3", "blockwise", True, "none", 1, "")
    output.backward(gradient)
    plain = input_.detach().float().requires_grad_()
    normal = torch.nn.functional.rms_norm(plain, (inputs,))
    expected = normal @ weight.float().t()
    expected.backward(gradient.float())
    assert error(output.detach(), expected.detach()) < 0.05
    assert error(input_.grad, plain.grad) < 0.05  # type: ignore[arg-type]
    assert error(total, gradient.float().t() @ normal.detach()) < 0.05
