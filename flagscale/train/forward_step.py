"""Forward step of one micro-batch, as megatron.core's pipeline schedules call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flagscale.train.device import Device
from flagscale.train.models.base import DOCUMENT_NUMBERS_KEY, ModelSpec
from flagscale.train.models.context_parallel import split_batch
from flagscale.train.models.document_mask import DocumentMaskBuilder
from flagscale.train.models.mtp import mtp_loss_masks
from flagscale.train.state import unwrap_model

MicroBatchTensors = Mapping[str, torch.Tensor]
LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

LOSS_REPORT_KEY = "loss_sum_and_tokens"
"""Key of a micro-batch's loss report, a tensor of shape [2]; see :func:`micro_batch_loss`."""


class PreparedMicroBatch(NamedTuple):
    """Inputs of a model chunk for one micro-batch, on the device.

    ``inputs`` maps argument names to tensors. ``mask`` is the loss mask [b, s] on the last pipeline
    stage, None elsewhere.
    """

    inputs: dict[str, torch.Tensor | None]
    mask: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the micro-batch, without those that are None."""
        return [tensor for tensor in (*self.inputs.values(), self.mask) if tensor is not None]

    def copy(self) -> PreparedMicroBatch:
        """Return a deep copy."""
        inputs = {name: _clone_optional(tensor) for name, tensor in self.inputs.items()}
        return PreparedMicroBatch(inputs, _clone_optional(self.mask))


def _clone_optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


class ForwardStep:
    """Callable ``(iterator, model)`` that returns the model's output and a loss function.

    This is megatron.core's ``forward_step_func``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        *,
        per_token: bool,
        mask_builder: DocumentMaskBuilder | None = None,
        measure_data: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the forward step of a model family.

        Args:
            spec: model family.
            device: device of the model.
            per_token: whether the loss is divided by the tokens of the whole step instead of those
                of a micro-batch (``calculate_per_token_loss``).
            mask_builder: builder of document masks, used if batches contain document numbers.
            measure_data: returns a context manager in which a micro-batch is read.
        """
        self._spec = spec
        self._device = device.torch_device
        self._per_token = per_token
        self._mask_builder = mask_builder
        self._measure_data = measure_data

    def __call__(
        self,
        iterator: Iterator[MicroBatchTensors | PreparedMicroBatch] | None,
        model: torch.nn.Module,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
        batch: MicroBatchTensors | PreparedMicroBatch = {}
        if iterator is not None:
            with self._measure_data():
                batch = next(iterator)
        if not isinstance(batch, PreparedMicroBatch):
            batch = self.prepare(batch, model)
        group = parallel_state.get_context_parallel_group()
        output = model(**batch.inputs)
        mean_group = None if group.size() == 1 or self._per_token else group
        return output, partial(micro_batch_loss, batch.mask, mean_group=mean_group)

    def prepare(self, batch: MicroBatchTensors, model: torch.nn.Module) -> PreparedMicroBatch:
        """Return the inputs of the model chunk ``model`` for a micro-batch, on the device."""
        inner_model: Any = unwrap_model(model)
        group = parallel_state.get_context_parallel_group()
        batch = dict(batch)
        documents = batch.pop(DOCUMENT_NUMBERS_KEY, None)
        # Chunks with multi-token prediction (MTP) layers also have embedding and output layer.
        mtp_masks: Mapping[str, torch.Tensor] = {}
        if has_mtp := getattr(inner_model, "mtp_process", False):
            mtp_masks = mtp_loss_masks(
                batch["loss_mask"], documents, inner_model.config.mtp_num_layers
            )
        batch = dict(split_batch({**batch, **mtp_masks}, group.rank(), group.size()))
        if documents is not None and self._mask_builder is not None:
            batch["attention_mask"] = self._mask_builder(documents)
        is_last = inner_model.post_process
        inputs = dict(
            self._spec.inputs(batch, first=inner_model.pre_process or has_mtp, last=is_last)
        )
        if mtp_masks:
            inputs["loss_mask"] = torch.stack([batch[name] for name in mtp_masks]).float()
        mask = self._to_device(batch["loss_mask"]).float() if is_last else None
        return PreparedMicroBatch(
            {name: self._to_device(tensor) for name, tensor in inputs.items()}, mask
        )

    def _to_device(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.to(self._device, non_blocking=True)


def micro_batch_loss(
    mask: torch.Tensor | None, losses: torch.Tensor, *, mean_group: dist.ProcessGroup | None = None
) -> LossResult:
    """Return the loss of a micro-batch from the losses of its tokens.

    Args:
        mask: loss mask [b, s], 1.0 for tokens that count. None counts all tokens.
        losses: cross-entropies in nats, [b, s].
        mean_group: context-parallel group, if the mean is over the tokens of all its ranks. The
            schedule divides by the tokens of this rank, and data parallelism averages over the
            group. The sum is therefore scaled such that the result is the mean over the group.

    Returns:
        Sum of the losses, number of tokens that count (int32), and a report with a copy of both
        (fp64). The copy is needed because the schedule divides the sum in place: by the tokens, or
        with ``calculate_per_token_loss`` by all tokens of the step.
    """
    losses = losses.float()
    total = (losses * mask).sum() if mask is not None else losses.sum()
    count = mask.sum() if mask is not None else torch.full_like(total, losses.numel())
    report = torch.stack([total.detach(), count]).double()
    if mean_group is not None:
        group_count = count.clone()
        dist.all_reduce(group_count, group=mean_group)
        total = total * (count * mean_group.size() / group_count.clamp(min=1))
    return total, count.to(torch.int), {LOSS_REPORT_KEY: report}
