"""Members of megatron.core's optimizers."""

from __future__ import annotations

from typing import Any


def list_members(optimizer: Any) -> list[Any]:
    """Return the members of a chained optimizer, or the only optimizer of a model without one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
