"""One micro-batch through the model, as megatron.core's pipeline schedules call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flagscale.train.device import Device
from flagscale.train.models.base import DOCUMENTS, ModelSpec
from flagscale.train.models.context import own_batch
from flagscale.train.models.documents import DocumentMasks
from flagscale.train.models.mtp import further_masks
from flagscale.train.state import unwrap

Batch = Mapping[str, torch.Tensor]
LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

LOSS_KEY = "loss_sum_and_tokens"
"""Key, in what a schedule returns for a micro-batch, of a tensor of two: see :func:`loss_of`."""


class Prepared(NamedTuple):
    """A micro-batch on the device: what the model takes, by name, and the mask of the loss
    ``[micro-batch, sequence]`` where the model gives losses."""

    inputs: dict[str, torch.Tensor | None]
    mask: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [tensor for tensor in (*self.inputs.values(), self.mask) if tensor is not None]

    def copy(self) -> Prepared:
        """The same in memory of its own."""
        inputs = {name: _cloned(tensor) for name, tensor in self.inputs.items()}
        return Prepared(inputs, _cloned(self.mask))


def _cloned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


class ForwardStep:
    """Callable of ``(iterator, model)``: the model's output and a function that gives the loss."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        *,
        per_token: bool,
        masks: DocumentMasks | None = None,
    ) -> None:
        """``spec``: of the models' family. ``per_token``: the loss is divided by all tokens of a
        step, not of a micro-batch. ``masks``: of documents, where the data tells these."""
        self._spec = spec
        self._device = device.torch_device
        self._per_token = per_token
        self._masks = masks

    def __call__(
        self, iterator: Iterator[Batch | Prepared] | None, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
        batch = next(iterator) if iterator is not None else {}
        if not isinstance(batch, Prepared):
            batch = self.prepare(batch, model)
        group = parallel_state.get_context_parallel_group()
        output = model(**batch.inputs)
        shared = None if group.size() == 1 or self._per_token else group
        return output, partial(loss_of, batch.mask, shared=shared)

    def prepare(self, batch: Batch, model: torch.nn.Module) -> Prepared:
        """What of a micro-batch the model takes, on its device."""
        bare: Any = unwrap(model)
        group = parallel_state.get_context_parallel_group()
        batch = dict(batch)
        documents = batch.pop(DOCUMENTS, None)
        # Embedding and head of the layers that predict further tokens, where this chunk has them.
        further: Mapping[str, torch.Tensor] = {}
        if predicts := getattr(bare, "mtp_process", False):
            further = further_masks(batch["loss_mask"], documents, bare.config.mtp_num_layers)
        batch = dict(own_batch({**batch, **further}, group.rank(), group.size()))
        if documents is not None and self._masks is not None:
            batch["attention_mask"] = self._masks(documents)
        last = bare.post_process
        inputs = dict(self._spec.inputs(batch, first=bare.pre_process or predicts, last=last))
        if further:
            inputs["loss_mask"] = torch.stack([batch[name] for name in further]).float()
        mask = self._moved(batch["loss_mask"]).float() if last else None
        return Prepared({name: self._moved(tensor) for name, tensor in inputs.items()}, mask)

    def _moved(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.to(self._device, non_blocking=True)


def loss_of(
    mask: torch.Tensor | None, losses: torch.Tensor, *, shared: dist.ProcessGroup | None = None
) -> LossResult:
    """Loss of a micro-batch from each token's.

    Args:
        mask: ``[micro-batch, sequence]``, 1.0 where a token counts.
        losses: cross-entropies in nats, of the same shape.
        shared: the ranks that have parts of these sequences, if the mean is to be over all of
            theirs. The schedule divides by this rank's tokens and data parallelism averages over
            these ranks, so the sum is scaled by what makes that their mean.

    Returns:
        Sum of the losses, number of tokens that count, and a report. The schedule divides the sum
        in place, by the tokens or (``calculate_per_token_loss``) by all tokens of the step, so the
        report holds a copy.
    """
    losses = losses.float()
    total = (losses * mask).sum() if mask is not None else losses.sum()
    count = mask.sum() if mask is not None else torch.full_like(total, losses.numel())
    report = torch.stack([total.detach(), count]).double()
    if shared is not None:
        together = count.clone()
        dist.all_reduce(together, group=shared)
        total = total * (count * shared.size() / together.clamp(min=1))
    return total, count.to(torch.int), {LOSS_KEY: report}
