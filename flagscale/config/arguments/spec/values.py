"""Conversion of YAML values and command-line words to an argument's value, and back to words."""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

from flagscale.config.arguments.compat.names import UNSUPPORTED_VALUES
from flagscale.config.arguments.spec.argument import Argument

_MAX_ITEMS = 100_000
_SEPARATOR = re.compile(r"\s*,\s*|\s+")
_LIST_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_BRACKETS = ("()", "[]")


def is_list_expression(text: str) -> bool:
    """Return whether a text looks like a list expression (:func:`evaluate_list`)."""
    return "[" in text


def split_numbers(text: str) -> list[str]:
    """Split a text of several numbers, separated by commas or spaces and optionally in brackets:
    ``127,0``, ``(127, 0)``, ``2 2 100``. Return an empty list for other texts."""
    bare = text.strip()
    if bare[:1] + bare[-1:] in _BRACKETS:
        bare = bare[1:-1].strip()
    parts = _SEPARATOR.split(bare)
    return parts if len(parts) > 1 and all(map(_LIST_NUMBER.fullmatch, parts)) else []


def evaluate_list(text: str) -> list[int]:
    """Evaluate an expression of lists of integers, ``+``, ``*`` and parentheses, such as
    ``[0]+[1]*3``.

    Raises:
        ValueError: the text is another expression; it is not evaluated.
    """
    try:
        content = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError from None
    if not isinstance(content, list):
        raise ValueError
    return content


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_require_int(_evaluate(item)) for item in node.elts]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Mult)):
        raise ValueError
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Add):
        return _require_list(left) + _require_list(right)
    items, times = (left, right) if isinstance(left, list) else (right, left)
    if len(_require_list(items)) * _require_int(times) > _MAX_ITEMS:
        raise ValueError
    return _require_list(items) * _require_int(times)


def _require_int(value: int | list[int]) -> int:
    if isinstance(value, list):
        raise ValueError
    return value


def _require_list(value: int | list[int]) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    return value


_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
MAX_TEXT = 128 * 1024 - 1
"""Maximum length in bytes of one argument or one ``NAME=value`` of a program on Linux
(MAX_ARG_STRLEN without its NUL)."""
MAX_NAME = 255
"""Maximum length in bytes of a file name, and of other names."""
_MAX_INT = 2**63 - 1
"""Largest integer that shells and tensors support."""
_KIND_TEXTS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
}


def format_value(value: Any) -> str:
    """Format a value for a message; very long text is shortened in the middle."""
    text = "nothing" if value is None else str(value) if _is_number(value) else repr(value)
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 120 else f"{text[:80]} … {text[-30:]}"


def nearest_names(name: str, names: Iterable[str], count: int = 3, least: float = 0.7) -> list[str]:
    """Return the valid names most similar to ``name``, best first. ``least`` is the required
    similarity, from 0 to 1."""
    return difflib.get_close_matches(name, list(names), n=count, cutoff=least)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name; empty if no name is similar."""
    nearest = nearest_names(name, names)
    return f"; did you mean {' or '.join(repr(n) for n in nearest)}?" if nearest else ""


def byte_length(text: str) -> int:
    """Return the length of a text in bytes."""
    return len(text.encode("utf-8", "surrogatepass"))


def why_unfit(text: str) -> str | None:
    """Return why a text cannot be passed to a program; None if it can."""
    if "\0" in text:
        return "cannot hold a NUL character"
    if byte_length(text) > MAX_TEXT:
        return f"is {byte_length(text):,} bytes long; expected at most {MAX_TEXT:,}"
    return None


def is_negative_number(text: str) -> bool:
    """Return whether a word with a leading dash is a number and cannot be confused with a flag."""
    return text.startswith("-") and _NUMBER.fullmatch(text) is not None


def describe_expected(argument: Argument) -> str:
    """Describe the values that an argument accepts."""
    if argument.choices is not None:
        item = "one of " + ", ".join(str(c) for c in argument.choices)
    else:
        item = _KIND_TEXTS[argument.kind] + _describe_bounds(argument)
    return f"a list, each item {item}" if argument.many else item


def _describe_bounds(argument: Argument) -> str:
    low, high = argument.minimum, argument.maximum
    if low is not None and high is not None:
        return f" from {low:.15g} to {high:.15g}"
    if low is not None:
        return f" not less than {low:.15g}"
    return f" not greater than {high:.15g}" if high is not None else ""


def convert(argument: Argument, value: Any) -> Any:
    """Convert a YAML value or command-line words to the argument's value.

    For ``many`` arguments, a single value is a list of one item. Lists of numbers may also be given
    as one text (``127,0``), and lists of integers as an expression (``[0]+[1]*3``).

    Raises:
        ValueError: the value is invalid; the message states the expected and the found value.
    """
    if argument.many:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        items = expand_number_text(argument, items[0]) if len(items) == 1 else items
        items = [expanded for item in items for expanded in _expand_item(argument, item)]
        return [_convert_one(argument, item, value) for item in items]
    return _convert_one(argument, value, value)


def expand_number_text(argument: Argument, value: Any) -> list[Any]:
    """Return the items of a value of a number list: the numbers written in a text, or the value
    itself."""
    several = argument.kind in ("int", "float") and isinstance(value, str)
    return (several and split_numbers(value)) or [value]


def _expand_item(argument: Argument, item: Any) -> list[Any]:
    """Return the items of a list expression, or the item itself."""
    if argument.kind == "int" and isinstance(item, str) and is_list_expression(item):
        try:
            return list(evaluate_list(item))
        except ValueError:
            message = f"expected {describe_expected(argument)}, or [0]+[1]*3 for [0, 1, 1, 1]"
            raise ValueError(f"{message}, found {format_value(item)}") from None
    return [item]


def _convert_one(argument: Argument, item: Any, whole: Any) -> Any:
    try:
        converted = _CONVERTERS[argument.kind](item)
    except ValueError:
        raise ValueError(
            f"expected {describe_expected(argument)}, found {format_value(whole)}"
        ) from None
    if not _is_within(argument, converted):
        if why := UNSUPPORTED_VALUES.get((argument.name, str(converted))):
            raise ValueError(f"{format_value(whole)} is not supported: {why}")
        near = did_you_mean(str(converted), map(str, argument.choices or ()))
        raise ValueError(
            f"expected {describe_expected(argument)}, found {format_value(whole)}{near}"
        )
    return converted


def _is_within(argument: Argument, value: Any) -> bool:
    if argument.choices is not None and value not in argument.choices:
        return False
    if argument.minimum is not None and value < argument.minimum:
        return False
    return argument.maximum is None or value <= argument.maximum


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _to_int(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    number = int(value)
    if abs(number) > _MAX_INT:
        raise ValueError
    return number


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):  # 1e400 is infinite
        raise ValueError
    return number


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    if _is_number(value):
        return to_word(value)
    raise ValueError


def _to_bool(value: Any) -> bool:
    text = str(value).lower()
    if isinstance(value, (bool, int, str)) and text in _TRUE | _FALSE:
        return text in _TRUE
    raise ValueError


_CONVERTERS = {"int": _to_int, "float": _to_float, "str": _to_str, "bool": _to_bool}


def to_word(value: Any) -> str:
    """Format a scalar as one command-line word. Floats keep every digit."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
