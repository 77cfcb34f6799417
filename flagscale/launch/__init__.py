"""From a checked experiment to running processes: plan, scripts, runners, state.

Planning and rendering are pure; only ``runners`` start and end processes, and ``query``, ``logs``
and ``stop`` read nothing but the run's state on disk. Nothing here imports torch.

The package can be called: ``flagscale.launch(…)`` is :func:`flagscale.api.launch`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package, which a program calls by the name that people know."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # By its name: the API is above this package, which knows nothing of it.
        return import_module("flagscale.api").launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
