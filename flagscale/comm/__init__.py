"""Communication backends that a YAML can name.

Importing this package registers the backend ``fsccl`` with ``torch.distributed``, now or as soon
as torch is imported.
"""

from __future__ import annotations

from flagscale.after_torch import call_after_torch


def _register() -> None:
    import torch.distributed as dist

    if dist.is_available():
        import flagscale.comm.fsccl  # noqa: F401


call_after_torch(_register)
