"""Cross-entropy over a vocabulary that is split over tensor-parallel ranks.

Between the passes only the 16-bit logits and one number a token are kept; the gradient is written
over the logits. fp32 copies of the logits exist in registers alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flagscale.train.layers.accumulating import flat
from flagscale.train.layers.jit import compiled_if_faster


@compiled_if_faster()
def _partial_sums(
    logits: torch.Tensor, labels: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token over this rank's part of the vocabulary, which begins at ``first``: greatest
    logit, sum of exponentials relative to it, and the label's logit (0 where another has it)."""
    logits = logits.float()
    own = (labels >= first) & (labels < first + logits.shape[-1])
    column = torch.where(own, labels - first, 0)
    greatest = logits.amax(-1)
    total = torch.exp(logits - greatest[:, None]).sum(-1)
    found = torch.where(own, logits.gather(1, column[:, None]).squeeze(1), 0.0)
    return greatest, total, found


@compiled_if_faster()
def _write_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    log_sum: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Over ``logits``: ``(softmax - one_hot(label)) x gradient``."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    label = columns[None, :] == (labels - first)[:, None]
    probability = torch.exp(logits.float() - log_sum[:, None])
    logits.copy_((probability - label.float()) * gradient[:, None])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.first = logits.shape[-1] * group.rank()
        greatest, total, found = _partial_sums(logits, labels, ctx.first)
        if group.size() > 1:
            own = greatest.clone()
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
            sums = torch.stack([total * torch.exp(own - greatest), found])
            dist.all_reduce(sums, group=group)
            total, found = sums
        log_sum = greatest + torch.log(total)
        ctx.save_for_backward(logits, labels, log_sum)
        return log_sum - found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, labels, log_sum = ctx.saved_tensors
        # Nobody reads the logits after their gradient: in their place it takes no memory.
        logits = logits.detach()
        _write_gradient(logits, labels, ctx.first, log_sum, gradient.contiguous())
        return logits, None, None


def vocabulary_loss(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Cross-entropy of each token in nats. Its backward pass can run once.

    Args:
        logits: ``[sequence, batch, this rank's part of the vocabulary]``.
        labels: ``[batch, sequence]``, numbers in the whole vocabulary.
        group: the tensor-parallel ranks, in the order of their parts.

    Returns:
        ``[batch, sequence]`` in fp32.
    """
    labels = labels.transpose(0, 1).contiguous()
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat(logits), labels.reshape(-1), group
    )
    return losses.view(labels.shape).transpose(0, 1).contiguous()
