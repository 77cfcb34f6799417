"""What a codemod is, and the one pass over a file that runs all of them.

A codemod is a small object that says which kinds of syntax node it looks at and returns, for one
of them, the node itself or its replacement. It never matches text: a name is recognised by what
the file's imports bind it to (:class:`Bindings`), a literal by where it stands. That is why one
codemod serves many files and survives a new release of the backend.
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

#: The device module and the name rewritten files import it under. Not ``device``: that is the
#: commonest local variable of all in such code.
DEVICE_PACKAGE = "megatron.core"
DEVICE_MODULE = "device"
DEVICE_ALIAS = "accelerator"


@dataclass(frozen=True)
class Bindings:
    """What a file's imports bind each name to, and which names it binds in any other way."""

    imported: Mapping[str, str]
    rebound: frozenset[str]
    #: Names the file compares with ``None``.
    tested_for_none: frozenset[str]

    @classmethod
    def of(cls, source: str) -> Bindings:
        """Read them from ``source``; a name imported as two things counts as rebound.

        Raises:
            SyntaxError: ``source`` is not Python.
        """
        imported: dict[str, str] = {}
        rebound: set[str] = set()
        tested: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            for name, origin in _imports(node):
                if imported.setdefault(name, origin) != origin:
                    rebound.add(name)
            rebound.update(_bound(node))
            tested.update(_tested_for_none(node))
        return cls(imported, frozenset(rebound), frozenset(tested))

    def qualified(self, node: cst.CSTNode) -> str | None:
        """``torch.cuda.synchronize`` for whichever spelling of it; ``None`` for anything else."""
        dotted = get_full_name_for_node(node) if _is_dotted(node) else None
        if dotted is None:
            return None
        root, _, rest = dotted.partition(".")
        if root not in self.imported or root in self.rebound:
            return None
        return f"{self.imported[root]}.{rest}" if rest else self.imported[root]

    def uses(self, name: str) -> bool:
        """Whether the file binds ``name`` at all."""
        return name in self.imported or name in self.rebound


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)


def _imports(node: ast.AST) -> Iterable[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (root, root)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _bound(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler
    ):
        yield from [node.name] if node.name else []


def _tested_for_none(node: ast.AST) -> Iterable[str]:
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
    """What a codemod may know of the file it works on."""

    path: str
    bindings: Bindings
    #: Nodes around the one in hand, outermost first.
    ancestors: list[cst.CSTNode] = field(default_factory=list)
    #: How often each codemod changed something.
    changes: Counter[str] = field(default_factory=Counter)
    #: Whether something written refers to the device module.
    uses_device: bool = False

    def within(self, *kinds: type[cst.CSTNode]) -> bool:
        """Whether the node in hand stands inside one of ``kinds``."""
        return any(isinstance(node, kinds) for node in self.ancestors)

    def function(self) -> str | None:
        """Name of the innermost function around the node in hand."""
        for node in reversed(self.ancestors):
            if isinstance(node, cst.FunctionDef):
                return node.name.value
        return None


class Codemod(ABC):
    """One concern. Stateless: the same object serves every file."""

    name: ClassVar[str]
    #: One line for the summary and the status command.
    summary: ClassVar[str]
    handles: ClassVar[tuple[type[cst.CSTNode], ...]]
    #: Whether what it writes refers to the device module, which the file must then import.
    uses_device: ClassVar[bool] = True

    @abstractmethod
    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        """Return ``updated`` or what replaces it; ``original`` is the node before its children."""


def device_name(name: str) -> cst.Attribute:
    """The expression ``accelerator.<name>``."""
    return cst.Attribute(cst.Name(DEVICE_ALIAS), cst.Name(name))


def device_call(name: str, args: Sequence[cst.Arg] = ()) -> cst.Call:
    """The expression ``accelerator.<name>(<args>)``."""
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


class _Pass(cst.CSTTransformer):
    """Offers every node, once its children are done, to the codemods that handle its kind."""

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
class Rewritten:
    """A file after its codemods: the new text, and how often each changed it."""

    source: str
    changes: Mapping[str, int]


def rewrite_source(source: str, codemods: Sequence[Codemod], *, path: str) -> Rewritten:
    """Run ``codemods`` over one file's text in one pass.

    Raises:
        BackendSourceError: the file is not Python, or uses the device module's alias itself.
    """
    try:
        context = FileContext(path, Bindings.of(source))
        module = cst.parse_module(source)
    except (SyntaxError, cst.ParserSyntaxError) as error:
        raise BackendSourceError(f"{path}: not valid Python, so no codemod can run: {error}") from (
            error
        )
    changed = module.visit(_Pass(codemods, context))
    if not context.changes:
        return Rewritten(source, {})
    if context.uses_device:
        if context.bindings.uses(DEVICE_ALIAS):
            raise BackendSourceError(
                f"{path}: binds the name {DEVICE_ALIAS!r} itself, under which rewritten files "
                f"import the device module",
                hint="exclude the file in codemods.yaml and adapt it with a patch",
            )
        changed = _with_device_import(changed)
    return Rewritten(changed.code, dict(context.changes))


def _with_device_import(module: cst.Module) -> cst.Module:
    """Add the device module's import after the file's leading imports.

    An import that follows other statements stays where it is: it may depend on them.
    """
    at = 1 if module.get_docstring() is not None else 0
    while at < len(module.body) and _is_import(module.body[at]):
        at += 1
    line = cst.parse_statement(f"from {DEVICE_PACKAGE} import {DEVICE_MODULE} as {DEVICE_ALIAS}\n")
    return module.with_changes(body=[*module.body[:at], line, *module.body[at:]])


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(part, cst.Import | cst.ImportFrom) for part in statement.body
    )
