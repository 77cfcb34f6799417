"""flagscale: one YAML, one command, LLM training on any mix of machines and chips.

``flagscale.launch``, ``plan``, ``find`` and ``Run`` are those of :mod:`flagscale.api`, loaded when
first used.
"""

from importlib import import_module as _import_module

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("Run", "find", "launch", "plan"):
        return getattr(_import_module("flagscale.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
