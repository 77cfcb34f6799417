"""Loss monitor: spikes, non-finite values and skipped steps; deferred copies of metrics."""

from __future__ import annotations

import math

import pytest
import torch

from flagscale.errors import JobError
from flagscale.train.deferred_metrics import (
    GRADIENTS_LOST,
    GRADIENTS_OVERFLOWED,
    DeferredMetrics,
    HostMetrics,
    StepMetrics,
)
from flagscale.train.loss_monitor import LossMonitor

pytestmark = pytest.mark.torch


def create_metrics(
    step: int, loss: float, norm: float = 1.0, *, is_rank_loss_finite: bool = True
) -> StepMetrics:
    host_metrics = HostMetrics(step=step, consumed_samples=step, learning_rate=1e-3)
    return StepMetrics(
        host_metrics,
        loss=loss,
        grad_norm=norm,
        stop_reason=None,
        is_rank_loss_finite=is_rank_loss_finite,
    )


def test_spike_is_reported_with_step_and_median() -> None:
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=True)
    assert [monitor.check_step(create_metrics(step, 3.0)) for step in range(20)] == [None] * 20
    warning = monitor.check_step(create_metrics(20, 6.5))
    assert warning is not None
    assert "loss spike at step 20: 6.5000 is more than 2 times" in warning
    assert "the median of the last 20 steps, 3.0000" in warning


def find_spikes(losses: list[float]) -> list[int]:
    """Return the steps of these losses that are reported as spikes."""
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=True)
    return [
        step for step, loss in enumerate(losses) if monitor.check_step(create_metrics(step, loss))
    ]


def test_spikes_of_less_than_half_a_nat_are_ignored() -> None:
    small_losses = [0.05, 0.03, 0.04, 0.06, 0.05] * 4
    assert find_spikes([*small_losses, 0.15, 0.05, 0.4, 0.05, 0.12]) == []
    assert find_spikes([*small_losses, 0.9]) == [20]


def test_earlier_spikes_do_not_hide_later_ones() -> None:
    usual_losses = [3.0] * 20
    assert find_spikes([*usual_losses, 60.0, 3.0, 3.0, 6.5, 3.0]) == [20, 23]


def test_first_of_consecutive_spikes_is_reported() -> None:
    usual_losses = [3.0] * 20
    assert find_spikes([*usual_losses, 7.0, 8.0, 9.0, 3.0, 7.0]) == [20, 24]


def test_no_spikes_in_the_first_steps() -> None:
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=True)
    assert monitor.check_step(create_metrics(1, 1.0)) is None
    assert monitor.check_step(create_metrics(2, 9.0)) is None


def test_factor_0_disables_spike_detection() -> None:
    monitor = LossMonitor(spike_factor=0.0, fail_on_nonfinite=True)
    assert [monitor.check_step(create_metrics(step, 10.0**step)) for step in range(15)] == [
        None
    ] * 15


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_names_step_and_rank(loss: float) -> None:
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=True)
    with pytest.raises(JobError, match=r"at step 7; not finite on rank 0") as error:
        monitor.check_step(create_metrics(7, loss, is_rank_loss_finite=False))
    assert error.value.exit_code == 1


@pytest.mark.usefixtures("single_process_group")
def test_non_finite_gradient_names_the_step() -> None:
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=True)
    with pytest.raises(JobError, match="gradient norm is nan at step 7"):
        monitor.check_step(create_metrics(7, 2.0, math.nan))


def test_non_finite_loss_is_only_a_warning_if_configured() -> None:
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=False)
    assert monitor.check_step(create_metrics(7, math.nan)) == "step 7: loss nan, gradient norm 1.0"


def test_consecutive_skipped_steps_are_reported_once() -> None:
    monitor = LossMonitor(spike_factor=2.0, fail_on_nonfinite=True)
    warnings = []
    for step, skipped in enumerate(
        [GRADIENTS_OVERFLOWED, GRADIENTS_OVERFLOWED, "", GRADIENTS_LOST]
    ):
        host_metrics = HostMetrics(
            step=step, consumed_samples=3, learning_rate=0.0, skip_reason=skipped
        )
        warnings.append(
            monitor.check_step(
                StepMetrics(
                    host_metrics,
                    loss=3.0,
                    grad_norm=0.0,
                    stop_reason=None,
                    is_rank_loss_finite=True,
                )
            )
        )
    assert [bool(warning) for warning in warnings] == [True, False, False, True]
    assert "step 0 is skipped: its gradients overflow" in str(warnings[0])
    assert "step 3 is skipped: too much of its gradients was lost" in str(warnings[3])


@pytest.mark.usefixtures("single_process_group")
def test_non_finite_loss_of_a_skipped_step_is_an_error() -> None:
    host_metrics = HostMetrics(
        step=3, consumed_samples=3, learning_rate=0.0, skip_reason=GRADIENTS_OVERFLOWED
    )
    with pytest.raises(JobError, match="the loss is inf at step 3"):
        LossMonitor(spike_factor=2.0, fail_on_nonfinite=True).check_step(
            StepMetrics(
                host_metrics,
                loss=math.inf,
                grad_norm=0.0,
                stop_reason=None,
                is_rank_loss_finite=False,
            )
        )


@pytest.mark.parametrize(
    ("values", "loss", "stop_reason", "is_rank_loss_finite"),
    # Sum of losses, tokens, ranks with a signal, ranks out of time, gradient norm, own sum of
    # losses.
    [
        ([30.0, 10.0, 0.0, 0.0, 2.5, 15.0], 3.0, None, True),
        ([30.0, 10.0, 1.0, 0.0, 2.5, 15.0], 3.0, "signal", True),
        ([30.0, 10.0, 0.0, 2.0, 2.5, 15.0], 3.0, "exit-interval", True),
        ([30.0, 10.0, 1.0, 1.0, 2.5, 15.0], 3.0, "signal", True),
        ([30.0, 10.0, 0.0, 0.0, 2.5, math.nan], 3.0, None, False),
        ([0.0, 0.0, 0.0, 0.0, 2.5, 0.0], 0.0, None, True),
    ],
)
def test_device_values_become_step_metrics(
    values: list[float], loss: float, stop_reason: str | None, is_rank_loss_finite: bool
) -> None:
    deferred_metrics = DeferredMetrics()
    for step in (1, 2, 3):
        host_metrics = HostMetrics(step=step, consumed_samples=step, learning_rate=1e-3)
        deferred_metrics.add(host_metrics, torch.tensor(values, dtype=torch.float64))
    completed = deferred_metrics.pop_completed(keep_newest=1)
    assert [metrics.host.step for metrics in completed] == [1, 2]
    (last,) = deferred_metrics.pop_completed(keep_newest=0)
    assert (last.loss, last.grad_norm) == (loss, 2.5)
    assert (last.stop_reason, last.is_rank_loss_finite) == (stop_reason, is_rank_loss_finite)
