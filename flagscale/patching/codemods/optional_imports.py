"""Rewrites of optional imports whose names would stay undefined.

``try: from package import name`` … ``except ImportError: HAVE_IT = False``, followed elsewhere by
``if name is not None``, is a ``NameError`` on every machine without the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from flagscale.patching.codemods.base import Codemod, FileContext

_MISSING = m.Name("ImportError") | m.Name("ModuleNotFoundError")


class OptionalImports(Codemod):
    """Binds such a name to ``None`` if the import fails; the file itself tests for ``None``."""

    name: ClassVar[str] = "optional-imports"
    summary: ClassVar[str] = "a missing optional import is None where the file tests for None"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Try,)
    uses_device: ClassVar[bool] = False

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(original, cst.Try) or context.is_within(cst.FunctionDef, cst.ClassDef):
            return updated
        bindings = context.bindings
        names = [
            name
            for name in _imported_names(original.body)
            if name in bindings.tested_for_none and name not in bindings.rebound
        ]
        node = cst.ensure_type(updated, cst.Try)
        catches_import_error = [m.matches(h, m.ExceptHandler(type=_MISSING)) for h in node.handlers]
        if not names or not any(catches_import_error):
            return updated
        lines = [cst.parse_statement(f"{name} = None\n") for name in names]
        handlers = [
            _append_lines(handler, lines) if it_does else handler
            for handler, it_does in zip(node.handlers, catches_import_error, strict=True)
        ]
        return node.with_changes(handlers=handlers)


def _imported_names(block: cst.BaseSuite) -> Iterable[str]:
    for statement in block.body:
        for part in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
                for alias in part.names:
                    yield alias.evaluated_alias or alias.evaluated_name


def _append_lines(
    handler: cst.ExceptHandler, lines: list[cst.SimpleStatementLine | cst.BaseCompoundStatement]
) -> cst.ExceptHandler:
    body = cst.ensure_type(handler.body, cst.IndentedBlock)
    return handler.with_changes(body=body.with_changes(body=[*body.body, *lines]))
