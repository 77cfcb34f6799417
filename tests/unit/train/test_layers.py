"""Optimized layers, compared with fp32 arithmetic of torch, forward and backward."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional

from flagscale.errors import ConfigError
from flagscale.train.layers import fp8, jit, layer_compilation
from flagscale.train.layers.cross_entropy import vocab_parallel_cross_entropy
from flagscale.train.layers.grouped_experts import ROW_ALIGNMENT, _GroupedLinear, pad_expert_rows
from flagscale.train.layers.linear import _LinearFunction
from flagscale.train.layers.rotary import apply_rotary
from flagscale.train.layers.wgrad_accumulation import add_product, add_rows, add_tensor

pytestmark = pytest.mark.torch

SINGLE_RANK_GROUP: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""Process group of one rank, without communication."""


def random_numbers(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def test_core_rounds_residuals_which_is_why_fp32_residual_connection_is_refused() -> None:
    residual, output = random_numbers(4, 8), random_numbers(4, 8, dtype=torch.bfloat16)
    total = bias_dropout_add_unfused(training=True)((output, None), residual, 0.0)
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, residual.bfloat16() + output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_linear_layer_accumulates_its_weight_gradient(dtype: Any) -> None:
    input_ = random_numbers(5, 3, 16, dtype=dtype).requires_grad_()
    weight = random_numbers(8, 16, seed=1, dtype=dtype).requires_grad_()
    gradient = random_numbers(5, 3, 8, seed=2, dtype=dtype)
    initial = random_numbers(8, 16, seed=3)
    accumulator = initial.clone()
    _LinearFunction.apply(input_, weight, accumulator, "none", 1, "").backward(gradient)
    reference = functional.linear(input_.detach(), weight.detach())
    rows = gradient.float().reshape(-1, 8)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert (
        relative_error(_LinearFunction.apply(input_, weight, None, "none", 1, ""), reference) == 0
    )
    assert (
        relative_error(accumulator - initial, rows.t() @ input_.detach().float().reshape(-1, 16))
        < tolerance
    )
    assert relative_error(input_.grad, gradient.float() @ weight.detach().float()) < tolerance


def test_weight_gradient_without_an_accumulator_is_returned() -> None:
    input_, weight = (
        random_numbers(5, 16).requires_grad_(),
        random_numbers(8, 16, seed=1).requires_grad_(),
    )
    gradient = random_numbers(5, 8, seed=2)
    _LinearFunction.apply(input_, weight, None, "none", 1, "").backward(gradient)
    torch.testing.assert_close(weight.grad, gradient.t() @ input_.detach())


def test_accumulation_does_not_increment_the_version() -> None:
    """All accumulators are views of one buffer. If writing to one incremented the version counter,
    the backward pass of another layer would reject its saved accumulator.
    """
    buffer = torch.zeros(2, 8, 16)
    version = buffer._version
    add_product(buffer[0], random_numbers(4, 8), random_numbers(4, 16))
    add_tensor(buffer[1], random_numbers(8, 16).bfloat16())
    add_rows(buffer[1], torch.tensor([[1, 1], [3, 0]]), random_numbers(2, 2, 16))
    assert buffer._version == version
    assert buffer[0].any()
    assert buffer[1].any()


def test_repeated_rows_are_added_repeatedly() -> None:
    total = torch.zeros(4, 3)
    add_rows(total, torch.tensor([2, 0, 2]), torch.ones(3, 3, dtype=torch.bfloat16))
    assert total[:, 0].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_equals_cross_entropy(dtype: Any) -> None:
    logits = (4 * random_numbers(6, 2, 50)).to(dtype).requires_grad_()
    labels = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(1))
    weights = random_numbers(2, 6, seed=2)
    reference = logits.detach().float().requires_grad_()
    expected = functional.cross_entropy(reference.permute(1, 2, 0), labels, reduction="none")
    (expected * weights).sum().backward()
    losses = vocab_parallel_cross_entropy(logits, labels, SINGLE_RANK_GROUP)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    (losses * weights).sum().backward()
    assert reference.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert relative_error(logits.grad, reference.grad) < tolerance  # type: ignore[arg-type]


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[3e4, -3e4, 0.0]]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]), SINGLE_RANK_GROUP)
    assert float(loss.detach()) == pytest.approx(6e4)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("width", [16, 8], ids=["whole_head", "half_of_the_head"])
def test_rotary_table_equals_angles(width: int) -> None:
    tensor = random_numbers(6, 2, 3, 16)
    angles = random_numbers(6, 1, 1, width // 2, seed=1).repeat(1, 1, 1, 2)
    half = angles[..., : width // 2]
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    expected = apply_rotary_pos_emb(tensor, angles, config, cp_group=SINGLE_RANK_GROUP)
    torch.testing.assert_close(
        apply_rotary(tensor, torch.stack((half.cos(), half.sin()))), expected
    )
    torch.testing.assert_close(
        apply_rotary(tensor, angles, config, cp_group=SINGLE_RANK_GROUP), expected
    )


@given(
    exponent=st.integers(-30, 30),
    scaling=st.sampled_from(["tensorwise", "rowwise"]),
    dtype=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
)
def test_fp8_scales_any_magnitude(exponent: int, scaling: Any, dtype: torch.dtype) -> None:
    tensor = random_numbers(32, 64, seed=exponent % 7) * 2.0**exponent
    values, scale = fp8.quantize(tensor, dtype, scaling)
    assert values.dtype == dtype
    assert scale.shape == (() if scaling == "tensorwise" else (32, 1))
    assert torch.isfinite(values.float()).all()
    # Half a unit in the last place: 3 bits of mantissa, or 2.
    assert relative_error(values.float() * scale, tensor) < (
        0.04 if dtype == fp8.FORWARD_DTYPE else 0.08
    )


def test_zeros_stay_zeros() -> None:
    values, scale = fp8.quantize(torch.zeros(4, 16), fp8.FORWARD_DTYPE, "rowwise")
    assert not values.float().any()
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("is_weight_gradient_fp8", [True, False], ids=["fp8-wgrad", "bf16-wgrad"])
@pytest.mark.parametrize("gradient_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_fp8_linear_is_close_to_fp32(
    scaling: Any, gradient_format: str, is_weight_gradient_fp8: bool
) -> None:
    input_ = random_numbers(32, 2, 64, dtype=torch.bfloat16).requires_grad_()
    weight = (random_numbers(48, 64, seed=1) * 0.02).bfloat16().requires_grad_()
    gradient = (random_numbers(32, 2, 48, seed=2) * 1e-6).bfloat16()
    accumulator = torch.zeros(48, 64)
    quantized_weight = fp8.quantize_weight(weight.detach(), scaling)
    output = fp8.Fp8Linear.apply(
        input_,
        weight,
        accumulator,
        *quantized_weight,
        gradient_format,
        scaling,
        is_weight_gradient_fp8,
        "none",
        1,
        "",
    )
    output.backward(gradient)
    # Rounding of e4m3 (3 bits of mantissa) and of e5m2 (2 bits).
    fp32_input, fp32_weight = input_.detach().float(), weight.detach().float()
    fp32_gradient = gradient.float()
    tolerance = 0.045 if gradient_format == "e4m3" else 0.07
    assert relative_error(output.detach(), fp32_input @ fp32_weight.t()) < 0.045
    assert relative_error(input_.grad, fp32_gradient @ fp32_weight) < tolerance
    weight_gradient = fp32_gradient.reshape(-1, 48).t() @ fp32_input.reshape(-1, 64)
    assert relative_error(accumulator, weight_gradient) < (
        tolerance if is_weight_gradient_fp8 else 0.01
    )


@pytest.mark.parametrize("counts", [[3, 0, 17, 16], [0, 0, 0, 1], [32, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_gemm_equals_a_gemm_per_expert(counts: list[int], dtype: Any) -> None:
    tokens = sum(counts)
    rows, ends = pad_expert_rows(torch.tensor(counts), tokens)
    assert not any(int(end) % ROW_ALIGNMENT for end in ends)
    assert len(set(rows.tolist())) == tokens
    input_ = torch.zeros(tokens + 4 * ROW_ALIGNMENT, 32, dtype=dtype)
    input_[rows] = random_numbers(tokens, 32, dtype=dtype)
    input_.requires_grad_()
    weight = random_numbers(4, 16, 32, seed=1, dtype=dtype).requires_grad_()
    gradient = random_numbers(tokens, 16, seed=2, dtype=dtype)
    accumulator = torch.zeros(4, 16, 32)
    output = _GroupedLinear.apply(input_, weight, accumulator, ends)[rows]
    output.backward(gradient)
    expert_operands = zip(
        input_.detach()[rows].split(counts), gradient.split(counts), weight.detach(), strict=True
    )
    operands = [(x.float(), g.float(), w.float()) for x, g, w in expert_operands]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (
        relative_error(output.detach(), torch.cat([x @ w.t() for x, _, w in operands])) < tolerance
    )
    assert input_.grad is not None
    assert relative_error(input_.grad[rows], torch.cat([g @ w for _, g, w in operands])) < tolerance
    assert relative_error(accumulator, torch.stack([g.t() @ x for x, g, _ in operands])) < tolerance


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"recompute_granularity": "full"}, None),
        ({"attention_dropout": 0.1, "sequence_parallel": True}, None),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attention_backend": AttnBackend.local}, "attention_backend"),
    ],
)
def test_reason_why_layers_are_not_compiled(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_compilation, "explain_missing_compiler", lambda: None)
    defaults = {
        "recompute_granularity": None, "attention_dropout": 0.0, "sequence_parallel": False,
        "attention_backend": AttnBackend.auto, "multi_latent_attention": False,
    }  # fmt: skip
    actual_reason = layer_compilation.explain_uncompiled_layers(
        SimpleNamespace(**{**defaults, **changes})
    )  # type: ignore[arg-type]
    assert actual_reason is None if reason is None else reason in str(actual_reason)


@torch._dynamo.config.patch(disable=False)
def test_graph_break_falls_back_to_eager() -> None:
    runs = []

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        runs.append(torch.compiler.is_compiling())
        return tensor + 1

    failures: list[Exception] = []
    first, second = (
        layer_compilation.compile_with_fallback(layer, failures, "eager") for _ in range(2)
    )
    with pytest.warns(RuntimeWarning, match="layers are not compiled, which costs speed: .*break"):
        assert first(torch.zeros(2)).tolist() == [1, 1]
    assert second(torch.zeros(2)).tolist() == [1, 1]
    assert runs == [False, False]
    assert len(failures) == 1


@torch._dynamo.config.patch(disable=False)
def test_graph_break_is_an_error_if_ranks_communicate_in_a_layer() -> None:
    def layer(tensor: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return tensor

    call = layer_compilation.compile_with_fallback(layer, [], "eager", raise_on_failure=True)
    with pytest.raises(ConfigError, match=r"cannot be compiled on this rank: .*break") as caught:
        call(torch.zeros(2))
    assert "transformer_impl: local" in str(caught.value.hint)


@torch._dynamo.config.patch(disable=False, recompile_limit=2)
def test_recompile_limit_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_compilation, "_MAX_GRAPHS", 2)
    call = layer_compilation.compile_with_fallback(lambda tensor: tensor + 1, [], "eager")
    sizes = [call(torch.zeros(size)).numel() for size in (2, 3)]
    with pytest.warns(RuntimeWarning, match="layers are not compiled, which costs speed"):
        sizes += [call(torch.zeros(size)).numel() for size in (4, 5)]
    assert sizes == [2, 3, 4, 5]


def test_reason_why_a_host_cannot_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slim container images have neither a compiler nor Python headers; layers run uncompiled
    there.
    """
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda _: None)
    assert jit.explain_missing_compiler.__wrapped__() == "Triton is not installed"
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in str(jit.explain_missing_compiler.__wrapped__())
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", "mycc")
    monkeypatch.setattr(jit.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert f"({tmp_path}/Python.h)" in str(jit.explain_missing_compiler.__wrapped__())
    (tmp_path / "Python.h").touch()
    assert jit.explain_missing_compiler.__wrapped__() is None


@torch._dynamo.config.patch(disable=False)
def test_max_shapes_raises_the_recompile_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 shapes are compiled once each, although torch's limit is 8, as weights of MLA require."""
    monkeypatch.setattr(jit, "_COMPILED_DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(jit, "explain_missing_compiler", lambda: None)
    monkeypatch.setattr(jit, "compile_disabled", lambda: False)
    graphs = []

    def count_graph(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count_graph))

    @jit.compiled_if_faster(max_shapes=12)
    def sum_elements(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum()

    sizes = [*range(2, 14), *range(2, 14)]
    assert [int(sum_elements(torch.ones(size))) for size in sizes] == sizes
    assert len(graphs) == 12


def test_private_torch_api_for_concatenation_exists() -> None:
    """Without it, SwiGLU's backward pass and rotary positions are slower (_use_concat_kernel)."""
    from torch._inductor import ir, lowering

    assert callable(lowering.pointwise_cat)
    assert callable(ir.ConcatKernel.create)
