"""Something that is to happen as soon as torch is there, without importing it.

``import flagscale.comm`` makes the backend ``fsccl`` known to torch, and is also what the launcher
imports on machines without torch, and where importing torch would take longer than all it does.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch"


def call(action: Callable[[], None]) -> None:
    """Call ``action`` now if torch is imported, else right after it has been."""
    torch = sys.modules.get(_NAME)
    # While it is being imported its spec says so, and the end of that cannot be hooked any more.
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        action()
    elif torch is None:
        sys.meta_path.insert(0, _Finder(action))


class _Finder(MetaPathFinder):
    """Finds torch as all others would, and lets its loader call ``action`` at the end."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self._asks_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others = False
        # Who only asks whether there is a torch gets such a spec, too, and never runs its loader.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """The loader that it stands for, but for what follows."""

    def __init__(self, real: Loader, finder: _Finder) -> None:
        self._real, self._finder = real, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            try:
                self._finder.action()
            except Exception as error:  # noqa: BLE001 - torch itself is fine, and stays
                warnings.warn(f"after importing torch: {error}", RuntimeWarning, stacklevel=2)
