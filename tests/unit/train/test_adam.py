"""FusedAdam, compared with torch's Adam and AdamW; its state and its imports."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

from flagscale.train.optim.adam import FusedAdam

pytestmark = pytest.mark.torch

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def create_parameters() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 5), (7,), (2, 2, 2))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    ("adam_w_mode", "reference"),
    [(True, torch.optim.AdamW), (False, torch.optim.Adam)],
    ids=["adamw", "adam"],
)
def test_steps_equal_torch(adam_w_mode: bool, reference: Any) -> None:
    parameters, reference_parameters = create_parameters(), create_parameters()
    optimizers = [
        FusedAdam(parameters, adam_w_mode=adam_w_mode, **SETTINGS),
        reference(reference_parameters, **SETTINGS),
    ]
    for step in range(5):
        for stepped_parameters, optimizer in zip(
            (parameters, reference_parameters), optimizers, strict=True
        ):
            set_gradients(stepped_parameters, step)
            optimizer.step()
    for parameter, expected in zip(parameters, reference_parameters, strict=True):
        torch.testing.assert_close(parameter, expected)


def test_step_is_one_integer_per_group() -> None:
    parameters = create_parameters()
    optimizer = FusedAdam([{"params": parameters[:2]}, {"params": parameters[2:]}], **SETTINGS)
    set_gradients(parameters, 0)
    optimizer.step()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_resuming_from_a_saved_state_equals_continuing() -> None:
    parameters = create_parameters()
    optimizer = FusedAdam(parameters, **SETTINGS)
    for step in range(3):
        set_gradients(parameters, step)
        optimizer.step()
    resumed_parameters = [
        torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters
    ]
    resumed = FusedAdam(resumed_parameters, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for stepped_parameters, stepped_optimizer in (
        (parameters, optimizer),
        (resumed_parameters, resumed),
    ):
        set_gradients(stepped_parameters, 3)
        stepped_optimizer.step()
    for parameter, resumed_parameter in zip(parameters, resumed_parameters, strict=True):
        assert torch.equal(parameter, resumed_parameter)


def test_parameters_without_gradients_do_not_change() -> None:
    parameters = create_parameters()
    original_parameters = [parameter.detach().clone() for parameter in parameters]
    FusedAdam(parameters, **SETTINGS).step()
    assert all(
        torch.equal(actual, original)
        for actual, original in zip(parameters, original_parameters, strict=True)
    )


def test_16_bit_and_32_bit_parameters_together() -> None:
    parameters = [
        torch.nn.Parameter(torch.ones(3, dtype=t)) for t in (torch.float32, torch.bfloat16)
    ]
    optimizer = FusedAdam(parameters, **SETTINGS)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # The first step changes 1 by lr (1e-2) and by weight decay lr · 0.1.
    assert parameters[0][0].item() == pytest.approx(0.989, abs=1e-4)
    assert parameters[1][0].item() == pytest.approx(0.989, abs=5e-3)


def test_closure_returns_the_loss() -> None:
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = FusedAdam([parameter], **SETTINGS)

    def closure() -> float:
        loss = parameter * 2
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 2.0


def test_a_step_does_not_load_torchs_compiler() -> None:
    program = """
import sys
import torch
from flagscale.train.optim.adam import FusedAdam
weight = torch.nn.Parameter(torch.ones(2))
optimizer = FusedAdam([weight])
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
