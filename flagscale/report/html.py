"""Building blocks of HTML. Text from outside passes :func:`text`, which escapes all markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple


class Html(str):
    """Text that is markup already, so it is not escaped again."""

    __slots__ = ()


# Control characters, and characters that change the text direction: a name must not hide or
# rearrange its neighbours.
_INVISIBLE_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)


def escape_text(value: object) -> Html:
    """Escape a value for use as text or as an attribute. :class:`Html` is returned unchanged.

    Invalid and invisible characters are written as escapes.
    """
    if isinstance(value, Html):
        return value
    string = str(value)
    if not string.isascii():
        string = string.encode("utf-8", "backslashreplace").decode()
    return Html(escape(_INVISIBLE_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", string)))


def join_parts(parts: Iterable[object], separator: str = "\n") -> Html:
    """Escape the parts that are not empty and join them with ``separator``."""
    return Html(separator.join(escape_text(part) for part in parts if part != ""))


def element(name: str, *content: object, **attributes: object) -> Html:
    """Return ``<name attribute="…">inside</name>``.

    ``class_`` is the attribute ``class``; ``_`` in other names becomes ``-``. A value of True omits
    the value; None and False omit the attribute.
    """
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape_text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{attribute_text}>{join_parts(content, '')}</{name}>")


class Cell(NamedTuple):
    """Cell of a table with a CSS class, or spanning several columns."""

    content: object
    class_: str | None = None
    columns: int = 1


def table(
    headings: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    align_numbers: bool = False,
) -> Html:
    """Return a table that scrolls if it is wider than the page.

    A row with fewer cells than ``headings`` needs a :class:`Cell` with several columns. ``numbers``
    aligns numbers.
    """
    head = element("tr", *(element("th", heading, scope="col") for heading in headings))
    body = (element("tr", *map(_cell, row)) for row in rows)
    parts = [
        element("caption", caption) if caption else "",
        element("thead", head),
        element("tbody", join_parts(body)),
    ]
    # Scrolling elements must be reachable by keyboard.
    table_element = element("table", *parts, class_="numbers" if align_numbers else None)
    label = caption or "table"
    return element("div", table_element, class_="wide", tabindex=0, role="group", aria_label=label)


def _cell(value: object) -> Html:
    if isinstance(value, Cell):
        columns = value.columns if value.columns > 1 else None
        return element("td", value.content, class_=value.class_, colspan=columns)
    return element("td", value)


def definition_list(pairs: Mapping[str, object]) -> Html:
    """Return a definition list, without entries that are empty."""
    rows = (
        element("div", element("dt", name), element("dd", value))
        for name, value in pairs.items()
        if value not in ("", None)
    )
    return element("dl", join_parts(rows))


def details(summary: object, *content: object, is_open: bool = False) -> Html:
    """Return a collapsed ``<details>`` element; ``is_open`` shows it expanded."""
    return element("details", element("summary", summary), *content, open=is_open)


def section(title: object, *content: object) -> Html:
    return element("section", element("h2", title), *content)
