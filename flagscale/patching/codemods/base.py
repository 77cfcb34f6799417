"""Base classes of codemods, and the single pass over a file that runs all of them.

A codemod declares the kinds of syntax node that it handles and returns, for such a node, the node
or its replacement. It never matches text: names are recognized by the file's imports
(:class:`Bindings`), literals by their position. Therefore one codemod serves many files and
survives new releases of the backend.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import libcst as cst
from libcst.helpers import get_full_name_for_node

from flagscale.errors import BackendSourceError

DEVICE_PACKAGE = "megatron.core"
"""Package of the device module, which rewritten files import as :data:`DEVICE_ALIAS`.

The alias is not ``device``, because that is the most common local variable in such code.
"""
DEVICE_MODULE = "device"
DEVICE_ALIAS = "accelerator"


@dataclass(frozen=True)
class Bindings:
    """Names that a file binds: ``imported`` maps names to the full names that they are imported
    from; ``rebound`` are names that are bound in any other way, which are therefore not resolved.
    """

    imported: Mapping[str, str]
    rebound: frozenset[str]
    tested_for_none: frozenset[str]
    """Names that the file compares with ``None``."""

    @classmethod
    def from_source(cls, source: str) -> Bindings:
        """Read the bindings of ``source``. A name that is imported from two different modules
        counts as rebound.

        Raises:
            SyntaxError: ``source`` is not Python.
        """
        imported: dict[str, str] = {}
        rebound: set[str] = set()
        tested_for_none: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            for name, origin in _imported_names(node):
                if imported.setdefault(name, origin) != origin:
                    rebound.add(name)
            rebound.update(_bound_names(node))
            tested_for_none.update(_names_compared_with_none(node))
        return cls(imported, frozenset(rebound), frozenset(tested_for_none))

    def resolve_name(self, node: cst.CSTNode) -> str | None:
        """Return the full name, such as ``torch.cuda.synchronize``, or None."""
        dotted = get_full_name_for_node(node) if _is_dotted(node) else None
        if dotted is None:
            return None
        root, _, suffix = dotted.partition(".")
        if root not in self.imported or root in self.rebound:
            return None
        return f"{self.imported[root]}.{suffix}" if suffix else self.imported[root]

    def binds(self, name: str) -> bool:
        """Return True if the file binds ``name`` by an import or in any other way."""
        return name in self.imported or name in self.rebound


def _imported_names(node: ast.AST) -> Iterable[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (root, root)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _bound_names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler
    ):
        yield from [node.name] if node.name else []


def _names_compared_with_none(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
        right = node.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None:
            yield node.left.id


def _is_dotted(node: cst.CSTNode) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


@dataclass
class FileContext:
    """Context of the node that a codemod handles."""

    path: str
    bindings: Bindings
    ancestors: list[cst.CSTNode] = field(default_factory=list)
    """Enclosing nodes, outermost first."""
    changes: Counter[str] = field(default_factory=Counter)
    """Number of changes per codemod."""
    uses_device: bool = False
    """True if any replacement refers to the device module."""

    def is_within(self, *kinds: type[cst.CSTNode]) -> bool:
        """Return True if the node is inside a node of one of these types."""
        return any(isinstance(node, kinds) for node in self.ancestors)

    def enclosing_function(self) -> str | None:
        """Return the name of the innermost enclosing function."""
        for node in reversed(self.ancestors):
            if isinstance(node, cst.FunctionDef):
                return node.name.value
        return None


class Codemod(ABC):
    """Rewrite with one concern. Stateless: one object serves every file."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the summary and the status command."""
    handles: ClassVar[tuple[type[cst.CSTNode], ...]]
    uses_device: ClassVar[bool] = True
    """True if replacements refer to the device module, which the file must then import."""

    @abstractmethod
    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        """Return ``updated`` or its replacement; ``original`` is the node before its children
        changed.
        """


class KeywordCodemod(Codemod):
    """Codemod that rewrites the values of one keyword argument."""

    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Arg,)
    keyword: ClassVar[str]

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(original, cst.Arg) or not isinstance(updated, cst.Arg):
            return updated
        if original.keyword is None or original.keyword.value != self.keyword:
            return updated
        value = self.replace_value(original.value, updated.value, context)
        return updated if value is None else updated.with_changes(value=value)

    @abstractmethod
    def replace_value(
        self, original: cst.BaseExpression, updated: cst.BaseExpression, context: FileContext
    ) -> cst.BaseExpression | None:
        """Return the new value of the argument, or None to keep it."""


def device_name(name: str) -> cst.Attribute:
    """Return the expression ``accelerator.<name>``."""
    return cst.Attribute(cst.Name(DEVICE_ALIAS), cst.Name(name))


def device_call(name: str, args: Sequence[cst.Arg] = ()) -> cst.Call:
    """Return the expression ``accelerator.<name>(<args>)``."""
    return cst.Call(device_name(name), args)


#: Nodes without anything of interest inside; half of all nodes are white space.
_SKIPPED = (
    cst.Import,
    cst.ImportFrom,
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Comma,
    cst.Dot,
    cst.AssignEqual,
)


class _CodemodPass(cst.CSTTransformer):
    """Passes every node, after its children, to the codemods that handle its kind."""

    def __init__(self, codemods: Sequence[Codemod], context: FileContext) -> None:
        super().__init__()
        self._context = context
        self._by_kind: dict[type[cst.CSTNode], list[Codemod]] = {}
        for codemod in codemods:
            for kind in codemod.handles:
                self._by_kind.setdefault(kind, []).append(codemod)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED):
            return False
        self._context.ancestors.append(node)
        return True

    def on_leave(
        self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT
    ) -> cst.CSTNodeT | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNodeT]:
        if isinstance(original_node, _SKIPPED):
            return updated_node
        self._context.ancestors.pop()
        node: cst.CSTNode = updated_node
        for codemod in self._by_kind.get(type(original_node), ()):
            rewritten = codemod.rewrite(original_node, node, self._context)
            if rewritten is not node:
                self._context.changes[codemod.name] += 1
                self._context.uses_device |= codemod.uses_device
                node = rewritten
        return cast(cst.CSTNodeT, node)


@dataclass(frozen=True)
class RewriteResult:
    """Result for one file: the new text and the number of changes per codemod."""

    source: str
    changes: Mapping[str, int]


def rewrite_source(source: str, codemods: Sequence[Codemod], *, path: str) -> RewriteResult:
    """Run ``codemods`` over one file's text in one pass.

    Raises:
        BackendSourceError: the file is not Python, or uses the device module's alias itself.
    """
    try:
        context = FileContext(path, Bindings.from_source(source))
        module = cst.parse_module(source)
    except (SyntaxError, cst.ParserSyntaxError) as error:
        raise BackendSourceError(f"{path}: not valid Python, so no codemod can run: {error}") from (
            error
        )
    changed = module.visit(_CodemodPass(codemods, context))
    if not context.changes:
        return RewriteResult(source, {})
    if context.uses_device:
        if context.bindings.binds(DEVICE_ALIAS):
            raise BackendSourceError(
                f"{path}: binds the name {DEVICE_ALIAS!r} itself, under which rewritten files "
                f"import the device module",
                hint="exclude the file in codemods.yaml and adapt it with a patch",
            )
        changed = _with_device_import(changed)
    return RewriteResult(changed.code, dict(context.changes))


def _with_device_import(module: cst.Module) -> cst.Module:
    """Add the import of the device module after the file's leading imports.

    Imports that follow other statements stay in place, because they may depend on them.
    """
    position = 1 if module.get_docstring() is not None else 0
    while position < len(module.body) and _is_import(module.body[position]):
        position += 1
    line = cst.parse_statement(f"from {DEVICE_PACKAGE} import {DEVICE_MODULE} as {DEVICE_ALIAS}\n")
    return module.with_changes(body=[*module.body[:position], line, *module.body[position:]])


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(part, cst.Import | cst.ImportFrom) for part in statement.body
    )
