"""From YAML values and command-line words to an argument's value, and back to words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

from flagscale.config.arguments import expressions
from flagscale.config.arguments.foreign import VALUES
from flagscale.config.arguments.spec import Argument

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
MAX_TEXT = 128 * 1024 - 1
"""Bytes that Linux takes in one argument or one ``NAME=value`` when it starts a program
(MAX_ARG_STRLEN, less its NUL)."""
MAX_NAME = 255
"""Bytes of a file's name, and of any name that is no text."""
_MAX_INT = 2**63 - 1
"""The largest whole number of the shells, programs and tensors that a value goes to."""
_ARTICLES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
}


def shown(value: Any) -> str:
    """A value as a message quotes it; what is very long is cut in the middle."""
    text = "nothing" if value is None else str(value) if _is_number(value) else repr(value)
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 120 else f"{text[:80]} … {text[-30:]}"


def nearest(name: str, names: Iterable[str], count: int = 3, least: float = 0.7) -> list[str]:
    """The valid names that look most like ``name``, best first; ``least`` is how much they have
    to, from 0 to 1."""
    return difflib.get_close_matches(name, list(names), n=count, cutoff=least)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name; empty when nothing comes close."""
    found = nearest(name, names)
    return f"; did you mean {' or '.join(repr(n) for n in found)}?" if found else ""


def size(text: str) -> int:
    """Bytes of a text."""
    return len(text.encode("utf-8", "surrogatepass"))


def unfit(text: str) -> str | None:
    """Why no program can be started with a text; None if one can."""
    if "\0" in text:
        return "cannot hold a NUL character"
    if size(text) > MAX_TEXT:
        return f"is {size(text):,} bytes long; a program can get {MAX_TEXT:,} at most in one text"
    return None


def is_negative_number(text: str) -> bool:
    """Whether a word that starts with a dash is a number and so cannot be taken for a flag."""
    return text.startswith("-") and _NUMBER.fullmatch(text) is not None


def expected(argument: Argument) -> str:
    """What an argument takes, in words."""
    if argument.choices is not None:
        one = "one of " + ", ".join(str(c) for c in argument.choices)
    else:
        one = _ARTICLES[argument.kind] + _bounds(argument)
    return f"a list, each item {one}" if argument.many else one


def _bounds(argument: Argument) -> str:
    low, high = argument.minimum, argument.maximum
    if low is not None and high is not None:
        return f" from {low:.15g} to {high:.15g}"
    if low is not None:
        return f" not less than {low:.15g}"
    return f" not greater than {high:.15g}" if high is not None else ""


def convert(argument: Argument, value: Any) -> Any:
    """The argument's value from a YAML value or from words.

    ``many`` arguments give a list and accept a single value for a list of one, of numbers a text
    that writes several (``127,0``), and of whole numbers an expression (``[0]+[1]*3``). Raises
    ValueError, whose text says what was expected and found.
    """
    if argument.many:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        items = written_out(argument, items[0]) if len(items) == 1 else items
        items = [one for item in items for one in _items(argument, item)]
        return [_convert_one(argument, item, value) for item in items]
    return _convert_one(argument, value, value)


def written_out(argument: Argument, value: Any) -> list[Any]:
    """What one value of a list of numbers stands for: itself, or those that it writes."""
    several = argument.kind in ("int", "float") and isinstance(value, str)
    return (several and expressions.numbers(value)) or [value]


def _items(argument: Argument, item: Any) -> list[Any]:
    """What one item of a list stands for: itself, or the items of an expression."""
    if argument.kind == "int" and isinstance(item, str) and expressions.looks_like_one(item):
        try:
            return list(expressions.listed(item))
        except ValueError:
            message = f"expected {expected(argument)}, or [0]+[1]*3 for [0, 1, 1, 1]"
            raise ValueError(f"{message}, found {shown(item)}") from None
    return [item]


def _convert_one(argument: Argument, item: Any, whole: Any) -> Any:
    try:
        converted = _CONVERTERS[argument.kind](item)
    except ValueError:
        raise ValueError(f"expected {expected(argument)}, found {shown(whole)}") from None
    if not _within(argument, converted):
        if why := VALUES.get((argument.name, str(converted))):
            raise ValueError(f"{shown(whole)} cannot be given: {why}")
        near = did_you_mean(str(converted), map(str, argument.choices or ()))
        raise ValueError(f"expected {expected(argument)}, found {shown(whole)}{near}")
    return converted


def _within(argument: Argument, value: Any) -> bool:
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
    if not math.isfinite(number):  # as 1e400 is not
        raise ValueError
    return number


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    if _is_number(value):
        return word(value)
    raise ValueError


def _to_bool(value: Any) -> bool:
    text = str(value).lower()
    if isinstance(value, (bool, int, str)) and text in _TRUE | _FALSE:
        return text in _TRUE
    raise ValueError


_CONVERTERS = {"int": _to_int, "float": _to_float, "str": _to_str, "bool": _to_bool}


def word(value: Any) -> str:
    """A scalar as one command-line word. Floats keep every digit."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
