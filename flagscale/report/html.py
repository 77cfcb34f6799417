"""Pieces of HTML. Every text from outside passes :func:`text`, which no markup comes out of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


# Control characters, and those that turn the direction of what follows: a name is not to hide or
# rearrange what stands beside it.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def text(value: object) -> Html:
    """A value as text of a page or within the quotes of an attribute; markup stays as it is. What
    is no character, or is not seen, is spelled out."""
    if isinstance(value, Html):
        return value
    found = str(value)
    if not found.isascii():
        found = found.encode("utf-8", "backslashreplace").decode()
    return Html(escape(_UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", found)))


def join(parts: Iterable[object], between: str = "\n") -> Html:
    return Html(between.join(text(part) for part in parts if part != ""))


def element(name: str, *inside: object, **attributes: object) -> Html:
    """``<name attribute="…">inside</name>``; ``class_`` is the attribute ``class``, ``_`` in others
    is ``-``. One that is True has no value; one that is None or False is left out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>{join(inside, '')}</{name}>")


class Cell(NamedTuple):
    """A cell of a table that is more than its text."""

    inside: object
    class_: str | None = None
    columns: int = 1


def table(
    headings: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    numbers: bool = False,
) -> Html:
    """A table that scrolls by itself where it is wider than the page. A row of fewer cells than
    ``headings`` needs a :class:`Cell` of several columns. ``numbers`` stand below each other."""
    head = element("tr", *(element("th", heading, scope="col") for heading in headings))
    body = (element("tr", *map(_cell, row)) for row in rows)
    parts = [
        element("caption", caption) if caption else "",
        element("thead", head),
        element("tbody", join(body)),
    ]
    # What scrolls has to be reached by the keyboard.
    inside = element("table", *parts, class_="numbers" if numbers else None)
    label = caption or "table"
    return element("div", inside, class_="wide", tabindex=0, role="group", aria_label=label)


def _cell(value: object) -> Html:
    if isinstance(value, Cell):
        columns = value.columns if value.columns > 1 else None
        return element("td", value.inside, class_=value.class_, colspan=columns)
    return element("td", value)


def facts(pairs: Mapping[str, object]) -> Html:
    """What is known by name: a list of terms, without those that have nothing to say."""
    rows = (
        element("div", element("dt", name), element("dd", value))
        for name, value in pairs.items()
        if value not in ("", None)
    )
    return element("dl", join(rows))


def details(summary: object, *inside: object, opened: bool = False) -> Html:
    """What is shown when it is asked for."""
    return element("details", element("summary", summary), *inside, open=opened)


def section(title: object, *inside: object) -> Html:
    return element("section", element("h2", title), *inside)
