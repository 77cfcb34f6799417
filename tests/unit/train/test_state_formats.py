"""Formats of Adam's states: what is representable, rounding, and updates beside fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offload import update_as_on_a_device

from flagscale.config.arguments.rules.optimizer_states import BLOCK_WEIGHTS, StateFormats
from flagscale.train.optim import state_formats
from flagscale.train.optim.lean_update import AdamFormats, AdamTensors, get_update, hyperparameters
from flagscale.train.optim.master_adam import MasterWeightAdam
from flagscale.train.optim.state_formats import (
    FIRST_MOMENTS,
    NEAREST,
    SECOND_MOMENTS,
    Format,
    InPlaceWeights,
    RemainderWeights,
    as_rows,
    draw_thresholds,
)

pytestmark = pytest.mark.torch

HOST = torch.device("cpu")
MOMENTS = [
    *((f"first-{name}", form) for name, form in FIRST_MOMENTS.items()),
    *((f"second-{name}", form) for name, form in SECOND_MOMENTS.items()),
]
PRECISION = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""Largest relative error of rounding to nearest."""
parametrize_moments = pytest.mark.parametrize(
    ("name", "form"), MOMENTS, ids=[name for name, _ in MOMENTS]
)


def store(form: Format, values: torch.Tensor, thresholds: torch.Tensor | float = NEAREST) -> Any:
    """Return what is read after values have been written."""
    tensors = form.rows(form.allocate(values.numel(), HOST))
    form.write(tensors, as_rows(values), thresholds)
    return form.read(tensors).view(-1)


def draw_values(name: str, size: int = 40 * BLOCK_WEIGHTS, seed: int = 0) -> torch.Tensor:
    """Return values of four magnitudes; those of second moments are positive."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10 ** -(
        4 * torch.rand(size, generator=generator)
    )
    return values.square() if name.startswith("second") else values


@parametrize_moments
def test_values_are_rounded_to_the_precision_of_the_format(name: str, form: Format) -> None:
    values = draw_values(name)
    precision = PRECISION[name.partition("-")[2]]
    largest = as_rows(values).abs().amax(dim=1, keepdim=True).expand(-1, BLOCK_WEIGHTS)
    # Numbers below the range of the format are evenly spaced.
    spacing = 2.0**-30 if name.startswith("second") else 2.0**-16
    limit = (precision * values.abs()).maximum(bool(precision) * spacing * largest.reshape(-1))
    assert ((store(form, values) - values).abs() <= limit).all()


@parametrize_moments
@given(exponent=st.integers(-70, 100), seed=st.integers(0, 999), threshold=st.floats(0.01, 0.99))
@settings(max_examples=15, deadline=None)
def test_representable_values_are_kept(
    name: str, form: Format, exponent: int, seed: int, threshold: float
) -> None:
    """Neither a checkpoint nor a step without a gradient changes a moment."""
    values = draw_values(name, 3 * BLOCK_WEIGHTS, seed) * 2.0**exponent
    representable = store(form, values)
    thresholds = torch.full((3, BLOCK_WEIGHTS), threshold)
    assert torch.equal(store(form, representable, thresholds), representable)


@parametrize_moments
def test_rounding_keeps_the_expected_value(name: str, form: Format) -> None:
    values = draw_values(name, 8 * BLOCK_WEIGHTS)
    rounds, total = 400, torch.zeros_like(values)
    for key in range(rounds):
        thresholds = draw_thresholds(torch.tensor(key * 7919), as_rows(values))
        total += store(form, values, thresholds.second_moment)
    is_in_range = values.abs() > 1e-3 * values.abs().max()
    error = ((total / rounds - values) / values)[is_in_range]
    # Of one value, one standard deviation is at most half of the distance of two numbers.
    deviation = PRECISION[name.partition("-")[2]] / math.sqrt(rounds) + 1e-5
    assert error.abs().max() < 5 * deviation
    assert error.mean().abs() < 5 * deviation / math.sqrt(len(error))


@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_a_small_second_moment_does_not_become_zero(name: str) -> None:
    """An update is divided by its root."""
    values = torch.full((BLOCK_WEIGHTS,), 1e-18)
    values[0] = 1.0
    assert (store(SECOND_MOMENTS[name], values) > 0).all()
    assert (store(SECOND_MOMENTS[name], torch.zeros(7)) == 0).all()


@pytest.mark.parametrize("name", FIRST_MOMENTS)
def test_an_infinite_value_stays_visible_in_the_weights(name: str) -> None:
    formats = StateFormats("bf16", first_moment=name, second_moment=name)
    weights = torch.ones(200, dtype=torch.bfloat16)
    adam = MasterWeightAdam([weights], formats=formats)
    gradient = torch.ones(200)
    gradient[3] = math.nan
    weights.decoupled_grad = gradient  # type: ignore[attr-defined]
    adam.step()
    assert weights[3].isnan()
    assert weights[150:].isfinite().all()


finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@given(values=st.lists(finite_floats, min_size=1, max_size=BLOCK_WEIGHTS))
@settings(max_examples=200, deadline=None)
def test_weights_with_remainders_are_fp32_weights(values: list[float]) -> None:
    master = torch.tensor(values)
    form, weights = RemainderWeights(), torch.zeros(len(values), dtype=torch.bfloat16)
    tensors = form.rows((weights, *form.allocate(len(values), HOST)))
    form.write(tensors, as_rows(master), NEAREST)
    assert torch.equal(weights, master.bfloat16())
    restored = form.read(tensors).view(-1)
    # In the middle of two bf16 numbers, the next smaller fp32 number.
    is_middle = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(restored[~is_middle], master[~is_middle])
    assert (restored.view(torch.int32) - master.view(torch.int32)).abs().max() <= 1


def test_not_a_number_stays_one() -> None:
    master = torch.tensor([math.nan, -math.nan, math.inf, -math.inf])
    form, weights = RemainderWeights(), torch.zeros(4, dtype=torch.bfloat16)
    tensors = form.rows((weights, *form.allocate(4, HOST)))
    form.write(tensors, as_rows(master), NEAREST)
    assert form.read(tensors).isnan().tolist() == [[True, True, False, False]]
    assert weights.isnan().tolist() == [True, True, False, False]


# -- steps -----------------------------------------------------------------------------------------


class ReferenceAdam:
    """AdamW or Adam in fp64."""

    def __init__(
        self, weights: torch.Tensor, options: dict[str, Any], *, is_decoupled: bool
    ) -> None:
        self.weights, self.options, self.is_decoupled = weights.double(), options, is_decoupled
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.step_count = 0

    def step(self, gradient: torch.Tensor) -> None:
        self.step_count += 1
        (beta1, beta2), decay, rate = (self.options[key] for key in ("betas", "weight_decay", "lr"))
        slope = gradient.double()
        if self.is_decoupled:
            self.weights *= 1 - rate * decay
        else:
            slope = slope + decay * self.weights
        self.first = beta1 * self.first + (1 - beta1) * slope
        self.second = beta2 * self.second + (1 - beta2) * slope**2
        mean = self.first / (1 - beta1**self.step_count)
        square = self.second / (1 - beta2**self.step_count)
        self.weights -= rate * mean / (square.sqrt() + 1e-8)


@pytest.mark.parametrize(
    ("formats", "tolerance"),
    [
        (StateFormats(remainders=True), 1e-4),
        (StateFormats("bf16"), 0.25),
        (StateFormats(remainders=True, first_moment="bf16", second_moment="bf16"), 0.02),
        (StateFormats(remainders=True, first_moment="fp16", second_moment="fp16"), 0.002),
        (StateFormats(remainders=True, first_moment="fp8", second_moment="fp8"), 0.1),
        (StateFormats("bf16", first_moment="fp8", second_moment="fp8", gradients="bf16"), 0.25),
    ],
    ids=["remainders", "bf16-weights", "bf16-moments", "fp16-moments", "fp8-moments", "all"],
)
@pytest.mark.parametrize("is_decoupled", [True, False], ids=["adamw", "adam"])
def test_many_steps_beside_fp64(
    formats: StateFormats, tolerance: float, is_decoupled: bool
) -> None:
    """An update, 1e-3, is less than half of the distance of two bf16 numbers, so that rounding to
    nearest would lose them all.
    """
    size, generator = 5 * BLOCK_WEIGHTS + 17, torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    weights = (2 + torch.randn(size, generator=generator).abs()).bfloat16()
    drift = torch.randn(size, generator=generator)
    reference = ReferenceAdam(weights, options, is_decoupled=is_decoupled)
    adam = MasterWeightAdam([weights], formats=formats, adam_w_mode=is_decoupled, **options)
    start = weights.float().clone()
    for _ in range(500):
        gradient = drift + 0.5 * torch.randn(size, generator=generator)
        if formats.gradients == "bf16":
            gradient = gradient.bfloat16()
        weights.decoupled_grad = gradient  # type: ignore[attr-defined]
        adam.step()
        reference.step(gradient)
    expected = reference.weights - start
    moved = adam.get_unscaled_state(weights, "master_param") - start
    assert (moved - expected).norm() < tolerance * expected.norm()
    # Rounding is noise: it makes the weights neither faster nor slower.
    assert (moved * expected).sum() / expected.square().sum() == pytest.approx(1, abs=0.03)


def test_the_same_weight_is_rounded_equally_everywhere() -> None:
    """Not so weights of another name, and of other steps."""

    def train(name: str, steps: int) -> torch.Tensor:
        weights = torch.linspace(1, 2, 300).bfloat16()
        formats = StateFormats("bf16", first_moment="fp8", second_moment="fp8")
        adam = MasterWeightAdam([weights], formats=formats, lr=1e-4)
        adam.name_parameter(weights, name)
        for _ in range(steps):
            weights.decoupled_grad = torch.ones(300)  # type: ignore[attr-defined]
            adam.step()
        return weights

    assert torch.equal(train("a", 3), train("a", 3))
    assert not torch.equal(train("a", 3), train("b", 3))


def test_copies_of_other_ranks_get_fp32_states() -> None:
    weights = torch.linspace(1, 2, 300).bfloat16()
    formats = StateFormats("bf16", first_moment="fp8", second_moment="fp8")
    adam = MasterWeightAdam([weights], formats=formats, offload_fraction=1.0)
    assert adam.host_bytes == math.ceil(300 * 2 * (1 + 1 / BLOCK_WEIGHTS))
    adam.name_parameter(weights, "embedding", is_replicated=True)
    assert adam.host_bytes == 300 * 12
    adam.initialize_states()
    assert {state.tensors[-1].dtype for state in adam.state[weights].values()} == {torch.float32}


@pytest.mark.parametrize(
    ("fraction", "is_updated_by_device"),
    [(0.0, True), (1.0, False), (1.0, True)],
    ids=["device", "host", "host-on-device"],
)
def test_rounding_depends_on_the_position_of_a_weight_alone(
    fraction: float, is_updated_by_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the parts in which weights are updated, nor on the memory that they are in."""
    formats = StateFormats("bf16", first_moment="fp8", second_moment="fp8")

    def train(offload_fraction: float) -> torch.Tensor:
        weights = torch.linspace(1, 2, 1000).bfloat16()
        adam = MasterWeightAdam(
            [weights], formats=formats, lr=1e-4, offload_fraction=offload_fraction
        )
        for _ in range(3):
            weights.decoupled_grad = torch.ones(1000)  # type: ignore[attr-defined]
            adam.step()
        return weights

    expected = train(0.0)
    monkeypatch.setattr("flagscale.train.optim.lean_update.HOST_PART", BLOCK_WEIGHTS)
    for module in ("offload_staging", "master_adam"):
        monkeypatch.setattr(f"flagscale.train.optim.{module}.WEIGHTS_PER_PIECE", 2 * BLOCK_WEIGHTS)
    if is_updated_by_device:
        update_as_on_a_device(monkeypatch)
    get_update.cache_clear()
    assert torch.equal(train(fraction), expected)


@pytest.mark.parametrize("size", [1, 100, 128, 300])
def test_parts_are_updated_as_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = AdamFormats(
        InPlaceWeights(torch.float32), FIRST_MOMENTS["fp32"], SECOND_MOMENTS["fp32"]
    )
    gradient, options = torch.linspace(-1, 1, size), {"lr": 0.1, "betas": (0.9, 0.99)}
    parameters = hyperparameters(
        {**options, "step": 1, "weight_decay": 0.1, "eps": 1e-8}, is_decoupled=True, device=HOST
    )
    results = []
    for part in (BLOCK_WEIGHTS, state_formats.HOST_PART):
        monkeypatch.setattr("flagscale.train.optim.lean_update.HOST_PART", part)
        get_update.cache_clear()
        weights = torch.ones(size)
        moments = (formats.first_moment.allocate(size, HOST) for _ in range(2))
        tensors = AdamTensors((weights,), *moments)
        get_update(formats, is_decoupled=True)(tensors, gradient, parameters, 1)
        results.append(weights)
    assert torch.equal(*results)
    assert torch.allclose(results[0], 0.99 - 0.1 * gradient.sign(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_offloaded_states_have_the_formats_of_those_on_the_device(
    dtype: torch.dtype, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same values, from the initial ones over steps and a checkpoint to later steps."""
    formats = StateFormats(remainders=True, first_moment=moments, second_moment=moments)

    def create_adam(fraction: float) -> tuple[torch.Tensor, MasterWeightAdam]:
        weights = draw_values("first", 500).to(dtype)
        options = {"lr": 1e-2, "weight_decay": 0.1}
        return weights, MasterWeightAdam(
            [weights], formats=formats, offload_fraction=fraction, **options
        )

    def take_steps(weights: Any, adam: MasterWeightAdam, seeds: range) -> None:
        for seed in seeds:
            weights.decoupled_grad = draw_values("first", 500, seed)
            adam.step()

    expected, adam_on_device = create_adam(0.0)
    take_steps(expected, adam_on_device, range(1, 6))
    update_as_on_a_device(monkeypatch)
    weights, adam = create_adam(1.0)
    take_steps(weights, adam, range(1, 3))
    resumed_weights, resumed = create_adam(1.0)
    resumed_weights.copy_(weights)
    resumed.load_state_dict(adam.state_dict())
    take_steps(resumed_weights, resumed, range(3, 6))
    assert adam.host_bytes == 500 * formats.state_bytes(
        "bf16" if dtype == torch.bfloat16 else "fp32"
    )
    assert torch.equal(resumed_weights, expected)
    for name in ("master_param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(
            resumed.get_unscaled_state(resumed_weights, name),
            adam_on_device.get_unscaled_state(expected, name),
        )


def test_fp32_parameters_are_not_rounded() -> None:
    """A model in bf16 may have some."""
    formats = StateFormats("bf16", second_moment="bf16")
    weights = torch.ones(10)
    adam = MasterWeightAdam([weights], formats=formats, lr=1e-5)
    weights.decoupled_grad = torch.ones(10)  # type: ignore[attr-defined]
    adam.step()
    assert torch.allclose(weights, torch.tensor(1 - 1e-5))
    assert torch.equal(adam.get_unscaled_state(weights, "master_param"), weights)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_update_of_the_host_equals_the_plain_one() -> None:
    """States in host memory of a model on a device are updated by compiled code."""
    formats = AdamFormats(RemainderWeights(), FIRST_MOMENTS["fp8"], SECOND_MOMENTS["fp8"])
    group = {"lr": 0.1, "betas": (0.9, 0.99), "step": 1, "weight_decay": 0.1, "eps": 1e-8}
    parameters = hyperparameters(group, is_decoupled=True, device=HOST)
    size = 3 * BLOCK_WEIGHTS + 5
    gradient = draw_values("first", size).bfloat16()
    results = []
    for is_compiled in (False, True):
        weights = draw_values("first", size, seed=1).bfloat16()
        tensors = AdamTensors(
            (weights, *formats.weights.allocate(size, HOST)),
            formats.first_moment.allocate(size, HOST),
            formats.second_moment.allocate(size, HOST),
        )
        update = get_update(formats, is_decoupled=True, compiles_on_host=is_compiled)
        for key in range(3):
            update(tensors, gradient, parameters, key)
        results.append([weights, *tensors.first_moment, *tensors.second_moment])
    for plain, compiled in zip(*results, strict=True):
        assert (plain == compiled).float().mean() > 0.99
