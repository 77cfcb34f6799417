"""Hook that runs an action as soon as torch has been imported, without importing it.

``import flagscale.comm`` registers the backend ``fsccl`` with torch. The launcher imports it
too, on machines without torch, and where importing torch would take longer than the launcher's
own work.
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

_MODULE = "torch"


def call_after_torch(action: Callable[[], None]) -> None:
    """Call ``action`` now if torch is imported, otherwise right after its import."""
    torch = sys.modules.get(_MODULE)
    # A partially imported module is marked in its spec. The end of that import can no longer be
    # hooked.
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        action()
    elif torch is None:
        sys.meta_path.insert(0, _Finder(action))


class _Finder(MetaPathFinder):
    """Finder that delegates to the other finders and wraps torch's loader so that it calls
    ``action``.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self._is_delegating = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE or self._is_delegating:
            return None
        self._is_delegating = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_delegating = False
        # A caller that only checks whether torch is installed gets such a spec too, but does not
        # run its loader.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """Wrapper of torch's loader that runs the action after the module has been executed."""

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
            except Exception as error:  # noqa: BLE001 - torch itself works and stays imported
                warnings.warn(f"after importing torch: {error}", RuntimeWarning, stacklevel=2)
