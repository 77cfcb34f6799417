"""Construction of the optimizer and its schedule from the arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
    layer_wise_optimizer,
)
from megatron.core.optimizer import optimizer as base_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from flagscale.config.arguments.rules.muon import LION, uses_muon
from flagscale.config.arguments.rules.optimizer import schedule_lengths, weight_decays
from flagscale.config.arguments.rules.optimizer_states import state_formats
from flagscale.config.arguments.rules.sharding import shards_gradients
from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.host_memory import explain_lack_of_memory
from flagscale.train.models.config import build_optimizer_config
from flagscale.train.optim.adam import FusedAdam
from flagscale.train.optim.clip_grads import clip_grads_by_norm, compute_grad_norm
from flagscale.train.optim.global_norm import use_global_grad_norm
from flagscale.train.optim.group_optimizer import GroupOptimizer
from flagscale.train.optim.hyperparameters import mark_decoupled_groups
from flagscale.train.optim.lion import Lion
from flagscale.train.optim.master_adam import MasterWeightAdam
from flagscale.train.optim.matrices import MuonSettings
from flagscale.train.optim.members import list_members
from flagscale.train.optim.muon import Muon
from flagscale.train.optim.muon_setup import (
    connect_members,
    group_overrides,
    identify_groups,
    mark_parameters,
)
from flagscale.train.optim.states import LION_STATES, mark_states
from flagscale.train.sharding.optimizer import ShardedOptimizer


def replace_fallbacks() -> None:
    """Replace megatron.core's fallback implementations by this project's.

    If Transformer Engine or Apex is installed, megatron.core uses and keeps theirs.
    """
    if not core_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    core_optimizer.Adam = FusedAdam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = GroupOptimizer  # the class that it accepts
    # The state has the layout of Transformer Engine's FusedAdam.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    for module in (clip_grads, base_optimizer, layer_wise_optimizer):
        module.get_grad_norm_fp32 = compute_grad_norm
    for module in (clip_grads, base_optimizer):
        module.clip_grad_by_total_norm_fp32 = clip_grads_by_norm
    core_optimizer.optimizer.get_grad_norm_fp32 = compute_grad_norm


def build_optimizer(
    args: argparse.Namespace, chunks: list[DistributedDataParallel], device: Device
) -> MegatronOptimizer:
    """Return the optimizer for the parameters of ``chunks``, which are on ``device``."""
    replace_fallbacks()
    config = build_optimizer_config(args)
    with ExitStack() as replacements:
        if shards_gradients(vars(args)):
            replacements.enter_context(_use_sharded_optimizer())
        overrides = None
        if has_muon := uses_muon(vars(args)):
            mark_parameters(chunks)
            overrides = group_overrides(config)
        if args.optimizer == LION:
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                mark_states(parameter, LION_STATES)
        if constructor := _select_constructor(args, config):
            replacements.enter_context(_use_optimizer(constructor))
        optimizer = get_megatron_optimizer(
            config, chunks, config_overrides=overrides, use_gloo_process_groups=False
        )
    _drop_empty_members(optimizer)
    for chained in list_members(optimizer):
        if chained.optimizer is not None and chained.init_state_fn is None:
            # Loading a checkpoint allocates the state first. megatron.core has no function for SGD.
            chained.init_state_fn = _init_sgd_momentum
        if isinstance(chained.optimizer, MasterWeightAdam):
            _keep_master_weights(chained)
    if args.optimizer_cpu_offload:
        _check_host_memory(optimizer)
    mark_decoupled_groups(optimizer)
    identify_groups(optimizer, has_muon=has_muon)
    connect_members(args, optimizer, chunks)
    for member in list_members(optimizer):
        if isinstance(member.optimizer, Muon | Lion | MasterWeightAdam):
            _initialize_before_loading(member)
    if args.meshes is not None or args.num_moe_experts:
        use_global_grad_norm(
            optimizer,
            device.torch_device,
            is_hybrid=args.num_distributed_optimizer_instances > 1,
        )
    return optimizer


def _drop_empty_members(optimizer: Any) -> None:
    """Drop those members of a chain that have no parameters on any rank, such as the member of all
    layers but experts if only experts are trained. megatron.core cannot save them.
    """
    members = getattr(optimizer, "chained_optimizers", [])
    if trained := [member for member in members if not member.is_stub_optimizer]:
        optimizer.chained_optimizers = trained


def _check_host_memory(optimizer: MegatronOptimizer) -> None:
    """Check that the hosts have the memory for offloaded states. Collective.

    Raises:
        ConfigError: on all ranks, if a host has too little memory.
    """
    if reason := explain_lack_of_memory(_count_host_bytes(optimizer)):
        raise ConfigError(
            f"optimizer_cpu_offload: {reason}",
            hint="lower optimizer_offload_fraction, or use more hosts",
        )


def _count_host_bytes(optimizer: MegatronOptimizer) -> int:
    members = (member.optimizer for member in list_members(optimizer))
    return sum(adam.host_bytes for adam in members if isinstance(adam, MasterWeightAdam))


@contextmanager
def _use_sharded_optimizer() -> Iterator[None]:
    """Return a context manager in which megatron.core builds :class:`ShardedOptimizer`."""
    core_optimizer.DistributedOptimizer = ShardedOptimizer
    try:
        yield
    finally:
        core_optimizer.DistributedOptimizer = distrib_optimizer.DistributedOptimizer


@contextmanager
def _use_optimizer(create: Callable[..., torch.optim.Optimizer]) -> Iterator[None]:
    """Return a context manager in which megatron.core calls ``create`` in place of Adam."""
    core_optimizer.Adam = create
    try:
        yield
    finally:
        core_optimizer.Adam = FusedAdam


def _select_constructor(
    args: argparse.Namespace, config: OptimizerConfig
) -> Callable[..., torch.optim.Optimizer] | None:
    """Return the constructor that replaces Adam's, and adapt ``config`` to it; None for Adam itself
    and for SGD.
    """
    if args.optimizer_cpu_offload or args.use_precision_aware_optimizer:
        # megatron.core's own options would require Transformer Engine. This attribute, which it
        # derives from them, makes its distributed optimizer leave master weights to the optimizer.
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        fraction = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
        formats = state_formats(vars(args))
        return partial(MasterWeightAdam, offload_fraction=fraction, formats=formats)
    if uses_muon(vars(args)):
        config.optimizer = "adam"
        return partial(Muon, settings=MuonSettings.from_arguments(vars(args)))
    if args.optimizer != LION:
        return None
    config.optimizer = "adam"

    def create_lion(params: Any, *, lr: float, weight_decay: float, **_of_adam: Any) -> Lion:
        return Lion(params, lr, (args.lion_beta1, args.lion_beta2), weight_decay)

    return create_lion


def _initialize_before_loading(member: Any) -> None:
    """Let a member have its states before a checkpoint is loaded: megatron.core would allocate fp32
    states of Adam on the device.
    """
    inner: Muon | Lion | MasterWeightAdam = member.optimizer
    load_state_dict = member.load_state_dict

    def initialize_states(_optimizer: Any, _config: Any = None) -> None:
        inner.initialize_states()

    def initialize_and_load(state_dict: Any) -> None:
        inner.initialize_states()
        load_state_dict(state_dict)

    member.init_state_fn = initialize_states
    member.load_state_dict = initialize_and_load


def _keep_master_weights(distributed_optimizer: Any) -> None:
    """Connect a distributed optimizer to the state of its :class:`MasterWeightAdam`."""
    adam: MasterWeightAdam = distributed_optimizer.optimizer
    _identify_parameters(distributed_optimizer)

    take_over_weights = distributed_optimizer._copy_model_params_to_main_params

    def reset_master_weights(state_dict: Any = None) -> None:
        take_over_weights(state_dict)
        # megatron.core expects that there are no master weights before the first step.
        adam.reset_master_weights()

    distributed_optimizer._copy_model_params_to_main_params = reset_master_weights


def _identify_parameters(distributed_optimizer: Any) -> None:
    """Give the shards of a distributed optimizer names that are equal where weights are."""
    names = {
        parameter: f"{index}.{name}"
        for index, chunk in enumerate(distributed_optimizer.model_chunks)
        for name, parameter in chunk.named_parameters()
    }
    adam: MasterWeightAdam = distributed_optimizer.optimizer
    for parameter, (group, order) in distributed_optimizer.model_param_group_index_map.items():
        start = distributed_optimizer._get_model_param_range_map(parameter)["param"].start
        # The first and the last pipeline stage hold copies of a tied embedding.
        is_replicated = getattr(parameter, "shared_embedding", False)
        adam.name_parameter(
            adam.param_groups[group]["params"][order],
            f"{names[parameter]}[{start}]",
            is_replicated=is_replicated,
        )


def _init_sgd_momentum(optimizer: Any, _config: Any = None) -> None:
    """Allocate zero momentum buffers for SGD."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter.data)
            )


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay, counted in samples.

    ``args`` are resolved. Lengths in steps are multiplied by the global batch size.
    """
    start_weight_decay, end_weight_decay = weight_decays(vars(args))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_decay_style=args.lr_decay_style,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
        start_wd=start_weight_decay,
        end_wd=end_weight_decay,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        **schedule_lengths(vars(args)),
    )
