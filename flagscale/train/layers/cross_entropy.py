"""Cross-entropy over a vocabulary that is split over tensor-parallel ranks.

Between forward and backward pass only the 16-bit logits and one number per token are stored, and
the gradient overwrites the logits. fp32 copies of the logits exist only in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flagscale.train.layers.jit import compiled_if_faster
from flagscale.train.layers.wgrad_accumulation import flatten_tokens


@compiled_if_faster()
def _partial_softmax(
    logits: torch.Tensor, labels: torch.Tensor, vocab_start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return partial softmax results of each token over this rank's part of the vocabulary.

    These are the largest logit, the sum of exponentials relative to it, and the logit of the label
    (0 if another rank holds it). The part of the vocabulary begins at ``vocab_start``.
    """
    logits = logits.float()
    is_local = (labels >= vocab_start) & (labels < vocab_start + logits.shape[-1])
    column = torch.where(is_local, labels - vocab_start, 0)
    max_logit = logits.amax(-1)
    exp_sum = torch.exp(logits - max_logit[:, None]).sum(-1)
    label_logit = torch.where(is_local, logits.gather(1, column[:, None]).squeeze(1), 0.0)
    return max_logit, exp_sum, label_logit


@compiled_if_faster()
def _write_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_start: int,
    log_sum: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Overwrite ``logits`` with ``(softmax - one_hot(label)) · gradient``."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    label = columns[None, :] == (labels - vocab_start)[:, None]
    probability = torch.exp(logits.float() - log_sum[:, None])
    logits.copy_((probability - label.float()) * gradient[:, None])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.vocab_start = logits.shape[-1] * group.rank()
        max_logit, exp_sum, label_logit = _partial_softmax(logits, labels, ctx.vocab_start)
        if group.size() > 1:
            local_max = max_logit.clone()
            dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=group)
            reduced = torch.stack([exp_sum * torch.exp(local_max - max_logit), label_logit])
            dist.all_reduce(reduced, group=group)
            exp_sum, label_logit = reduced
        log_sum = max_logit + torch.log(exp_sum)
        ctx.save_for_backward(logits, labels, log_sum)
        return log_sum - label_logit

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, labels, log_sum = ctx.saved_tensors
        # The logits are not needed after their gradient, so overwriting them saves memory.
        logits = logits.detach()
        _write_gradient(logits, labels, ctx.vocab_start, log_sum, gradient.contiguous())
        return logits, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the cross-entropy of each token in nats. The backward pass can run once.

    Args:
        logits: [s, b, v/tp]; overwritten in the backward pass.
        labels: [b, s], indices into the whole vocabulary.
        group: tensor-parallel ranks in the order of their vocabulary parts.

    Returns:
        [b, s] in fp32.
    """
    labels = labels.transpose(0, 1).contiguous()
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flatten_tokens(logits), labels.reshape(-1), group
    )
    return losses.view(labels.shape).transpose(0, 1).contiguous()
