"""fsccl: our collective library, as a backend of ``torch.distributed``.

Importing ``flagscale.comm`` registers the backend, as does importing this package; nothing is
compiled before the first group is made::

    import flagscale.comm
    torch.distributed.init_process_group("fsccl")

docs/fsccl.md tells how it works and which ``FSCCL_*`` environment variables steer it.
"""

from __future__ import annotations

from flagscale.comm.fsccl.backend import register
from flagscale.comm.fsccl.build import BuildError, load_extension, unavailable

__all__ = ["BuildError", "load_extension", "register", "unavailable"]

register()
