"""Data parallelism with sharded gradients (ZeRO-2) and optionally sharded weights (ZeRO-3, FSDP).

Every data-parallel rank keeps a shard of the gradients, the optimizer state and, with ZeRO-3, the
weights of each unit: a transformer layer, the embedding, or everything after the last layer
(Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020;
Zhao et al., "PyTorch FSDP", 2023). The unsharded tensors of a unit exist only around its passes.
One micro-batch, with what the communication streams do below what the compute stream does::

    forward     | layer k-1        | layer k            | layer k+1
                | all-gather k     | all-gather k+1     | all-gather k+2

    backward    | layer k+1          | layer k             | layer k-1
                | all-gather k       | all-gather k-1      | all-gather k-2
                | reduce-scatter k+2 | reduce-scatter k+1  | reduce-scatter k

Of FP8 linear layers, the FP8 values of the weights are gathered instead (:mod:`.fp8_bucket`).

1. When layer k-1 begins its forward pass, the weights of layer k are prefetched: their all-gather
   starts.
2. Layer k waits for them, computes and releases them. The last layer of the model keeps them,
   because its backward pass follows.
3. When layer k+1 begins its backward pass, the weights of layer k are prefetched again.
4. Layer k waits for them, receives memory for its unsharded gradients and computes.
   Recomputation of its forward pass uses the same weights.
5. When layer k-1 begins its backward pass, the reduce-scatter of the gradients of layer k starts,
   and the weights of layer k are released.
6. When layer k-2 begins, that reduce-scatter is waited for. Its result has been added to this
   rank's shard of the gradients, and the memory of the unsharded ones is used by layer k-2.

What the next micro-batch reads first is there when it begins: the embedding is gathered during the
backward pass of the first layer, which then keeps its weights.

With hybrid sharding (``num_distributed_optimizer_instances``) groups of data-parallel ranks, such
as those of a host, share the weights, and each group has a replica. Collectives of steps 1 to 6 are
within a group. In the last micro-batch, the all-reduce of a unit's shard of the gradients between
the groups follows step 6.

After the last micro-batch ``main_grad`` of a weight is the part of it that is in this rank's shard.
:class:`.optimizer.ShardedOptimizer` updates its main parameters (fp32 shards) with it and writes
them to the shards of the weights.

Hooks of forward passes and of the gradients of layers' outputs start the communication. They run in
the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.layers.fp8_layers import Fp8Linears
from flagscale.train.layers.layer_compilation import find_transformer_layers
from flagscale.train.layers.wgrad_accumulation import (
    bind_accumulators,
    is_uninitialized,
    pop_uninitialized,
)
from flagscale.train.sharding.bucket import Initialize, ShardedBucket
from flagscale.train.sharding.collectives import create_collectives
from flagscale.train.sharding.fp8_bucket import Fp8Bucket, quantize_shards
from flagscale.train.sharding.partition import ChunkPartition, has_embedding_in_head
from flagscale.train.sharding.unit import ShardedUnit
from flagscale.train.state import unwrap_model


class ShardedDataParallel(_BaseDataParallel):  # type: ignore[misc]
    """Data parallelism with sharded gradients and, optionally, sharded weights.

    It has the methods that megatron.core's schedules and distributed optimizer call. Each
    transformer layer is a unit; so are the embedding and everything after the last layer (the
    head). If these two share weights, the head's unit holds those of both, and they stay unsharded
    from the start of a micro-batch's forward pass to the end of its backward pass.

    Attributes:
        buffers: buckets of the trained weights, except for those of experts.
        expert_parallel_buffers: buckets of the trained weights of experts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        *,
        shards_weights: bool,
        accumulates_in_layers: bool,
        timeout: timedelta,
        initialize: Initialize | None = None,
        fp8_linears: Fp8Linears | None = None,
    ) -> None:
        """Shard a model chunk.

        Args:
            config: the model's configuration.
            ddp_config: configuration of data parallelism.
            module: the model chunk, with initialized weights that are equal on all ranks.
            shards_weights: shard weights as well, not only gradients.
            accumulates_in_layers: layers add the gradients of their weights to ``main_grad``
                themselves (:mod:`flagscale.train.layers.wgrad_accumulation`).
            timeout: timeout of operations between ranks.
            initialize: initializes given weights of ``module``, which then needs no memory for its
                matrices before (:mod:`.deferred`). None if they are initialized.
            fp8_linears: the layers that use FP8; None without. If their weights are sharded, their
                FP8 values are gathered.
        """
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        groups = ProcessGroupCollection.setup_process_groups_for_ddp(None, config, ddp_config)
        replica_group = groups["inter_dist_opt_group"]
        self._collectives = {
            of_experts: create_collectives(groups[name], replica_group, timeout=timeout)
            for of_experts, name in ((False, "intra_dp_cp_group"), (True, "intra_expt_dp_group"))
        }
        # Sums over the ranks become gradients of the mean loss. The factor is the same for experts,
        # which see the tokens of all ranks that share them.
        gradient_scaling_factor = 1.0 / groups["dp_cp_group"].size()
        if config.calculate_per_token_loss:
            gradient_scaling_factor = 1.0
        self.params_with_grad = [param for param in module.parameters() if param.requires_grad]
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        model: Any = unwrap_model(self)
        self._ends_model = bool(getattr(model, "post_process", False))
        self._head_has_embedding = has_embedding_in_head(model)
        partition = ChunkPartition(
            model,
            ddp_config,
            self._collectives,
            gradient_scaling_factor,
            shards_weights=shards_weights,
            initialize=initialize,
            fp8_linears=fp8_linears,
        )
        self._embedding_unit, self._head_unit = partition.embedding_unit, partition.head_unit
        self._layer_units = partition.layer_units
        self._units = [self._embedding_unit, *self._layer_units, self._head_unit]
        self._synchronize_ranks()
        self.buffers = partition.list_buffers(of_experts=False)
        self.expert_parallel_buffers = partition.list_buffers(of_experts=True)
        self._accumulated_weights: list[torch.nn.Parameter] = []
        if accumulates_in_layers:
            self._accumulated_weights = bind_accumulators(unwrap_model(self))
        self._in_backward_pass = False
        self._forward_passes_left = self._backward_passes_left = 0
        self._add_hooks()

    # Hooks

    def _add_hooks(self) -> None:
        model: Any = unwrap_model(self)
        layers = find_transformer_layers(model)
        model.register_forward_pre_hook(self._pre_forward_chunk)
        model.register_forward_hook(self._post_forward_chunk)
        if getattr(model, "embedding", None) is not None:
            model.embedding.register_forward_hook(self._post_forward_embedding)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._pre_forward_layer, index))
            layer.register_forward_hook(partial(self._post_forward_layer, index))
        for unit in self._units:
            for bucket in unit.buckets:
                for param in bucket.params_list:
                    if param.requires_grad:
                        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                            partial(self._accumulate_gradient, unit)
                        )

    def _pre_forward_chunk(self, *_: Any) -> None:
        self._quantize_shards()
        self._prefetch_first_units()
        self._embedding_unit.all_gather()
        if self._head_has_embedding or not self._layer_units:
            self._head_unit.all_gather()
        if torch.is_grad_enabled():
            self._forward_passes_left -= 1

    def _quantize_shards(self) -> None:
        """Quantize the shards of FP8 weights that have changed. Collective."""
        buckets = [b for b in self.iter_buckets() if isinstance(b, Fp8Bucket) and b.is_stale]
        if buckets:
            # No rank still reads the values that are overwritten: each has waited for its
            # all-gathers before it takes part in the exchange of magnitudes.
            quantize_shards(buckets, self._collectives[False].group)
            self._synchronize_ranks()

    def _prefetch_first_units(self) -> None:
        """Prefetch the weights that the forward pass of a micro-batch reads first."""
        self._embedding_unit.start_all_gather()
        if self._head_has_embedding:
            self._head_unit.start_all_gather()
        for unit in self._layer_units[:1]:
            unit.start_all_gather()

    def _post_forward_embedding(self, _: Any, __: Any, output: Any) -> None:
        self._on_gradient(output, self._pre_backward_embedding)

    def _pre_forward_layer(self, index: int, *_: Any) -> None:
        if index == 0 and not self._in_backward_pass:
            self._embedding_unit.release()
        self._layer_units[index].all_gather()
        if self._in_backward_pass:  # recomputation
            self._prefetch_previous_layer(index)
        elif self._is_last(index):
            self._head_unit.start_all_gather()
        else:
            self._layer_units[index + 1].start_all_gather()

    def _post_forward_layer(self, index: int, _: Any, __: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._on_gradient(output, partial(self._pre_backward_layer, index))
        if not self._in_backward_pass:
            # The backward pass of the model's last layer follows its forward pass.
            is_kept = self._is_last(index) and self._ends_model and torch.is_grad_enabled()
            if not is_kept:
                self._layer_units[index].release()
            if self._is_last(index):
                self._head_unit.all_gather()

    def _is_last(self, index: int) -> bool:
        return index + 1 == len(self._layer_units)

    def _post_forward_chunk(self, _: Any, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._on_gradient(output, self._pre_backward_chunk):
            return
        if not self._in_backward_pass:
            for unit in self._units:
                unit.release()

    @staticmethod
    def _on_gradient(output: Any, hook: Any) -> bool:
        """Call ``hook`` when a gradient of the tensors in ``output`` is there; return whether one
        of them has a gradient.
        """
        has_gradient = False
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                has_gradient = True
        return has_gradient

    def _pre_backward_chunk(self, _: torch.Tensor) -> None:
        if self._in_backward_pass:
            return
        self._in_backward_pass = True
        torch.autograd.Variable._execution_engine.queue_callback(self._post_backward_chunk)
        self._head_unit.all_gather()
        self._head_unit.prepare_gradients()

    def _pre_backward_layer(self, index: int, _: torch.Tensor) -> None:
        unit = self._layer_units[index]
        unit.prepare_backward()
        # The pass of the next layer has ended; the reduce-scatter of the one after it is under way.
        finished_units = self._layer_units[index + 1 : index + 3]
        if not self._head_has_embedding:
            finished_units.append(self._head_unit)
        self._reduce_scatter(finished_units)
        self._prefetch_previous_layer(index)
        unit.prepare_gradients()

    def _pre_backward_embedding(self, _: torch.Tensor) -> None:
        self._embedding_unit.prepare_gradients()

    def _prefetch_previous_layer(self, index: int) -> None:
        """Prefetch the weights of the layer whose backward pass follows that of a layer, or after
        the first layer those that the next micro-batch reads first.
        """
        if index > 0:
            self._layer_units[index - 1].start_all_gather()
        elif self._forward_passes_left > 0:
            self._embedding_unit.start_all_gather()

    def _accumulate_gradient(self, unit: ShardedUnit, param: Any) -> None:
        """Add a gradient from autograd to ``main_grad`` unless the layer has done so."""
        unit.prepare_gradients()
        if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
            if pop_uninitialized(param.main_grad):
                param.main_grad.copy_(param.grad)
            else:
                param.main_grad.add_(param.grad)
        elif is_uninitialized(param.main_grad):
            raise RuntimeError(
                "a compiled layer added a gradient to a copy of its accumulator, which it had not "
                "done in an earlier micro-batch; set transformer_impl: local"
            )
        param.grad = None

    def _post_backward_chunk(self) -> None:
        # In the last phase of a pipeline, no forward pass follows a backward pass.
        is_followed = self._forward_passes_left > 0
        first_units = [self._embedding_unit, *self._layer_units[:1]] if is_followed else []
        self._reduce_scatter(self._units, kept=first_units)
        self._in_backward_pass = False
        self._backward_passes_left -= 1
        if is_followed:
            self._prefetch_first_units()

    def _reduce_scatter(
        self, units: Sequence[ShardedUnit], *, kept: Sequence[ShardedUnit] = ()
    ) -> None:
        """Reduce-scatter the gradients of units whose backward pass has ended, and release their
        weights, except for units in ``kept``. Collectives that were started before are waited for.
        """
        for unit in units:
            if unit.finish_reduce_scatter() and self._backward_passes_left == 1:
                unit.start_all_reduce()
        for unit in units:
            unit.zero_unwritten_gradients()
            self._check_gradients(unit)
            unit.start_reduce_scatter()
            if unit not in kept:
                unit.release()

    def _check_gradients(self, unit: ShardedUnit) -> None:
        config = self.ddp_config
        if unit.has_unreduced_gradients and (
            config.check_for_nan_in_grad or config.check_for_large_grads
        ):
            buckets = [bucket for bucket in unit.buckets if bucket.grad_data is not None]
            group = self._collectives[False].group
            _ParamAndGradBucketGroup(buckets, config, group, group.size()).check_grads(
                config.check_for_nan_in_grad, config.check_for_large_grads
            )

    # Methods that schedules and the optimizer call

    def set_micro_batches(self, count: int) -> None:
        """Set the number of micro-batches of the step that begins.

        It tells when no forward pass follows, for which weights would be prefetched, and when
        gradients are complete.
        """
        self._forward_passes_left = self._backward_passes_left = count

    def zero_grad_buffer(self) -> None:
        """Zero the gradients at the start of a step."""
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        for weight in self._accumulated_weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        for bucket in self.iter_buckets():
            bucket.start_step()

    def start_grad_sync(self, *_: Any) -> None:
        """Do nothing: the backward pass of each micro-batch starts to reduce gradients."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete this rank's shards of the gradients and set ``main_grad`` to them."""
        assert not force_all_reduce
        for unit in self._units:
            unit.finish_reduce_scatter()
            unit.start_all_reduce()
        for unit in self._units:
            unit.finish_all_reduce()
        # From here on no rank reads the weights of another one, until the optimizer has updated
        # them.
        self._synchronize_ranks()
        for bucket in self.iter_buckets():
            bucket.finish_step()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply this rank's shards of the gradients by a factor."""
        for bucket in self.iter_buckets():
            if bucket.gradient_shard is not None:
                bucket.gradient_shard *= scaling_factor

    def start_param_sync(self, *_: Any, force_sync: bool = False, **__: Any) -> None:
        """Require a new all-gather, because the optimizer has updated the shards of the weights.

        The next forward pass gathers them, or this method with ``force_sync``.
        """
        self._invalidate_units(only_trained=True)
        if force_sync:
            self._quantize_shards()
            for unit in self._units:
                unit.all_gather()

    def take_over_shards(self) -> None:
        """Require a new all-gather, because all shards of the weights have been overwritten."""
        self._invalidate_units(only_trained=False)

    def _invalidate_units(self, *, only_trained: bool) -> None:
        self._synchronize_ranks()
        for unit in self._units:
            unit.invalidate(only_trained=only_trained)

    def _synchronize_ranks(self) -> None:
        for collectives in self._collectives.values():
            collectives.synchronize_ranks()

    def iter_buckets(self) -> Iterator[ShardedBucket]:
        """Yield all buckets of the chunk."""
        for unit in self._units:
            yield from unit.buckets

    # Access to unsharded weights

    @property
    def unit_count(self) -> int:
        """Number of units."""
        return len(self._units)

    def iter_unsharded(self) -> Iterator[list[ShardedBucket]]:
        """Yield the buckets of one unit at a time while their unsharded weights can be read.

        Closing the generator releases them.
        """
        for unit in self._units:
            try:
                unit.all_gather_weights()
                yield unit.buckets
            finally:
                unit.release()

    def iter_writable(self) -> Iterator[list[ShardedBucket]]:
        """Yield the buckets of one unit at a time while their unsharded weights can be written to.

        What is written is kept, except if the generator is closed; all ranks must write the same.
        """
        for unit in self._units:
            try:
                unit.all_gather_weights()
                yield unit.buckets
                self._synchronize_ranks()
                unit.update_shards()
            finally:
                unit.release()
        self._synchronize_ranks()

    def iter_weight_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each weight with the flat part of it that is in this rank's shard; maybe empty."""
        for bucket in self.iter_buckets():
            yield from bucket.iter_weight_shards()
