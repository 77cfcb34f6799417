"""Data parallelism that gathers weights and reduces gradients layer by layer.

A rank keeps a shard of the weights of each layer. Before the forward and the backward pass of a
layer its whole weights are gathered, while the layer before is computed, and they are released
afterwards. The gradients of a layer are reduced to the shards after its backward pass in each
micro-batch, while the next layer's pass is computed. (Rajbhandari et al., "ZeRO: Memory
optimizations toward training trillion parameter models", 2020; Zhao et al., "PyTorch FSDP", 2023.)

Communication is started by hooks of the forward passes and of the gradients of layers' outputs,
which run in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.layers.layer_compilation import find_transformer_layers
from flagscale.train.layers.wgrad_accumulation import (
    bind_accumulators,
    is_uninitialized,
    take_first_write,
)
from flagscale.train.sharding.bucket import Initialize, ShardedBucket
from flagscale.train.sharding.buffer import ShardedBuffer
from flagscale.train.sharding.exchange import create_exchange
from flagscale.train.sharding.unit import GradientSlot, ShardedUnit
from flagscale.train.state import unwrap_model


class ShardedDataParallel(_BaseDataParallel):  # type: ignore[misc]
    """Data parallelism with sharded gradients and, optionally, sharded weights.

    It has the methods that megatron.core's schedules and distributed optimizer call. Each
    transformer layer is a unit; so are the embedding and everything after the last layer. If they
    share weights, both are one unit, which stays gathered from the start of a micro-batch's forward
    pass to the end of its backward pass.

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
        initialize: Initialize | None = None,
    ) -> None:
        """Shard a model chunk.

        Args:
            config: the model's configuration.
            ddp_config: configuration of data parallelism.
            module: the model chunk, with initialized weights that are equal on all ranks.
            shards_weights: shard weights as well, not only gradients.
            accumulates_in_layers: layers add the gradients of their weights to ``main_grad``
                themselves (:mod:`flagscale.train.layers.wgrad_accumulation`).
            initialize: initializes given weights of ``module``, which then needs no memory for its
                matrices before (:mod:`.deferred`). None if they are initialized.
        """
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        self._shards_weights, self._initialize = shards_weights, initialize
        groups = ProcessGroupCollection.setup_process_groups_for_ddp(None, config, ddp_config)
        self._data_parallel_size = int(groups["dp_cp_group"].size())
        # By whether they are of experts.
        self._exchanges = {
            False: create_exchange(groups["intra_dp_cp_group"]),
            True: create_exchange(groups["intra_expt_dp_group"]),
        }
        self._buffers: dict[tuple[bool, torch.dtype, torch.dtype], ShardedBuffer] = {}
        self.params_with_grad = [param for param in module.parameters() if param.requires_grad]
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._create_units()
        self.buffers = self._list_buffers(of_experts=False)
        self.expert_parallel_buffers = self._list_buffers(of_experts=True)
        self._accumulated_weights: list[torch.nn.Parameter] = []
        if accumulates_in_layers:
            self._accumulated_weights = bind_accumulators(unwrap_model(self))
        self._in_backward_pass = self._micro_batches_follow = False
        self._add_hooks()

    # Construction

    def _create_units(self) -> None:
        model: Any = unwrap_model(self)
        layers = find_transformer_layers(model)
        layer_parameters = {param for layer in layers for param in layer.parameters()}
        others = [param for param in model.parameters() if param not in layer_parameters]
        embedding = getattr(model, "embedding", None)
        embedding_parameters = set() if embedding is None else set(embedding.parameters())
        # MTP layers embed tokens again, after the last layer of the decoder.
        embeds_first_only = not getattr(self.config, "mtp_num_layers", None) and not (
            embedding is not None
            and getattr(model, "post_process", False)
            and getattr(model, "share_embeddings_and_output_weights", False)
        )
        before = [param for param in others if param in embedding_parameters and embeds_first_only]
        after = [param for param in others if param not in set(before)]
        # When the gradients of a layer are expected, those of the next but one are reduced.
        outer_slot, layer_slots = GradientSlot(), (GradientSlot(), GradientSlot())
        self._unit_before = self._create_unit(before, outer_slot)
        self._layer_units = [
            self._create_unit(list(layer.parameters()), layer_slots[index % len(layer_slots)])
            for index, layer in enumerate(layers)
        ]
        self._unit_after = self._create_unit(after, outer_slot)
        self._after_is_used_before = not embeds_first_only
        self._ends_model = bool(getattr(model, "post_process", False))
        self._units = [self._unit_before, *self._layer_units, self._unit_after]
        for buffer in self._buffers.values():
            buffer.create_gradients(self._list_sharing_buckets(buffer))
        self._synchronize_ranks()

    def _list_sharing_buckets(self, buffer: ShardedBuffer) -> list[list[ShardedBucket]]:
        """Return lists of buckets whose gradients are never needed at the same time."""
        sharing: dict[tuple[GradientSlot, int], list[ShardedBucket]] = {}
        for unit in self._units:
            buckets = [bucket for bucket in unit.buckets if bucket in buffer.buckets]
            for index, bucket in enumerate(buckets):
                sharing.setdefault((unit.slot, index), []).append(bucket)
        return list(sharing.values())

    def _create_unit(self, params: Sequence[torch.nn.Parameter], slot: GradientSlot) -> ShardedUnit:
        by_bucket: dict[Any, list[torch.nn.Parameter]] = {}
        for param in dict.fromkeys(params):
            of_experts = not getattr(param, "allreduce", True)
            # Weights that two pipeline stages share must be sharded in the same way on both.
            shared = getattr(param, "shared_embedding", False)
            key = (of_experts, param.dtype, param.requires_grad, shared)
            by_bucket.setdefault(key, []).append(param)
        buckets = []
        for (of_experts, dtype, is_trained, _), bucket_params in by_bucket.items():
            if is_trained:
                buckets.append(
                    self._get_buffer(dtype, of_experts).add_bucket(bucket_params, self._initialize)
                )
            else:
                buckets.append(
                    ShardedBucket(
                        bucket_params,
                        self._exchanges[of_experts],
                        keeps_weights=not self._shards_weights,
                        initialize=self._initialize,
                    )
                )
        return ShardedUnit(buckets, slot, keeps_weights=not self._shards_weights)

    def _get_buffer(self, dtype: torch.dtype, of_experts: bool) -> ShardedBuffer:
        grad_dtype = torch.float32 if self.ddp_config.grad_reduce_in_fp32 else dtype
        key = (of_experts, dtype, grad_dtype)
        if key not in self._buffers:
            self._buffers[key] = ShardedBuffer(
                self.ddp_config,
                dtype,
                grad_dtype,
                self._exchanges[of_experts],
                self._gradient_scaling_factor(),
                keeps_weights=not self._shards_weights,
            )
        return self._buffers[key]

    def _gradient_scaling_factor(self) -> float:
        """Return the factor that makes sums over the ranks the gradients of the mean loss.

        It is the same for experts, which see the tokens of all ranks that share them.
        """
        if self.config.calculate_per_token_loss:
            return 1.0
        return 1.0 / self._data_parallel_size

    def _list_buffers(self, *, of_experts: bool) -> list[ShardedBuffer]:
        return [buffer for key, buffer in self._buffers.items() if key[0] == of_experts]

    # Hooks

    def _add_hooks(self) -> None:
        model: Any = unwrap_model(self)
        layers = find_transformer_layers(model)
        model.register_forward_pre_hook(self._before_chunk)
        model.register_forward_hook(self._after_chunk)
        if getattr(model, "embedding", None) is not None:
            model.embedding.register_forward_hook(self._after_embedding)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_layer, index))
            layer.register_forward_hook(partial(self._after_layer, index))
        for unit in self._units:
            for bucket in unit.buckets:
                for param in bucket.params_list:
                    if param.requires_grad:
                        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                            partial(self._accumulate_gradient, unit)
                        )

    def _before_chunk(self, *_: Any) -> None:
        self._start_gathering_first()
        self._unit_before.gather()
        if self._after_is_used_before or not self._layer_units:
            self._unit_after.gather()

    def _start_gathering_first(self) -> None:
        """Start to gather what the forward pass of a micro-batch reads first."""
        self._unit_before.start_gather()
        if self._after_is_used_before:
            self._unit_after.start_gather()
        for unit in self._layer_units[:1]:
            unit.start_gather()

    def _after_embedding(self, _: Any, __: Any, output: Any) -> None:
        self._on_gradient(output, self._before_embedding_backward)

    def _before_layer(self, index: int, *_: Any) -> None:
        if index == 0 and not self._in_backward_pass:
            self._unit_before.release()
        self._layer_units[index].gather()
        if self._in_backward_pass:
            self._start_gather_before(index)
        else:
            following = self._unit_after if self._is_last(index) else self._layer_units[index + 1]
            following.start_gather()

    def _after_layer(self, index: int, _: Any, __: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._on_gradient(output, partial(self._before_layer_backward, index))
        if not self._in_backward_pass:
            # The backward pass of the model's last layer follows its forward pass.
            is_kept = self._is_last(index) and self._ends_model and torch.is_grad_enabled()
            if not is_kept:
                self._layer_units[index].release()
            if self._is_last(index):
                self._unit_after.gather()

    def _is_last(self, index: int) -> bool:
        return index + 1 == len(self._layer_units)

    def _after_chunk(self, _: Any, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._on_gradient(output, self._begin_backward):
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

    def _begin_backward(self, _: torch.Tensor) -> None:
        if self._in_backward_pass:
            return
        self._in_backward_pass = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._unit_after.gather()
        self._unit_after.expect_gradients()

    def _before_layer_backward(self, index: int, _: torch.Tensor) -> None:
        unit = self._layer_units[index]
        unit.gather()
        # The pass of the next layer has ended; the gradients of the one after it are reduced.
        finished = self._layer_units[index + 1 : index + 3]
        if not self._after_is_used_before:
            finished.append(self._unit_after)
        self._reduce(finished)
        self._start_gather_before(index)
        unit.expect_gradients()

    def _before_embedding_backward(self, _: torch.Tensor) -> None:
        self._unit_before.expect_gradients()

    def _start_gather_before(self, index: int) -> None:
        """Start to gather the layer whose backward pass follows that of a layer."""
        if index > 0:
            self._layer_units[index - 1].start_gather()

    def _accumulate_gradient(self, unit: ShardedUnit, param: Any) -> None:
        """Add a gradient from autograd to ``main_grad`` unless the layer has done so."""
        unit.expect_gradients()
        if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
            if take_first_write(param.main_grad):
                param.main_grad.copy_(param.grad)
            else:
                param.main_grad.add_(param.grad)
        elif is_uninitialized(param.main_grad):
            raise RuntimeError(
                "a compiled layer added a gradient to a copy of its accumulator, which it had not "
                "done in an earlier micro-batch; set transformer_impl: local"
            )
        param.grad = None

    def _end_backward(self) -> None:
        self._reduce(self._units)
        self._in_backward_pass = False
        if self._micro_batches_follow:
            self._start_gathering_first()

    def _reduce(self, units: Sequence[ShardedUnit]) -> None:
        """Start to reduce the gradients of units whose backward pass has ended, release their
        weights, and complete the reductions that were started before.
        """
        for unit in units:
            unit.finish_reduce()
        for unit in units:
            unit.complete_gradients()
            self._check_gradients(unit)
            unit.start_reduce()
            unit.release()

    def _check_gradients(self, unit: ShardedUnit) -> None:
        config = self.ddp_config
        if unit.has_unreduced_gradients and (
            config.check_for_nan_in_grad or config.check_for_large_grads
        ):
            buckets = [bucket for bucket in unit.buckets if bucket.grad_data is not None]
            group = self._exchanges[False].group
            _ParamAndGradBucketGroup(buckets, config, group, group.size()).check_grads(
                config.check_for_nan_in_grad, config.check_for_large_grads
            )

    def _finish_reduces(self) -> None:
        for unit in self._units:
            unit.finish_reduce()

    # Methods that schedules and the optimizer call

    def zero_grad_buffer(self) -> None:
        """Zero the gradients at the start of a step."""
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        for weight in self._accumulated_weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        for bucket in self.iter_buckets():
            bucket.start_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager for all micro-batches of a step except the last one.

        Gradients are reduced in it as well.
        """
        self._micro_batches_follow = True
        yield
        self._micro_batches_follow = False

    def start_grad_sync(self, *_: Any) -> None:
        """Do nothing: the backward pass starts to reduce gradients."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete this rank's shards of the gradients and expose them as ``main_grad``."""
        assert not force_all_reduce
        self._finish_reduces()
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
        """Take note that the optimizer has updated the shards of the weights.

        The next forward pass gathers them, or this method with ``force_sync``.
        """
        self._synchronize_ranks()
        for unit in self._units:
            unit.mark_updated()
            if force_sync:
                unit.gather()

    def _synchronize_ranks(self) -> None:
        for exchange in self._exchanges.values():
            exchange.synchronize_ranks()

    def iter_buckets(self) -> Iterator[ShardedBucket]:
        """Yield all buckets of the chunk."""
        for unit in self._units:
            yield from unit.buckets

    # Access to whole weights

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Return a context manager in which every rank holds all whole weights.

        Weights that are written to in it are kept; all ranks must write the same.
        """
        for unit in self._units:
            unit.gather()
        yield
        self._synchronize_ranks()
        for unit in self._units:
            unit.update_shards()
            unit.release()
        self._synchronize_ranks()

    @property
    def unit_count(self) -> int:
        """Number of units."""
        return len(self._units)

    def iter_gathered(self) -> Iterator[list[ShardedBucket]]:
        """Yield the buckets of one unit at a time while their whole weights can be read."""
        for unit in self._units:
            unit.gather()
            yield unit.buckets
            unit.release()

    def iter_writable(self) -> Iterator[list[ShardedBucket]]:
        """Yield the buckets of one unit at a time while their whole weights can be written to.

        What is written is kept; all ranks must write the same.
        """
        for unit in self._units:
            unit.gather()
            yield unit.buckets
            self._synchronize_ranks()
            unit.update_shards()
            unit.release()
        self._synchronize_ranks()

    def iter_weight_shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each weight with the flat part of it that is in this rank's shard; maybe empty."""
        for bucket in self.iter_buckets():
            yield from bucket.iter_weight_shards()
