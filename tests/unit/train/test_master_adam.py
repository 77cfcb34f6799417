"""Adam with master weights of its own, compared with the fused Adam on fp32 weights."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload import update_as_on_a_device

from flagscale.accelerators.device import Device
from flagscale.train.host_memory import read_available_memory
from flagscale.train.optim import master_adam, offload_staging
from flagscale.train.optim.adam import FusedAdam
from flagscale.train.optim.master_adam import MasterWeightAdam

pytestmark = pytest.mark.torch

SIZES = (50, 7, 33)
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


def random_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def take_steps(adam: Any, parameters: list[torch.Tensor], seeds: range, attribute: str) -> None:
    for seed in seeds:
        for parameter, gradient in zip(parameters, random_tensors(seed), strict=True):
            setattr(parameter, attribute, gradient)
        adam.step()


@pytest.mark.parametrize("device_fraction", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_those_of_fp32_weights(
    fraction: float,
    dtype: torch.dtype,
    device_fraction: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_staging, "WEIGHTS_PER_PIECE", 8)
    monkeypatch.setattr(master_adam, "WEIGHTS_PER_PIECE", 8)
    monkeypatch.setattr(master_adam, "_DEVICE_FRACTION", device_fraction)
    update_as_on_a_device(monkeypatch)
    weights = [weight.to(dtype) for weight in random_tensors(0)]
    expected = [weight.float().clone() for weight in weights]
    adam = MasterWeightAdam(weights, offload_fraction=fraction, **OPTIONS)
    take_steps(adam, weights, range(1, 5), "decoupled_grad")
    take_steps(FusedAdam(expected, **OPTIONS), expected, range(1, 5), "grad")
    for weight, reference in zip(weights, expected, strict=True):
        assert torch.equal(adam.get_unscaled_state(weight, "master_param"), reference)
        assert torch.equal(weight, reference.to(dtype))


@pytest.mark.parametrize(("fraction", "offloaded"), [(0.5, 33), (1.0, 90)])
def test_copies_of_other_ranks_are_offloaded_with_all_others_only(
    fraction: float, offloaded: int
) -> None:
    """The shards of another rank are others, so that its device would update some of the copies."""
    weights = random_tensors(0)
    adam = MasterWeightAdam(weights, offload_fraction=fraction, **OPTIONS)
    adam.name_parameter(weights[0], "embedding", is_replicated=True)
    adam.name_parameter(weights[1], "copy", is_replicated=True)
    assert adam.host_bytes == 8 * offloaded


def test_states_that_a_device_updates_stay_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is pinned as long as the registered tensor exists."""
    monkeypatch.setattr(master_adam, "WEIGHTS_PER_PIECE", 8)
    update_as_on_a_device(monkeypatch)
    registered: list[weakref.ref[torch.Tensor]] = []

    def register(_device: Device, tensor: torch.Tensor) -> bool:
        registered.append(weakref.ref(tensor))
        return len(registered) != 5  # a state of the second parameter cannot be pinned

    monkeypatch.setattr(Device, "register_host_memory", register)
    weights = [torch.ones(20).bfloat16() for _ in range(2)]
    adam = MasterWeightAdam(weights, offload_fraction=1.0, **OPTIONS)
    with pytest.warns(UserWarning, match="cannot be pinned"):
        adam.initialize_states()
    assert [tensor() is not None for tensor in registered] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("own_cores", "expected"), [(16, 4), (8, 4), (4, 4), (2, 2)], ids=str)
def test_rank_that_is_bound_to_cores_uses_its_share_of_the_hosts(
    own_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of a host with 16 cores, bound by torchrun to all, a half, a quarter or less."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16 if pid else own_cores)))
    assert master_adam._count_cores_per_rank() == expected


def test_loaded_state_continues_as_the_saved_one() -> None:
    weights = [weight.bfloat16() for weight in random_tensors(0)]
    adam = MasterWeightAdam(weights, offload_fraction=1.0, **OPTIONS)
    take_steps(adam, weights, range(1, 3), "decoupled_grad")
    copies = [weight.clone() for weight in weights]
    resumed = MasterWeightAdam(copies, offload_fraction=0.3, **OPTIONS)
    resumed.load_state_dict(adam.state_dict())
    take_steps(adam, weights, range(3, 6), "decoupled_grad")
    take_steps(resumed, copies, range(3, 6), "decoupled_grad")
    for weight, copy in zip(weights, copies, strict=True):
        assert torch.equal(weight, copy)


def test_loaded_weights_replace_master_weights() -> None:
    weights = [weight.bfloat16() for weight in random_tensors(0)]
    adam = MasterWeightAdam(weights, offload_fraction=1.0, **OPTIONS)
    adam.initialize_states()
    assert adam.host_bytes == 12 * sum(SIZES)
    weights[0].fill_(3.0)
    adam.reset_master_weights()
    assert adam.get_unscaled_state(weights[0], "master_param").eq(3.0).all()


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 1024 * 900), ("500000", 500000 - 300000 + 100000)]
)
def test_available_memory_is_what_the_limit_leaves(
    limit: str, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 900 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\nfile 100000\n")
    assert read_available_memory(tmp_path / "meminfo", tmp_path) == expected


def test_available_memory_is_not_known_without_its_files(tmp_path: Path) -> None:
    assert read_available_memory(tmp_path / "meminfo", tmp_path) is None
