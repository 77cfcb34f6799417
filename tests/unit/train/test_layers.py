"""The parts of the faster build against plain fp32 arithmetic, forward and backward."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional

from flagscale.errors import ConfigError
from flagscale.train.layers import compiling, fp8, jit
from flagscale.train.layers.accumulating import add_product, add_rows, add_tensor
from flagscale.train.layers.experts import ALIGNMENT, _GroupedProduct, places
from flagscale.train.layers.linear import _Linear
from flagscale.train.layers.loss import vocabulary_loss
from flagscale.train.layers.rotary import rotate

pytestmark = pytest.mark.torch

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def numbers(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_linear_layer_adds_its_weight_gradient(dtype: Any) -> None:
    input_ = numbers(5, 3, 16, dtype=dtype).requires_grad_()
    weight = numbers(8, 16, seed=1, dtype=dtype).requires_grad_()
    gradient = numbers(5, 3, 8, seed=2, dtype=dtype)
    before = numbers(8, 16, seed=3)
    total = before.clone()
    _Linear.apply(input_, weight, total, "none", 1, "").backward(gradient)
    plain = functional.linear(input_.detach(), weight.detach())
    rows = gradient.float().reshape(-1, 8)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert error(_Linear.apply(input_, weight, None, "none", 1, ""), plain) == 0
    assert error(total - before, rows.t() @ input_.detach().float().reshape(-1, 16)) < tolerance
    assert error(input_.grad, gradient.float() @ weight.detach().float()) < tolerance


def test_without_an_accumulator_the_gradient_is_autograd_s() -> None:
    input_, weight = numbers(5, 16).requires_grad_(), numbers(8, 16, seed=1).requires_grad_()
    gradient = numbers(5, 8, seed=2)
    _Linear.apply(input_, weight, None, "none", 1, "").backward(gradient)
    torch.testing.assert_close(weight.grad, gradient.t() @ input_.detach())


def test_adding_leaves_what_others_saved_valid() -> None:
    """All accumulators are views of one buffer; the pipeline runs a second forward pass before the
    first backward one."""
    buffer = torch.zeros(2, 8, 16)
    version = buffer._version
    add_product(buffer[0], numbers(4, 8), numbers(4, 16))
    add_tensor(buffer[1], numbers(8, 16).bfloat16())
    add_rows(buffer[1], torch.tensor([[1, 1], [3, 0]]), numbers(2, 2, 16))
    assert buffer._version == version
    assert buffer[0].any()
    assert buffer[1].any()


def test_rows_named_twice_are_added_twice() -> None:
    total = torch.zeros(4, 3)
    add_rows(total, torch.tensor([2, 0, 2]), torch.ones(3, 3, dtype=torch.bfloat16))
    assert total[:, 0].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_is_cross_entropy(dtype: Any) -> None:
    logits = (4 * numbers(6, 2, 50)).to(dtype).requires_grad_()
    labels = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(1))
    weights = numbers(2, 6, seed=2)
    plain = logits.detach().float().requires_grad_()
    expected = functional.cross_entropy(plain.permute(1, 2, 0), labels, reduction="none")
    (expected * weights).sum().backward()
    found = vocabulary_loss(logits, labels, ALONE)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (found * weights).sum().backward()
    assert plain.grad is not None
    rounding = 1e-6 if dtype == torch.float32 else 4e-3
    assert error(logits.grad, plain.grad) < rounding  # type: ignore[arg-type]


def test_huge_logits_are_no_overflow() -> None:
    logits = torch.tensor([[[3e4, -3e4, 0.0]]], requires_grad=True)
    loss = vocabulary_loss(logits, torch.tensor([[1]]), ALONE)
    assert float(loss.detach()) == pytest.approx(6e4)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("width", [16, 8], ids=["whole", "half of the head"])
def test_a_table_rotates_as_angles_do(width: int) -> None:
    tensor = numbers(6, 2, 3, 16)
    angles = numbers(6, 1, 1, width // 2, seed=1).repeat(1, 1, 1, 2)
    half = angles[..., : width // 2]
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    expected = apply_rotary_pos_emb(tensor, angles, config, cp_group=ALONE)
    torch.testing.assert_close(rotate(tensor, torch.stack((half.cos(), half.sin()))), expected)
    torch.testing.assert_close(rotate(tensor, angles, config, cp_group=ALONE), expected)


@given(
    exponent=st.integers(-30, 30),
    scaling=st.sampled_from(["tensorwise", "rowwise"]),
    dtype=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
)
def test_eight_bits_keep_any_magnitude(exponent: int, scaling: Any, dtype: torch.dtype) -> None:
    tensor = numbers(32, 64, seed=exponent % 7) * 2.0**exponent
    values, scale = fp8.quantize(tensor, dtype, scaling)
    assert values.dtype == dtype
    assert scale.shape == (() if scaling == "tensorwise" else (32, 1))
    assert torch.isfinite(values.float()).all()
    # Half of the last place: 3 bits of mantissa, or 2.
    assert error(values.float() * scale, tensor) < (0.04 if dtype == fp8.FORWARD else 0.08)


def test_nothing_but_zeros_stays_zeros() -> None:
    values, scale = fp8.quantize(torch.zeros(4, 16), fp8.FORWARD, "rowwise")
    assert not values.float().any()
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("eight", [True, False], ids=["weight-gradient-8-bits", "16-bits"])
@pytest.mark.parametrize("gradients", ["hybrid", "e4m3"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_eight_bit_products_are_near_the_exact_ones(
    scaling: Any, gradients: str, eight: bool
) -> None:
    input_ = numbers(32, 2, 64, dtype=torch.bfloat16).requires_grad_()
    weight = (numbers(48, 64, seed=1) * 0.02).bfloat16().requires_grad_()
    gradient = (numbers(32, 2, 48, seed=2) * 1e-6).bfloat16()
    total = torch.zeros(48, 64)
    cast = fp8.cast_weight(weight.detach(), scaling)
    output = fp8.Fp8Linear.apply(
        input_, weight, total, *cast, gradients, scaling, eight, "none", 1, ""
    )
    output.backward(gradient)
    exact = input_.detach().float(), weight.detach().float(), gradient.float()
    rounding = 0.045 if gradients == "e4m3" else 0.07
    assert error(output.detach(), exact[0] @ exact[1].t()) < 0.045
    assert error(input_.grad, exact[2] @ exact[1]) < rounding
    of_weight = exact[2].reshape(-1, 48).t() @ exact[0].reshape(-1, 64)
    assert error(total, of_weight) < (rounding if eight else 0.01)


@pytest.mark.parametrize("counts", [[3, 0, 17, 16], [0, 0, 0, 1], [32, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_products_are_each_expert_s(counts: list[int], dtype: Any) -> None:
    tokens = sum(counts)
    rows, ends = places(torch.tensor(counts), tokens)
    assert not any(int(end) % ALIGNMENT for end in ends)
    assert len(set(rows.tolist())) == tokens
    input_ = torch.zeros(tokens + 4 * ALIGNMENT, 32, dtype=dtype)
    input_[rows] = numbers(tokens, 32, dtype=dtype)
    input_.requires_grad_()
    weight = numbers(4, 16, 32, seed=1, dtype=dtype).requires_grad_()
    gradient = numbers(tokens, 16, seed=2, dtype=dtype)
    total = torch.zeros(4, 16, 32)
    output = _GroupedProduct.apply(input_, weight, total, ends)[rows]
    output.backward(gradient)
    given = zip(
        input_.detach()[rows].split(counts), gradient.split(counts), weight.detach(), strict=True
    )
    parts = [(x.float(), g.float(), w.float()) for x, g, w in given]
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    assert error(output.detach(), torch.cat([x @ w.t() for x, _, w in parts])) < rounding
    assert input_.grad is not None
    assert error(input_.grad[rows], torch.cat([g @ w for _, g, w in parts])) < rounding
    assert error(total, torch.stack([g.t() @ x for x, g, _ in parts])) < rounding


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"recompute_granularity": "full"}, None),
        ({"attention_dropout": 0.1, "sequence_parallel": True}, None),
        ({"recompute_granularity": "selective"}, "recompute_granularity"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"cpu_offloading": True}, "offloading"),
        ({"attention_backend": AttnBackend.local}, "attention_backend"),
    ],
)
def test_what_cannot_be_compiled_is_said(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "why_not_here", lambda: None)
    usual = {
        "recompute_granularity": None, "attention_dropout": 0.0, "sequence_parallel": False,
        "fine_grained_activation_offloading": False, "cpu_offloading": False,
        "attention_backend": AttnBackend.auto, "multi_latent_attention": False,
    }  # fmt: skip
    found = compiling.why_not(SimpleNamespace(**{**usual, **changes}))  # type: ignore[arg-type]
    assert found is None if reason is None else reason in str(found)


@torch._dynamo.config.patch(disable=False)
def test_what_breaks_a_graph_runs_as_it_is() -> None:
    runs = []

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        runs.append(torch.compiler.is_compiling())
        return tensor + 1

    failures: list[Exception] = []
    first, second = (compiling.or_as_it_is(layer, failures, "eager") for _ in range(2))
    with pytest.warns(RuntimeWarning, match="layers are not compiled, which costs speed: .*break"):
        assert first(torch.zeros(2)).tolist() == [1, 1]
    assert second(torch.zeros(2)).tolist() == [1, 1]
    assert runs == [False, False]
    assert len(failures) == 1


@torch._dynamo.config.patch(disable=False)
def test_a_rank_does_not_leave_the_others_with_their_graphs() -> None:
    def layer(tensor: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return tensor

    call = compiling.or_as_it_is(layer, [], "eager", shared=True)
    with pytest.raises(ConfigError, match=r"cannot be compiled on this rank: .*break") as caught:
        call(torch.zeros(2))
    assert "transformer_impl: local" in str(caught.value.hint)


@torch._dynamo.config.patch(disable=False, recompile_limit=2)
def test_what_would_be_compiled_too_often_runs_as_it_is() -> None:
    call = compiling.or_as_it_is(lambda tensor: tensor + 1, [], "eager")
    sizes = [call(torch.zeros(size)).numel() for size in (2, 3)]
    with pytest.warns(RuntimeWarning, match="layers are not compiled, which costs speed"):
        sizes += [call(torch.zeros(size)).numel() for size in (4, 5)]
    assert sizes == [2, 3, 4, 5]


def test_a_machine_that_cannot_compile_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slim images have neither compiler nor headers; layers run uncompiled there."""
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda _: None)
    assert jit.why_not_here.__wrapped__() == "Triton is not installed"
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in str(jit.why_not_here.__wrapped__())
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", "mycc")
    monkeypatch.setattr(jit.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert f"({tmp_path}/Python.h)" in str(jit.why_not_here.__wrapped__())
    (tmp_path / "Python.h").touch()
    assert jit.why_not_here.__wrapped__() is None


@torch._dynamo.config.patch(disable=False)
def test_a_function_is_compiled_for_as_many_sizes_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model with latent attention more weights differ in size than torch compiles for."""
    monkeypatch.setattr(jit, "_COMPILING", {"cpu"})
    monkeypatch.setattr(jit, "why_not_here", lambda: None)
    monkeypatch.setattr(jit, "uncompiled", lambda: False)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))

    @jit.compiled_if_faster(sizes=12)
    def total(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum()

    sizes = [*range(2, 14), *range(2, 14)]
    assert [int(total(torch.ones(size))) for size in sizes] == sizes
    assert len(graphs) == 12


def test_the_compiler_s_lowering_is_where_it_was() -> None:
    """Private to torch: a torch without it is to be looked at, two kernels are slower there."""
    from torch._inductor import ir, lowering

    assert callable(lowering.pointwise_cat)
    assert callable(ir.ConcatKernel.create)
