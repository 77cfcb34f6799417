"""megatron.core's distributed optimizer on buckets whose unsharded tensors have no memory.

The base class takes shards as views of unsharded weights and gradients. Here they are parts of the
shards that every rank keeps. Main parameters are the fp32 copies of the shards of 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class ShardedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """Distributed optimizer of chunks wrapped in :class:`.data_parallel.ShardedDataParallel`."""

    @classmethod
    def _build_model_gbuf_range(cls, param_and_grad_buffer: Any, bucket_index: int) -> Any:
        ranges = super()._build_model_gbuf_range(param_and_grad_buffer, bucket_index)
        return {**ranges, "bucket": param_and_grad_buffer.buckets[bucket_index]}

    @classmethod
    def _build_model_and_main_param_groups(
        cls, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any
    ) -> Any:
        """Create the optimizer's parameters: shards of fp32 weights, main parameters of others.

        Returns:
            Lists of one list per parameter group: 16-bit weights, fp32 weights, the shards of
            both, and the main parameters of the 16-bit shards (None if the optimizer has them).
        """
        has_main_params = not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        groups = []
        for group_range in opt_group_ranges:
            weights_16, weights_32, shards_16, shards_32, main_params = [], [], [], [], []
            for weight in group_range["params"]:
                buffer_index, dtype, bucket_index = param_gbuf_map[weight]
                ranges = gbuf_ranges[buffer_index][dtype][bucket_index]
                local = ranges["param_map"][weight]["gbuf_local"]
                shard = ranges["bucket"].weight_shard[local.start : local.end]
                _copy_attributes(shard, weight)
                if weight.dtype == torch.float32:
                    weights_32.append(weight)
                    shards_32.append(shard)
                    continue
                main_param = None
                if has_main_params:
                    main_param = shard.clone().float()
                    _copy_attributes(main_param, weight)
                weight.main_param, weight.main_param_sharded = main_param, True
                weights_16.append(weight)
                shards_16.append(shard)
                main_params.append(main_param)
            group_range["orig_group"]["params"] = [
                *shards_32,
                *(main_params if has_main_params else shards_16),
            ]
            groups.append((weights_16, weights_32, shards_16, shards_32, main_params))
        return tuple(map(list, zip(*groups, strict=True))) if groups else ([], [], [], [], [])

    def _copy_model_grads_to_main_grads(self) -> None:
        if self.is_stub_optimizer:
            return
        is_precision_aware = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        main_params = self.shard_float16_groups
        if not is_precision_aware:
            main_params = self.shard_fp32_from_float16_groups
        for weights, parameters in (
            (self.model_float16_groups, main_params),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for weight, parameter in _iter_pairs(weights, parameters):
                # Gradients are complete, so that this is the part of this rank's shard.
                gradient = weight.main_grad
                assert gradient.numel() == parameter.numel()
                if is_precision_aware:
                    parameter.decoupled_grad = gradient
                else:
                    parameter.grad = gradient.float()

    def _copy_main_params_to_model_params(self) -> None:
        if self.is_stub_optimizer or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return
        for shard, main_param in _iter_pairs(
            self.shard_float16_groups, self.shard_fp32_from_float16_groups
        ):
            shard.copy_(main_param)

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Take over loaded weights: unsharded ones if they are gathered, or else shards."""
        assert state_dict is None, "weights are loaded into the model"
        if self.is_stub_optimizer:
            return
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.update_shard()
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return
        for shard, main_param in _iter_pairs(
            self.shard_float16_groups, self.shard_fp32_from_float16_groups
        ):
            main_param.data.copy_(shard)


def _copy_attributes(shard: torch.Tensor, weight: Any) -> None:
    tensor_parallel.copy_tensor_model_parallel_attributes(shard, weight)
    if hasattr(weight, "shared"):
        shard.shared = weight.shared  # type: ignore[attr-defined]


def _iter_pairs(first_groups: Any, second_groups: Any) -> Iterator[tuple[Any, Any]]:
    for first_group, second_group in zip(first_groups, second_groups, strict=True):
        yield from zip(first_group, second_group, strict=True)
