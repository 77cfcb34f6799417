"""Lists as Megatron-LM's arguments write them: ``[0]+[1]*26``, ``([0]*2+[1])*4``, ``127,0``."""

from __future__ import annotations

import ast
import re

_MAX_ITEMS = 100_000
_BETWEEN = re.compile(r"\s*,\s*|\s+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PAIRS = ("()", "[]")


def looks_like_one(text: str) -> bool:
    """Whether a text is meant as such an expression."""
    return "[" in text


def numbers(text: str) -> list[str]:
    """The numbers of a text that writes several, with commas or spaces between them and maybe
    parentheses or brackets around: ``127,0``, ``(127, 0)``, ``2 2 100``. Empty for any other."""
    bare = text.strip()
    if bare[:1] + bare[-1:] in _PAIRS:
        bare = bare[1:-1].strip()
    parts = _BETWEEN.split(bare)
    return parts if len(parts) > 1 and all(map(_NUMBER.fullmatch, parts)) else []


def listed(text: str) -> list[int]:
    """The list that an expression of lists of whole numbers, ``+``, ``*`` and parentheses stands
    for. Nothing is evaluated but these. Raises ValueError for any other."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError from None
    if not isinstance(found, list):
        raise ValueError
    return found


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_whole(_value(item)) for item in node.elts]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Mult)):
        raise ValueError
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add):
        return _list(left) + _list(right)
    items, times = (left, right) if isinstance(left, list) else (right, left)
    if len(_list(items)) * _whole(times) > _MAX_ITEMS:
        raise ValueError
    return _list(items) * _whole(times)


def _whole(value: int | list[int]) -> int:
    if isinstance(value, list):
        raise ValueError
    return value


def _list(value: int | list[int]) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    return value
