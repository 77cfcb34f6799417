"""Muon on one rank: its algorithm, compared with other implementations, and its states."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.muon_reference import CASES, DEFAULTS, QKV_ROWS, STEPS, draw, split_qkv

from flagscale.train.optim.adam import FusedAdam
from flagscale.train.optim.matrices import MatrixLayout, MuonSettings, compute_update
from flagscale.train.optim.muon import USES_MUON, Matrix, Muon
from flagscale.train.optim.newton_schulz import orthogonalize

pytestmark = pytest.mark.torch

RECORDED = json.loads(
    (Path(__file__).parents[2] / "golden" / "train" / "muon.json").read_text(encoding="utf-8")
)
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def create_muon(
    weights: list[Any], vectors: list[Any], settings: MuonSettings, **options: Any
) -> Muon:
    """Return an optimizer of whole matrices and other weights."""
    groups = [{"params": weights, USES_MUON: True}]
    muon = Muon([*groups, {"params": vectors}], settings=settings, **options)
    muon.set_matrices([Matrix(MatrixLayout(weight.shape), 0, weight) for weight in weights])
    return muon


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_emerging_optimizers(name: str) -> None:
    shape, options = CASES[name]
    options = {**DEFAULTS, **options}
    weight: Any = torch.nn.Parameter(draw(shape, 0))
    schedule = {key: options.pop(key) for key in ("lr", "weight_decay")}
    muon = Muon(
        [{"params": [weight], USES_MUON: True}], settings=MuonSettings(**options), **schedule
    )
    row_blocks = QKV_ROWS if name == "qkv" else None
    muon.set_matrices([Matrix(MatrixLayout(weight.shape, row_blocks=row_blocks), 0, weight)])
    for step in range(1, STEPS + 1):
        weight.grad = draw(shape, step)
        muon.step()
    parts = split_qkv(weight.detach()) if name == "qkv" else [weight.detach()]
    tolerance = 1e-3 if options["fp32_matmul_prec"] == "medium" else 1e-6
    for part, expected in zip(parts, RECORDED[name], strict=True):
        torch.testing.assert_close(part, torch.tensor(expected), rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("use_nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize(
    ("adjustment", "scale_mode", "factor"),
    [("original", "shape_scaling", 1.0), ("match_rms_adamw", "spectral", 0.2)],
)
@pytest.mark.parametrize("shape", [(9, 4), (4, 9)], ids=["tall", "wide"])
def test_one_iteration_equals_torch(
    shape: tuple[int, int], adjustment: Any, scale_mode: str, factor: float, use_nesterov: bool
) -> None:
    """torch has equal coefficients in all iterations. It computes in bf16."""
    settings = MuonSettings(0.9, use_nesterov, 1, scale_mode, factor)
    weights = [torch.nn.Parameter(draw(shape, 0)) for _ in range(2)]
    muon = create_muon(weights[:1], [], settings, lr=0.1, weight_decay=0.5)
    reference = torch.optim.Muon(
        weights[1:],
        lr=0.1,
        weight_decay=0.5,
        momentum=0.9,
        nesterov=use_nesterov,
        ns_coefficients=(4.0848, -6.8946, 2.9270),
        ns_steps=1,
        adjust_lr_fn=adjustment,
    )
    for step in range(1, 4):
        for weight in weights:
            weight.grad = draw(shape, step)
        muon.step()
        reference.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-2)
    assert not torch.allclose(weights[0], draw(shape, 0) * 0.95**3, atol=0.05)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (3, 12, 40)], ids=["tall", "wide", "three"])
def test_singular_values_become_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 1e-4
    result = orthogonalize(matrix, steps=5, precision="highest")
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    diagonal = (left.mT @ result @ right.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close((left * diagonal[..., None, :]) @ right, result, rtol=0, atol=1e-5)
    assert 0.7 < float(diagonal.min()) < float(diagonal.max()) < 1.2


def test_zeros_and_huge_values_stay_finite() -> None:
    for matrix in (torch.zeros(4, 6), torch.full((4, 6), 1e15)):
        assert orthogonalize(matrix, steps=5, precision="medium").isfinite().all()


def test_each_expert_has_a_matrix_of_its_own() -> None:
    matrices = torch.stack([draw((5, 3), seed) for seed in range(4)])
    settings = MuonSettings(fp32_matmul_prec="highest")
    expected = [compute_update(matrix, MatrixLayout(matrix.shape), settings) for matrix in matrices]
    update = compute_update(matrices, MatrixLayout(matrices.shape), settings)
    torch.testing.assert_close(update, torch.stack(expected), rtol=0, atol=1e-4)


def test_other_weights_are_trained_by_adam() -> None:
    weights = [torch.nn.Parameter(draw((5, 4), 0))]
    vectors = [torch.nn.Parameter(draw((1, 6), 1)[0]) for _ in range(2)]
    muon = create_muon(weights, vectors[:1], MuonSettings(), **ADAM)
    adam = FusedAdam(vectors[1:], **ADAM)
    for step in range(3):
        for parameter in (*weights, *vectors):
            parameter.grad = torch.full_like(parameter, step - 0.5)
        muon.step()
        adam.step()
    assert torch.equal(vectors[0], vectors[1])
    assert set(muon.state[weights[0]]) == {"momentum_buffer"}
    assert set(muon.state[vectors[0]]) == {"exp_avg", "exp_avg_sq"}
    assert [group["step"] for group in muon.param_groups] == [3, 3]


def test_resuming_from_a_saved_state_equals_continuing() -> None:
    results = []
    saved: Any = None
    for is_resumed in (False, True):
        weights = [torch.nn.Parameter(draw((5, 4), 0))]
        muon = create_muon(weights, [], MuonSettings(use_nesterov=True), **ADAM)
        muon.initialize_states()
        if is_resumed:
            weights[0].data.copy_(saved["weight"])
            muon.load_state_dict(saved["state"])
        for step in range(4):
            weights[0].grad = draw((5, 4), step)
            if step < 2 and is_resumed:
                continue
            if step == 2 and not is_resumed:
                saved = {
                    "weight": weights[0].detach().clone(),
                    "state": copy.deepcopy(muon.state_dict()),
                }
            muon.step()
        results.append(weights[0].detach())
    assert torch.equal(*results)
