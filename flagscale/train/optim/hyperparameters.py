"""Hyperparameters of the optimizer and its schedule in a resumed run.

megatron.core keeps learning rates, betas, epsilon and momentum in the optimizer's parameter groups,
and a checkpoint contains these groups. The groups of a resumed run are always its own: of the
checkpoint's groups only the number of steps is state. Whether the hyperparameters are those of the
arguments or of the checkpoint is decided in :mod:`flagscale.config.arguments.rules.resuming`; their
keys are those of :data:`.SCHEDULE_TERMS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_SCHEDULER_KEYS = (
    "max_lr",
    "min_lr",
    "init_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "wsd_decay_steps",
    "lr_wsd_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
)
"""Attributes of megatron.core's scheduler that determine a schedule."""
_STEP = "step"


def describe_schedule(
    scheduler: OptimizerParamScheduler, optimizer: MegatronOptimizer
) -> dict[str, Any]:
    """Return the hyperparameters that take effect in a run."""
    values = {key: getattr(scheduler, key) for key in _SCHEDULER_KEYS}
    return {**values, **_describe_groups(optimizer.param_groups)}


def save_schedule(scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    """Return the state of a schedule, for a checkpoint.

    megatron.core's own state lacks the start of the warm-up and the final phase of WSD.
    """
    return {**{key: getattr(scheduler, key) for key in _SCHEDULER_KEYS}, **scheduler.state_dict()}


def read_saved_schedule(common_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a checkpoint from the part of it that is not sharded."""
    scheduler_state = common_state["scheduler"]
    values = {key: scheduler_state[key] for key in _SCHEDULER_KEYS if key in scheduler_state}
    return {**values, **_describe_groups(_saved_groups(common_state["optimizer"]))}


def saved_optimizer_name(common_state: Mapping[str, Any]) -> str | None:
    """Return the optimizer that saved a checkpoint (``adam`` or ``sgd``); None if unknown."""
    groups = list(_saved_groups(common_state["optimizer"]))
    if any("betas" in group for group in groups):
        return "adam"
    return "sgd" if any("momentum" in group for group in groups) else None


def set_hyperparameters(
    scheduler: OptimizerParamScheduler, optimizer: MegatronOptimizer, values: Mapping[str, Any]
) -> None:
    """Replace hyperparameters of a run by ``values``."""
    for key in values.keys() & set(_SCHEDULER_KEYS):
        setattr(scheduler, key, values[key])
    for group in optimizer.param_groups:
        rates = {"max_lr": values.get("max_lr"), "min_lr": values.get("min_lr")}
        if group["is_decoupled_lr"]:
            # None: the checkpoint has no separate rates, and all weights have the same.
            rates = {
                "max_lr": values.get("decoupled_lr") or rates["max_lr"],
                "min_lr": values.get("decoupled_min_lr") or rates["min_lr"],
            }
        group.update({key: value for key, value in rates.items() if value is not None})
        if "betas" in group:
            beta1, beta2 = group["betas"]
            group["betas"] = (values.get("adam_beta1", beta1), values.get("adam_beta2", beta2))
            group["eps"] = values.get("adam_eps", group["eps"])
        if "momentum" in group:
            group["momentum"] = values.get("sgd_momentum", group["momentum"])
    scheduler.step(0)


def resume_schedule(scheduler: OptimizerParamScheduler, state: Mapping[str, Any]) -> None:
    """Continue a schedule at the position of a checkpoint, with the hyperparameters it has."""
    scheduler.num_steps = state["num_steps"]
    scheduler.step(0)
