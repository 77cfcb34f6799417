"""What sums of gradients in bounded time left out, for the log (``comm: {tail: bounded}``)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from megatron.core import parallel_state

from flagscale.accelerators.device import current


class TailReadings:
    """Reads the counts of the groups over which gradients are summed, between two calls of
    :meth:`take`. Other backends have none, and on devices sums are exact."""

    def __init__(self) -> None:
        groups = _groups() if current().is_host else []
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        self._backends = [one for one in backends if hasattr(one, "tail_statistics")]
        self._before: Counter[str] = Counter()

    def take(self) -> dict[str, float | int]:
        """Of the sums since the last call: the shares of pieces that were left out and of packets
        that were lost (0 to 1), and how many sums were repeated exactly. Empty where none went in
        bounded time. Each rank has counts of its own."""
        now: Counter[str] = Counter()
        for backend in self._backends:
            now.update(backend.tail_statistics())
        before, self._before = self._before, now
        new = {name: count - before[name] for name, count in now.items()}
        if not new.get("operations"):
            return {}
        return {
            "tail_excluded": new["excluded"] / max(new["pieces"], 1),
            "tail_lost": new["lost"] / max(new["packets"], 1),
            "tail_repeated": int(new["repeated"]),
        }


def _groups() -> list[Any]:
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    return [dense] if experts in (None, dense) else [dense, experts]
