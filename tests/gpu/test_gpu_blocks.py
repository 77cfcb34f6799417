"""The kernel of block-scaled 8-bit products, compared with products of the dequantized operands.

pytest -m gpu tests/gpu/test_gpu_blocks.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flagscale.accelerators.device import Device
from flagscale.train.layers import fp8, fp8_blockwise

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(
        CUDA and not Device.from_torch(torch.device("cuda", 0)).supports_block_scaled_fp8,
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
"""Tokens, input and output features.

The kernel reads four scales of 128 x 128 blocks at a time, so sizes have one to six such blocks,
and partial ones.
"""


def make_values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return random values whose magnitude changes along rows and columns, so that no two blocks
    agree.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, device="cuda")
    values *= torch.logspace(-1, 1, rows, device="cuda")[:, None]
    return values * torch.logspace(1, -1, columns, device="cuda")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_blockwise_kernel(tokens: int, inputs: int, outputs: int, result: torch.dtype) -> None:
    """The products of a layer: forward, and backward for input and weight."""
    left, gradient = make_values(tokens, inputs), make_values(tokens, outputs, seed=1)
    cast = fp8_blockwise.quantize_weight(make_values(outputs, inputs, seed=2), E4M3)
    for *operands, squares in (
        (*fp8_blockwise.quantize_rows(left, E4M3), *cast[:2], True),
        (*fp8_blockwise.quantize_rows(gradient, E4M3), *cast[2:], True),
        (
            *fp8_blockwise.quantize_columns(gradient, E4M3),
            *fp8_blockwise.quantize_columns(left, E4M3),
            False,
        ),
    ):
        actual = fp8_blockwise.multiply_blockwise(*operands, result, square_blocks=squares)
        expected = fp8_blockwise.multiply_blockwise(
            *(operand.cpu() for operand in operands), torch.float32, square_blocks=squares
        )
        assert actual.dtype == result
        # Sums within a block have 14 bits on Hopper, bf16 has 8.
        assert relative_error(actual.cpu(), expected) < (4e-3 if result == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("compiled", [False, True], ids=["as-it-is", "compiled"])
def test_blockwise_layer(compiled: bool) -> None:
    """A layer after a normalization, into which casts are fused when it is compiled."""
    tokens, inputs, outputs = 512, 688, 384
    input_ = make_values(tokens, inputs).bfloat16().requires_grad_()
    weight = make_values(outputs, inputs, seed=2).bfloat16()
    gradient = (make_values(tokens, outputs, seed=1) * 1e-6).bfloat16()
    total = torch.zeros(outputs, inputs, device="cuda")
    cast = fp8.quantize_weight(weight, "blockwise")

    def layer(activations: torch.Tensor, total: torch.Tensor, *settings: Any) -> torch.Tensor:
        normal = torch.nn.functional.rms_norm(activations, (inputs,))
        product: torch.Tensor = fp8.Fp8Linear.apply(normal, weight, total, *settings)
        return product

    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    output = run(input_, total, *cast, "e4m3", "blockwise", True, "none", 1, "")
    output.backward(gradient)
    plain = input_.detach().float().requires_grad_()
    normal = torch.nn.functional.rms_norm(plain, (inputs,))
    expected = normal @ weight.float().t()
    expected.backward(gradient.float())
    assert relative_error(output.detach(), expected.detach()) < 0.05
    assert relative_error(input_.grad, plain.grad) < 0.05  # type: ignore[arg-type]
    assert relative_error(total, gradient.float().t() @ normal.detach()) < 0.05
