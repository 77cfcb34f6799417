"""Communication backends that a YAML can name.

Importing it makes the backend ``fsccl`` known to ``torch.distributed``, now or when torch is
imported.
"""

from __future__ import annotations

from flagscale.comm import after_torch


def _register() -> None:
    import torch.distributed as dist

    if dist.is_available():
        import flagscale.comm.fsccl  # noqa: F401


after_torch.call(_register)
