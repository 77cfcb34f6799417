"""Nothing from outside becomes markup."""

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
    made = element("p", inside, title=attribute, class_=None)
    read = ParsedPage(made)
    assert [tag for tag, _ in read.elements] == ["p"]
    assert read.open == []
    assert read.text == unescape(escape_text(inside))
    assert read.elements[0][1] == {"title": unescape(escape_text(attribute))}
    made.encode()


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
def test_text(value: object, written: str) -> None:
    assert escape_text(value) == written


def test_rendered_elements() -> None:
    assert join_parts(["a<", "", Html("<i>")], " ") == "a&lt; <i>"
    assert element("i", hidden=True, x=False, aria_label="a") == '<i hidden aria-label="a"></i>'
    assert definition_list({"a": "1", "b": "", "c": None}).count("<dt>") == 1
    made = table(["x", "y"], [["1", Cell("2", "path")], [Cell("all", columns=2)]], caption="c")
    assert re.findall(r"<td[^>]*>", made) == ["<td>", '<td class="path">', '<td colspan="2">']
    assert 'aria-label="c"' in made


def test_page_runs_only_its_own_script_and_loads_nothing() -> None:
    made = render_page("t <", element("p", "x"), note="n")
    read = ParsedPage(made)
    assert read.open == []
    policy = read.of("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"] or ""
    assert policy.startswith("default-src 'none'; ")
    assert "'sha256-" in policy
    assert "unsafe-inline'; script-src 'sha256-" in policy, "styles alone may be inline"
    assert len(read.scripts) == 1
    assert not re.search(r"(src|href)=|url\(|@import|https?:", made)
