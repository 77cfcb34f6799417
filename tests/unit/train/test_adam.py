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
    ("decoupled", "reference"),
    [(True, torch.optim.AdamW), (False, torch.optim.Adam)],
    ids=["adamw", "adam"],
)
def test_steps_equal_torch(decoupled: bool, reference: Any) -> None:
    parameters, reference_parameters = create_parameters(), create_parameters()
    optimizers = [
        FusedAdam(parameters, adam_w_mode=decoupled, **SETTINGS),
        reference(reference_parameters, **SETTINGS),
    ]
    for step in range(5):
        for owners, optimizer in zip((parameters, reference_parameters), optimizers, strict=True):
            set_gradients(owners, step)
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
    resumed_parameters = [torch.nn.Parameter(owner.detach().clone()) for owner in parameters]
    resumed = FusedAdam(resumed_parameters, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for these, their in ((parameters, optimizer), (resumed_parameters, resumed)):
        set_gradients(these, 3)
        their.step()
    for mine, resumed_parameter in zip(parameters, resumed_parameters, strict=True):
        assert torch.equal(mine, resumed_parameter)


def test_parameters_without_gradients_do_not_change() -> None:
    parameters = create_parameters()
    before = [owner.detach().clone() for owner in parameters]
    FusedAdam(parameters, **SETTINGS).step()
    assert all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))


def test_16_bit_and_32_bit_parameters_together() -> None:
    parameters = [
        torch.nn.Parameter(torch.ones(3, dtype=t)) for t in (torch.float32, torch.bfloat16)
    ]
    optimizer = FusedAdam(parameters, **SETTINGS)
    for owner in parameters:
        owner.grad = torch.ones_like(owner)
    optimizer.step()
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


def test_a_step_does_not_load_the_compiler() -> None:
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
