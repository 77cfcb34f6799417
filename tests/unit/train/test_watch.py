from __future__ import annotations

import math

import pytest
import torch

from flagscale.errors import JobError
from flagscale.train.readings import LOST, OVERFLOW, Reading, Readings, StepNumbers
from flagscale.train.watch import LossWatch

pytestmark = pytest.mark.torch


def reading(step: int, loss: float, norm: float = 1.0, *, own: bool = True) -> Reading:
    numbers = StepNumbers(step=step, samples=step, learning_rate=1e-3)
    return Reading(numbers, loss, norm, stop=None, own_loss_finite=own)


def test_a_spike_is_told_with_step_and_median() -> None:
    watch = LossWatch(spike_factor=2.0, fatal=True)
    assert [watch.observe(reading(step, 3.0)) for step in range(20)] == [None] * 20
    warning = watch.observe(reading(20, 6.5))
    assert warning is not None
    assert "loss spike at step 20: 6.5000 is more than 2 times" in warning
    assert "the median of the last 20 steps, 3.0000" in warning


def told(losses: list[float]) -> list[int]:
    """The steps of these losses that are told as a spike."""
    watch = LossWatch(spike_factor=2.0, fatal=True)
    return [step for step, loss in enumerate(losses) if watch.observe(reading(step, loss))]


def test_what_is_known_by_heart_does_not_spike() -> None:
    small = [0.05, 0.03, 0.04, 0.06, 0.05] * 4
    assert told([*small, 0.15, 0.05, 0.4, 0.05, 0.12]) == []
    assert told([*small, 0.9]) == [20]


def test_spikes_before_do_not_hide_a_later_one() -> None:
    usual = [3.0] * 20
    assert told([*usual, 60.0, 3.0, 3.0, 6.5, 3.0]) == [20, 23]


def test_of_a_row_of_spikes_the_first_is_told() -> None:
    usual = [3.0] * 20
    assert told([*usual, 7.0, 8.0, 9.0, 3.0, 7.0]) == [20, 24]


def test_the_first_steps_are_no_spike() -> None:
    watch = LossWatch(spike_factor=2.0, fatal=True)
    assert watch.observe(reading(1, 1.0)) is None
    assert watch.observe(reading(2, 9.0)) is None


def test_factor_0_never_warns() -> None:
    watch = LossWatch(spike_factor=0.0, fatal=True)
    assert [watch.observe(reading(step, 10.0**step)) for step in range(15)] == [None] * 15


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_step_and_rank(loss: float) -> None:
    watch = LossWatch(spike_factor=2.0, fatal=True)
    with pytest.raises(JobError, match=r"at step 7; not finite on rank 0") as error:
        watch.observe(reading(7, loss, own=False))
    assert error.value.exit_code == 1


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_that_is_not_finite_names_the_step() -> None:
    watch = LossWatch(spike_factor=2.0, fatal=True)
    with pytest.raises(JobError, match="gradient norm is nan at step 7"):
        watch.observe(reading(7, 2.0, math.nan))


def test_without_the_check_it_is_a_warning() -> None:
    watch = LossWatch(spike_factor=2.0, fatal=False)
    assert watch.observe(reading(7, math.nan)) == "step 7: loss nan, gradient norm 1.0"


def test_a_row_of_skipped_steps_is_told_once() -> None:
    watch = LossWatch(spike_factor=2.0, fatal=True)
    found = []
    for step, skipped in enumerate([OVERFLOW, OVERFLOW, "", LOST]):
        numbers = StepNumbers(step=step, samples=3, learning_rate=0.0, skipped=skipped)
        found.append(watch.observe(Reading(numbers, 3.0, 0.0, None, True)))
    assert [bool(warning) for warning in found] == [True, False, False, True]
    assert "step 0 is skipped: its gradients overflow" in str(found[0])
    assert "step 3 is skipped: too much of its gradients was lost" in str(found[3])


@pytest.mark.usefixtures("one_rank")
def test_no_loss_scale_mends_a_loss_that_is_not_finite() -> None:
    numbers = StepNumbers(step=3, samples=3, learning_rate=0.0, skipped=OVERFLOW)
    with pytest.raises(JobError, match="the loss is inf at step 3"):
        LossWatch(spike_factor=2.0, fatal=True).observe(
            Reading(numbers, math.inf, 0.0, None, False)
        )


@pytest.mark.parametrize(
    ("values", "loss", "stop", "own_finite"),
    [
        ([30.0, 10.0, 0.0, 0.0, 2.5, 15.0], 3.0, None, True),
        ([30.0, 10.0, 1.0, 0.0, 2.5, 15.0], 3.0, "signal", True),
        ([30.0, 10.0, 0.0, 2.0, 2.5, 15.0], 3.0, "exit-interval", True),
        ([30.0, 10.0, 1.0, 1.0, 2.5, 15.0], 3.0, "signal", True),
        ([30.0, 10.0, 0.0, 0.0, 2.5, math.nan], 3.0, None, False),
        ([0.0, 0.0, 0.0, 0.0, 2.5, 0.0], 0.0, None, True),
    ],
)
def test_readings(values: list[float], loss: float, stop: str | None, own_finite: bool) -> None:
    readings = Readings()
    for step in (1, 2, 3):
        numbers = StepNumbers(step=step, samples=step, learning_rate=1e-3)
        readings.add(numbers, torch.tensor(values, dtype=torch.float64))
    assert [found.numbers.step for found in readings.take(leave=1)] == [1, 2]
    (last,) = readings.take(leave=0)
    assert (last.loss, last.grad_norm) == (loss, 2.5)
    assert (last.stop, last.own_loss_finite) == (stop, own_finite)
