"""fsccl: this project's collective library, as a backend of ``torch.distributed``.

Importing ``flagscale.comm`` or this package registers the backend. Nothing is compiled before
the first group is created::

    import flagscale.comm
    torch.distributed.init_process_group("fsccl")

docs/design/fsccl.md describes its design, and the ``FSCCL_*`` environment variables that
configure it.
"""

from __future__ import annotations

from flagscale.comm.fsccl.backend import register
from flagscale.comm.fsccl.build import BuildError, load_extension, unavailable_reason
from flagscale.comm.fsccl.flight_recorder import write_flight_record

__all__ = [
    "BuildError",
    "load_extension",
    "register",
    "unavailable_reason",
    "write_flight_record",
]

register()
