"""Aggregation of multi-token prediction losses for logging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class MtpLossAverages:
    """Averages the losses of multi-token prediction layers between two calls of
    :meth:`pop_averages`.
    """

    def __init__(
        self, layer_count: int | None, models: Sequence[Any], device: torch.device
    ) -> None:
        """Start with empty sums.

        Args:
            layer_count: number of multi-token prediction (MTP) layers of the model, or None.
            models: unwrapped model chunks of this rank.
            device: device of the models.
        """
        self._layer_count, self._models, self._device = layer_count or 0, models, device

    def pop_averages(self) -> dict[str, float]:
        """Return the loss of each MTP layer and reset the sums.

        Collective: all ranks call it. It synchronizes the device.

        The losses are unscaled, in nats, averaged over the tokens of all steps since the last call
        and over all ranks. Keys are Megatron's names (``mtp_1_loss`` …). Empty for a model without
        MTP. Tensor-parallel ranks report the same tokens, which cancels in the quotient of sum and
        count.
        """
        if not self._layer_count:
            return {}
        loss_sums = torch.zeros(self._layer_count, 2, dtype=torch.float64, device=self._device)
        for model in self._models:
            if getattr(model, "mtp_loss_sums", None) is not None:
                loss_sums += model.mtp_loss_sums
                model.mtp_loss_sums = None
        dist.all_reduce(loss_sums)
        return {
            f"mtp_{layer}_loss": total / tokens if tokens else 0.0
            for layer, (total, tokens) in enumerate(loss_sums.tolist(), start=1)
        }
