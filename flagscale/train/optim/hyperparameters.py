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

from flagscale.train.optim.lion import LION_BETAS
from flagscale.train.optim.members import list_members
from flagscale.train.optim.muon import USES_MUON

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
_DECOUPLED_KEYS = {"max_lr": "decoupled_lr", "min_lr": "decoupled_min_lr"}
"""Rates of a parameter group, and their names in a group of decoupled weights."""
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
    """Return the optimizer that saved a checkpoint (``adam``, ``muon``, ``lion`` or ``sgd``); None
    if unknown.
    """
    keys = {"muon": USES_MUON, "lion": LION_BETAS, "adam": "betas", "sgd": "momentum"}
    groups = list(_saved_groups(common_state["optimizer"]))
    for name, key in keys.items():
        if any(key in group and group[key] is not False for group in groups):
            return name
    return None


def set_hyperparameters(
    scheduler: OptimizerParamScheduler, optimizer: MegatronOptimizer, values: Mapping[str, Any]
) -> None:
    """Replace hyperparameters of a run by ``values``."""
    for key in values.keys() & set(_SCHEDULER_KEYS):
        setattr(scheduler, key, values[key])
    rates = {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
    for group in optimizer.param_groups:
        if not group["is_decoupled_lr"]:
            group.update(rates)
        for key, name in _DECOUPLED_KEYS.items() if group["is_decoupled_lr"] else ():
            if name in values:
                # None: the checkpoint's decoupled weights have the rates of all others.
                group[key] = rates[key] if values[name] is None else values[name]
        if "betas" in group:
            beta1, beta2 = group["betas"]
            group["betas"] = (values.get("adam_beta1", beta1), values.get("adam_beta2", beta2))
            group["eps"] = values.get("adam_eps", group["eps"])
        if LION_BETAS in group:
            beta1, beta2 = group[LION_BETAS]
            group[LION_BETAS] = (values.get("lion_beta1", beta1), values.get("lion_beta2", beta2))
        if "momentum" in group:
            group["momentum"] = values.get("sgd_momentum", group["momentum"])
    scheduler.step(0)


def resume_schedule(scheduler: OptimizerParamScheduler, state: Mapping[str, Any]) -> None:
    """Continue a schedule at the position of a checkpoint, with the hyperparameters that it has."""
    scheduler.num_steps = state["num_steps"]
    scheduler.step(0)


def mark_decoupled_groups(optimizer: MegatronOptimizer) -> None:
    """Mark the groups with a learning rate of their own (``decoupled_lr``).

    megatron.core identifies the groups of a checkpoint by this mark and others, but never sets it,
    and would exchange the groups with and without such a rate.
    """
    for group in optimizer.param_groups:
        group["is_decoupled_lr"] = _is_decoupled(group)


def remove_groups(sharded_state: Any, saved_schedule: Mapping[str, Any]) -> None:
    """Remove the parameter groups from an optimizer's sharded state dict before it is loaded.

    The checkpoint may have other groups. Buffers that it lacks are removed as well: SGD without
    momentum has none.
    """
    for state in _iter_group_owners(sharded_state):
        del state["param_groups"]
        if saved_schedule.get("sgd_momentum") == 0:
            state["state"] = {}


def insert_groups(loaded_state: Any, optimizer: MegatronOptimizer) -> None:
    """Put the run's parameter groups into the loaded state of an optimizer, in place.

    Each gets the number of steps that is recorded in the checkpoint's groups.
    """
    steps = [int(group[_STEP]) for group in _saved_groups(loaded_state) if group.get(_STEP)]
    members = list_members(optimizer)
    for index, member in enumerate(members):
        if member.optimizer is None:
            continue  # this rank has no parameters of this optimizer
        state = loaded_state if len(members) == 1 else loaded_state[index]
        if state.get("grad_scaler") == {}:
            del state["grad_scaler"]  # a constant loss scale has no state
        inner_state = state.get("optimizer", state)
        inner_state.setdefault("state", {})
        groups = member.optimizer.state_dict()["param_groups"]
        for group in groups:
            group.pop(_STEP, None)
            if steps:
                group[_STEP] = max(steps)
        inner_state["param_groups"] = groups


def _describe_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters that parameter groups contain."""
    values: dict[str, Any] = dict.fromkeys(_DECOUPLED_KEYS.values())
    for group in groups:
        if "betas" in group:
            values["adam_beta1"], values["adam_beta2"] = group["betas"]
            values["adam_eps"] = group["eps"]
        elif LION_BETAS in group:
            values["lion_beta1"], values["lion_beta2"] = group[LION_BETAS]
        elif "momentum" in group:
            values["sgd_momentum"] = group["momentum"]
        if _is_decoupled(group):
            values.update({name: group[key] for key, name in _DECOUPLED_KEYS.items()})
    return values


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    return bool(group.get("is_decoupled_lr")) or not group.get("default_config", True)


def _saved_groups(optimizer_state: Any) -> Iterator[Mapping[str, Any]]:
    for state in _iter_group_owners(optimizer_state):
        yield from state["param_groups"]


def _iter_group_owners(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the state dicts of torch's optimizers in the state dict of megatron.core's optimizer,
    which is a sequence of several if it is chained."""
    if isinstance(state, list):
        for item in state:
            yield from _iter_group_owners(item)
    elif isinstance(state, dict) and "param_groups" in state:
        yield state
    elif isinstance(state, dict):
        for key, item in state.items():
            if key == "optimizer" or isinstance(key, int):
                yield from _iter_group_owners(item)
