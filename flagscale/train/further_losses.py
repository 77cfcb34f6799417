"""The losses of multi-token prediction, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class FurtherLosses:
    """Collects the losses of layers that predict further tokens between two calls of
    :meth:`take`."""

    def __init__(self, layers: int | None, models: Sequence[Any], device: torch.device) -> None:
        """``layers``: how many there are, if any; ``models``: the bare models of this rank."""
        self._layers, self._models, self._device = layers or 0, models, device

    def take(self) -> dict[str, float]:
        """The loss of each such layer in nats, not scaled: the mean over the tokens of all steps
        since the last call, over all ranks; by Megatron's names. Empty without such layers.

        Every rank has to call this; it waits for the device. Tensor-parallel ranks report the same
        tokens: sum and number grow alike.
        """
        if not self._layers:
            return {}
        sums = torch.zeros(self._layers, 2, dtype=torch.float64, device=self._device)
        for model in self._models:
            if getattr(model, "further_losses", None) is not None:
                sums += model.further_losses
                model.further_losses = None
        dist.all_reduce(sums)
        return {
            f"mtp_{layer}_loss": total / tokens if tokens else 0.0
            for layer, (total, tokens) in enumerate(sums.tolist(), start=1)
        }
