"""Tests that no external text becomes markup."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_lab import ParsedPage

from flagscale.report.frame import render_page
from flagscale.report.html import (
    Cell,
    Html,
    definition_list,
    element,
    escape_text,
    join_parts,
    table,
)

ODD = st.text() | st.text("<>&\"'/!- =\x00\x1b\u202e\ud800]scriptyle")


@given(ODD, ODD)
def test_any_text_round_trips_through_a_parser(inside: str, attribute: str) -> None:
    markup = element("p", inside, title=attribute, class_=None)
    page = ParsedPage(markup)
    assert [tag for tag, _ in page.elements] == ["p"]
    assert page.open_tags == []
    assert page.text == unescape(escape_text(inside))
    assert page.elements[0][1] == {"title": unescape(escape_text(attribute))}
    markup.encode()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("</script>", "&lt;/script&gt;"),
        ('" onload="x', "&quot; onload=&quot;x"),
        ("a\x1b[31m\x00", "a\\u001b[31m\\u0000"),
        ("\u202etxt", "\\u202etxt"),
        ("\ud800", "\\ud800"),
        ("Zürich 東京\n\t", "Zürich 東京\n\t"),
        (Html("<b>"), "<b>"),
        (7, "7"),
    ],
)
def test_text_is_escaped(value: object, written: str) -> None:
    assert escape_text(value) == written


def test_rendered_elements() -> None:
    assert join_parts(["a<", "", Html("<i>")], " ") == "a&lt; <i>"
    assert element("i", hidden=True, x=False, aria_label="a") == '<i hidden aria-label="a"></i>'
    assert definition_list({"a": "1", "b": "", "c": None}).count("<dt>") == 1
    markup = table(["x", "y"], [["1", Cell("2", "path")], [Cell("all", columns=2)]], caption="c")
    assert re.findall(r"<td[^>]*>", markup) == ["<td>", '<td class="path">', '<td colspan="2">']
    assert 'aria-label="c"' in markup


def test_page_runs_only_its_own_script_and_loads_nothing() -> None:
    markup = render_page("t <", element("p", "x"), note="n")
    page = ParsedPage(markup)
    assert page.open_tags == []
    policy = (
        page.find_elements("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"] or ""
    )
    assert policy.startswith("default-src 'none'; ")
    assert "'sha256-" in policy
    assert "unsafe-inline'; script-src 'sha256-" in policy, "styles alone may be inline"
    assert len(page.scripts) == 1
    assert not re.search(r"(src|href)=|url\(|@import|https?:", markup)
