"""Builds the optimizer and its schedule from the arguments."""

from __future__ import annotations

import argparse
from typing import Any

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
    layer_wise_optimizer,
)
from megatron.core.optimizer import optimizer as base_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from flagscale.config.arguments.resolve import schedule_lengths
from flagscale.config.arguments.rules import weight_decays
from flagscale.train.device import Device
from flagscale.train.models.config import optimizer_config
from flagscale.train.optim.adam import FusedAdam
from flagscale.train.optim.gradients import clip, gradient_norm
from flagscale.train.optim.joint import join


def replace_fallbacks() -> None:
    """Give megatron.core this project's optimizer parts where it would fall back on its own.

    Where Transformer Engine or Apex is installed, megatron.core has theirs, and keeps them.
    """
    if not core_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    core_optimizer.Adam = FusedAdam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    # The state's layout is the one of Transformer Engine's FusedAdam.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    for module in (clip_grads, base_optimizer, layer_wise_optimizer):
        module.get_grad_norm_fp32 = gradient_norm
    for module in (clip_grads, base_optimizer):
        module.clip_grad_by_total_norm_fp32 = clip
    core_optimizer.optimizer.get_grad_norm_fp32 = gradient_norm


def build_optimizer(
    args: argparse.Namespace, chunks: list[DistributedDataParallel], device: Device
) -> MegatronOptimizer:
    """The optimizer over the parameters of ``chunks``, which are on ``device``."""
    replace_fallbacks()
    optimizer = get_megatron_optimizer(
        optimizer_config(args), chunks, use_gloo_process_groups=False
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None and part.init_state_fn is None:
            # Loading makes a place for the state that it reads; of SGD megatron.core knows none.
            part.init_state_fn = _start_momentum
    if args.meshes is not None or args.num_moe_experts:
        join(optimizer, device.torch_device)
    return optimizer


def _start_momentum(optimizer: Any, _config: Any = None) -> None:
    """Give the parameters of an SGD their momentum, which is nothing yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter.data)
            )


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay, counted in samples.

    ``args`` is resolved. A schedule given in steps is multiplied by the global batch size.
    """
    start, end = weight_decays(vars(args))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_decay_style=args.lr_decay_style,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        **schedule_lengths(vars(args)),
    )
