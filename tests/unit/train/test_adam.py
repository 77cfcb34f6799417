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


def parameters() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 5), (7,), (2, 2, 2))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(owners: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for owner in owners:
        owner.grad = torch.randn(owner.shape, generator=generator)


@pytest.mark.parametrize(
    ("decoupled", "reference"),
    [(True, torch.optim.AdamW), (False, torch.optim.Adam)],
    ids=["adamw", "adam"],
)
def test_steps_like_torch(decoupled: bool, reference: Any) -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [
        FusedAdam(ours, adam_w_mode=decoupled, **SETTINGS),
        reference(theirs, **SETTINGS),
    ]
    for step in range(5):
        for owners, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(owners, step)
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_step_is_one_whole_number_a_group() -> None:
    owners = parameters()
    optimizer = FusedAdam([{"params": owners[:2]}, {"params": owners[2:]}], **SETTINGS)
    give_gradients(owners, 0)
    optimizer.step()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_going_on_from_a_saved_state_is_going_on() -> None:
    owners = parameters()
    optimizer = FusedAdam(owners, **SETTINGS)
    for step in range(3):
        give_gradients(owners, step)
        optimizer.step()
    others = [torch.nn.Parameter(owner.detach().clone()) for owner in owners]
    resumed = FusedAdam(others, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for these, their in ((owners, optimizer), (others, resumed)):
        give_gradients(these, 3)
        their.step()
    for mine, other in zip(owners, others, strict=True):
        assert torch.equal(mine, other)


def test_without_gradients_nothing_moves() -> None:
    owners = parameters()
    before = [owner.detach().clone() for owner in owners]
    FusedAdam(owners, **SETTINGS).step()
    assert all(torch.equal(now, then) for now, then in zip(owners, before, strict=True))


def test_16_bit_and_32_bit_parameters_together() -> None:
    owners = [torch.nn.Parameter(torch.ones(3, dtype=t)) for t in (torch.float32, torch.bfloat16)]
    optimizer = FusedAdam(owners, **SETTINGS)
    for owner in owners:
        owner.grad = torch.ones_like(owner)
    optimizer.step()
    assert owners[0][0].item() == pytest.approx(0.989, abs=1e-4)
    assert owners[1][0].item() == pytest.approx(0.989, abs=5e-3)


def test_a_closure_gives_the_loss() -> None:
    owner = torch.nn.Parameter(torch.ones(()))
    optimizer = FusedAdam([owner], **SETTINGS)

    def closure() -> float:
        loss = owner * 2
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
